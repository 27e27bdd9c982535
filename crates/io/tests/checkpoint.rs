//! Sharded checkpoints: tensors of many files, read in parallel.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ingot_format::{Dtype, Format, Index, Spec, layout, to_u64};
use ingot_io::binding::{Prefetch, Request, TensorId, warm_tensors};
use ingot_io::{
    Archive, Backend, Checkpoint, CheckpointOptions, Error, Failure, Job, MemorySource, OpenOptions,
    ReadOptions, Source, Tensor, Unwatched,
};

const SIZES: [u64; 4] = [10, 0, 3 << 20, 70_000];

/// Returns a file of tensors of several sizes. Their bytes depend on `seed`, so that each file's are unique.
fn file(seed: u64) -> Vec<u8> {
    let names: Vec<String> = (0..SIZES.len())
        .map(|number| format!("{seed}.{number}"))
        .collect();
    let shapes = SIZES.map(|size| [size]);
    let specs: Vec<Spec<'_>> = names
        .iter()
        .zip(&shapes)
        .map(|(name, shape)| Spec {
            name,
            dtype: Dtype::U8,
            shape,
        })
        .collect();
    let layout = layout(&specs, None, Format::Safetensors).unwrap();
    let mut file = layout.head;
    file.extend((0..layout.header.data_nbytes()).map(|at| (at * (seed + 3) + seed).to_le_bytes()[0]));
    file
}

/// Writes three shards and their index, and returns the path of the index.
fn write(directory: &Path) -> PathBuf {
    let mut entries = Vec::new();
    for seed in 0..3 {
        fs::write(directory.join(format!("{seed}.safetensors")), file(seed)).unwrap();
        entries.extend((0..SIZES.len()).map(|number| format!("\"{seed}.{number}\":\"{seed}.safetensors\"")));
    }
    let path = directory.join("model.safetensors.index.json");
    fs::write(&path, format!("{{\"weight_map\":{{{}}}}}", entries.join(","))).unwrap();
    path
}

fn open(path: &Path, backend: Backend) -> Checkpoint {
    let options = CheckpointOptions::new().open(OpenOptions::new().backend(backend));
    Checkpoint::open(path, &options).unwrap()
}

/// Returns all names in an order in which neighbours are in different files.
fn mixed() -> Vec<String> {
    (0..SIZES.len())
        .flat_map(|number| (0..3).map(move |seed| format!("{seed}.{number}")))
        .collect()
}

/// Returns the bytes of a tensor, read from its shard as a single file.
fn alone(directory: &Path, name: &str) -> Vec<u8> {
    let path = directory.join(format!("{}.safetensors", &name[..1]));
    let archive = Archive::open(&path, &OpenOptions::default()).unwrap();
    archive.read(name).unwrap().to_vec()
}

#[test]
fn tensors_of_many_files_are_those_of_each_file_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = write(directory.path());
    let names = mixed();
    let borrowed: Vec<&str> = names.iter().map(String::as_str).collect();
    for backend in [Backend::Mmap, Backend::Pread] {
        for path in [directory.path(), &path] {
            let checkpoint = open(path, backend);
            let tensors = checkpoint.find_all(&borrowed, &Unwatched).unwrap();
            let parts: Vec<Job<'_>> = tensors.iter().copied().map(Job::from).collect();
            let regions = ingot_io::read(&parts, &ReadOptions::default(), &Unwatched).unwrap();
            for (name, region) in names.iter().zip(&regions) {
                assert_eq!(region.to_vec(), alone(directory.path(), name), "{name}");
            }
            let warmed = warm_tensors(&tensors, &ReadOptions::default(), &Unwatched).unwrap();
            assert_eq!(warmed, 3 * SIZES.iter().sum::<u64>());
        }
    }
}

#[test]
fn parts_of_many_files_are_read_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = open(&write(directory.path()), Backend::Pread);
    let index = [Index::Span {
        start: Some(3),
        stop: None,
        step: Some(2),
    }];
    let names = mixed();
    let part = |name: &String| Job::new(checkpoint.find(name).unwrap(), &index, None).unwrap();
    let parts: Vec<Job<'_>> = names.iter().map(part).collect();
    let expected = |name: &String| -> Vec<u8> {
        let bytes = alone(directory.path(), name);
        bytes.into_iter().skip(3).step_by(2).collect()
    };
    let regions = ingot_io::read(&parts, &ReadOptions::default(), &Unwatched).unwrap();
    for (name, region) in names.iter().zip(regions) {
        assert_eq!(region.to_vec(), expected(name), "{name}");
    }
}

#[test]
fn tensors_of_many_files_are_read_ahead_in_any_order() {
    let directory = tempfile::tempdir().unwrap();
    for backend in [Backend::Mmap, Backend::Pread] {
        let checkpoint = Arc::new(open(&write(directory.path()), backend));
        let names = mixed();
        let requests = names.iter().map(|name| Request {
            tensor: checkpoint.id(name).unwrap(),
            index: None,
            onto: None,
        });
        for ahead in [0, 1 << 20, u64::MAX] {
            let requests = requests.clone().collect();
            let prefetch = Prefetch::new(Arc::clone(&checkpoint), requests, ahead, ReadOptions::default());
            for name in &names {
                let (_, fetched) = prefetch.next(&Unwatched).unwrap().unwrap();
                assert_eq!(
                    fetched.buffer.host().unwrap().to_vec(),
                    alone(directory.path(), name),
                    "{name}"
                );
            }
            assert!(prefetch.next(&Unwatched).unwrap().is_none());
        }
    }
}

/// Bytes in memory. Reads fail from the position `broken` on.
#[derive(Debug)]
struct Broken {
    bytes: MemorySource<Vec<u8>>,
    broken: u64,
}

impl Source for Broken {
    fn nbytes(&self) -> u64 {
        self.bytes.nbytes()
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        if position + to_u64(dest.len()) > self.broken {
            return Err(io::Error::other("a bad block"));
        }
        self.bytes.read_at(position, dest)
    }
}

#[test]
fn what_goes_wrong_is_that_of_the_file_it_went_wrong_in() {
    let broken = Broken {
        broken: to_u64(file(1).len()) - 1000,
        bytes: MemorySource::new(file(1)),
    };
    let sources: [Box<dyn Source>; 3] = [
        Box::new(MemorySource::new(file(0))),
        Box::new(broken),
        Box::new(MemorySource::new(file(2))),
    ];
    let archives = sources.map(|source| Archive::from_source(source, &OpenOptions::default()).unwrap());
    let all: Vec<Tensor<'_>> = archives
        .iter()
        .flat_map(|archive| (0..SIZES.len()).map(|number| archive.tensor(number).unwrap()))
        .collect();
    let parts: Vec<Job<'_>> = all.iter().copied().map(Job::from).collect();
    let options = ReadOptions::default();
    let faults = [
        warm_tensors(&all, &options, &Unwatched).map(drop),
        ingot_io::read(&parts, &options, &Unwatched).map(drop),
    ];
    for fault in faults {
        let fault = fault.unwrap_err();
        assert!(matches!(fault.failure(), Failure::Read { .. }), "{fault}");
        assert!(
            fault.tensor().is_some_and(|tensor| tensor.starts_with("1.")),
            "{fault}"
        );
    }
}

#[test]
fn files_that_are_rearranged_are_held_against_the_index_too() {
    let directory = tempfile::tempdir().unwrap();
    let path = write(directory.path());
    let files = || {
        Checkpoint::open(&path, &CheckpointOptions::default())?
            .all_files()
            .map(|files| files.len())
    };
    assert_eq!(files().unwrap(), 3);
    fs::copy(
        directory.path().join("0.safetensors"),
        directory.path().join("1.safetensors"),
    )
    .unwrap();
    let fault = files().unwrap_err();
    assert_eq!(fault.code(), "tensor-in-two-shards", "{fault}");
}

#[test]
fn an_index_is_read_without_its_shards() {
    let directory = tempfile::tempdir().unwrap();
    let path = write(directory.path());
    let shard = directory.path().join("0.safetensors");
    assert!(Checkpoint::index_at(&shard).unwrap().is_none());
    fs::remove_file(shard).unwrap();
    for place in [directory.path(), &path] {
        let index = Checkpoint::index_at(place).unwrap().unwrap();
        assert_eq!(index.shards().len(), 3);
    }
}

/// Writes more shards than are kept open at once, with one tensor each.
fn many(directory: &Path) -> (PathBuf, Vec<String>) {
    let names: Vec<String> = (0..60).map(|number| format!("t{number:02}")).collect();
    let mut entries = Vec::new();
    for (number, name) in (0..60_u8).zip(&names) {
        let spec = Spec {
            name,
            dtype: Dtype::U8,
            shape: &[9],
        };
        let head = layout(&[spec], None, Format::Safetensors).unwrap().head;
        let bytes = [&*head, &[number; 9]].concat();
        fs::write(directory.join(format!("{name}.safetensors")), bytes).unwrap();
        entries.push(format!("\"{name}\":\"{name}.safetensors\""));
    }
    let path = directory.join("model.safetensors.index.json");
    fs::write(&path, format!("{{\"weight_map\":{{{}}}}}", entries.join(","))).unwrap();
    (path, names)
}

#[test]
fn a_shard_that_was_closed_is_refused_when_another_file_has_its_name() {
    for backend in [Backend::Mmap, Backend::Pread] {
        let directory = tempfile::tempdir().unwrap();
        let (path, names) = many(directory.path());
        let checkpoint = open(&path, backend);
        let bytes = |number: usize| {
            let tensor = checkpoint.find(&names[number])?;
            Ok::<_, Error>(tensor.archive().read(&names[number])?.to_vec())
        };
        for _ in 0..2 {
            for number in 0..names.len() {
                let expected = u8::try_from(number).unwrap();
                assert_eq!(bytes(number).unwrap(), [expected; 9]);
            }
        }
        let first = directory.path().join("t00.safetensors");
        let modified = fs::metadata(&first).unwrap().modified().unwrap();
        let other = directory.path().join("other");
        fs::write(&other, fs::read(&first).unwrap()).unwrap();
        let file = fs::File::options().write(true).open(&other).unwrap();
        file.set_modified(modified).unwrap();
        drop(file);
        if cfg!(windows) {
            // Windows does not replace a mapped file, but renames it.
            fs::rename(&first, directory.path().join("aside")).unwrap();
        }
        fs::rename(other, first).unwrap();
        let fault = bytes(0).unwrap_err();
        assert!(
            matches!(fault.failure(), Failure::Changed { nbytes_now: None, .. }),
            "{fault}"
        );
        assert_eq!(bytes(1).unwrap(), [1; 9]);
    }
}

/// Other tests of this process may open many files meanwhile. Then the shard is closed, and reading it fails.
#[cfg(unix)]
#[test]
fn reads_a_shard_as_it_was_when_the_index_was_read() {
    let found = (0..20).find_map(|_| read_a_replaced_shard());
    assert_eq!(found.expect("a shard stays open").last(), file(1).last());
}

/// Open a checkpoint, replace a shard, and return the bytes of a tensor in it; `None` if the shard was closed.
#[cfg(unix)]
fn read_a_replaced_shard() -> Option<Vec<u8>> {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = open(&write(directory.path()), Backend::Pread);
    let shard = directory.path().join("1.safetensors");
    let modified = fs::metadata(&shard).unwrap().modified().unwrap();
    // Same size and time stamps, as after two saves within the resolution of the clock.
    let (other, mut bytes) = (directory.path().join("other"), file(1));
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&other, bytes).unwrap();
    let written = fs::File::options().write(true).open(&other).unwrap();
    written.set_modified(modified).unwrap();
    fs::rename(&other, &shard).unwrap();
    match checkpoint.find("1.3").unwrap().archive().read("1.3") {
        Ok(found) => Some(found.to_vec()),
        Err(fault) => {
            assert_eq!(fault.code(), "changed");
            None
        }
    }
}

/// Replaces the checkpoint of a directory by one with `count` shards, whose names no other version has.
#[cfg(unix)]
fn replace_index(directory: &Path, version: u64, shards: u64) {
    let name = |version: u64, shard: u64| format!("{version}-{shard}.safetensors");
    let mut entries = Vec::new();
    for shard in 0..shards {
        fs::write(directory.join(name(version, shard)), small(shard)).unwrap();
        entries.push(format!("\"{shard}\": \"{}\"", name(version, shard)));
    }
    let index = format!("{{\"weight_map\": {{{}}}}}", entries.join(", "));
    fs::write(directory.join("new"), index).unwrap();
    fs::rename(
        directory.join("new"),
        directory.join("model.safetensors.index.json"),
    )
    .unwrap();
    for shard in 0..shards {
        let _ = fs::remove_file(directory.join(name(version.wrapping_sub(1), shard)));
    }
}

/// Returns a file with one tensor, whose name is a number.
#[cfg(unix)]
fn small(number: u64) -> Vec<u8> {
    let (name, shape) = (number.to_string(), [1]);
    let spec = Spec {
        name: &name,
        dtype: Dtype::U8,
        shape: &shape,
    };
    let mut file = layout(&[spec], None, Format::Safetensors).unwrap().head;
    file.push(0);
    file
}

// Windows does not rename a file over an open one, and the index is open here.
#[cfg(unix)]
#[test]
fn a_checkpoint_that_is_replaced_while_it_is_opened_is_opened_again() {
    // 60 shards are more than stay open. Of these, only the first one is open.
    for (shards, versions) in [(60, 60), (1, 400)] {
        let directory = tempfile::tempdir().unwrap();
        let replace = |version| replace_index(directory.path(), version, shards);
        replace(0);
        std::thread::scope(|scope| {
            let replacing = scope.spawn(|| (1..versions).for_each(replace));
            while !replacing.is_finished() {
                let checkpoint = Checkpoint::open(directory.path(), &CheckpointOptions::default()).unwrap();
                assert_eq!(to_u64(checkpoint.files()), shards);
                checkpoint.backend().unwrap();
            }
        });
    }
    let directory = tempfile::tempdir().unwrap();
    let replace_index = |version| replace_index(directory.path(), version, 1);
    replace_index(0);
    let checkpoint = open(directory.path(), Backend::Pread);
    assert!(!checkpoint.is_replaced());
    let identity = checkpoint.identity().unwrap();
    assert!(identity.is_some());
    replace_index(1);
    assert!(checkpoint.is_replaced());
    assert_ne!(
        open(directory.path(), Backend::Pread).identity().unwrap(),
        identity
    );
}

#[test]
fn numbers_that_no_file_or_tensor_has_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let index = write(directory.path());
    let paths = [(directory.path().join("1.safetensors"), 1), (index, 3)];
    for (path, files) in paths {
        let checkpoint = open(&path, Backend::Pread);
        assert_eq!(checkpoint.files(), files);
        assert_eq!(checkpoint.file_names().count(), files);
        let tensor = |file, number| checkpoint.tensor(TensorId { file, number });
        assert!(tensor(files - 1, SIZES.len() - 1).is_ok());
        for file in [files, usize::MAX] {
            assert_eq!(checkpoint.file_path(file), None);
            let fault = tensor(file, 0).unwrap_err();
            assert!(matches!(fault.failure(), Failure::Open(_)), "{fault:?}");
            assert!(fault.to_string().contains(&format!("no file {file}")), "{fault}");
        }
        for number in [SIZES.len(), usize::MAX] {
            let fault = tensor(0, number).unwrap_err();
            assert!(
                matches!(fault.failure(), Failure::UnknownTensor { .. }),
                "{fault:?}"
            );
        }
    }
}
