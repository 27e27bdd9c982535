//! Hash functions and their digests.

use std::fmt;

use sha2::Digest as _;
use xxhash_rust::xxh3::Xxh3;

/// A hash function over bytes.
///
/// ```
/// use ingot_io::Algorithm;
///
/// let digest = Algorithm::Sha256.digest(b"abc");
/// assert_eq!(digest.as_bytes().len(), 32);
/// assert_eq!(Algorithm::from_name("sha256"), Some(Algorithm::Sha256));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// BLAKE3, 256 bits. Made for many threads: the bytes of one tensor are shared out among them.
    #[default]
    Blake3,
    /// SHA-256. One thread for each run of bytes.
    Sha256,
    /// XXH3 with 64 bits. Finds accidents, not attacks.
    Xxh3,
    /// XXH3 with 128 bits. Finds accidents, not attacks.
    Xxh3Wide,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Algorithm; 4] = [
        Algorithm::Blake3,
        Algorithm::Sha256,
        Algorithm::Xxh3,
        Algorithm::Xxh3Wide,
    ];

    /// The algorithm of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Algorithm> {
        Algorithm::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
    }

    /// The name that options and files use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Blake3 => "blake3",
            Algorithm::Sha256 => "sha256",
            Algorithm::Xxh3 => "xxh3",
            Algorithm::Xxh3Wide => "xxh3_128",
        }
    }

    /// Bytes of a digest.
    #[must_use]
    pub const fn digest_len(self) -> usize {
        match self {
            Algorithm::Blake3 | Algorithm::Sha256 => 32,
            Algorithm::Xxh3 => 8,
            Algorithm::Xxh3Wide => 16,
        }
    }

    /// The digest of `bytes`.
    #[must_use]
    pub fn digest(self, bytes: &[u8]) -> Digest {
        let mut hasher = Hasher::new(self);
        hasher.update(bytes);
        hasher.finish()
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The result of a hash function. `Display` writes it in lowercase hexadecimal digits.
///
/// ```
/// use ingot_io::{Algorithm, Digest};
///
/// let digest = Algorithm::Xxh3.digest(b"abc");
/// assert_eq!(Digest::from_hex(Algorithm::Xxh3, &digest.to_string()), Some(digest));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest {
    /// Zero from `len` on.
    bytes: [u8; 32],
    len: u8,
}

impl Digest {
    fn new(from: &[u8]) -> Digest {
        let mut bytes = [0; 32];
        let len = from.len().min(bytes.len());
        bytes[..len].copy_from_slice(&from[..len]);
        Digest {
            bytes,
            // At most 32.
            len: len.to_le_bytes()[0],
        }
    }

    pub(crate) fn of_blake3(hash: &blake3::Hash) -> Digest {
        Digest::new(hash.as_bytes())
    }

    /// A digest of `algorithm` with only zeros: the placeholder in a file until the real digest is known.
    #[must_use]
    pub fn zero(algorithm: Algorithm) -> Digest {
        Digest::new(&[0; 32][..algorithm.digest_len()])
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The digest of `algorithm` that `hex` spells, in digits of either case.
    #[must_use]
    pub fn from_hex(algorithm: Algorithm, hex: &str) -> Option<Digest> {
        let mut bytes = [0; 32];
        if hex.len() != 2 * algorithm.digest_len() {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16);
            *byte = u8::try_from(16 * digit(0)? + digit(1)?).ok()?;
        }
        Some(Digest::new(&bytes[..algorithm.digest_len()]))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes()
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Two digests that should be equal.
///
/// ```
/// use ingot_io::{Algorithm, Unequal};
///
/// let algorithm = Algorithm::Xxh3;
/// let (expected, found) = (algorithm.digest(b"abc"), algorithm.digest(b"abe"));
/// let unequal = Unequal { algorithm, expected, found };
/// assert_eq!(unequal.to_string(), format!("expected xxh3 {expected}, found {found}"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unequal {
    /// The hash function.
    pub algorithm: Algorithm,
    /// The expected digest.
    pub expected: Digest,
    /// The digest of the bytes in the file.
    pub found: Digest,
}

impl fmt::Display for Unequal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected {} {}, found {}",
            self.algorithm, self.expected, self.found
        )
    }
}

/// The state of a hash function that gets its bytes in order.
pub(crate) enum Hasher {
    Blake3(Box<blake3::Hasher>),
    Sha256(sha2::Sha256),
    Xxh3(Box<Xxh3>),
    Xxh3Wide(Box<Xxh3>),
}

impl Hasher {
    pub(crate) fn new(algorithm: Algorithm) -> Hasher {
        match algorithm {
            Algorithm::Blake3 => Hasher::Blake3(Box::new(blake3::Hasher::new())),
            Algorithm::Sha256 => Hasher::Sha256(sha2::Sha256::new()),
            Algorithm::Xxh3 => Hasher::Xxh3(Box::new(Xxh3::new())),
            Algorithm::Xxh3Wide => Hasher::Xxh3Wide(Box::new(Xxh3::new())),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Blake3(hasher) => drop(hasher.update(bytes)),
            Hasher::Sha256(hasher) => hasher.update(bytes),
            Hasher::Xxh3(hasher) | Hasher::Xxh3Wide(hasher) => hasher.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> Digest {
        match self {
            Hasher::Blake3(hasher) => Digest::of_blake3(&hasher.finalize()),
            Hasher::Sha256(hasher) => Digest::new(&hasher.finalize()),
            // The canonical form of XXH3 is big-endian.
            Hasher::Xxh3(hasher) => Digest::new(&hasher.digest().to_be_bytes()),
            Hasher::Xxh3Wide(hasher) => Digest::new(&hasher.digest128().to_be_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The digests of zero bytes, as the authors' own programs print them.
    #[test]
    fn the_digests_of_nothing_are_those_that_everybody_gets() {
        for (algorithm, hex) in [
            (
                Algorithm::Blake3,
                "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
            ),
            (
                Algorithm::Sha256,
                "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            ),
            (Algorithm::Xxh3, "2d06800538d394c2"),
            (Algorithm::Xxh3Wide, "99aa06d3014798d86001c324468d497f"),
        ] {
            assert_eq!(algorithm.digest(b"").to_string(), hex);
            assert_eq!(Algorithm::from_name(algorithm.name()), Some(algorithm));
        }
    }

    #[test]
    fn a_digest_is_read_in_either_case_and_in_full_only() {
        let digest = Algorithm::Xxh3.digest(b"");
        let read = |hex| Digest::from_hex(Algorithm::Xxh3, hex);
        assert_eq!(read("2d06800538d394c2"), Some(digest));
        assert_eq!(read("2D06800538D394C2"), Some(digest));
        assert_eq!(read("2d06800538d394c"), None);
        assert_eq!(read("2d06800538d394cg"), None);
        assert_eq!(read("2d06800538d394c2c2"), None);
        assert_eq!(Digest::from_hex(Algorithm::Sha256, "2d06800538d394c2"), None);
    }
}
