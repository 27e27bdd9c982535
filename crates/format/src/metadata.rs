//! The free text of a header.

use alloc::string::String;
use alloc::vec::Vec;

use crate::extent;

/// The key under which a safetensors header holds its metadata. No tensor may have this name.
pub const METADATA_KEY: &str = "__metadata__";

/// Keys and values from a header's metadata, each key once, in the order of the file.
///
/// All text lies back to back in one string, because a hostile header may hold eight million pairs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    text: String,
    /// Where each key and each value ends, in turn.
    ends: Vec<u32>,
}

impl Metadata {
    /// How many pairs there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len() / 2
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The value of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.iter().find(|pair| pair.0 == key).map(|pair| pair.1)
    }

    /// All pairs, in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        (0..self.len()).map(|pair| (self.part(2 * pair), self.part(2 * pair + 1)))
    }

    /// Appends a key or a value. Keys are not compared here: see [`Metadata::duplicate`].
    pub(crate) fn push(&mut self, part: &str) {
        self.text.push_str(part);
        self.ends.push(extent::to_u32(self.text.len()));
    }

    /// A key that stands there twice.
    pub(crate) fn duplicate(&self) -> Option<&str> {
        let mut keys: Vec<u32> = (0..extent::to_u32(self.len())).collect();
        let key = |&pair: &u32| self.part(2 * extent::index(pair));
        // Sorted, not hashed: keys chosen to collide cost nothing extra, and writers sort them already.
        keys.sort_by(|a, b| key(a).cmp(key(b)));
        keys.windows(2)
            .find(|pair| key(&pair[0]) == key(&pair[1]))
            .map(|pair| key(&pair[0]))
    }

    fn part(&self, number: usize) -> &str {
        let begin = number
            .checked_sub(1)
            .map_or(0, |before| extent::index(self.ends[before]));
        &self.text[begin..extent::index(self.ends[number])]
    }
}
