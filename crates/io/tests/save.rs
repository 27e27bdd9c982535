//! Saves, and their failures. The numbers W… are of the list of threats.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use ingot_format::{Dtype, Format, Layout, Spec, layout};
use ingot_io::{
    Archive, Error, Failure, MetadataChange, OpenOptions, Payload, Replace, SaveOptions, Unwatched, Watch,
    save, update_metadata,
};
use tempfile::TempDir;

const OLD: &[u8] = b"what was there before";

const IN_PLACE: SaveOptions = SaveOptions::new().replace(Replace::InPlace);

const FAST: SaveOptions = SaveOptions::new().durable(false);

const FORCE: SaveOptions = SaveOptions::new().replace_read_only(true);

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
    // The contents of the header do not matter here.
    let layout = Layout {
        head: head.to_vec(),
        ..layout(&[spec], None, Format::Safetensors).unwrap()
    };
    save(path, &layout, &[Payload::from(payload)], options, watch)
}

/// Makes a folder with a file whose contents are `OLD`, and returns the path of the file too.
fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, OLD).unwrap();
    (folder, path)
}

/// Returns the names in a folder. Older versions of Windows, and wine, list a removed file until it is closed. A thread that
/// flushes in the background after a save may close one a moment later.
fn names(folder: &Path) -> Vec<String> {
    let is_going = |name: &String| cfg!(windows) && name.ends_with(".ingot-tmp");
    for _ in 0..500 {
        let names = listed(folder);
        if !names.iter().any(is_going) {
            return names;
        }
        thread::sleep(Duration::from_millis(20));
    }
    listed(folder)
}

fn listed(folder: &Path) -> Vec<String> {
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
    assert_eq!(error.code(), "write", "{error}");
    assert_eq!(error.system().unwrap().kind(), kind, "{error}");
    error.to_string()
}

// ── The saving process as a child, to be traced, limited or killed ───────────────────────────────────────────────

/// The program of the child process of a test. Without its environment variable it does nothing.
#[test]
fn child() {
    let Some(path) = std::env::var_os("INGOT_SAVE_PATH").map(PathBuf::from) else {
        return;
    };
    let has = |word: &str| std::env::var("INGOT_SAVE_HOW").is_ok_and(|how| how.contains(word));
    let options = SaveOptions::new()
        .durable(!has("fast"))
        .replace(if has("in-place") {
            Replace::InPlace
        } else {
            Replace::Atomic
        })
        .replace_read_only(has("force"));
    let size = std::env::var("INGOT_SAVE_SIZE").map_or(NEW_SIZE, |size| size.parse().unwrap());
    if has("for-ever") {
        eprintln!("{BEGUN}");
        match has("edit") {
            true => edit_for_ever(&path),
            false => save_for_ever(&path, size, &options),
        }
    }
    // The tests that count system calls start counting here.
    let _ = fs::symlink_metadata(MARK);
    match put(&path, &new(size), &options) {
        Ok(()) => eprintln!("saved"),
        Err(error) => eprintln!("error: {error}"),
    }
}

/// Saves one version after the other, without end.
fn save_for_ever(path: &Path, size: usize, options: &SaveOptions) -> ! {
    loop {
        for letter in VERSIONS {
            put(path, &vec![letter; size], options).unwrap();
        }
    }
}

/// Changes the metadata of a file without end, alternately with a new file and in place.
fn edit_for_ever(path: &Path) -> ! {
    for number in 0.. {
        let value = format!("{number:020}");
        let change = MetadataChange {
            set: &[("number", &value)],
            remove: &[],
            rewrite: number % 2 == 1,
        };
        update_metadata(path, &change, &FAST, &Unwatched).unwrap();
    }
    unreachable!("it is killed before that")
}

/// The line that the child prints before its first save.
const BEGUN: &str = "it begins";
/// The letters of the files that the child saves alternately.
const VERSIONS: [u8; 2] = [b'n', b'm'];

const NEW_SIZE: usize = 3000;
const MARK: &str = "/the save begins here";

fn new(size: usize) -> Vec<u8> {
    vec![b'n'; size]
}

/// Returns the number of kills: `usual`, unless the environment sets another one.
fn rounds(usual: u64) -> u64 {
    std::env::var("INGOT_KILLS").map_or(usual, |kills| kills.parse().unwrap())
}

/// Returns a command that runs `child` in this program.
fn child_program() -> Command {
    child_of(&std::env::current_exe().unwrap())
}

fn child_of(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(CHILD_ARGUMENTS);
    command
}

const CHILD_ARGUMENTS: [&str; 4] = ["save::child", "--exact", "--nocapture", "--test-threads=1"];

fn with(mut command: Command, path: &Path, how: &str) -> Command {
    command.env("INGOT_SAVE_PATH", path).env("INGOT_SAVE_HOW", how);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// `ERROR_INTERNAL_ERROR`: wine fails to start one process in five hundred with it. No other system has this number.
const NOT_BEGUN: i32 = 1359;

/// Runs a child that saves without end, and kills it.
fn kill(mut command: Command, after: Duration) {
    let mut child = (0..10)
        .find_map(|_| match command.spawn() {
            Err(fault) if fault.raw_os_error() == Some(NOT_BEGUN) => None,
            begun => Some(begun.unwrap()),
        })
        .unwrap();
    // A generous limit, since a busy machine takes long to start a program.
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let begun = lines.find(|line| line.as_ref().is_ok_and(|line| line == BEGUN));
    assert!(begun.is_some(), "it begins");
    thread::sleep(after);
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success(), "it was killed");
}

/// Return the time after which a process is killed, or `None` after the last round. On a busy machine no save may end in the
/// usual rounds: further rounds wait for seconds until a save `has_ended`.
fn moment(round: u64, rounds: u64, has_ended: bool) -> Option<Duration> {
    match round.checked_sub(rounds) {
        None => Some(Duration::from_millis(7 * (round % 30))),
        Some(more) if has_ended || more > 4 => None,
        Some(more) => Some(Duration::from_secs(1 << more)),
    }
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
    let is_version = |found: &[u8]| VERSIONS.iter().any(|&letter| found == vec![letter; size]);
    let (rounds, mut round, mut replaced, mut left_behind) = (rounds(30), 0, 0, 0);
    while let Some(after) = moment(round, rounds, replaced > 0) {
        let mut command = with(child_program(), &path, "for-ever fast");
        command.env("INGOT_SAVE_SIZE", size.to_string());
        kill(command, after);
        let found = fs::read(&path).unwrap();
        assert!(
            found == OLD || is_version(&found),
            "{} bytes after a kill",
            found.len()
        );
        replaced += u64::from(found != OLD);
        left_behind += u64::from(listed(folder.path()) != ["file"]);
        put(&path, OLD, &FAST).unwrap();
        assert_eq!(fs::read(&path).unwrap(), OLD);
        assert_eq!(names(folder.path()), ["file"], "round {round}");
        round += 1;
    }
    eprintln!("{round} kills: {replaced} found a new file, {left_behind} a temporary one");
    assert!(replaced > 0, "none of {round} was killed after a save");
}

#[test]
fn a_killed_edit_leaves_a_whole_file_and_the_next_one_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let bytes = vec![7; 4 << 20];
    let spec = Spec {
        name: "tensor",
        dtype: Dtype::U8,
        shape: &[4 << 20],
    };
    let layout = layout(&[spec], None, Format::Safetensors).unwrap();
    save(&path, &layout, &[Payload::from(&bytes[..])], &FAST, &Unwatched).unwrap();
    let (rounds, mut round, mut edited, mut left_behind) = (rounds(10), 0, 0, 0);
    while let Some(after) = moment(round, rounds, edited > 0) {
        kill(with(child_program(), &path, "for-ever edit"), after);
        let archive = Archive::open(&path, &OpenOptions::default()).unwrap();
        assert!(archive.read("tensor").unwrap().to_vec() == bytes);
        let number = archive.header().metadata().and_then(|pairs| pairs.get("number"));
        assert!(number.is_none_or(|number| number.len() == 20), "{number:?}");
        edited += u64::from(number.is_some_and(|number| !number.starts_with("the next")));
        drop(archive);
        left_behind += u64::from(listed(folder.path()) != ["file"]);
        let change = MetadataChange {
            set: &[("number", &format!("the next one {round:07}"))],
            remove: &[],
            rewrite: true,
        };
        update_metadata(&path, &change, &FAST, &Unwatched).unwrap();
        assert_eq!(names(folder.path()), ["file"], "round {round}");
        round += 1;
    }
    eprintln!("{round} kills: {edited} found an edited file, {left_behind} a temporary one");
    assert!(edited > 0, "none of {round} was killed after an edit");
}

#[test]
fn a_trap_under_a_temporary_name_hurts_nothing() {
    let (folder, path) = folder();
    let victim = folder.path().join("victim");
    fs::write(&victim, OLD).unwrap();
    #[cfg(unix)]
    unix::lay_traps(folder.path(), &victim);
    fs::create_dir(folder.path().join(".file.0000000000000003.ingot-tmp")).unwrap();
    fs::hard_link(&victim, folder.path().join(".file.0000000000000004.ingot-tmp")).unwrap();
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), OLD);
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn a_temporary_file_is_removed_when_nobody_holds_it() {
    let (folder, path) = folder();
    let stale = folder.path().join(".file.0000000000000001.ingot-tmp");
    let live = folder.path().join(".file.0000000000000005.ingot-tmp");
    let of_another = folder.path().join(".other.0000000000000001.ingot-tmp");
    for path in [&stale, &live, &of_another] {
        fs::write(path, b"half a model").unwrap();
    }
    let lock = File::options().read(true).write(true).open(&live).unwrap();
    lock.try_lock().unwrap();
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert!(!stale.exists());
    assert!(live.exists());
    assert!(of_another.exists());
    // Closing is not enough: a child process of another test may keep the file open for a moment.
    match cfg!(windows) {
        // No child process has this file open.
        true => drop(lock),
        false => lock.unlock().unwrap(),
    }
    put(&path, b"new", &SaveOptions::default()).unwrap();
    assert!(!live.exists());
}

fn is_denied(fault: &Error) -> bool {
    matches!(fault.failure(), Failure::Write { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
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
                    let options = SaveOptions::new().durable(false);
                    for _ in 0..40 {
                        while let Err(fault) = put(path, &fill(saver), &options) {
                            // On a busy machine the reader may have the file open for longer than a save waits for it.
                            assert!(cfg!(windows) && is_denied(&fault), "{fault}");
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let found = match fs::read(&path) {
                    // If the system cannot replace a file that this thread has open, the path has no file for a moment.
                    Err(fault) if cfg!(windows) && fault.kind() == io::ErrorKind::NotFound => continue,
                    found => found.unwrap(),
                };
                assert!(found == fill(found[0]), "a mixed file of {} bytes", found.len());
                if cfg!(windows) {
                    // Nor can it while this thread has the file open. Without a pause, that is nearly always.
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let saved: Vec<_> = savers.into_iter().map(|saver| saver.join()).collect();
        // Stop the reader in any case, or it would not end.
        done.store(true, Ordering::Relaxed);
        for saved in saved {
            saved.unwrap();
        }
    });
    if cfg!(windows) {
        // The next save removes a replaced file that the reader had open at the end.
        put(&path, &fill(0), &SaveOptions::default()).unwrap();
    }
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

/// Stops a save at its check number `after`.
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
            let options = SaveOptions::new().replace(replace);
            let bytes = new(size);
            for after in 0.. {
                let watch = StopAfter::new(after);
                match put_watched(&path, &bytes, &options, &watch) {
                    Err(fault) if fault.is_interrupted() => assert_eq!(fs::read(&path).unwrap(), OLD),
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

const NOTHING: SaveOptions = SaveOptions::new()
    .replace(Replace::Nothing)
    .replace_read_only(true);

#[track_caller]
fn assert_is_there(result: Result<(), Error>) {
    let error = result.unwrap_err();
    assert_eq!(error.code(), "open", "{error}");
    assert_eq!(error.system().unwrap().kind(), io::ErrorKind::AlreadyExists);
}

#[test]
fn what_has_the_name_stays_where_nothing_is_replaced() {
    let (folder, path) = folder();
    assert_is_there(put(&path, &new(1000), &NOTHING));
    assert_eq!(fs::read(&path).unwrap(), OLD);
    assert_eq!(names(folder.path()), ["file"]);

    let other = folder.path().join("other");
    put(&other, &new(1000), &NOTHING).unwrap();
    assert_eq!(fs::read(&other).unwrap(), new(1000));
    assert_eq!(names(folder.path()), ["file", "other"]);
}

/// Makes a file at the first check for an interrupt, which is after the save has checked whether the path exists.
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
        let options = SaveOptions::new().replace(replace);
        let path = folder.path().join("file");
        let result = put_watched(&path, OLD, &options, &StopAfter::new(1));
        assert!(result.as_ref().is_err_and(Error::is_interrupted));
        assert_eq!(names(folder.path()), [""; 0]);
    }
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

// ── Messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_path_in_a_message_cannot_steer_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no\x1b[2J/file");
    let text = put(&path, OLD, &SaveOptions::default()).unwrap_err().to_string();
    assert!(
        text.contains("no\\x1b[2J/file: could not open it for writing: "),
        "{text}"
    );
}
