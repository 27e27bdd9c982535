//! Valid names of shards in an index.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;

use super::error::{IndexError, ShardNameFault};

/// The limits of Linux for one part of a path and for the whole path, in bytes.
const PART_NBYTES: usize = 255;
const PATH_NBYTES: usize = 4095;

/// Names that Windows reserves for devices, in every directory and with every extension.
const DEVICES: [&str; 6] = ["con", "prn", "aux", "nul", "conin$", "conout$"];
const NUMBERED_DEVICES: [&str; 2] = ["com", "lpt"];

/// Rule I6.
pub(super) fn check(shard: &str) -> Result<(), ShardNameFault> {
    let fault = match shard {
        "" => ShardNameFault::Empty,
        _ if shard.starts_with('/') => ShardNameFault::Absolute,
        _ if shard.starts_with('~') => ShardNameFault::Home,
        _ if shard.contains('\\') => ShardNameFault::Backslash,
        _ if shard.contains(':') => ShardNameFault::Colon,
        _ if shard.chars().any(char::is_control) => ShardNameFault::Control,
        _ if shard.len() > PATH_NBYTES => ShardNameFault::TooLong,
        _ => return shard.split('/').try_for_each(check_part),
    };
    Err(fault)
}

/// How often a name may be decoded on its way, once each by the server and the proxies before it.
const DECODINGS: usize = 5;

/// Checks rule I6 for a name that becomes part of a URL: its decoded forms must keep the rule too.
pub(super) fn check_decoded(shard: &str) -> Result<(), ShardNameFault> {
    let mut name = decoded(shard);
    for _ in 0..DECODINGS {
        let Some(plain) = name else {
            return Ok(());
        };
        check(&plain).map_err(|_| ShardNameFault::Encoded)?;
        name = decoded(&plain);
    }
    name.map_or(Ok(()), |_| Err(ShardNameFault::Encoded))
}

/// Percent-decodes `text`, or returns `None` if nothing in it is encoded. A `%` without two digits is left unchanged.
fn decoded(text: &str) -> Option<String> {
    let digits = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    let mut bytes = Vec::with_capacity(text.len());
    let mut is_encoded = false;
    let mut at = 0;
    while let Some(&byte) = text.as_bytes().get(at) {
        let escape = digits(at + 1).filter(|_| byte == b'%');
        is_encoded |= escape.is_some();
        bytes.push(escape.unwrap_or(byte));
        at += if escape.is_some() { 3 } else { 1 };
    }
    is_encoded.then(|| String::from_utf8_lossy(&bytes).into_owned())
}

fn check_part(part: &str) -> Result<(), ShardNameFault> {
    let fault = match part {
        "" => ShardNameFault::EmptyPart,
        "." | ".." => ShardNameFault::Parent,
        _ if part.len() > PART_NBYTES => ShardNameFault::TooLong,
        _ if part.ends_with(['.', ' ']) => ShardNameFault::TrailingDot,
        _ if is_device(part) => ShardNameFault::Device,
        _ => return Ok(()),
    };
    Err(fault)
}

fn is_device(part: &str) -> bool {
    let stem = part.split('.').next().unwrap_or(part).trim_end();
    let has_number = |device: &str| {
        stem.get(..device.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(device))
            && matches!(
                &stem[device.len()..],
                "0" | "1" | "2" | "3" | "4" | "5" | "6" | "7" | "8" | "9" | "¹" | "²" | "³"
            )
    };
    DEVICES.iter().any(|device| stem.eq_ignore_ascii_case(device))
        || NUMBERED_DEVICES.iter().any(|device| has_number(device))
}

/// Checks rule I8: no two shards, which are sorted, have names that are the same file where names ignore case.
pub(super) fn refuse_collisions(shards: &[String]) -> Result<(), IndexError> {
    let mut folded: Vec<(String, &String)> = shards
        .iter()
        .map(|shard| (shard.chars().flat_map(char::to_lowercase).collect(), shard))
        .collect();
    folded.sort();
    match folded.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        None => Ok(()),
        Some(pair) => Err(IndexError::ShardCollision {
            shards: (pair[0].1.to_owned(), pair[1].1.to_owned()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_refused_for_what_is_wrong_with_it() {
        use ShardNameFault as Fault;
        let long = "a".repeat(PART_NBYTES);
        let path = |nbytes: usize| "a/".repeat(nbytes / 2) + &"b".repeat(nbytes % 2);
        for (name, verdict) in [
            ("a.safetensors", Ok(())),
            ("a/b", Ok(())),
            ("", Err(Fault::Empty)),
            ("/a", Err(Fault::Absolute)),
            ("~a", Err(Fault::Home)),
            ("a\\b", Err(Fault::Backslash)),
            ("c:a", Err(Fault::Colon)),
            ("a\nb", Err(Fault::Control)),
            ("a//b", Err(Fault::EmptyPart)),
            ("a/", Err(Fault::EmptyPart)),
            ("./a", Err(Fault::Parent)),
            ("a/..", Err(Fault::Parent)),
            ("...", Err(Fault::TrailingDot)),
            ("a /b", Err(Fault::TrailingDot)),
            ("NUL", Err(Fault::Device)),
            ("a/con .txt", Err(Fault::Device)),
            ("Com1.safetensors", Err(Fault::Device)),
            ("lpt\u{b2}", Err(Fault::Device)),
            ("com", Ok(())),
            ("com10", Ok(())),
            ("comX", Ok(())),
            ("null", Ok(())),
            (&long, Ok(())),
            (&[&long, "b"].concat(), Err(Fault::TooLong)),
            (&path(PATH_NBYTES), Ok(())),
            (&(path(PATH_NBYTES - 1) + "bb"), Err(Fault::TooLong)),
        ] {
            assert_eq!(check(name), verdict, "{name}");
        }
    }

    #[test]
    fn a_name_in_a_url_keeps_the_rule_however_often_it_is_decoded() {
        for (name, is_good) in [
            ("a%20b", true),
            ("100%", true),
            ("%zz", true),
            ("a%2fb", true),
            ("%2e%2e", false),
            ("%2fa", false),
            ("a%5cb", false),
            ("%252e%252e", false),
            ("%2525252525252561", false),
            ("%25252561", true),
        ] {
            let verdict = if is_good {
                Ok(())
            } else {
                Err(ShardNameFault::Encoded)
            };
            assert_eq!(check_decoded(name), verdict, "{name}");
        }
        assert_eq!(decoded("a%41%c3%A4%4"), Some("aAä%4".to_owned()));
        assert_eq!(decoded("a%4"), None);
    }
}
