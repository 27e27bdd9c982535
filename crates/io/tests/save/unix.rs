//! Saves on Unix: modes, owners, links and pipes, and system calls that fail.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;

use rustix::fs::{XattrFlags, getxattr, setxattr};

use super::*;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Makes links, pipes and directories with the names of temporary files.
pub(super) fn lay_traps(folder: &Path, victim: &Path) {
    symlink(victim, folder.join(".file.0000000000000001.ingot-tmp")).unwrap();
    make_pipe(&folder.join(".file.0000000000000002.ingot-tmp"));
}

// ── W5, W7: attributes of files ───────────────────────────────────────────────────────────────────────────────────

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

    // Another user may replace the file if the directory permits it, and becomes its owner. Their group gets only the
    // permissions of others, and the bits for set-user-id and set-group-id are dropped.
    fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    let output = with(as_nobody(folder.path()), &path, "force").output().unwrap();
    assert!(said(&output).contains("saved"), "{}", said(&output));
    let metadata = path.metadata().unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (NOBODY, NOBODY));
    assert_eq!(metadata.mode() & 0o7777, 0o600);
}

const NOBODY: u32 = 65534;

/// Returns a command that runs the child as an unprivileged user, from a copy of the program that this user may execute.
fn as_nobody(folder: &Path) -> Command {
    let program = folder.join("program");
    if !program.exists() {
        // Another process makes the copy: if this one wrote it, a child process of another test could inherit the open file, and
        // a file that is open for writing cannot be executed.
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

/// Sets an extended attribute. Returns false if the file system does not support it.
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

/// Returns an access list: rw for the owner, r for user 1000, nothing for the group, mask r, nothing for others.
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
    // A new file does inherit it from the directory, as with every program.
    let other = folder.path().join("other");
    put(&other, b"new", &SaveOptions::default()).unwrap();
    fs::write(folder.path().join("plain"), b"new").unwrap();
    assert_eq!(
        attribute(&other, ACCESS_LIST),
        attribute(&folder.path().join("plain"), ACCESS_LIST)
    );
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
fn a_link_is_what_has_the_name_too() {
    let (folder, path) = folder();
    let link = folder.path().join("link");
    symlink("file", &link).unwrap();
    assert_is_there(put(&link, &new(1000), &NOTHING));
    assert_eq!(fs::read(&path).unwrap(), OLD);
    assert_eq!(names(folder.path()), ["file", "link"]);
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
    assert_eq!(error.code(), "write", "{error}");
    assert_eq!(
        error.system().unwrap().raw_os_error(),
        Some(rustix::io::Errno::LOOP.raw_os_error())
    );
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
    // More than a pipe can hold, so that the save must wait for the reader.
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
    assert!(unopened.as_ref().is_err_and(Error::is_interrupted));
    // Open the pipe for reading, and never read.
    let _reader = File::options().read(true).write(true).open(&path).unwrap();
    let full = put_watched(&path, &new(1 << 20), &SaveOptions::default(), &StopAfter::new(4));
    assert!(full.as_ref().is_err_and(Error::is_interrupted));
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
    // Like a file with contents, which stay, also behind a link.
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
    let options = SaveOptions::new().replace(Replace::Nothing);
    let refused = put(&path, &new(5000), &options).unwrap_err();
    assert_eq!(refused.code(), "open", "{refused}");
    let mut found = Vec::new();
    file.read_to_end(&mut found).unwrap();
    assert_eq!(found, OLD);
}

/// Returns a command that runs as an unprivileged user. `mode` is the mode of the folder.
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
    assert!(text.contains("save_file(..., atomic=False)"), "{text}");
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

/// A mounted file system of 4 MiB, which is unmounted when it is dropped.
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
    // In another process: a child process of another test could inherit open files of this one, and keep their space for a
    // moment.
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
        // All space can be used: a file that fits is written. Beside an old file there must be space for two.
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

    /// Runs the child under strace with `arguments`. Returns `None`, and prints the reason, if strace cannot run.
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

    /// Returns the `wanted` calls of the save itself, in order.
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
        // For a new file, its directory is flushed too.
        let (lines, _) = strace(&[], &path.with_file_name("new"), "in-place").unwrap();
        assert_eq!(
            calls(&lines, &DURABLE),
            ["fallocate", "pwrite64", "fsync", "fsync"]
        );
    }

    fn thread_of(line: &str) -> &str {
        line.split_once(' ').map_or("", |(thread, _)| thread)
    }

    /// Returns the calls of `name` on the thread that saves, and the number of such calls before the save. strace counts the
    /// calls of each thread separately.
    fn on_saving_thread<'l>(lines: &'l [String], name: &str) -> (usize, Vec<&'l String>) {
        let begin = lines.iter().position(|line| line.contains(MARK)).unwrap();
        let thread = thread_of(&lines[begin]);
        let is_wanted = |line: &&String| thread_of(line) == thread && call(line) == Some(name);
        let before = lines[..begin].iter().filter(is_wanted).count();
        (before, lines.iter().filter(is_wanted).collect())
    }

    /// Returns the number of the call that opens the unnamed file.
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

    /// The system calls of a save, without those that every thread makes.
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
                // One more than the save's thread makes: the flush runs on another thread, whose calls strace counts separately.
                for when in before + 1..=all.len().max(before + 1) {
                    refresh();
                    let inject = format!("inject={name}:error=EIO:when={when}");
                    // If a call gets two faults, strace uses the later one.
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
    fn a_flush_that_fails_while_the_rest_is_written_is_reported() {
        // A tmpfs has no direct writes: a large file is flushed in pieces.
        let folder = match tempfile::tempdir_in("/dev/shm") {
            Ok(folder) => folder,
            Err(fault) => return eprintln!("not run: there is no /dev/shm: {fault}"),
        };
        let path = folder.path().join("file");
        fs::write(&path, OLD).unwrap();
        let large = format!("INGOT_SAVE_SIZE={}", 48 << 20);
        let arguments = ["-E", &large, "-e", "inject=fdatasync:error=EIO"];
        let Some((lines, text)) = strace(&arguments, &path, "") else {
            return;
        };
        assert!(lines.iter().any(|line| call(line) == Some("fdatasync")));
        assert!(text.contains("could not flush: "), "{text}");
        assert_eq!(fs::read(&path).unwrap(), OLD);
        assert_eq!(names(folder.path()), ["file"]);
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
