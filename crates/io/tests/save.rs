//! Saving, and everything that can go wrong with it. The numbers W… are those of the list of threats.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "the functions that tests share are tests too, though clippy cannot see it"
)]

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use ingot_format::{Dtype, Format, Layout, Spec, layout};
use ingot_io::{Durability, Error, Payload, ReadOnly, Replace, SaveOptions, Unwatched, Watch, save};
use rustix::fs::{FlockOperation, XattrFlags, flock, getxattr, setxattr};
use tempfile::TempDir;

const OLD: &[u8] = b"what was there before";

const IN_PLACE: SaveOptions = SaveOptions {
    durable: Durability::Durable,
    replace: Replace::InPlace,
    read_only: ReadOnly::Refuse,
};

const FORCE: SaveOptions = SaveOptions {
    durable: Durability::Durable,
    replace: Replace::Atomic,
    read_only: ReadOnly::Replace,
};

fn put(path: &Path, bytes: &[u8], options: &SaveOptions) -> Result<(), Error> {
    put_watched(path, bytes, options, &Unwatched)
}

fn put_watched(path: &Path, bytes: &[u8], options: &SaveOptions, watch: &dyn Watch) -> Result<(), Error> {
    let (head, payload) = bytes.split_at(bytes.len() / 2);
    let shape = [u64::try_from(payload.len()).unwrap()];
    let spec = Spec {
        name: "tensor",
        dtype: Dtype::U8,
        shape: &shape,
    };
    // What a head says does not matter here.
    let layout = Layout {
        head: head.to_vec(),
        ..layout(&[spec], None, Format::Safetensors).unwrap()
    };
    save(path, &layout, &[Payload::from(payload)], options, watch)
}

/// A folder with `OLD` in `file`.
fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, OLD).unwrap();
    (folder, path)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[track_caller]
fn assert_write_fails(result: Result<(), Error>, kind: io::ErrorKind) -> String {
    let error = result.unwrap_err();
    match &error {
        Error::Write { source, .. } => assert_eq!(source.kind(), kind, "{error}"),
        other => panic!("{other}"),
    }
    error.to_string()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

// ── The saving process as a child, to be watched, limited or killed ──────────────────────────────────────────────

/// What a child of a test does; on its own this test does nothing.
#[test]
fn child() {
    let Some(path) = std::env::var_os("INGOT_SAVE_PATH").map(PathBuf::from) else {
        return;
    };
    let has = |word: &str| std::env::var("INGOT_SAVE_HOW").is_ok_and(|how| how.contains(word));
    let options = SaveOptions {
        durable: if has("fast") {
            Durability::Fast
        } else {
            Durability::Durable
        },
        replace: if has("in-place") {
            Replace::InPlace
        } else {
            Replace::Atomic
        },
        read_only: if has("force") {
            ReadOnly::Replace
        } else {
            ReadOnly::Refuse
        },
    };
    let size = std::env::var("INGOT_SAVE_SIZE").map_or(NEW_SIZE, |size| size.parse().unwrap());
    // The tests that count system calls begin here.
    let _ = fs::symlink_metadata(MARK);
    loop {
        match put(&path, &new(size), &options) {
            Ok(()) => eprintln!("saved"),
            Err(error) => eprintln!("error: {error}"),
        }
        if !has("for-ever") {
            return;
        }
    }
}

const NEW_SIZE: usize = 3000;
const MARK: &str = "/the save begins here";

fn new(size: usize) -> Vec<u8> {
    vec![b'n'; size]
}

/// This very program, made to run `child`.
fn child_program() -> Command {
    child_of(&std::env::current_exe().unwrap())
}

fn child_of(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(CHILD_ARGUMENTS);
    command
}

const CHILD_ARGUMENTS: [&str; 4] = ["child", "--exact", "--nocapture", "--test-threads=1"];

fn with(mut command: Command, path: &Path, how: &str) -> Command {
    command.env("INGOT_SAVE_PATH", path).env("INGOT_SAVE_HOW", how);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

// ── W1, W10, W19: whole files, no leftovers ──────────────────────────────────────────────────────────────────────

#[test]
fn every_size_arrives_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    for size in [0, 1, 2, 5000, (1 << 20) + 1, (40 << 20) + 3] {
        let bytes: Vec<u8> = (0..size).map(|n| u8::try_from(n % 253).unwrap()).collect();
        put(&path, &bytes, &SaveOptions::default()).unwrap();
        assert!(fs::read(&path).unwrap() == bytes, "{size} bytes, atomic");
        put(&path, &bytes, &IN_PLACE).unwrap();
        assert!(fs::read(&path).unwrap() == bytes, "{size} bytes, in place");
    }
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn a_killed_save_leaves_a_whole_file_and_the_next_one_cleans_up() {
    let (folder, path) = folder();
    let size = 24 << 20;
    for round in 0..30 {
        let mut command = with(child_program(), &path, "for-ever fast");
        command.env("INGOT_SAVE_SIZE", size.to_string());
        let mut child = command.spawn().unwrap();
        thread::sleep(Duration::from_millis(15 + 7 * round));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        let found = fs::read(&path).unwrap();
        assert!(
            found == OLD || found == new(size),
            "{} bytes after a kill",
            found.len()
        );
    }
    put(&path, b"the next one", &SaveOptions::default()).unwrap();
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn a_temporary_file_is_removed_when_nobody_holds_it() {
    let (folder, path) = folder();
    let stale = folder.path().join(".file.0123456789abcdef.ingot-tmp");
    let live = folder.path().join(".file.fedcba9876543210.ingot-tmp");
    let of_another = folder.path().join(".other.0123456789abcdef.ingot-tmp");
    for path in [&stale, &live, &of_another] {
        fs::write(path, b"half a model").unwrap();
    }
    let lock = File::open(&live).unwrap();
    flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert!(!stale.exists());
    assert!(live.exists());
    assert!(of_another.exists());
    // Closing would not do: a child that another test starts may hold the file for a moment longer.
    flock(&lock, FlockOperation::Unlock).unwrap();
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert!(!live.exists());
}

#[test]
fn a_trap_under_a_temporary_name_hurts_nothing() {
    let (folder, path) = folder();
    let victim = folder.path().join("victim");
    fs::write(&victim, OLD).unwrap();
    symlink(&victim, folder.path().join(".file.0123456789abcdef.ingot-tmp")).unwrap();
    let pipe = folder.path().join(".file.1123456789abcdef.ingot-tmp");
    make_pipe(&pipe);
    fs::create_dir(folder.path().join(".file.2123456789abcdef.ingot-tmp")).unwrap();
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), OLD);
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn savers_of_one_path_leave_whole_files_only() {
    let (folder, path) = folder();
    let size = 300_000;
    let fill = |saver: u8| vec![saver; size];
    put(&path, &fill(0), &SaveOptions::default()).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let savers: Vec<_> = (1..=6)
            .map(|saver| {
                let path = &path;
                scope.spawn(move || {
                    let options = SaveOptions {
                        durable: Durability::Fast,
                        ..SaveOptions::default()
                    };
                    for _ in 0..40 {
                        put(path, &fill(saver), &options).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let found = fs::read(&path).unwrap();
                assert!(found == fill(found[0]), "a mixed file of {} bytes", found.len());
            }
        });
        for saver in savers {
            saver.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn a_name_of_255_bytes_can_be_saved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ä".repeat(127) + "b");
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

// ── C7: interruption ─────────────────────────────────────────────────────────────────────────────────────────────

/// Asks to stop when it is asked for the `after`th time.
struct StopAfter {
    after: usize,
    asked: AtomicUsize,
    thread: thread::ThreadId,
}

impl StopAfter {
    fn new(after: usize) -> StopAfter {
        StopAfter {
            after,
            asked: AtomicUsize::new(0),
            thread: thread::current().id(),
        }
    }
}

impl Watch for StopAfter {
    fn interrupted(&self) -> bool {
        assert_eq!(thread::current().id(), self.thread, "asked on another thread");
        self.asked.fetch_add(1, Ordering::Relaxed) >= self.after
    }
}

#[test]
fn an_interrupted_save_leaves_the_old_file() {
    for size in [1000, 48 << 20] {
        for replace in [Replace::Atomic, Replace::InPlace] {
            let (folder, path) = folder();
            let options = SaveOptions {
                replace,
                ..SaveOptions::default()
            };
            let bytes = new(size);
            for after in 0.. {
                let watch = StopAfter::new(after);
                match put_watched(&path, &bytes, &options, &watch) {
                    Err(Error::Interrupted) => assert_eq!(fs::read(&path).unwrap(), OLD),
                    other => {
                        other.unwrap();
                        assert!(after >= 2, "asked {after} times for {size} bytes");
                        break;
                    }
                }
                assert_eq!(names(folder.path()), ["file"]);
            }
        }
    }
}

// ── What is not replaced ─────────────────────────────────────────────────────────────────────────────────────────────

const NOTHING: SaveOptions = SaveOptions {
    durable: Durability::Durable,
    replace: Replace::Nothing,
    read_only: ReadOnly::Replace,
};

#[track_caller]
fn assert_is_there(result: Result<(), Error>) {
    match result.unwrap_err() {
        Error::Open { source, .. } => assert_eq!(source.kind(), io::ErrorKind::AlreadyExists),
        other => panic!("{other}"),
    }
}

#[test]
fn what_has_the_name_stays_where_nothing_is_replaced() {
    let (folder, path) = folder();
    assert_is_there(put(&path, &new(1000), &NOTHING));
    let link = folder.path().join("link");
    symlink("file", &link).unwrap();
    assert_is_there(put(&link, &new(1000), &NOTHING));
    assert_eq!(fs::read(&path).unwrap(), OLD);
    assert_eq!(names(folder.path()), ["file", "link"]);

    let other = folder.path().join("other");
    put(&other, &new(1000), &NOTHING).unwrap();
    assert_eq!(fs::read(&other).unwrap(), new(1000));
    assert_eq!(names(folder.path()), ["file", "link", "other"]);
}

/// Makes a file when it is first asked whether to stop, which is after the save has looked at what has the name.
struct Makes<'p>(&'p Path);

impl Watch for Makes<'_> {
    fn interrupted(&self) -> bool {
        if !self.0.exists() {
            fs::write(self.0, OLD).unwrap();
        }
        false
    }
}

#[test]
fn what_got_the_name_meanwhile_stays_where_nothing_is_replaced() {
    for size in [1000, 48 << 20] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert_is_there(put_watched(&path, &new(size), &NOTHING, &Makes(&path)));
        assert_eq!(fs::read(&path).unwrap(), OLD);
        assert_eq!(names(folder.path()), ["file"]);
    }
}

#[test]
fn an_interrupted_first_save_leaves_nothing() {
    for replace in [Replace::Atomic, Replace::InPlace] {
        let folder = tempfile::tempdir().unwrap();
        let options = SaveOptions {
            replace,
            ..SaveOptions::default()
        };
        let path = folder.path().join("file");
        let result = put_watched(&path, OLD, &options, &StopAfter::new(1));
        assert!(matches!(result, Err(Error::Interrupted)));
        assert_eq!(names(folder.path()), [""; 0]);
    }
}

// ── W5, W7: what a file has besides its bytes ────────────────────────────────────────────────────────────────────

#[test]
fn a_new_file_gets_its_mode_from_the_umask() {
    for (umask, mode) in [("0", 0o666), ("022", 0o644), ("027", 0o640), ("077", 0o600)] {
        for how in ["", "in-place"] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("file");
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("umask {umask}; exec \"$0\" \"$@\"")]);
            shell.arg(std::env::current_exe().unwrap()).args(CHILD_ARGUMENTS);
            let output = with(shell, &path, how).output().unwrap();
            assert!(said(&output).contains("saved"), "{}", said(&output));
            assert_eq!(
                path.metadata().unwrap().mode() & 0o7777,
                mode,
                "umask {umask} {how}"
            );
            assert_eq!(names(folder.path()), ["file"]);
        }
    }
}

#[test]
fn an_existing_file_keeps_its_mode() {
    let (_folder, path) = folder();
    for mode in [0o600, 0o640, 0o666, 0o664, 0o755] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        put(&path, b"new", &SaveOptions::default()).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, mode);
    }
}

#[test]
fn an_existing_file_keeps_its_owner_as_far_as_allowed() {
    if !is_root() {
        eprintln!("not run: only root gives files away");
        return;
    }
    let (folder, path) = folder();
    std::os::unix::fs::chown(&path, Some(1234), Some(2345)).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o4660)).unwrap();
    put(&path, b"new", &SaveOptions::default()).unwrap();
    let metadata = path.metadata().unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (1234, 2345));
    assert_eq!(metadata.mode() & 0o7777, 0o4660);

    // Another user may replace it where the directory lets them, but becomes its owner; their group gets no more
    // than everybody had, and nobody's privileges pass to them.
    fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    let output = with(as_nobody(folder.path()), &path, "force").output().unwrap();
    assert!(said(&output).contains("saved"), "{}", said(&output));
    let metadata = path.metadata().unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (NOBODY, NOBODY));
    assert_eq!(metadata.mode() & 0o7777, 0o600);
}

const NOBODY: u32 = 65534;

/// The child as an ordinary user, run from a copy of the program that it may execute.
fn as_nobody(folder: &Path) -> Command {
    let program = folder.join("program");
    if !program.exists() {
        // By another process: while one of ours writes the copy, a child that another test starts holds it open, and
        // what is open for writing cannot be run.
        let mut copy = Command::new("cp");
        copy.arg(std::env::current_exe().unwrap()).arg(&program);
        assert!(copy.status().unwrap().success());
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = child_of(&program);
    command.uid(NOBODY).gid(NOBODY).current_dir(folder);
    command
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = [0; 256];
    let len = getxattr(path, name, &mut value[..]).ok()?;
    Some(value[..len].to_vec())
}

/// Sets an extended attribute, or says that it cannot be done here.
fn set_attribute(path: &Path, name: &str, value: &[u8]) -> bool {
    let set = setxattr(path, name, value, XattrFlags::empty());
    if let Err(fault) = set {
        eprintln!("not run: {name} cannot be set here: {fault}");
    }
    set.is_ok()
}

#[test]
fn an_existing_file_keeps_its_extended_attributes() {
    let (_folder, path) = folder();
    if !set_attribute(&path, "user.origin", b"trained here") {
        return;
    }
    for options in [SaveOptions::default(), IN_PLACE] {
        put(&path, b"new", &options).unwrap();
        assert_eq!(attribute(&path, "user.origin").unwrap(), b"trained here");
    }
}

const ACCESS_LIST: &str = "system.posix_acl_access";

/// rw for the owner, r for user 1000, nothing for the owning group, r as the mask, nothing for others.
fn access_list() -> Vec<u8> {
    let none = u32::MAX;
    let entries = [
        (1u16, 6u16, none),
        (2, 4, 1000),
        (4, 0, none),
        (0x10, 4, none),
        (0x20, 0, none),
    ];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        list.extend(tag.to_le_bytes());
        list.extend(rights.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    list
}

#[test]
fn an_existing_file_keeps_its_access_list() {
    let (_folder, path) = folder();
    if !set_attribute(&path, ACCESS_LIST, &access_list()) {
        return;
    }
    let mode = path.metadata().unwrap().mode();
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert_eq!(attribute(&path, ACCESS_LIST).unwrap(), access_list());
    assert_eq!(path.metadata().unwrap().mode(), mode);
}

#[test]
fn the_list_of_a_directory_does_not_open_an_existing_file() {
    let (folder, path) = folder();
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    if !set_attribute(folder.path(), "system.posix_acl_default", &access_list()) {
        return;
    }
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert_eq!(attribute(&path, ACCESS_LIST), None);
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o640);
    // A new file does get it, as from every program.
    let other = folder.path().join("other");
    put(&other, b"new", &SaveOptions::default()).unwrap();
    fs::write(folder.path().join("plain"), b"new").unwrap();
    assert_eq!(
        attribute(&other, ACCESS_LIST),
        attribute(&folder.path().join("plain"), ACCESS_LIST)
    );
}

#[test]
fn hard_links_keep_the_old_bytes_unless_written_in_place() {
    let (folder, path) = folder();
    let link = folder.path().join("link");
    fs::hard_link(&path, &link).unwrap();
    put(&path, b"in place", &IN_PLACE).unwrap();
    assert_eq!(fs::read(&link).unwrap(), b"in place");
    put(&path, b"atomic", &SaveOptions::default()).unwrap();
    assert_eq!(fs::read(&link).unwrap(), b"in place");
}

// ── W6: symlinks ─────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_chain_of_symlinks_is_followed_and_kept() {
    let (folder, path) = folder();
    let elsewhere = folder.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    symlink("../file", elsewhere.join("second")).unwrap();
    let first = folder.path().join("first");
    symlink("elsewhere/second", &first).unwrap();
    for options in [SaveOptions::default(), IN_PLACE] {
        put(&first, b"new", &options).unwrap();
        assert!(first.is_symlink());
        assert!(elsewhere.join("second").is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(!path.is_symlink());
    }
    assert_eq!(names(&elsewhere), ["second"]);
}

#[test]
fn a_dangling_symlink_gets_its_target() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link");
    symlink(folder.path().join("target"), &link).unwrap();
    put(&link, b"new", &SaveOptions::default()).unwrap();
    assert!(link.is_symlink());
    assert_eq!(fs::read(folder.path().join("target")).unwrap(), b"new");
}

#[test]
fn a_loop_of_symlinks_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link");
    symlink("link", &link).unwrap();
    let error = put(&link, b"new", &SaveOptions::default()).unwrap_err();
    match error {
        Error::Write { source, .. } => assert_eq!(
            source.raw_os_error(),
            Some(rustix::io::Errno::LOOP.raw_os_error())
        ),
        other => panic!("{other}"),
    }
}

#[test]
fn a_relative_path_is_one_from_the_working_directory() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["plain", "./dotted"] {
        let mut command = child_program();
        command.current_dir(folder.path());
        let output = with(command, Path::new(name), "").output().unwrap();
        assert!(said(&output).contains("saved"), "{}", said(&output));
    }
    assert_eq!(names(folder.path()), ["dotted", "plain"]);
}

// ── W8: pipes and devices ────────────────────────────────────────────────────────────────────────────────────────

fn make_pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn a_pipe_is_streamed_into() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    make_pipe(&path);
    // More than a pipe holds, so that the reader has to be waited for.
    let bytes: Vec<u8> = (0..9_000_000u32).map(|n| n.to_le_bytes()[0]).collect();
    let reader = thread::spawn({
        let path = path.clone();
        move || {
            let mut pipe = File::open(path).unwrap();
            thread::sleep(Duration::from_millis(120));
            let mut found = Vec::new();
            pipe.read_to_end(&mut found).unwrap();
            found
        }
    });
    put(&path, &bytes, &SaveOptions::default()).unwrap();
    assert!(reader.join().unwrap() == bytes);
    assert_eq!(names(folder.path()), ["pipe"]);
}

#[test]
fn a_pipe_that_nobody_reads_can_be_interrupted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    make_pipe(&path);
    let unopened = put_watched(&path, OLD, &SaveOptions::default(), &StopAfter::new(3));
    assert!(matches!(unopened, Err(Error::Interrupted)));
    // A reader that does not read.
    let _reader = File::options().read(true).write(true).open(&path).unwrap();
    let full = put_watched(&path, &new(1 << 20), &SaveOptions::default(), &StopAfter::new(4));
    assert!(matches!(full, Err(Error::Interrupted)));
}

#[test]
fn devices_are_written_to_and_stay_devices() {
    put(Path::new("/dev/null"), OLD, &SaveOptions::default()).unwrap();
    assert!(!Path::new("/dev/null").metadata().unwrap().is_file());
    if Path::new("/dev/full").exists() {
        let text = assert_write_fails(
            put(Path::new("/dev/full"), OLD, &SaveOptions::default()),
            io::ErrorKind::StorageFull,
        );
        assert!(
            text.starts_with("/dev/full: could not write: ") && text.ends_with("the file needs 21 bytes"),
            "{text}"
        );
    }
}

#[test]
fn standard_output_is_written_to_from_where_it_stands() {
    // As a pipe.
    let output = with(child_program(), Path::new("/dev/stdout"), "")
        .output()
        .unwrap();
    assert!(
        find(&output.stdout, &new(NEW_SIZE)),
        "{}, {}",
        output.stdout.len(),
        said(&output)
    );
    // As a file that already has bytes, which stay, also when a link leads there.
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link");
    symlink("/dev/stdout", &link).unwrap();
    let path = folder.path().join("out");
    for target in [Path::new("/dev/stdout"), &link] {
        fs::write(&path, b"before ").unwrap();
        let mut command = with(child_program(), target, "");
        command.stdout(File::options().append(true).open(&path).unwrap());
        let output = command.output().unwrap();
        let found = fs::read(&path).unwrap();
        assert!(
            found.starts_with(b"before ") && find(&found, &new(NEW_SIZE)),
            "{}",
            said(&output)
        );
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

#[test]
#[cfg(target_os = "linux")]
fn a_file_without_a_name_is_written_in_place() {
    use std::os::fd::AsRawFd;
    let mut file = tempfile::tempfile().unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    put(&path, &new(5000), &SaveOptions::default()).unwrap();
    put(&path, OLD, &SaveOptions::default()).unwrap();
    let mut found = Vec::new();
    file.read_to_end(&mut found).unwrap();
    assert_eq!(found, OLD);
}

// ── W9, W11: what may not be written ─────────────────────────────────────────────────────────────────────────────

#[test]
fn a_directory_is_not_a_target() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("not there/");
    for path in [folder.path(), &*inside, &folder.path().join(".")] {
        for options in [SaveOptions::default(), IN_PLACE] {
            assert_write_fails(put(path, OLD, &options), io::ErrorKind::IsADirectory);
        }
    }
    assert_write_fails(
        put(
            &folder.path().join("not there/file"),
            OLD,
            &SaveOptions::default(),
        ),
        io::ErrorKind::NotFound,
    );
    assert_write_fails(
        put(Path::new(""), OLD, &SaveOptions::default()),
        io::ErrorKind::NotFound,
    );
}

/// A command as an ordinary user, who may do in the folder what `mode` lets everybody do.
fn as_ordinary_user(folder: &Path, mode: u32) -> Command {
    let command = if is_root() {
        as_nobody(folder)
    } else {
        child_program()
    };
    fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
    command
}

#[test]
fn a_read_only_file_is_replaced_only_when_forced() {
    let (folder, path) = folder();
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    let save = |how| {
        let output = with(as_ordinary_user(folder.path(), 0o777), &path, how)
            .output()
            .unwrap();
        said(&output)
    };
    let text = save("");
    assert!(
        text.contains("could not replace it, since it is read-only: Permission denied"),
        "{text}"
    );
    assert!(text.contains("replace_read_only"), "{text}");
    let text = save("in-place force");
    assert!(text.contains("could not open it for writing"), "{text}");
    assert_eq!(fs::read(&path).unwrap(), OLD);
    let text = save("force");
    assert!(text.contains("saved"), "{text}");
    assert_eq!(fs::read(&path).unwrap(), new(NEW_SIZE));
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o444);
}

#[test]
fn a_read_only_directory_allows_only_writing_in_place() {
    let (folder, path) = folder();
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    let save = |how| {
        let output = with(as_ordinary_user(folder.path(), 0o555), &path, how)
            .output()
            .unwrap();
        said(&output)
    };
    let text = save("");
    assert!(
        text.contains("could not create a temporary file: Permission denied"),
        "{text}"
    );
    assert!(text.contains("atomic=False"), "{text}");
    assert_eq!(fs::read(&path).unwrap(), OLD);
    let text = save("in-place");
    assert!(text.contains("saved"), "{text}");
    assert_eq!(fs::read(&path).unwrap(), new(NEW_SIZE));
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_directory_that_cannot_be_listed_can_be_saved_into() {
    let (folder, path) = folder();
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    let output = with(as_ordinary_user(folder.path(), 0o333), &path, "")
        .output()
        .unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    assert!(said(&output).contains("saved"), "{}", said(&output));
    assert_eq!(fs::read(&path).unwrap(), new(NEW_SIZE));
}

// ── W3: no space ─────────────────────────────────────────────────────────────────────────────────────────────────

/// A file system of 4 MiB, until it is dropped.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn mount() -> Option<SmallDisk> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"])
            .arg(folder.path());
        match mount.output() {
            Ok(output) if output.status.success() => Some(SmallDisk(folder)),
            Ok(output) => {
                eprintln!("not run: no file system can be mounted here: {}", said(&output));
                None
            }
            Err(fault) => {
                eprintln!("not run: no file system can be mounted here: {fault}");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_keeps_the_old_file_and_says_what_is_needed() {
    let Some(disk) = SmallDisk::mount() else { return };
    let path = disk.0.path().join("file");
    // By another process: a child that another test starts holds our open files for a moment, and with them the space.
    let save = |size: usize, how: &str| {
        let mut command = with(child_program(), &path, how);
        command.env("INGOT_SAVE_SIZE", size.to_string());
        said(&command.output().unwrap())
    };
    for how in ["", "in-place"] {
        fs::write(&path, OLD).unwrap();
        let text = save(6 << 20, how);
        assert!(text.contains("could not reserve space: No space left"), "{text}");
        assert!(text.contains("the file needs 6291456 bytes"), "{text}");
        assert_eq!(fs::read(&path).unwrap(), OLD);
        assert_eq!(names(disk.0.path()), ["file"]);
        // Nothing is held back: what fits, fits. In place, there have to be two of it.
        for size in [1500 << 10, 100] {
            let text = save(size, how);
            assert!(text.contains("saved"), "{text}");
            assert!(fs::read(&path).unwrap() == new(size));
        }
    }
    fs::remove_file(&path).unwrap();
    let text = save(6 << 20, "in-place");
    assert!(text.contains("could not reserve space: No space left"), "{text}");
    assert_eq!(names(disk.0.path()), [""; 0]);
}

#[test]
fn a_limit_on_file_size_is_an_error_and_no_signal() {
    let (folder, path) = folder();
    let mut shell = Command::new("sh");
    // 8 blocks of 512 or 1024 bytes.
    shell.args(["-c", "ulimit -f 8; exec \"$0\" \"$@\""]);
    shell.arg(std::env::current_exe().unwrap()).args(CHILD_ARGUMENTS);
    let mut command = with(shell, &path, "");
    command.env("INGOT_SAVE_SIZE", "100000");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    let text = said(&output);
    assert!(
        text.contains("could not reserve space") && text.contains("100000 bytes"),
        "{text}"
    );
    assert_eq!(fs::read(&path).unwrap(), OLD);
    assert_eq!(names(folder.path()), ["file"]);
}

// ── System calls, seen and made to fail by strace ────────────────────────────────────────────────────────────────

#[cfg(target_os = "linux")]
mod traced {
    use super::*;

    /// The child under strace with `arguments`; `None`, with the reason, where there is none.
    fn strace(arguments: &[&str], path: &Path, how: &str) -> Option<(Vec<String>, String)> {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new("strace");
        command.args(["-f", "-o"]).arg(log.path()).args(arguments);
        command
            .arg(std::env::current_exe().unwrap())
            .args(CHILD_ARGUMENTS);
        let output = match with(command, path, how).output() {
            Ok(output) => output,
            Err(fault) => {
                eprintln!("not run: strace cannot be started: {fault}");
                return None;
            }
        };
        let lines = fs::read_to_string(log.path()).unwrap();
        if lines.is_empty() {
            eprintln!("not run: strace may not trace here: {}", said(&output));
            return None;
        }
        Some((lines.lines().map(str::to_owned).collect(), said(&output)))
    }

    fn call(line: &str) -> Option<&str> {
        let rest = line.split_once(' ')?.1.trim_start();
        rest.split_once('(').map(|(name, _)| name)
    }

    /// The calls of the save itself that are `wanted`, in order.
    fn calls(lines: &[String], wanted: &[&str]) -> Vec<String> {
        let begin = lines.iter().position(|line| line.contains(MARK)).unwrap();
        let names = lines[begin..].iter().filter_map(|line| call(line));
        names
            .filter(|name| wanted.contains(name))
            .map(str::to_owned)
            .collect()
    }

    const DURABLE: [&str; 6] = [
        "fallocate",
        "pwrite64",
        "fsync",
        "linkat",
        "renameat",
        "renameat2",
    ];

    #[test]
    fn a_durable_save_flushes_before_and_after_renaming() {
        let (_folder, path) = folder();
        let Some((lines, _)) = strace(&[], &path, "") else {
            return;
        };
        let order = ["fallocate", "pwrite64", "fsync", "linkat", "renameat", "fsync"];
        assert_eq!(calls(&lines, &DURABLE), order);
        let (lines, _) = strace(&[], &path, "fast").unwrap();
        assert_eq!(
            calls(&lines, &DURABLE),
            ["fallocate", "pwrite64", "linkat", "renameat"]
        );
        let (lines, _) = strace(&[], &path, "in-place").unwrap();
        assert_eq!(
            calls(&lines, &DURABLE),
            ["fallocate", "pwrite64", "fallocate", "fsync"]
        );
    }

    fn thread_of(line: &str) -> &str {
        line.split_once(' ').map_or("", |(thread, _)| thread)
    }

    /// The calls of `name` on the thread that saves, since strace counts those of each thread by itself: the first
    /// number is how many there are before the save begins.
    fn on_saving_thread<'l>(lines: &'l [String], name: &str) -> (usize, Vec<&'l String>) {
        let begin = lines.iter().position(|line| line.contains(MARK)).unwrap();
        let thread = thread_of(&lines[begin]);
        let is_wanted = |line: &&String| thread_of(line) == thread && call(line) == Some(name);
        let before = lines[..begin].iter().filter(is_wanted).count();
        (before, lines.iter().filter(is_wanted).collect())
    }

    /// The number of the call that opens the unnamed file.
    fn unnamed_open(lines: &[String]) -> usize {
        let (_, opens) = on_saving_thread(lines, "openat");
        1 + opens
            .into_iter()
            .position(|line| line.contains("O_TMPFILE"))
            .unwrap()
    }

    #[test]
    fn calls_that_a_file_system_lacks_are_done_without() {
        let (folder, path) = folder();
        let Some((lines, _)) = strace(&[], &path, "") else {
            return;
        };
        let unnamed = unnamed_open(&lines);
        let faults: &[&[&str]] = &[
            &["fallocate:error=ENOSYS"],
            &["fallocate:error=EOPNOTSUPP"],
            &["fallocate:error=EINVAL"],
            &["fallocate:error=EINTR"],
            &["renameat,renameat2:error=ENOSYS"],
            &["renameat,renameat2:error=EXDEV"],
            &["linkat:error=ENOENT"],
            &["linkat:error=EPERM"],
            &["linkat:error=EEXIST:when=1"],
            &["linkat:error=EEXIST"],
            &["linkat:error=EOPNOTSUPP", "renameat,renameat2:error=EOPNOTSUPP"],
            &["flock:error=ENOLCK"],
            &["flock:error=EAGAIN:when=1"],
            &["fgetxattr,flistxattr,fsetxattr,fremovexattr:error=EOPNOTSUPP"],
            &["fchown:error=EPERM"],
            &["fchmod:error=EPERM"],
            &["faccessat2:error=ENOSYS"],
            &["fsync:error=EINVAL"],
            &["pwrite64:error=EINTR:when=1"],
            &["clone3,clone:error=EAGAIN"],
        ];
        let no_unnamed = format!("openat:error=EOPNOTSUPP:when={unnamed}");
        let named = ["", &no_unnamed];
        for fault in faults {
            for named in named {
                let injects: Vec<String> = fault
                    .iter()
                    .copied()
                    .chain([named])
                    .filter(|fault| !fault.is_empty())
                    .map(|fault| format!("inject={fault}"))
                    .collect();
                let arguments: Vec<&str> = injects.iter().flat_map(|inject| ["-e", inject]).collect();
                fs::remove_file(&path).unwrap();
                fs::write(&path, OLD).unwrap();
                let (_, text) = strace(&arguments, &path, "").unwrap();
                assert!(text.contains("saved"), "{injects:?}: {text}");
                assert!(fs::read(&path).unwrap() == new(NEW_SIZE), "{injects:?}");
                assert_eq!(names(folder.path()), ["file"], "{injects:?}");
            }
        }
    }

    /// What a save calls, besides what any thread needs to live.
    const SAVE_CALLS: [&str; 22] = [
        "stat",
        "newfstatat",
        "fstat",
        "openat",
        "faccessat2",
        "fstatfs",
        "getdents64",
        "flock",
        "prlimit64",
        "fallocate",
        "pwrite64",
        "flistxattr",
        "fgetxattr",
        "fsetxattr",
        "fremovexattr",
        "fchown",
        "fchmod",
        "fcntl",
        "fsync",
        "linkat",
        "renameat",
        "statx",
    ];

    #[test]
    fn a_fault_in_any_call_leaves_the_old_file_or_the_new_one() {
        let (folder, path) = folder();
        set_attribute(&path, "user.origin", b"trained here");
        let refresh = || {
            fs::write(&path, OLD).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        };
        refresh();
        let Some((lines, _)) = strace(&[], &path, "") else {
            return;
        };
        let no_unnamed = format!("inject=openat:error=EOPNOTSUPP:when={}", unnamed_open(&lines));
        let mut failed = 0;
        for others in [&[][..], &["-e", &no_unnamed][..]] {
            refresh();
            let (lines, _) = strace(others, &path, "").unwrap();
            for name in SAVE_CALLS {
                let (before, all) = on_saving_thread(&lines, name);
                // One more than there are: the flush happens on another thread, which strace counts by itself.
                for when in before + 1..=all.len().max(before + 1) {
                    refresh();
                    let inject = format!("inject={name}:error=EIO:when={when}");
                    // With two faults for one call, strace keeps the later.
                    let arguments = [others, &["-e", &inject]].concat();
                    let (_, text) = strace(&arguments, &path, "").unwrap();
                    let found = fs::read(&path).unwrap();
                    match text.contains("saved") {
                        true => assert!(found == new(NEW_SIZE), "{inject}"),
                        false => failed += 1,
                    }
                    assert!(found == OLD || found == new(NEW_SIZE), "{inject}: {text}");
                    assert_eq!(
                        path.metadata().unwrap().mode() & 0o7777,
                        0o640,
                        "{inject}: {text}"
                    );
                    assert_eq!(names(folder.path()), ["file"], "{inject}: {text}");
                }
            }
        }
        assert!(failed > 8, "only {failed} of the injected faults were reported");
    }

    #[test]
    fn faults_are_named_by_step_and_path() {
        let (folder, path) = folder();
        let cases = [
            (
                "fallocate:error=ENOSPC",
                "could not reserve space: No space left on device",
            ),
            ("fallocate:error=EDQUOT", "could not reserve space: "),
            ("fallocate:error=EFBIG", "could not reserve space: File too large"),
            ("pwrite64:error=EIO", "could not write: "),
            (
                "pwrite64:error=ENOSPC",
                "could not write: No space left on device",
            ),
            ("fsync:error=EIO", "could not flush: "),
            (
                "linkat:error=EIO",
                "could not rename the temporary file over it: ",
            ),
            (
                "renameat,renameat2:error=EBUSY",
                "could not rename the temporary file over it: ",
            ),
        ];
        for (fault, expected) in cases {
            let inject = format!("inject={fault}");
            let Some((_, text)) = strace(&["-e", &inject], &path, "") else {
                return;
            };
            let begin = format!("error: {}: {expected}", path.display());
            assert!(text.contains(&begin), "{fault}: {text}");
            assert!(text.contains("the file needs 3000 bytes"), "{fault}: {text}");
            assert_eq!(fs::read(&path).unwrap(), OLD, "{fault}");
            assert_eq!(names(folder.path()), ["file"], "{fault}");
        }
    }

    #[test]
    fn a_directory_that_cannot_be_flushed_is_reported() {
        let (folder, path) = folder();
        let only_directory = folder.path().to_str().unwrap();
        let arguments = ["-P", only_directory, "-e", "inject=fsync:error=EIO"];
        let Some((_, text)) = strace(&arguments, &path, "") else {
            return;
        };
        assert!(
            text.contains("could not flush its directory, though it is written"),
            "{text}"
        );
        assert_eq!(fs::read(&path).unwrap(), new(NEW_SIZE));
    }

    #[test]
    fn a_kill_between_link_and_rename_is_cleaned_up_by_the_next_save() {
        let (folder, path) = folder();
        let kill = ["-e", "inject=renameat,renameat2:signal=KILL:error=EIO"];
        if strace(&kill, &path, "").is_none() {
            return;
        }
        assert_eq!(fs::read(&path).unwrap(), OLD);
        assert_eq!(names(folder.path()).len(), 2, "{:?}", names(folder.path()));
        put(&path, b"new", &SaveOptions::default()).unwrap();
        assert_eq!(names(folder.path()), ["file"]);
    }
}

// ── Messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_path_in_a_message_cannot_steer_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no\x1b[2J/file");
    let text = assert_write_fails(put(&path, OLD, &SaveOptions::default()), io::ErrorKind::NotFound);
    assert!(
        text.contains("no\\x1b[2J/file: could not open it for writing: "),
        "{text}"
    );
}

#[test]
fn a_path_need_not_be_text() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(OsStr::from_bytes(b"\xff\xfe"));
    if put(&path, b"new", &SaveOptions::default()).is_err() && cfg!(target_os = "macos") {
        eprintln!("not run: this file system wants names that are text");
        return;
    }
    assert_eq!(fs::read(&path).unwrap(), b"new");
    put(&path, b"again", &FORCE).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"again");
}
