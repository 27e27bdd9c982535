//! What stands in the addresses of stores: a bucket, or a container, and a key.

use crate::fault::{Fault, FaultKind};

/// An object of a store. The key is never put in another form: `..` and `//` are letters of it like all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Object<'o> {
    pub(crate) bucket: &'o str,
    pub(crate) key: &'o str,
}

impl<'o> Object<'o> {
    /// Reads what follows `s3://` and the like.
    pub(crate) fn parse(rest: &'o str) -> Result<Object<'o>, Fault> {
        let refuse = |why: &str| FaultKind::Address(why.to_owned());
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let may = |byte: u8| byte.is_ascii_alphanumeric() || b"-._$".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(may) {
            return Err(refuse("expected the name of a bucket and a key, found no such name").into());
        }
        if key.is_empty() {
            return Err(refuse("expected the name of a bucket and a key, found no key").into());
        }
        if key.chars().any(char::is_control) {
            return Err(refuse("the key has control characters").into());
        }
        Ok(Object { bucket, key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_all_that_follows_the_bucket() {
        let object = Object::parse("b/a/../c//d?e#f%2F").unwrap();
        assert_eq!((object.bucket, object.key), ("b", "a/../c//d?e#f%2F"));
        for text in ["", "/key", "bucket", "bucket/", "buc ket/k", "b@c/k", "b/k\r\n"] {
            assert!(Object::parse(text).is_err(), "{text:?}");
        }
    }
}
