//! How the bytes of a file are read, and why.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;

use crate::error::Error;

/// How to read a file: what the caller asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Backend {
    /// Choose by what is true of the file.
    #[default]
    Auto,
    /// Map it: tensors are views of the page cache, read when touched.
    Mmap,
    /// Read it into memory of our own, in parallel.
    Pread,
}

impl Backend {
    /// Every choice.
    pub const ALL: [Backend; 3] = [Backend::Auto, Backend::Mmap, Backend::Pread];

    /// The backend of this name: `auto`, `mmap` or `pread`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Backend> {
        Backend::ALL.into_iter().find(|backend| backend.name() == name)
    }

    /// The name that options use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Mmap => "mmap",
            Backend::Pread => "pread",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A decision, and what it rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) backend: Backend,
    pub(crate) why: Cow<'static, str>,
}

/// Overrides [`Backend::Auto`] for a whole process: `mmap` or `pread`.
pub const BACKEND_VARIABLE: &str = "INGOT_BACKEND";

/// File systems whose pages come over a network or through a process, by the number that `statfs` gives
/// (linux/magic.h and the sources of those that stand outside the kernel). Mapping a file there fetches it page
/// by page, 30 to 50 times slower than reading it, and an error on the way is a SIGBUS.
const REMOTE_FILE_SYSTEMS: &[(u32, &str)] = &[
    (0x6969, "NFS"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB2"),
    (0x517B, "SMB"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9p"),
    (0x0BD0_0BD0, "Lustre"),
    (0x00C3_6400, "Ceph"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x5346_414F, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0116_1970, "GFS2"),
    (0x7461_636F, "OCFS2"),
    (0x2003_0528, "OrangeFS"),
    (0x786F_4256, "vboxsf"),
    (0xBACB_ACBC, "vmhgfs"),
    (0x7C7C_6673, "prl_fs"),
    (0x6B41_4653, "kAFS"),
    (0xBEEF_DEAD, "StorNext"),
    (0xAAD7_AAEA, "PanFS"),
    (0x0131_11A8, "IBRIX"),
];

/// Chooses for a file on the file system `remote`, where that is one of [`REMOTE_FILE_SYSTEMS`]. `variable` is the
/// value of [`BACKEND_VARIABLE`], where it is set.
pub(crate) fn choose(
    asked: Backend,
    variable: Option<&str>,
    remote: Option<&'static str>,
) -> Result<Choice, Error> {
    let chosen = |backend, why| Ok(Choice { backend, why });
    if asked != Backend::Auto {
        return chosen(asked, "asked for by the caller".into());
    }
    match variable {
        None | Some("" | "auto") => {}
        Some(name) => {
            let backend = Backend::from_name(name).ok_or_else(|| Error::UnknownBackend {
                found: name.to_owned(),
            })?;
            return chosen(backend, format!("{BACKEND_VARIABLE}={backend}").into());
        }
    }
    if cfg!(windows) {
        let why = "mapped files on Windows count against the commit limit and cannot be replaced";
        return chosen(Backend::Pread, why.into());
    }
    // Not asked is whether the file is in the page cache. From the disk both ways take as long (2026-11: 2 GiB in 1.2 to 1.4
    // s), and of a mapping the next process has the pages.
    match remote {
        Some(name) => chosen(Backend::Pread, format!("{name} is slow to map").into()),
        None => chosen(Backend::Mmap, "local file system".into()),
    }
}

/// The file system that `file` lies on, where it is one of [`REMOTE_FILE_SYSTEMS`].
pub(crate) fn remote_file_system(file: &File) -> Option<&'static str> {
    file_system(file).and_then(remote_name)
}

fn remote_name(number: u32) -> Option<&'static str> {
    REMOTE_FILE_SYSTEMS
        .iter()
        .find(|row| row.0 == number)
        .map(|row| row.1)
}

/// The number of the file system that `file` lies on.
#[cfg(target_os = "linux")]
pub(crate) fn file_system(file: &File) -> Option<u32> {
    let number = rustix::fs::fstatfs(file).ok()?.f_type;
    // The kernel's numbers have 32 bits; on some machines the field is wider and keeps their sign.
    u32::try_from(number & 0xFFFF_FFFF).ok()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn file_system(_file: &File) -> Option<u32> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(asked: Backend, variable: Option<&str>) -> Choice {
        choose(asked, variable, None).unwrap()
    }

    #[test]
    fn the_caller_comes_before_the_environment_and_that_before_the_file() {
        assert_eq!(chosen(Backend::Mmap, Some("pread")).backend, Backend::Mmap);
        assert_eq!(chosen(Backend::Auto, Some("pread")).backend, Backend::Pread);
        assert_eq!(chosen(Backend::Auto, Some("pread")).why, "INGOT_BACKEND=pread");
        assert_eq!(chosen(Backend::Auto, Some("auto")), chosen(Backend::Auto, None));
        assert_eq!(chosen(Backend::Auto, Some("")), chosen(Backend::Auto, None));
    }

    #[test]
    fn a_backend_that_is_none_is_refused_with_the_choices() {
        let refusal = choose(Backend::Auto, Some("mmpa"), None).unwrap_err();
        assert_eq!(refusal.code(), "unknown-backend");
        assert_eq!(
            refusal.to_string(),
            "INGOT_BACKEND `mmpa` is unknown: expected one of auto, mmap, pread"
        );
        assert!(
            choose(Backend::Mmap, Some("mmpa"), None).is_ok(),
            "the caller has said which"
        );
    }

    #[test]
    fn what_comes_over_a_network_is_read_and_what_does_not_is_mapped() {
        for (_, name) in REMOTE_FILE_SYSTEMS {
            let choice = choose(Backend::Auto, None, Some(name)).unwrap();
            assert_eq!(
                (choice.backend, &*choice.why),
                (Backend::Pread, &*format!("{name} is slow to map"))
            );
            assert_eq!(
                choose(Backend::Mmap, None, Some(name)).unwrap().backend,
                Backend::Mmap
            );
        }
        assert_eq!(remote_file_system(&tempfile::tempfile().unwrap()), None);
    }

    #[test]
    fn the_table_names_each_file_system_once() {
        for (number, name) in REMOTE_FILE_SYSTEMS {
            assert_eq!(remote_name(*number), Some(*name), "two rows with one number");
            let rows = REMOTE_FILE_SYSTEMS.iter().filter(|row| row.1 == *name).count();
            assert_eq!(rows, 1, "{name}");
        }
        let ext4 = 0xEF53;
        assert_eq!(remote_name(ext4), None);
    }
}
