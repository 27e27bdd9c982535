//! Buckets, or containers, and the keys of their objects.

use crate::fault::{Fault, Result};
use crate::url::{Url, encode_path};

/// An object of a store. Keys are never normalised: `..` and `//` are ordinary characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Object<'o> {
    pub(crate) bucket: &'o str,
    pub(crate) key: &'o str,
}

impl<'o> Object<'o> {
    /// Parse the part of a URL after `s3://`, `gs://` or `az://`.
    pub(crate) fn parse(rest: &'o str) -> Result<Object<'o>> {
        let refuse = |why: &str| Err(Fault::address(why));
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let may = |byte: u8| byte.is_ascii_alphanumeric() || b"-._$".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(may) {
            return refuse("invalid bucket: expected the name of a bucket and a key");
        }
        if key.is_empty() {
            return refuse("missing key: expected the name of a bucket and a key");
        }
        if key.chars().any(char::is_control) {
            return refuse("the key has control characters");
        }
        Ok(Object { bucket, key })
    }

    /// Return the URL of the object at a service whose paths begin with the bucket.
    pub(crate) fn at(self, endpoint: &Url) -> Url {
        Url {
            user: None,
            query: None,
            ..endpoint.below(&format!("/{}/{}", self.bucket, encode_path(self.key)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_everything_after_the_bucket() {
        let object = Object::parse("b/a/../c//d?e#f%2F").unwrap();
        assert_eq!((object.bucket, object.key), ("b", "a/../c//d?e#f%2F"));
        for text in ["", "/key", "bucket", "bucket/", "buc ket/k", "b@c/k", "b/k\r\n"] {
            assert!(Object::parse(text).is_err(), "{text:?}");
        }
    }
}
