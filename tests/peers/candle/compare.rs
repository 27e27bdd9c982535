//! A program that uses candle behaves the same with ingot in place of the safetensors crate.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Return the two programs: the one with ingot, and the one with the safetensors crate, which the Makefile builds into
/// the same folder.
fn programs() -> [PathBuf; 2] {
    let ours = PathBuf::from(env!("CARGO_BIN_EXE_candle-on-ingot"));
    let theirs = ours.with_file_name("candle-on-upstream");
    assert!(
        theirs.exists(),
        "{} is missing: `make test-candle` builds it",
        theirs.display()
    );
    [ours, theirs]
}

/// Run `program`, and return its output.
fn said(program: &Path, command: &str, path: &Path) -> String {
    let ended = Command::new(program).arg(command).arg(path).output().unwrap();
    assert!(
        ended.status.success(),
        "{command}: {}",
        String::from_utf8_lossy(&ended.stderr)
    );
    String::from_utf8(ended.stdout).unwrap()
}

/// Save with both programs, and compare the files. Load each file with the other program, and compare the output.
fn saves_and_loads_as_upstream(save: &str, load: &str) {
    let folder = tempfile::tempdir().unwrap();
    let programs = programs();
    let [ours, theirs] =
        ["ours", "theirs"].map(|name| folder.path().join(name).with_extension("safetensors"));
    for (program, path) in programs.iter().zip([&ours, &theirs]) {
        assert_eq!(said(program, save, path), "");
    }
    let mut names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    names.sort();
    assert_eq!(names.len() % 2, 0, "{names:?}");
    let (ours_all, theirs_all) = names.split_at(names.len() / 2);
    for (ours, theirs) in ours_all.iter().zip(theirs_all) {
        assert_eq!(
            std::fs::read(ours).unwrap(),
            std::fs::read(theirs).unwrap(),
            "{}",
            ours.display()
        );
    }
    let expected = said(&programs[1], load, &theirs);
    assert!(
        expected.len() > 1000 && !expected.contains("refused"),
        "{expected}"
    );
    for (program, path) in [
        (&programs[0], &theirs),
        (&programs[1], &ours),
        (&programs[0], &ours),
    ] {
        assert_eq!(said(program, load, path), expected);
    }
}

#[test]
fn a_model_is_saved_and_loaded_as_upstream_does() {
    saves_and_loads_as_upstream("save-model", "load-model");
}

#[test]
fn each_dtype_is_saved_and_loaded_in_each_way_as_upstream_does() {
    saves_and_loads_as_upstream("save-dtypes", "load-each-way");
}

#[test]
fn what_is_no_file_is_refused_as_upstream_refuses_it() {
    let folder = tempfile::tempdir().unwrap();
    let [ours, theirs] = programs();
    let path = folder.path().join("broken");
    for bytes in [
        &b""[..],
        b"1234567",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{}x",
        &[0xFF; 64],
    ] {
        std::fs::write(&path, bytes).unwrap();
        for command in ["load-model", "load-each-way"] {
            let expected = said(&theirs, command, &path);
            assert!(expected.starts_with("refused"), "{expected}");
            assert_eq!(said(&ours, command, &path), expected, "{bytes:?}");
        }
    }
    for command in ["load-model", "load-each-way", "save-model"] {
        let nowhere = folder.path().join("nowhere/model.safetensors");
        assert_eq!(
            said(&ours, command, &nowhere),
            said(&theirs, command, &nowhere),
            "{command}"
        );
    }
}
