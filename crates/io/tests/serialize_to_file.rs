//! `serialize_to_file`: the old file survives every failure.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

use ingot_io::bintensors;
use ingot_io::safetensors::{
    Dtype, SafeTensorError, SafeTensors, TensorView, View, serialize, serialize_to_file,
};

const BIAS: [u8; 8] = *b"12345678";

fn bias() -> TensorView<'static> {
    TensorView::new(Dtype::F32, vec![2], &BIAS).unwrap()
}

fn names_in(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn writes_what_serialize_gives() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let metadata = HashMap::from([("b".to_owned(), "2".to_owned()), ("a".to_owned(), "1".to_owned())]);
    serialize_to_file([("bias", bias())], Some(metadata.clone()), &path).unwrap();
    assert_eq!(
        fs::read(&path).unwrap(),
        serialize([("bias", bias())], Some(metadata)).unwrap()
    );
    assert_eq!(names_in(directory.path()), ["model.safetensors"]);
}

#[test]
fn writes_bintensors_files_too() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.bt");
    bintensors::serialize_to_file([("bias", bias())], None, &path).unwrap();
    let file = fs::read(&path).unwrap();
    assert_eq!(file, bintensors::serialize([("bias", bias())], None).unwrap());
    assert_eq!(
        bintensors::BinTensors::deserialize(&file)
            .unwrap()
            .tensor("bias")
            .unwrap(),
        bias()
    );
}

/// A view that returns too few bytes after the write has begun.
struct CutOff;

impl View for CutOff {
    fn dtype(&self) -> Dtype {
        Dtype::U8
    }
    fn shape(&self) -> &[usize] {
        &[4]
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(b"abc")
    }
    fn data_len(&self) -> usize {
        4
    }
}

#[test]
fn a_failure_midway_leaves_the_old_file_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    fs::write(&path, "old").unwrap();
    let fault = serialize_to_file([("cut", CutOff)], None, &path).unwrap_err();
    assert_eq!((fault.code(), fault.tensor()), ("wrong-length", Some("cut")));
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names_in(directory.path()), ["model.safetensors"]);
}

#[test]
fn a_panicking_view_leaves_the_old_file_and_nothing_else() {
    struct Panics;
    impl View for Panics {
        fn dtype(&self) -> Dtype {
            Dtype::U8
        }
        fn shape(&self) -> &[usize] {
            &[1]
        }
        fn data(&self) -> Cow<'_, [u8]> {
            panic!("the device is gone")
        }
        fn data_len(&self) -> usize {
            1
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    fs::write(&path, "old").unwrap();
    let outcome = std::panic::catch_unwind(|| serialize_to_file([("x", Panics)], None, &path));
    assert!(outcome.is_err());
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names_in(directory.path()), ["model.safetensors"]);
}

#[test]
fn a_missing_directory_is_named_by_step_and_reason() {
    let directory = tempfile::tempdir().unwrap();
    let fault =
        serialize_to_file([("bias", bias())], None, &directory.path().join("no/where.st")).unwrap_err();
    let SafeTensorError::IoError(system) = &fault else {
        panic!("{fault:?}");
    };
    assert_eq!(system.kind(), std::io::ErrorKind::NotFound);
    assert!(
        fault
            .to_string()
            .contains("where.st: could not open it for writing: "),
        "{fault}"
    );
    let told = system
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<ingot_io::Error>());
    assert_eq!(told.map(ingot_io::Error::code), Some("write"));
    assert!(std::error::Error::source(&fault).is_some());
}

#[test]
fn a_directory_is_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let fault = serialize_to_file([("bias", bias())], None, directory.path()).unwrap_err();
    assert_eq!(fault.code(), "io");
    assert!(names_in(directory.path()).is_empty());
}

#[test]
fn the_longest_name_that_a_file_may_have_works() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x".repeat(255));
    serialize_to_file([("bias", bias())], None, &path).unwrap();
    assert!(SafeTensors::deserialize(&fs::read(&path).unwrap()).is_ok());
}

#[cfg(unix)]
mod unix {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn the_mode_of_the_old_file_is_kept_and_a_new_one_follows_the_umask() {
        let directory = tempfile::tempdir().unwrap();
        let (old, new, plain) = (
            directory.path().join("old"),
            directory.path().join("new"),
            directory.path().join("plain"),
        );
        fs::write(&old, "").unwrap();
        fs::set_permissions(&old, fs::Permissions::from_mode(0o640)).unwrap();
        fs::write(&plain, "").unwrap();
        serialize_to_file([("bias", bias())], None, &old).unwrap();
        serialize_to_file([("bias", bias())], None, &new).unwrap();
        assert_eq!(mode(&old), 0o640);
        assert_eq!(mode(&new), mode(&plain));
    }

    #[test]
    fn a_link_stays_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("target"), directory.path().join("link"));
        fs::write(&target, "old").unwrap();
        symlink("target", &link).unwrap();
        serialize_to_file([("bias", bias())], None, &link).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert!(SafeTensors::deserialize(&fs::read(&target).unwrap()).is_ok());
    }

    #[test]
    fn a_link_to_nowhere_is_kept_and_its_target_created() {
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("target"), directory.path().join("link"));
        symlink("target", &link).unwrap();
        serialize_to_file([("bias", bias())], None, &link).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert!(SafeTensors::deserialize(&fs::read(&target).unwrap()).is_ok());
    }
}

#[test]
fn a_device_is_written_to_and_stays() {
    let null = Path::new(if cfg!(windows) { "NUL" } else { "/dev/null" });
    serialize_to_file([("bias", bias())], None, null).unwrap();
    assert!(!fs::metadata(null).is_ok_and(|found| found.is_file()));
    assert!(!Path::new("NUL").is_file());
}
