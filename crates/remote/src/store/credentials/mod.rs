//! Identities for stores.
//!
//! The first source that is configured is used. If it fails, the error names it, and no other source is tried: another
//! identity than the configured one reads other files. Identities that the vendors' SDKs find, and that this crate does
//! not read, come through [`Credentials`](crate::Credentials).

pub(crate) mod amazon;
mod asker;
pub(crate) mod azure;
pub(crate) mod google;
mod issued;
mod issuer;
pub(crate) mod source;

use std::fs;
use std::path::Path;

use ingot_format::Escaped;

use crate::credentials::Secret;

pub(crate) use asker::element;

/// Return `path` for a message.
fn shown(path: &Path) -> String {
    Escaped(&path.to_string_lossy()).to_string()
}

/// Return the version of a file: another version may contain another identity.
fn stamp(path: &Path) -> Secret {
    let found = fs::metadata(path).ok();
    let found = found.map(|found| (found.modified().ok(), found.len()));
    Secret::new(format!("{found:?}"))
}

/// Whether the firmware says that this machine is one of a cloud. On other machines nothing is requested: the address may
/// belong to anyone, and a request in vain takes a second.
fn firmware_says(file: &str, word: &str) -> bool {
    let text = fs::read_to_string(Path::new("/sys/devices/virtual/dmi/id").join(file));
    text.is_ok_and(|text| text.trim().starts_with(word))
}
