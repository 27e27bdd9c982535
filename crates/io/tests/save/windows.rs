//! Saves on Windows: open files, long paths, names, attributes, access lists and pipes.

mod system;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::windows::fs::{MetadataExt, OpenOptionsExt, symlink_file};
use std::path::absolute;
use std::process::Child;

use ingot_io::Backend;

use super::*;
use system::{access_list, owner, pipe, set_access_list};

/// `FILE_SHARE_READ`: other programs may not write, delete or rename the file.
const SHARE_READ: u32 = 1;
/// All sharing: other programs may read, write, delete and rename the file.
const SHARE_ALL: u32 = 7;
const HIDDEN: u32 = 2;
/// `ERROR_PIPE_LISTENING`: no process has opened the other end yet.
const NOBODY_WRITES: i32 = 536;

/// Writes a file of one tensor, and returns the bytes of the file.
fn tensor(path: &Path, byte: u8) -> Vec<u8> {
    let shape = [1 << 20];
    let spec = Spec {
        name: "tensor",
        dtype: Dtype::U8,
        shape: &shape,
    };
    let layout = layout(&[spec], None, Format::Safetensors).unwrap();
    let bytes = vec![byte; 1 << 20];
    save(
        path,
        &layout,
        &[Payload::from(&bytes[..])],
        &SaveOptions::default(),
        &Unwatched,
    )
    .unwrap();
    bytes
}

#[test]
fn a_file_that_is_loaded_is_replaced_renamed_and_deleted() {
    let (folder, path) = folder();
    let old = tensor(&path, 1);
    let archive = Archive::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!(archive.backend(), "pread");
    let loaded = archive.read("tensor").unwrap();
    tensor(&path, 2);
    assert!(loaded.to_vec() == old);
    assert!(
        archive.read("tensor").unwrap().to_vec() == old,
        "the file that was opened is read"
    );
    let other = folder.path().join("other");
    let archive = Archive::open(&path, &OpenOptions::default()).unwrap();
    fs::rename(&path, &other).unwrap();
    fs::remove_file(&other).unwrap();
    assert!(archive.read("tensor").unwrap().to_vec() == vec![2; 1 << 20]);
}

#[test]
fn a_file_that_is_mapped_is_replaced_and_goes_with_the_next_save() {
    let (folder, path) = folder();
    let old = tensor(&path, 1);
    let mapped = OpenOptions::new().backend(Backend::Mmap);
    let archive = Archive::open(&path, &mapped).unwrap();
    let loaded = archive.read("tensor").unwrap();
    tensor(&path, 2);
    assert!(loaded.to_vec() == old);
    drop((archive, loaded));
    tensor(&path, 3);
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn what_is_mapped_is_named_when_it_cannot_be_written_in_place() {
    let (_folder, path) = folder();
    let old = tensor(&path, 1);
    let mapped = OpenOptions::new().backend(Backend::Mmap);
    let archive = Archive::open(&path, &mapped).unwrap();
    let loaded = archive.read("tensor").unwrap();
    let text = put(&path, &new(100), &IN_PLACE).unwrap_err().to_string();
    assert!(text.contains("has it mapped into memory"), "{text}");
    assert_eq!(loaded.len(), old.len());
}

/// The program of a process that maps a file. Without its environment variable it does nothing.
#[test]
fn mapping() {
    let Some(path) = std::env::var_os("INGOT_MAP_PATH").map(PathBuf::from) else {
        return;
    };
    let sharing = std::env::var("INGOT_MAP_SHARING").unwrap().parse().unwrap();
    let _keeper = File::options()
        .read(true)
        .share_mode(sharing)
        .open(&path)
        .unwrap();
    let mapped = OpenOptions::new().backend(Backend::Mmap);
    let archive = Archive::open(&path, &mapped).unwrap();
    let loaded = archive.read("tensor").unwrap();
    println!("\nmapped");
    io::stdout().flush().unwrap();
    // Wait until the parent process closes standard input.
    io::stdin().read_to_end(&mut Vec::new()).unwrap();
    assert!(loaded.to_vec() == vec![1; 1 << 20]);
}

/// Starts another process that opens the file with this sharing mode, and waits until it has mapped the file.
fn mapped_elsewhere(path: &Path, sharing: u32) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "save::windows::mapping",
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("INGOT_MAP_PATH", path)
        .env("INGOT_MAP_SHARING", sharing.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "mapped"));
    child
}

/// Makes the other process compare the mapped bytes, and waits for its end.
fn end(mut child: Child) {
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

#[test]
fn a_file_that_another_process_has_mapped_is_replaced_and_that_keeps_its_bytes() {
    let (folder, path) = folder();
    tensor(&path, 1);
    let child = mapped_elsewhere(&path, SHARE_ALL);
    let new = tensor(&path, 2);
    let archive = Archive::open(&path, &OpenOptions::default()).unwrap();
    assert!(archive.read("tensor").unwrap().to_vec() == new);
    drop(archive);
    end(child);
    tensor(&path, 3);
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn a_file_that_another_process_has_mapped_and_does_not_share_names_that_and_stays() {
    let (folder, path) = folder();
    tensor(&path, 1);
    let before = fs::read(&path).unwrap();
    let child = mapped_elsewhere(&path, SHARE_READ);
    let text = put(&path, b"new", &SaveOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("another program has it open, perhaps mapped into memory, and lets nobody replace it")
            && text.ends_with("close that, or save to another name"),
        "{text}"
    );
    end(child);
    assert!(fs::read(&path).unwrap() == before);
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn a_file_that_somebody_has_for_a_moment_is_waited_for() {
    let (folder, path) = folder();
    let scanner = File::options()
        .read(true)
        .share_mode(SHARE_READ)
        .open(&path)
        .unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(300));
            drop(scanner);
        });
        put(&path, b"new", &SaveOptions::default()).unwrap();
    });
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn a_file_that_somebody_keeps_says_so_and_stays() {
    let (folder, path) = folder();
    let _keeper = File::options()
        .read(true)
        .share_mode(SHARE_READ)
        .open(&path)
        .unwrap();
    let text = put(&path, b"new", &SaveOptions::default())
        .unwrap_err()
        .to_string();
    assert!(text.contains("another program has it open"), "{text}");
    assert_eq!(fs::read(&path).unwrap(), OLD);
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn a_file_that_was_moved_away_by_a_save_that_was_killed_comes_back() {
    let (folder, path) = folder();
    let old = folder.path().join(".file.0000000000000001.ingot-old");
    fs::rename(&path, &old).unwrap();
    assert!(put_watched(&path, b"new", &SaveOptions::default(), &StopAfter::new(0)).is_err());
    assert_eq!(fs::read(&path).unwrap(), OLD);
    fs::write(&old, "what was there before that").unwrap();
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn an_attribute_stays_and_what_is_read_only_is_replaced_only_when_forced() {
    let (folder, path) = folder();
    let set = |path: &Path, read_only| {
        let mut permissions = fs::metadata(path).unwrap().permissions();
        permissions.set_readonly(read_only);
        fs::set_permissions(path, permissions).unwrap();
    };
    set(&path, true);
    let text = put(&path, b"new", &SaveOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("could not replace it, since it is read-only"),
        "{text}"
    );
    assert_eq!(fs::read(&path).unwrap(), OLD);
    put(&path, b"new", &FORCE).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert!(fs::metadata(&path).unwrap().permissions().readonly());
    assert_eq!(names(folder.path()), ["file"]);
    set(&path, false);
}

#[test]
fn a_hidden_file_stays_hidden() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let made = File::options()
        .write(true)
        .create_new(true)
        .attributes(HIDDEN)
        .open(&path)
        .unwrap();
    drop(made);
    if fs::metadata(&path).unwrap().file_attributes() & HIDDEN == 0 {
        eprintln!("not run: this file system hides no files");
        return;
    }
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert_ne!(fs::metadata(&path).unwrap().file_attributes() & HIDDEN, 0);
}

/// Makes a file that only its owner may read, in a folder whose access list lets everybody read new files. Returns the
/// file's access list too.
fn confined() -> (TempDir, PathBuf, String) {
    let (folder, path) = folder();
    let owner = owner(&path);
    set_access_list(
        folder.path(),
        &format!("D:P(A;OICI;FA;;;{owner})(A;OICI;FR;;;WD)"),
    );
    set_access_list(&path, &format!("D:P(A;;FA;;;{owner})"));
    let list = access_list(&path);
    assert!(list.contains(&owner) && !list.contains(";WD)"), "{list}");
    (folder, path, list)
}

#[test]
fn an_existing_file_keeps_its_access_list_whatever_that_of_the_directory_is() {
    for options in [SaveOptions::default(), FAST, IN_PLACE] {
        let (_folder, path, list) = confined();
        put(&path, &new(NEW_SIZE), &options).unwrap();
        assert_eq!(access_list(&path), list);
        assert_eq!(fs::read(&path).unwrap(), new(NEW_SIZE));
    }
}

#[test]
fn a_new_file_has_the_access_list_of_any_that_is_made_there() {
    let (folder, _, list) = confined();
    let (other, plain) = (folder.path().join("other"), folder.path().join("plain"));
    fs::write(&plain, b"new").unwrap();
    for options in [SaveOptions::default(), IN_PLACE] {
        put(&other, b"new", &options).unwrap();
        assert_eq!(access_list(&other), access_list(&plain));
        assert_ne!(access_list(&other), list);
        fs::remove_file(&other).unwrap();
    }
}

#[test]
fn a_pipe_is_streamed_into() {
    let name = format!(r"\\.\pipe\ingot-{}", std::process::id());
    let mut pipe = pipe(Path::new(&name));
    // More than a pipe can hold, so that the save must wait for the reader.
    let bytes: Vec<u8> = (0..9_000_000u32).map(|n| n.to_le_bytes()[0]).collect();
    thread::scope(|scope| {
        let saver = scope.spawn(|| put(Path::new(&name), &bytes, &SaveOptions::default()));
        thread::sleep(Duration::from_millis(120));
        let mut found = Vec::new();
        while let Err(fault) = pipe.read_to_end(&mut found) {
            let is_waiting = fault.raw_os_error() == Some(NOBODY_WRITES);
            assert!(is_waiting && !saver.is_finished(), "{fault}");
            thread::sleep(Duration::from_millis(1));
        }
        saver.join().unwrap().unwrap();
        assert!(found == bytes);
    });
}

/// Returns a folder on the small file system that `scripts/test-windows` makes, or `None` if there is none.
fn small_disk() -> Option<TempDir> {
    let disk = std::env::var_os("INGOT_SMALL_DISK");
    if disk.is_none() {
        eprintln!("not run: INGOT_SMALL_DISK names no folder on a file system of 4 MiB");
    }
    disk.map(|disk| tempfile::tempdir_in(disk).unwrap())
}

#[test]
fn a_full_disk_keeps_the_old_file_and_says_what_is_needed() {
    let Some(folder) = small_disk() else { return };
    let path = folder.path().join("file");
    fs::write(&path, OLD).unwrap();
    for options in [SaveOptions::default(), FAST] {
        let text = assert_write_fails(put(&path, &new(6 << 20), &options), io::ErrorKind::StorageFull);
        assert!(text.ends_with("the file needs 6291456 bytes"), "{text}");
        assert_eq!(fs::read(&path).unwrap(), OLD);
        assert_eq!(names(folder.path()), ["file"]);
    }
    // All space can be used: a file that fits is written.
    for size in [1500 << 10, 100] {
        put(&path, &new(size), &SaveOptions::default()).unwrap();
        assert!(fs::read(&path).unwrap() == new(size));
        fs::write(&path, OLD).unwrap();
    }
}

#[test]
fn faults_are_named_by_step_and_path() {
    let (folder, path) = folder();
    let begins = |path: &Path, result: Result<(), Error>, step: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.starts_with(&format!("{}: {step}", path.display())), "{text}");
    };
    let nowhere = folder.path().join("not there").join("file");
    begins(
        &nowhere,
        put(&nowhere, OLD, &FAST),
        "could not open it for writing: ",
    );
    let keeper = File::options()
        .read(true)
        .share_mode(SHARE_READ)
        .open(&path)
        .unwrap();
    begins(
        &path,
        put(&path, &new(100), &FAST),
        "could not rename the temporary file over it: ",
    );
    begins(
        &path,
        put(&path, &new(100), &IN_PLACE),
        "could not open it for writing: ",
    );
    drop(keeper);
    assert_eq!(fs::read(&path).unwrap(), OLD);
    assert_eq!(names(folder.path()), ["file"]);
    if let Some(folder) = small_disk() {
        let path = folder.path().join("file");
        let text = put(&path, &new(6 << 20), &FAST).unwrap_err().to_string();
        let steps = ["could not reserve space: ", "could not write: "];
        let expected = steps.map(|step| format!("{}: {step}", path.display()));
        assert!(expected.iter().any(|begin| text.starts_with(begin)), "{text}");
        assert_eq!(names(folder.path()), [""; 0]);
    }
}

#[test]
fn a_path_may_be_longer_than_260_characters() {
    let folder = tempfile::tempdir().unwrap();
    let mut deep = folder.path().to_owned();
    while deep.as_os_str().len() < 400 {
        deep.push("a folder with a name of its own");
    }
    fs::create_dir_all(&deep).unwrap();
    let path = deep.join("file");
    for options in [SaveOptions::default(), IN_PLACE] {
        put(&path, b"new", &options).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }
    tensor(&path, 5);
    let archive = Archive::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!(archive.read("tensor").unwrap().len(), 1 << 20);
    assert_eq!(names(&deep), ["file"]);
}

#[test]
fn a_path_may_have_the_long_form() {
    let (folder, path) = folder();
    let long = PathBuf::from(format!(r"\\?\{}", absolute(&path).unwrap().display()));
    put(&long, b"new", &SaveOptions::default()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    let server = PathBuf::from(r"\\?\UNC\no such server\share\file");
    assert!(put(&server, b"new", &SaveOptions::default()).is_err());
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn names_of_devices_are_refused_and_nothing_is_lost_to_them() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["nul.safetensors", "AUX.bt", "com1", "Lpt9.x.y"] {
        let text = put(&folder.path().join(name), b"new", &SaveOptions::default())
            .unwrap_err()
            .to_string();
        assert!(text.contains("Windows keeps this name for the device"), "{text}");
    }
    assert_eq!(names(folder.path()), [""; 0]);
    put(Path::new("NUL"), b"new", &SaveOptions::default()).unwrap();
}

#[test]
fn case_dots_and_spaces_are_what_windows_makes_of_them() {
    let (folder, path) = folder();
    put(&folder.path().join("FILE"), b"new", &SaveOptions::default()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(names(folder.path()).len(), 1);
    put(&folder.path().join("file. ."), b"dots", &SaveOptions::default()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"dots");
    assert_eq!(names(folder.path()).len(), 1);
}

#[test]
fn a_name_need_not_be_text() {
    use std::ffi::OsString;
    use std::os::windows::ffi::OsStringExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(OsString::from_wide(&[0xD800, 0x61]));
    if fs::write(&path, b"old").is_err() {
        eprintln!("not run: this file system wants names that are text");
        return;
    }
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn a_link_is_followed_and_kept() {
    let (folder, path) = folder();
    let link = folder.path().join("link");
    if symlink_file("file", &link).is_err() || !link.is_symlink() {
        eprintln!("not run: this user may not make links, or the system has none");
        return;
    }
    for options in [SaveOptions::default(), IN_PLACE] {
        put(&link, b"new", &options).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }
}
