//! Names of files. They are text, except that programs may use unpaired surrogates in them.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf, Prefix};

/// Names of devices, in any directory and with any extension.
const DEVICES: [&str; 6] = ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"];
/// Names of devices that end in one of `DIGITS`.
const NUMBERED_DEVICES: [&str; 2] = ["COM", "LPT"];
const DIGITS: &str = "123456789¹²³";

/// Return a name as bytes for [`name_of`], or `None` if the name is not text.
pub(crate) fn name_bytes(name: &OsStr) -> Option<&[u8]> {
    name.to_str().map(str::as_bytes)
}

/// Return the name for bytes that [`name_bytes`] returned.
pub(crate) fn name_of(bytes: &[u8]) -> Option<OsString> {
    std::str::from_utf8(bytes).ok().map(OsString::from)
}

/// Shorten a name to at most `most` bytes of text, as a part of other names.
pub(crate) fn cut(name: &OsStr, most: usize) -> Cow<'_, OsStr> {
    let text = name.to_string_lossy();
    let end = (0..=most.min(text.len()))
        .rev()
        .find(|&cut| text.is_char_boundary(cut));
    OsString::from(&text[..end.unwrap_or(0)]).into()
}

/// Return the device that has this name.
pub(super) fn device(name: &OsStr) -> Option<&'static str> {
    let text = name.to_str()?;
    let stem = text.split(['.', ':']).next().unwrap_or(text).trim_end();
    let is = |device: &str| stem.eq_ignore_ascii_case(device);
    let is_numbered = |device: &str| {
        let digit = stem
            .get(..device.len())
            .filter(|begin| begin.eq_ignore_ascii_case(device));
        let digit = digit.and_then(|_| stem.get(device.len()..));
        digit.is_some_and(|digit| digit.chars().count() == 1 && DIGITS.contains(digit))
    };
    DEVICES
        .into_iter()
        .find(|device| is(device))
        .or_else(|| NUMBERED_DEVICES.into_iter().find(|device| is_numbered(device)))
}

/// Return the absolute path with the prefix `\\?\`, with which it may have 32,767 arbitrary characters.
pub(super) fn verbatim(path: &Path) -> PathBuf {
    let mut components = path.components();
    let Some(Component::Prefix(prefix)) = components.next() else {
        return path.to_owned();
    };
    let mut verbatim = match prefix.kind() {
        Prefix::Disk(_) => OsString::from(r"\\?\"),
        Prefix::UNC(server, share) => {
            let mut verbatim = OsString::from(r"\\?\UNC\");
            verbatim.push(server);
            verbatim.push(r"\");
            verbatim.push(share);
            verbatim.push(components.as_path());
            return verbatim.into();
        }
        _ => return path.to_owned(),
    };
    verbatim.push(path);
    verbatim.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_are_known_whatever_follows() {
        for name in [
            "nul",
            "NUL.safetensors",
            "aux .bt",
            "Com1",
            "lpt³.x",
            "CONOUT$",
            "nul:x",
        ] {
            assert!(device(OsStr::new(name)).is_some(), "{name}");
        }
        for name in [
            "null",
            "com",
            "com0",
            "com10",
            "model.nul",
            "xcon",
            "auxiliary.bt",
            "ä",
        ] {
            assert_eq!(device(OsStr::new(name)), None, "{name}");
        }
    }

    #[test]
    fn a_path_from_a_root_gets_the_prefix() {
        for (path, expected) in [
            (r"C:\a\b", r"\\?\C:\a\b"),
            (r"\\server\share\a", r"\\?\UNC\server\share\a"),
            (r"\\?\C:\a", r"\\?\C:\a"),
            (r"\\.\pipe\a", r"\\.\pipe\a"),
        ] {
            assert_eq!(verbatim(Path::new(path)), Path::new(expected));
        }
    }

    #[test]
    fn a_name_is_cut_at_a_letter_and_comes_back_from_its_bytes() {
        use std::os::windows::ffi::OsStringExt;
        assert_eq!(cut(OsStr::new("ää"), 3), OsStr::new("ä"));
        assert_eq!(cut(OsStr::new("ab"), 3), OsStr::new("ab"));
        let name = OsString::from("mödel");
        assert_eq!(name_bytes(&name).and_then(name_of), Some(name.clone()));
        assert_eq!(name_bytes(&OsString::from_wide(&[0xD800])), None);
    }
}
