//! Identities for stores.
//!
//! The first source that is configured is used. If it fails, the error names it, and no other source is tried: another
//! identity than the configured one reads other files. What the SDKs of the vendors find, and this crate does not read,
//! comes through [`Credentials`].

pub(crate) mod amazon;
mod asker;
pub(crate) mod azure;
pub(crate) mod google;
mod issued;
pub(crate) mod source;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ingot_format::Escaped;
use jiff::Timestamp;

use crate::credentials::{Secret, Variable};
use crate::fault::{Fault, FaultKind};
use crate::url::Url;

pub(crate) use asker::element;

/// The first of these variables that is set to something.
pub(crate) fn set(variable: Variable<'_>, names: &[&str]) -> Option<String> {
    names
        .iter()
        .find_map(|name| variable(name).filter(|value| !value.is_empty()))
}

/// The folder of the person who runs this.
fn home(variable: Variable<'_>) -> Option<PathBuf> {
    set(variable, &["HOME", "USERPROFILE"]).map(PathBuf::from)
}

/// A source that cannot be used as it stands.
fn refused(why: impl Into<String>) -> Fault {
    FaultKind::Option(why.into()).into()
}

/// `path` as it is shown.
fn shown(path: &Path) -> String {
    Escaped(&path.to_string_lossy()).to_string()
}

/// The version of a file: another one may hold another identity.
fn stamp(path: &Path) -> Secret {
    let found = fs::metadata(path).ok();
    Secret::new(format!(
        "{:?}",
        found.map(|found| (found.modified().ok(), found.len()))
    ))
}

/// The token that is all of a file; `None` where that is empty.
fn token_in(path: &Path) -> Result<Option<Secret>, Fault> {
    let text = fs::read_to_string(path);
    let text = text.map_err(|fault| refused(format!("{} cannot be read: {fault}", shown(path))))?;
    let token = Secret::new(text.trim()).checked(&format!("the token in {}", shown(path)))?;
    Ok(Some(token).filter(|token| !token.is_empty()))
}

/// Whether a service of this machine or of its cloud is asked, which stands next to it: no proxy leads there.
fn is_near(url: &Url) -> bool {
    const NAMES: &[&str] = &[
        "localhost",
        "metadata.google.internal",
        "fd00:ec2::23",
        "fd00:ec2::254",
    ];
    let is_near = |address: std::net::IpAddr| match address {
        std::net::IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local(),
        std::net::IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local(),
    };
    NAMES.contains(&url.host.as_str()) || url.address().is_some_and(is_near)
}

/// Whether the firmware says that this machine is one of a cloud. Elsewhere nobody is asked: the address may be
/// anybody's, and asking it in vain takes a second.
pub(crate) fn firmware_says(file: &str, word: &str) -> bool {
    let text = fs::read_to_string(Path::new("/sys/devices/virtual/dmi/id").join(file));
    text.is_ok_and(|text| text.trim().starts_with(word))
}

/// When something is over: a time such as `2026-11-21T20:53:24Z`, or seconds since 1970. Where that is not said, it is
/// asked for each time.
fn until(text: Option<&str>) -> SystemTime {
    let text = text.unwrap_or_default().trim();
    let seconds = text
        .parse()
        .ok()
        .and_then(|seconds| Timestamp::from_second(seconds).ok());
    // Old versions of Amazon's tools write `UTC` for `Z`.
    let time = seconds.or_else(|| text.replace("UTC", "Z").parse().ok());
    time.map_or(UNIX_EPOCH, SystemTime::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_services() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-28T23:59:59Z", 951_782_399),
            ("2000-02-29T23:59:59.123Z", 951_868_799),
            ("2000-03-01T02:59:59+03:00", 951_868_799),
            ("2100-03-01T00:00:00UTC", 4_107_542_400),
            ("951782399", 951_782_399),
        ] {
            let since = until(Some(text)).duration_since(UNIX_EPOCH).unwrap();
            assert_eq!(since.as_secs(), seconds, "{text}");
        }
        for text in [
            "",
            "soon",
            "2000-13-01T00:00:00Z",
            "2000-01-01",
            "2000-01-01T24:00:00Z",
            "99999999999999",
        ] {
            assert_eq!(until(Some(text)), UNIX_EPOCH, "{text}");
        }
    }
}
