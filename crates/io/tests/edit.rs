//! Editing, merging and filling files on disk.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use ingot_format::{
    Align, Dtype, Format, FormatError, Index, LayoutOptions, SafeTensors, Spec, TensorView, layout_with,
    serialize,
};
use ingot_io::binding::{Inherit, Pick, Pieces, Role, aliases, assemble, save_pieces};
use ingot_io::{
    Appender, Archive, Edited, Error, MetadataChange, OpenOptions, Payload, SaveOptions, Unwatched, Watch,
    Writer, replace_tensor, save, update_metadata,
};
use proptest::prelude::*;

const FAST: SaveOptions = SaveOptions::new().durable(false);

/// Returns the function by which [`assemble`] writes to `path`.
fn saving(path: &Path) -> impl FnOnce(Result<Pieces<'_>, FormatError>, &dyn Watch) -> Result<(), Error> {
    move |pieces, watch| save_pieces(path, pieces, &FAST, watch)
}

type Tensors = BTreeMap<String, Vec<u8>>;
type Pairs = BTreeMap<String, String>;

fn borrowed(pairs: &Pairs) -> Vec<(&str, &str)> {
    pairs.iter().map(|(key, value)| (&**key, &**value)).collect()
}

/// Writes a file of U8 tensors.
fn write(path: &Path, tensors: &Tensors, pairs: Option<&Pairs>, format: Format, options: &LayoutOptions) {
    let shapes: Vec<[u64; 1]> = tensors.values().map(|data| [data.len() as u64]).collect();
    let specs: Vec<Spec<'_>> = tensors
        .keys()
        .zip(&shapes)
        .map(|(name, shape)| Spec {
            name,
            dtype: Dtype::U8,
            shape,
        })
        .collect();
    let pairs = pairs.map(borrowed);
    let layout = layout_with(&specs, pairs.as_deref(), format, options).unwrap();
    let data: Vec<&Vec<u8>> = tensors.values().collect();
    let payloads: Vec<Payload<'_>> = layout
        .order
        .iter()
        .map(|&number| Payload::from(&**data[number]))
        .collect();
    save(path, &layout, &payloads, &FAST, &Unwatched).unwrap();
}

/// Returns the contents of an open file, even if its path names another file now.
fn held(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Returns the tensors and the metadata that the safetensors crate reads.
fn read(path: &Path) -> (Tensors, Option<Pairs>) {
    let file = fs::read(path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
    let pairs = header.metadata().as_ref().map(|pairs| {
        pairs
            .iter()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    });
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let tensors = tensors
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.data().to_vec()))
        .collect();
    (tensors, pairs)
}

fn only(folder: &Path, names: &[&str]) {
    let mut found: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    assert_eq!(found, names);
}

/// Checks the same while removed files are still open. Older versions of Windows, and wine, list those until they are
/// closed.
fn only_but_for_open(folder: &Path, names: &[&str]) {
    if !cfg!(windows) {
        only(folder, names);
    }
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    (folder, path)
}

fn some_tensors() -> Tensors {
    (0..20_u8)
        .map(|n| (format!("layer.{n}"), vec![n; usize::from(n) * 1000]))
        .collect()
}

fn pairs() -> impl Strategy<Value = Pairs> {
    let text = prop_oneof!["[a-c]{0,2}", any::<String>(), "x{0,3000}"];
    proptest::collection::btree_map("[a-e]", text, 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn any_series_of_edits_leaves_the_tensors_and_the_last_word(
        start in proptest::option::of(pairs()),
        reserve in prop_oneof![Just(0_u64), 0..9000_u64],
        edits in proptest::collection::vec((pairs(), proptest::collection::vec("[a-e]", 0..2), any::<bool>()), 1..5),
    ) {
        let (folder, path) = place();
        let tensors = some_tensors();
        let options = LayoutOptions { reserve, ..LayoutOptions::default() };
        write(&path, &tensors, start.as_ref(), Format::Safetensors, &options);
        let mut expected = start;
        for (set, remove, in_place) in edits {
            let before = fs::read(&path).unwrap();
            // The old file stays open during the edit.
            let file = File::open(&path).unwrap();
            let (set_refs, remove_refs) = (borrowed(&set), remove.iter().map(|key| &**key).collect::<Vec<_>>());
            let change = MetadataChange { set: &set_refs, remove: &remove_refs, rewrite: !in_place };
            let edited = update_metadata(&path, &change, &FAST, &Unwatched).unwrap();
            if expected.is_some() || !set.is_empty() {
                let pairs = expected.get_or_insert_default();
                pairs.extend(set);
                pairs.retain(|key, _| !remove.contains(key));
            }
            let after = fs::read(&path).unwrap();
            match edited {
                Edited::Unchanged => prop_assert!(before == after),
                Edited::Rewritten => prop_assert!(before == held(&file) && before != after),
                Edited::InPlace => {
                    prop_assert!(in_place);
                    prop_assert!(after == held(&file));
                    prop_assert_eq!(before.len(), after.len());
                    let pages: std::collections::BTreeSet<usize> =
                        (0..before.len()).filter(|&at| before[at] != after[at]).map(|at| at / 4096).collect();
                    prop_assert!(pages.len() <= 1, "{pages:?}");
                }
            }
            prop_assert_eq!(&read(&path), &(tensors.clone(), expected.clone()));
        }
        only(folder.path(), &["file"]);
    }

    #[test]
    fn a_merged_file_is_the_saved_one_byte_for_byte(
        split in proptest::collection::vec(0..3_usize, 20),
        metadata in proptest::option::of(pairs()),
        (from, to) in (any::<bool>(), any::<bool>()),
    ) {
        let format = |binary| if binary { Format::Bintensors } else { Format::Safetensors };
        let folder = tempfile::tempdir().unwrap();
        let whole = some_tensors();
        let mut parts = vec![Tensors::new(); 3];
        for ((name, data), &part) in whole.iter().zip(&split) {
            parts[part].insert(name.clone(), data.clone());
        }
        let files: Vec<Archive> = parts
            .iter()
            .enumerate()
            .map(|(number, part)| {
                let path = folder.path().join(format!("part{number}"));
                write(&path, part, None, format(from), &LayoutOptions::default());
                open(&path)
            })
            .collect();
        let names: Vec<(usize, usize, &str)> = files
            .iter()
            .enumerate()
            .flat_map(|(at, file)| file.header().names().enumerate().map(move |(number, name)| (at, number, name)))
            .collect();
        let picks: Vec<Pick<'_>> =
            names.iter().map(|&(at, number, name)| Pick { tensor: files[at].tensor(number).unwrap(), name, role: Role::Tensor }).collect();
        let pairs = metadata.as_ref().map(borrowed);
        let (merged, saved) = (folder.path().join("merged"), folder.path().join("saved"));
        assemble(&merged, saving(&merged), &picks, pairs.as_deref(), Inherit::Digests, format(to), &LayoutOptions::default(), &Unwatched).unwrap();
        write(&saved, &whole, metadata.as_ref(), format(to), &LayoutOptions::default());
        prop_assert!(fs::read(&merged).unwrap() == fs::read(&saved).unwrap());
    }
}

fn open(path: &Path) -> Archive {
    Archive::open(path, &OpenOptions::default()).unwrap()
}

/// Writes a file with one tensor of six bytes, an alias of it, and two aliases of its parts.
fn write_shared(path: &Path) -> Tensors {
    let shared = r#"{"middle":{"begin":1,"of":"whole","shape":[4],"stride":[1]},"odd":{"begin":1,"of":"whole","shape":[2],"stride":[2]},"other":{"of":"whole"}}"#;
    let pairs = Pairs::from([
        ("ingot.shared".to_owned(), shared.to_owned()),
        ("k".to_owned(), "v".to_owned()),
    ]);
    let tensors = Tensors::from([("whole".to_owned(), b"abcdef".to_vec())]);
    write(
        path,
        &tensors,
        Some(&pairs),
        Format::Safetensors,
        &LayoutOptions::default(),
    );
    Tensors::from([
        ("middle".to_owned(), b"bcde".to_vec()),
        ("odd".to_owned(), b"bd".to_vec()),
        ("other".to_owned(), b"abcdef".to_vec()),
        ("whole".to_owned(), b"abcdef".to_vec()),
    ])
}

/// Returns the tensors of a file, with their aliases.
fn read_all_names(path: &Path) -> Tensors {
    let file = open(path);
    let (mut tensors, _) = read(path);
    let stored: Vec<&str> = file.header().names().collect();
    for alias in aliases(std::iter::once((Some(path), file.header()))).unwrap() {
        let whole = &tensors[stored[alias.number]];
        let bytes = match &alias.part {
            None => whole.clone(),
            Some(part) => (0..part.count())
                .map(|number| whole[usize::try_from(part.place(number)).unwrap()])
                .collect(),
        };
        tensors.insert(alias.name, bytes);
    }
    tensors
}

#[test]
fn names_that_share_a_tensor_keep_their_values_whichever_of_them_are_picked() {
    let (folder, path) = place();
    let whole = write_shared(&path);
    let file = open(&path);
    let others = aliases(std::iter::once((Some(&*path), file.header()))).unwrap();
    let all: Vec<(&str, Role<'_>)> = others
        .iter()
        .map(|alias| (&*alias.name, alias.part.as_ref().map_or(Role::Alias, Role::Part)))
        .chain([("whole", Role::Tensor)])
        .collect();
    for choice in 0..1 << all.len() {
        let picks: Vec<Pick<'_>> = all
            .iter()
            .enumerate()
            .filter(|(at, _)| choice >> at & 1 == 1)
            .map(|(_, &(name, role))| Pick {
                tensor: file.tensor(0).unwrap(),
                name,
                role,
            })
            .collect();
        let expected: Tensors = picks
            .iter()
            .map(|pick| (pick.name.to_owned(), whole[pick.name].clone()))
            .collect();
        let out = folder.path().join("out");
        // A new file has no records about other files.
        let pairs = [
            ("ingot.shared", "stale"),
            ("ingot.checksums", "stale"),
            ("modelspec.hash_sha256", "stale"),
        ];
        assemble(
            &out,
            saving(&out),
            &picks,
            Some(&pairs),
            Inherit::Digests,
            Format::Safetensors,
            &LayoutOptions::default(),
            &Unwatched,
        )
        .unwrap();
        assert_eq!(read_all_names(&out), expected);
        let keys: Vec<String> = read(&out).1.unwrap().into_keys().collect();
        assert!(keys.iter().all(|key| key == "ingot.shared"), "{keys:?}");
        // A tensor is stored once if one of its names covers all others.
        let stored = read(&out).0.len();
        assert_eq!(stored, usize::from(!picks.is_empty()), "{choice:b}");
    }
}

#[test]
fn a_tensor_is_replaced_under_each_of_its_names_and_a_part_is_not() {
    let (_folder, path) = place();
    write_shared(&path);
    let put = |name, bytes: &[u8]| {
        let shape = [bytes.len() as u64];
        replace_tensor(
            &path,
            name,
            Dtype::U8,
            &shape,
            &Payload::from(bytes),
            &FAST,
            &Unwatched,
        )
    };
    put("other", b"uvwxyz").unwrap();
    let found = read_all_names(&path);
    assert_eq!(found["whole"], b"uvwxyz");
    assert_eq!(found["odd"], b"vx");
    let fault = put("odd", b"..").unwrap_err();
    assert_eq!((fault.code(), fault.tensor()), ("invalid-alias", Some("odd")));
    assert_eq!(put("none", b"..").unwrap_err().code(), "unknown-tensor");
    assert_eq!(read_all_names(&path), found);
}

#[test]
fn a_record_that_is_none_of_the_file_is_not_put_into_it() {
    let (_folder, path) = place();
    write_shared(&path);
    let before = fs::read(&path).unwrap();
    for text in ["{", r#"{"whole":{"of":"whole"}}"#, r#"{"new":{"of":"gone"}}"#] {
        let change = MetadataChange {
            set: &[("ingot.shared", text)],
            ..MetadataChange::default()
        };
        let fault = update_metadata(&path, &change, &FAST, &Unwatched).unwrap_err();
        assert_eq!(fault.code(), "invalid-alias");
        assert!(before == fs::read(&path).unwrap());
    }
}

#[cfg(unix)]
#[test]
fn an_edit_keeps_the_mode_and_follows_a_link() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let (folder, path) = place();
    write(
        &path,
        &some_tensors(),
        None,
        Format::Safetensors,
        &LayoutOptions::default(),
    );
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("file", &link).unwrap();
    let change = MetadataChange {
        set: &[("k", "v")],
        remove: &[],
        rewrite: true,
    };
    let edited = update_metadata(&link, &change, &FAST, &Unwatched).unwrap();
    assert_eq!(edited, Edited::Rewritten);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    assert_eq!(read(&path).1.unwrap()["k"], "v");
}

#[test]
fn a_file_that_is_not_there_is_not_edited() {
    let (folder, _) = place();
    let change = MetadataChange {
        set: &[("k", "v")],
        ..MetadataChange::default()
    };
    let missing = update_metadata(&folder.path().join("none"), &change, &FAST, &Unwatched);
    assert!(missing.is_err_and(|fault| fault.code() == "open"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_header_that_would_be_too_large_is_refused_before_anything_is_touched() {
    let (_folder, path) = place();
    write(
        &path,
        &some_tensors(),
        None,
        Format::Safetensors,
        &LayoutOptions::default(),
    );
    let before = fs::read(&path).unwrap();
    let value = "x".repeat(100_000_000);
    let change = MetadataChange {
        set: &[("k", &value)],
        ..MetadataChange::default()
    };
    let fault = update_metadata(&path, &change, &FAST, &Unwatched).unwrap_err();
    assert_eq!(fault.code(), "header-too-large");
    assert!(before == fs::read(&path).unwrap());
}

#[test]
fn of_many_edits_at_once_none_is_lost() {
    let (folder, path) = place();
    let options = LayoutOptions {
        reserve: 300,
        ..LayoutOptions::default()
    };
    write(&path, &some_tensors(), None, Format::Safetensors, &options);
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let path = &path;
            scope.spawn(move || {
                for turn in 0..12 {
                    let key = format!("{worker}.{turn}");
                    let change = MetadataChange {
                        set: &[(&key, "here")],
                        remove: &[],
                        rewrite: turn % 3 == 0,
                    };
                    update_metadata(path, &change, &FAST, &Unwatched).unwrap();
                }
            });
        }
    });
    assert_eq!(read(&path).1.unwrap().len(), 48);
    only(folder.path(), &["file"]);
}

/// Saves another file to the path during an edit.
struct Meddler<'p> {
    path: &'p Path,
    done: AtomicBool,
}

impl Watch for Meddler<'_> {
    fn interrupted(&self) -> bool {
        if !self.done.swap(true, Ordering::Relaxed) {
            let other = Tensors::from([("other".to_owned(), vec![1])]);
            write(
                self.path,
                &other,
                None,
                Format::Safetensors,
                &LayoutOptions::default(),
            );
        }
        false
    }
}

#[test]
fn an_edit_that_a_save_overtakes_is_refused_and_the_save_stays() {
    let (folder, path) = place();
    write(
        &path,
        &some_tensors(),
        None,
        Format::Safetensors,
        &LayoutOptions::default(),
    );
    let meddler = Meddler {
        path: &path,
        done: AtomicBool::new(false),
    };
    let change = MetadataChange {
        set: &[("k", "v")],
        remove: &[],
        rewrite: true,
    };
    let fault = update_metadata(&path, &change, &FAST, &meddler).unwrap_err();
    assert_eq!(fault.code(), "overtaken");
    assert_eq!(read(&path).0.into_keys().collect::<Vec<_>>(), ["other"]);
    only(folder.path(), &["file"]);
}

#[test]
fn a_replaced_tensor_is_the_only_thing_that_changes() {
    let (_folder, path) = place();
    let mut tensors = some_tensors();
    let options = LayoutOptions {
        align: Align::Page,
        ..LayoutOptions::default()
    };
    write(
        &path,
        &tensors,
        Some(&Pairs::from([("k".into(), "v".into())])),
        Format::Safetensors,
        &options,
    );
    let before = fs::read(&path).unwrap();
    let new = vec![200; 7000];
    let replace = |name: &str, dtype, shape: &[u64]| {
        replace_tensor(
            &path,
            name,
            dtype,
            shape,
            &Payload::from(&new[..]),
            &FAST,
            &Unwatched,
        )
    };
    for (name, dtype, shape, code) in [
        ("layer.8", Dtype::U8, [7000], "mismatch"),
        ("layer.7", Dtype::I8, [7000], "mismatch"),
        ("layer.7", Dtype::U8, [7001], "mismatch"),
        ("layer.20", Dtype::U8, [7000], "unknown-tensor"),
    ] {
        assert_eq!(replace(name, dtype, &shape).unwrap_err().code(), code);
        assert!(fs::read(&path).unwrap() == before);
    }
    replace("layer.7", Dtype::U8, &[7000]).unwrap();
    tensors.insert("layer.7".into(), new.clone());
    assert!(read(&path).0 == tensors);
    assert_eq!(
        fs::read(&path)
            .unwrap()
            .iter()
            .zip(&before)
            .filter(|(a, b)| a != b)
            .count(),
        7000
    );
}

#[test]
fn two_files_with_one_name_are_both_named() {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<Archive> = ["first", "second"]
        .iter()
        .map(|name| {
            let path = folder.path().join(name);
            let tensors = Tensors::from([("weight".to_owned(), vec![1, 2])]);
            write(
                &path,
                &tensors,
                None,
                Format::Safetensors,
                &LayoutOptions::default(),
            );
            open(&path)
        })
        .collect();
    let picks: Vec<Pick<'_>> = files
        .iter()
        .map(|file| Pick {
            tensor: file.tensor(0).unwrap(),
            name: "weight",
            role: Role::Tensor,
        })
        .collect();
    let out = folder.path().join("out");
    let fault = assemble(
        &out,
        saving(&out),
        &picks,
        None,
        Inherit::Digests,
        Format::Safetensors,
        &LayoutOptions::default(),
        &Unwatched,
    )
    .unwrap_err();
    let text = fault.to_string();
    assert!(
        text.contains("`weight`") && text.contains("first") && text.contains("second"),
        "{text}"
    );
    assert_eq!(fault.code(), "duplicate-tensor");
    only(folder.path(), &["first", "second"]);
}

fn specs() -> [Spec<'static>; 2] {
    [
        Spec {
            name: "matrix",
            dtype: Dtype::U8,
            shape: &[4, 6],
        },
        Spec {
            name: "bias",
            dtype: Dtype::F32,
            shape: &[2],
        },
    ]
}

fn begin(path: &Path) -> Writer {
    Writer::create(
        path,
        &specs(),
        None,
        Format::Safetensors,
        &LayoutOptions::default(),
        &FAST,
        &Unwatched,
    )
    .unwrap()
}

#[test]
fn columns_and_rows_fill_a_file_that_is_the_saved_one() {
    let (folder, path) = place();
    fs::write(&path, "old").unwrap();
    let writer = begin(&path);
    let matrix: Vec<u8> = (0..24).collect();
    let column = |at: usize| -> Vec<u8> { (0..4).map(|row| matrix[row * 6 + at]).collect() };
    for at in 0..5 {
        let index = [Index::WHOLE, Index::At(i64::try_from(at).unwrap())];
        writer
            .write(
                "matrix",
                &index,
                Dtype::U8,
                &[4],
                &Payload::from(&column(at)[..]),
                &Unwatched,
            )
            .unwrap();
    }
    let fault = writer.commit(&Unwatched).unwrap_err();
    // F32 comes first in the file.
    assert_eq!((fault.code(), fault.tensor()), ("never-filled", Some("bias")));
    writer
        .write(
            "bias",
            &[],
            Dtype::F32,
            &[2],
            &Payload::from(&[9; 8][..]),
            &Unwatched,
        )
        .unwrap();
    let fault = writer.commit(&Unwatched).unwrap_err();
    assert_eq!(
        (fault.code(), fault.expected_found()),
        ("partly-filled", Some((24, 20)))
    );
    let row = [Index::At(0)];
    let fault = writer
        .write(
            "matrix",
            &row,
            Dtype::U8,
            &[6],
            &Payload::from(&matrix[..6]),
            &Unwatched,
        )
        .unwrap_err();
    assert_eq!((fault.code(), fault.tensor()), ("filled-twice", Some("matrix")));
    for (dtype, shape) in [(Dtype::I8, &[4][..]), (Dtype::U8, &[4, 1])] {
        let index = [Index::WHOLE, Index::At(5)];
        let fault = writer
            .write(
                "matrix",
                &index,
                dtype,
                shape,
                &Payload::from(&column(5)[..]),
                &Unwatched,
            )
            .unwrap_err();
        assert_eq!(fault.code(), "mismatch");
    }
    let rest = [Index::WHOLE, Index::At(-1)];
    let guest = Writer::join(&path, false, &FAST, &Unwatched).unwrap();
    guest
        .write(
            "matrix",
            &rest,
            Dtype::U8,
            &[4],
            &Payload::from(&column(5)[..]),
            &Unwatched,
        )
        .unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    guest.commit(&Unwatched).unwrap();
    let fault = writer
        .write(
            "bias",
            &[],
            Dtype::F32,
            &[2],
            &Payload::from(&[9; 8][..]),
            &Unwatched,
        )
        .unwrap_err();
    assert_eq!(fault.code(), "committed");
    drop((writer, guest));
    let views = [
        ("matrix", TensorView::new(Dtype::U8, vec![4, 6], &matrix).unwrap()),
        ("bias", TensorView::new(Dtype::F32, vec![2], &[9; 8]).unwrap()),
    ];
    assert!(fs::read(&path).unwrap() == serialize(views, None).unwrap());
    only(folder.path(), &["file"]);
}

#[test]
fn leaving_without_a_commit_leaves_the_old_file_and_ends_it_for_the_others() {
    let (folder, path) = place();
    fs::write(&path, "old").unwrap();
    let writer = begin(&path);
    let second = Writer::create(
        &path,
        &specs(),
        None,
        Format::Safetensors,
        &LayoutOptions::default(),
        &FAST,
        &Unwatched,
    );
    assert_eq!(second.err().unwrap().code(), "busy");
    let guest = Writer::join(&path, false, &FAST, &Unwatched).unwrap();
    drop(writer);
    only_but_for_open(folder.path(), &["file"]);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    let fault = guest
        .write(
            "bias",
            &[],
            Dtype::F32,
            &[2],
            &Payload::from(&[9; 8][..]),
            &Unwatched,
        )
        .unwrap_err();
    assert_eq!(fault.code(), "abandoned");
    assert_eq!(guest.commit(&Unwatched).unwrap_err().code(), "abandoned");
    assert_eq!(
        Writer::join(&path, false, &FAST, &Unwatched)
            .err()
            .unwrap()
            .code(),
        "nothing-to-join"
    );
    drop(guest);
    only(folder.path(), &["file"]);
    drop(begin(&path));
}

#[test]
fn a_save_does_not_clean_up_what_a_writer_is_filling() {
    let (folder, path) = place();
    let writer = begin(&path);
    write(
        &path,
        &some_tensors(),
        None,
        Format::Safetensors,
        &LayoutOptions::default(),
    );
    writer
        .write(
            "bias",
            &[],
            Dtype::F32,
            &[2],
            &Payload::from(&[9; 8][..]),
            &Unwatched,
        )
        .unwrap();
    writer
        .write(
            "matrix",
            &[],
            Dtype::U8,
            &[4, 6],
            &Payload::from(&[7; 24][..]),
            &Unwatched,
        )
        .unwrap();
    writer.commit(&Unwatched).unwrap();
    assert_eq!(read(&path).0.len(), 2);
    only_but_for_open(folder.path(), &["file"]);
    drop(writer);
    only(folder.path(), &["file"]);
}

#[test]
fn appended_tensors_are_in_the_file_until_the_header_is_full() {
    let (folder, path) = place();
    let mut appender = Appender::create(&path, 1000, Some(&[("k", "v")]), &FAST, &Unwatched).unwrap();
    let mut expected = Tensors::new();
    let fault = loop {
        let name = format!("step.{}", expected.len());
        let data = vec![1; 3 * expected.len()];
        let shape = [data.len() as u64];
        match appender.append(&name, Dtype::U8, &shape, &Payload::from(&data[..]), &Unwatched) {
            Ok(()) => expected.insert(name, data),
            Err(fault) => break fault,
        };
    };
    assert_eq!(fault.code(), "reserve-full");
    assert!(expected.len() > 12, "only {} tensors", expected.len());
    let twice = appender.append("step.0", Dtype::U8, &[0], &Payload::from(&[][..]), &Unwatched);
    assert_eq!(twice.unwrap_err().code(), "duplicate-tensor");
    assert!(!path.exists());
    appender.commit(&Unwatched).unwrap();
    assert_eq!(appender.commit(&Unwatched).unwrap_err().code(), "committed");
    let late = appender.append("late", Dtype::U8, &[0], &Payload::from(&[][..]), &Unwatched);
    assert_eq!(late.unwrap_err().code(), "committed");
    drop(appender);
    assert!(read(&path) == (expected, Some(Pairs::from([("k".into(), "v".into())]))));
    let file = fs::read(&path).unwrap();
    assert_eq!(
        SafeTensors::deserialize(&file).unwrap().header().data_start(),
        1000
    );
    only(folder.path(), &["file"]);
}

#[test]
fn an_appender_that_is_left_leaves_nothing() {
    let (folder, path) = place();
    drop(Appender::create(&path, 1 << 20, None, &FAST, &Unwatched).unwrap());
    only(folder.path(), &[]);
    let fault = Appender::create(&path, 200_000_000, None, &FAST, &Unwatched)
        .err()
        .unwrap();
    assert_eq!(fault.code(), "header-too-large");
}
