//! Hashes of files, and digests of tensors that files store.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Mutex;

use ingot_format::{Align, Checksums, Dtype, Format, LayoutOptions, Spec, TensorView, to_vec};
use ingot_io::binding::{Buffer, FileRange, Keep, NewHeader, Pieces, Proof, save_pieces};
use ingot_io::{
    Algorithm, Archive, Checkpoint, Error, Job, Payload, Produce, ReadOptions, SaveOptions, Unwatched, Watch,
    hash, verify,
};
use proptest::prelude::*;
use tempfile::TempDir;

/// Makes a folder with one file.
fn file(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 249).to_le_bytes()[0]).collect()
}

/// Returns a file with tensors of these sizes and a digest of each.
fn with_checksums(algorithm: Algorithm, sizes: &[usize]) -> Vec<u8> {
    with_names(algorithm, sizes, "")
}

/// Returns the same file with names that begin with `prefix`.
fn with_names(algorithm: Algorithm, sizes: &[usize], prefix: &str) -> Vec<u8> {
    let tensors: Vec<(String, Vec<u8>)> = sizes
        .iter()
        .enumerate()
        .map(|(number, &len)| {
            (
                format!("{prefix}t{number:02}"),
                pattern(len + number)[number..].to_vec(),
            )
        })
        .collect();
    let digests = tensors
        .iter()
        .map(|(name, bytes)| (name.as_str(), algorithm.digest(bytes).to_string().into()));
    let record = Checksums::new(algorithm.name(), digests).unwrap().render();
    let views = tensors.iter().map(|(name, bytes)| {
        let view = TensorView::new(Dtype::U8, vec![bytes.len()], bytes).unwrap();
        (name, view)
    });
    to_vec(views, Some(&[("ingot.checksums", &record)]), Format::Safetensors).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_file_is_hashed_as_its_bytes_are(
        len in prop_oneof![0..5000_usize, (1 << 20) - 2..(1 << 20) + 2_usize, 0..9_000_000_usize],
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
    ) {
        let bytes = pattern(len);
        let (_folder, path) = file(&bytes);
        let found = hash(&path, algorithm, &Unwatched).unwrap();
        prop_assert_eq!(found, algorithm.digest(&bytes));
    }

    #[test]
    fn files_are_verified_as_one_and_told_of_as_one(
        files in prop::collection::vec(
            (prop::collection::vec(prop_oneof![4 => 0..4000_usize, 1 => 1..3_000_000_usize], 1..6),
             prop::sample::select(Algorithm::ALL.to_vec())), 1..5),
        bad in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let bad = bad.map(|bad| bad.index(files.len()));
        let (mut pairs, mut nbytes) = (Vec::new(), 0);
        for (number, (sizes, algorithm)) in files.iter().enumerate() {
            let prefix = format!("f{number}.");
            let mut bytes = with_names(*algorithm, sizes, &prefix);
            nbytes += bytes.len();
            if bad == Some(number) && sizes.iter().sum::<usize>() > 0 {
                *bytes.last_mut().unwrap() ^= 1;
            }
            let name = format!("f{number}.safetensors");
            pairs.extend((0..sizes.len()).map(|tensor| format!(r#""{prefix}t{tensor:02}":"{name}""#)));
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        let index = folder.path().join("model.safetensors.index.json");
        fs::write(&index, format!(r#"{{"weight_map":{{{}}}}}"#, pairs.join(","))).unwrap();
        let checkpoint = Checkpoint::open(&index, &ingot_io::CheckpointOptions::default());
        let reported = Recorder::default();
        let reports = checkpoint.unwrap().verify(None, &reported).unwrap();
        for (number, (report, (sizes, algorithm))) in reports.iter().zip(&files).enumerate() {
            let is_bad = bad == Some(number) && sizes.iter().sum::<usize>() > 0;
            prop_assert_eq!(report.is_ok(), !is_bad);
            prop_assert_eq!((report.checked, report.algorithm), (sizes.len(), Some(*algorithm)));
        }
        let reported = reported.0.into_inner().unwrap();
        let total = u64::try_from(nbytes).unwrap();
        prop_assert!(reported.is_sorted() && reported.iter().all(|pair| pair.1 == total));
        prop_assert_eq!(reported.last(), Some(&(total, total)));
    }

    #[test]
    fn a_flipped_bit_anywhere_in_the_data_is_found_and_its_tensor_named(
        sizes in prop::collection::vec(prop_oneof![3 => 1..4000_usize, 1 => 1..3_000_000_usize], 1..6),
        at in any::<prop::sample::Index>(),
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
    ) {
        let mut bytes = with_checksums(algorithm, &sizes);
        let (_folder, path) = file(&bytes);
        let report = verify(&path, None, &Unwatched).unwrap();
        prop_assert!(report.is_ok(), "{:?}", report);
        prop_assert_eq!(report.checked, sizes.len());

        let data_nbytes: usize = sizes.iter().sum();
        let begin = bytes.len() - data_nbytes;
        let at = at.index(data_nbytes);
        bytes[begin + at] ^= 0x10;
        fs::write(&path, &bytes).unwrap();
        let report = verify(&path, None, &Unwatched).unwrap();
        prop_assert!(!report.is_ok());
        let mut end = 0;
        let hit = sizes.iter().position(|len| { end += len; at < end }).unwrap();
        let named: Vec<&str> = report.bad.iter().map(|row| row.tensor.as_str()).collect();
        prop_assert_eq!(named, [format!("t{hit:02}")]);
    }
}

#[test]
fn a_wrong_digest_of_the_whole_file_is_found() {
    let bytes = with_checksums(Algorithm::Xxh3, &[10]);
    let (_folder, path) = file(&bytes);
    let right = Algorithm::Sha256.digest(&bytes);
    assert!(verify(&path, Some(right), &Unwatched).unwrap().is_ok());
    let report = verify(&path, Some(Algorithm::Sha256.digest(b"other")), &Unwatched).unwrap();
    assert!(!report.is_ok());
    assert_eq!(report.file.unwrap().found, right);
    assert!(report.bad.is_empty());
}

#[test]
fn a_file_that_keeps_no_digests_is_not_vouched_for() {
    let tensor = TensorView::new(Dtype::U8, vec![3], b"abc").unwrap();
    let bytes = to_vec([("a", tensor)], None, Format::Bintensors).unwrap();
    let (_folder, path) = file(&bytes);
    let report = verify(&path, None, &Unwatched).unwrap();
    assert_eq!(
        (report.algorithm, report.checked, report.is_ok()),
        (None, 0, false)
    );
    assert_eq!(report.unchecked, ["a"]);
    let whole = hash(&path, Algorithm::Sha256, &Unwatched).unwrap();
    assert!(verify(&path, Some(whole), &Unwatched).unwrap().is_ok());
}

#[test]
fn a_record_that_cannot_be_used_is_an_error() {
    let tensor = TensorView::new(Dtype::U8, vec![3], b"abc").unwrap();
    for (record, words) in [
        ("no JSON", "is not a record of checksums"),
        (r#"{"algorithm":"md4","tensors":{}}"#, "unknown algorithm `md4`"),
        (
            r#"{"algorithm":"xxh3","tensors":{"a":"00"}}"#,
            "tensor `a`: `00` is not a digest of xxh3",
        ),
    ] {
        let bytes = to_vec(
            [("a", &tensor)],
            Some(&[("ingot.checksums", record)]),
            Format::Safetensors,
        )
        .unwrap();
        let (_folder, path) = file(&bytes);
        let error = verify(&path, None, &Unwatched).unwrap_err();
        assert_eq!(error.code(), "invalid-checksums");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn names_without_a_tensor_are_reported() {
    let tensor = TensorView::new(Dtype::U8, vec![3], b"abc").unwrap();
    let record = r#"{"algorithm":"xxh3","tensors":{"gone":"0000000000000000"}}"#;
    let bytes = to_vec(
        [("a", &tensor)],
        Some(&[("ingot.checksums", record)]),
        Format::Safetensors,
    )
    .unwrap();
    let (_folder, path) = file(&bytes);
    let report = verify(&path, None, &Unwatched).unwrap();
    assert_eq!(
        (report.missing, report.unchecked),
        (vec!["gone".into()], vec!["a".into()])
    );
}

/// Records the progress of a call.
#[derive(Default)]
struct Recorder(Mutex<Vec<(u64, u64)>>);

impl Watch for Recorder {
    fn progressed(&self, done: u64, total: u64) {
        self.0.lock().unwrap().push((done, total));
    }
}

/// Stops a call at its first check.
struct Stopped;

impl Watch for Stopped {
    fn interrupted(&self) -> bool {
        true
    }
}

#[test]
fn hashing_stops_when_asked_to() {
    let (_folder, path) = file(&pattern(20 << 20));
    let stopped = hash(&path, Algorithm::Sha256, &Stopped);
    assert!(stopped.as_ref().is_err_and(Error::is_interrupted), "{stopped:?}");
}

/// A source whose reads fail from the position `good` on.
#[derive(Debug)]
struct Far<'b> {
    bytes: &'b [u8],
    good: usize,
}

impl Produce for Far<'_> {
    fn nbytes(&self) -> u64 {
        u64::try_from(self.bytes.len()).unwrap()
    }

    fn produce(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
        let begin = usize::try_from(begin).unwrap();
        let end = begin + into.len();
        if end > self.good {
            return Err(io::Error::other("the device fell off the bus"));
        }
        into.copy_from_slice(&self.bytes[begin..end]);
        Ok(())
    }
}

const FAST: SaveOptions = SaveOptions::new().durable(false);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_sealed_file_keeps_the_digests_of_what_is_in_it_however_it_came_there(
        // Only the largest files are written by several threads, and around the page cache if the save is durable.
        sizes in prop::collection::vec((prop_oneof![
            4 => 0..5000_usize, 2 => (128 << 10) - 2..(128_usize << 10) + 2, 1 => 10 << 20..20_usize << 20,
        ], 0..4_u8), 0..7),
        algorithm in prop::option::of(prop::sample::select(Algorithm::ALL.to_vec())),
        model_spec in any::<bool>(),
        format in prop::sample::select(vec![Format::Safetensors, Format::Bintensors]),
        room in prop::option::of(0..9000_u64),
        in_place in any::<bool>(),
        durable in any::<bool>(),
    ) {
        let whole = pattern(20 << 20);
        let mut other = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut other, &whole).unwrap();
        let names: Vec<String> = (0..sizes.len()).map(|number| format!("t{number}")).collect();
        let shapes: Vec<[u64; 1]> = sizes.iter().map(|&(len, _)| [u64::try_from(len).unwrap()]).collect();
        let specs: Vec<Spec<'_>> = names
            .iter()
            .zip(&shapes)
            .map(|(name, shape)| Spec { name, dtype: Dtype::U8, shape })
            .collect();
        let options = match (format, room) {
            (Format::Safetensors, Some(reserve)) => LayoutOptions { reserve, align: Align::Page, ..LayoutOptions::default() },
            _ => LayoutOptions::default(),
        };
        let keep = Keep { tensors: algorithm, model_spec };
        // Without digests the metadata is unchanged.
        let record = if keep == Keep::default() { "other" } else { "ingot.checksums" };
        let stale = [("a", "b"), (record, "stale"), ("modelspec.title", "t")];
        let sealed = NewHeader::new(&specs, Some(&stale), format, &options, keep).unwrap();
        let far: Vec<Far<'_>> = sizes.iter().map(|&(len, _)| Far { bytes: &whole[..len], good: len }).collect();
        let payloads: Vec<Payload<'_>> = sealed
            .layout()
            .order
            .iter()
            .map(|&number| match sizes[number] {
                (_, 0) => Payload::Produced(&far[number]),
                (_, 1) => Payload::File(FileRange::new(&other, 0, shapes[number][0])),
                (len, _) => Payload::from(&whole[..len]),
            })
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "old").unwrap();
        let save = FAST.replace(if in_place { ingot_io::Replace::InPlace } else { ingot_io::Replace::Atomic }).durable(durable);
        save_pieces(&path, Pieces::of_new(&sealed, &payloads), &save, &Unwatched).unwrap();
        let report = verify(&path, None, &Unwatched).unwrap();
        prop_assert_eq!(report.algorithm, algorithm);
        prop_assert_eq!(report.model_spec.is_some(), model_spec);
        prop_assert_eq!(report.is_ok(), algorithm.is_some() || model_spec || sizes.is_empty(), "{:?}", report);
        let archive = Archive::open(&path, &ingot_io::OpenOptions::default()).unwrap();
        let start = archive.header().data_start();
        prop_assert!(format == Format::Bintensors || room.is_none() || start.is_multiple_of(4096));
        prop_assert_eq!(start, sealed.layout().header.data_start());
        for (number, (len, _)) in sizes.iter().enumerate() {
            let bytes = archive.read(&names[number]).unwrap().to_vec();
            prop_assert!(bytes == whole[..*len]);
            if let (Some(algorithm), Some(text)) = (algorithm, archive.header().metadata().unwrap().get("ingot.checksums")) {
                let record = Checksums::parse(text).unwrap();
                prop_assert_eq!(record.get(&names[number]), Some(&*algorithm.digest(&bytes).to_string()));
            }
        }
        prop_assert_eq!(archive.header().metadata().unwrap().get("a"), Some("b"));
    }
}

#[test]
fn a_sealed_save_that_fails_ends_and_leaves_the_old_file() {
    let near = pattern(40 << 20);
    let far = Far {
        bytes: &near,
        good: 30 << 20,
    };
    let shape = [u64::try_from(near.len()).unwrap()];
    let specs = ["a", "b", "c"].map(|name| Spec {
        name,
        dtype: Dtype::U8,
        shape: &shape,
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "old").unwrap();
    for algorithm in Algorithm::ALL {
        let keep = Keep {
            tensors: Some(algorithm),
            model_spec: true,
        };
        let sealed =
            NewHeader::new(&specs, None, Format::Safetensors, &LayoutOptions::default(), keep).unwrap();
        let payloads = [
            Payload::from(&near[..]),
            Payload::Produced(&far),
            Payload::from(&near[..]),
        ];
        let error = save_pieces(&path, Pieces::of_new(&sealed, &payloads), &FAST, &Unwatched).unwrap_err();
        assert!(error.to_string().contains("fell off the bus"), "{error}");
        let stopped = save_pieces(&path, Pieces::of_new(&sealed, &payloads), &FAST, &Stopped).unwrap_err();
        assert!(stopped.is_interrupted(), "{stopped}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

#[test]
fn some_tensors_are_proven_without_the_others() {
    for algorithm in Algorithm::ALL {
        let sizes = [10, 3 << 20, 5000, 20];
        let mut bytes = with_checksums(algorithm, &sizes);
        let whole = Algorithm::Sha256.digest(&bytes);
        let (_folder, path) = file(&bytes);
        let read = |numbers: &[usize], proof: Proof| {
            let archive = Archive::open(&path, &ingot_io::OpenOptions::default()).unwrap();
            let checkpoint = Checkpoint::from(archive);
            let file = checkpoint.file(0).unwrap();
            let tensors = numbers.iter().filter_map(|&number| file.tensor(number));
            let jobs: Vec<_> = tensors.map(Job::from).collect();
            let read = checkpoint.proven(&jobs, &proof, &ReadOptions::default(), &Unwatched);
            read.map(|buffers| buffers.iter().map(Buffer::len).collect::<Vec<_>>())
        };
        let kept = Proof {
            kept: true,
            sha256: None,
        };
        let both = Proof {
            sha256: Some(whole),
            ..kept
        };
        for proof in [kept, both] {
            assert_eq!(read(&[2, 0, 2], proof).unwrap(), [5000, 10, 5000]);
            assert_eq!(read(&[], proof).unwrap(), [0; 0]);
            assert_eq!(read(&[0, 1, 2, 3], proof).unwrap(), sizes);
        }
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&[2, 1, 0], kept).unwrap(), [5000, 3 << 20, 10]);
        let error = read(&[0, 3], kept).unwrap_err();
        assert_eq!((error.code(), error.tensor()), ("digest-mismatch", Some("t03")));
        let error = read(&[0], both).unwrap_err();
        assert_eq!((error.code(), error.tensor()), ("digest-mismatch", None));
    }
}
