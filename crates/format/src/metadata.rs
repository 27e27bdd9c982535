//! The metadata of a header: pairs of strings.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;

use crate::extent;

/// The key under which a safetensors header holds its metadata. No tensor may have this name.
pub const METADATA_KEY: &str = "__metadata__";

/// Keys and values of a header's metadata, each key once, in file order.
///
/// All text is stored back to back in one string, because a hostile header may hold eight million pairs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    text: String,
    /// End of each key and each value, alternating.
    ends: Vec<u32>,
}

impl Metadata {
    /// Returns the number of pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len() / 2
    }

    /// Returns whether there are no pairs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the value of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.iter().find(|pair| pair.0 == key).map(|pair| pair.1)
    }

    /// Iterates over all pairs in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        (0..self.len()).map(|pair| (self.part(2 * pair), self.part(2 * pair + 1)))
    }

    /// Appends a key or a value. Keys are not compared here: see [`Metadata::duplicate`].
    pub(crate) fn push(&mut self, part: &str) {
        self.text.push_str(part);
        self.ends.push(extent::to_u32(self.text.len()));
    }

    /// Returns a key that occurs twice.
    pub(crate) fn duplicate(&self) -> Option<&str> {
        let mut keys: Vec<u32> = (0..extent::to_u32(self.len())).collect();
        let key = |&pair: &u32| self.part(2 * extent::index(pair));
        // Sorted, not hashed: keys chosen to collide cost nothing extra, and writers sort them already.
        keys.sort_by(|a, b| key(a).cmp(key(b)));
        keys.windows(2)
            .find(|pair| key(&pair[0]) == key(&pair[1]))
            .map(|pair| key(&pair[0]))
    }

    /// Keeps each key once, with its last value, as readers do that do not check for duplicates. Also returns the keys
    /// that occurred more than once.
    pub(crate) fn last_of_each(self) -> (Metadata, Vec<String>) {
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by(|&a, &b| self.part(2 * a).cmp(self.part(2 * b)));
        let mut kept: Vec<usize> = Vec::new();
        let mut twice: Vec<String> = Vec::new();
        for same in order.chunk_by(|&a, &b| self.part(2 * a) == self.part(2 * b)) {
            // Sorting keeps the order of equal keys.
            kept.extend(same.last());
            if let [first, _, ..] = same {
                twice.push(self.part(2 * first).to_owned());
            }
        }
        if twice.is_empty() {
            return (self, twice);
        }
        kept.sort_unstable();
        let mut metadata = Metadata::default();
        for pair in kept {
            metadata.push(self.part(2 * pair));
            metadata.push(self.part(2 * pair + 1));
        }
        (metadata, twice)
    }

    fn part(&self, number: usize) -> &str {
        let begin = number
            .checked_sub(1)
            .map_or(0, |before| extent::index(self.ends[before]));
        &self.text[begin..extent::index(self.ends[number])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(pairs: &[(&str, &str)]) -> Metadata {
        let mut metadata = Metadata::default();
        for (key, value) in pairs {
            metadata.push(key);
            metadata.push(value);
        }
        metadata
    }

    #[test]
    fn a_key_has_its_value_and_another_has_none() {
        let some = metadata(&[("a", "1"), ("b", "2"), ("", "3")]);
        assert_eq!(
            ["a", "b", "", "c"].map(|key| some.get(key)),
            [Some("1"), Some("2"), Some("3"), None]
        );
        assert_eq!((some.len(), some.is_empty()), (3, false));
        assert!(metadata(&[]).is_empty());
    }

    #[test]
    fn the_last_value_of_a_duplicate_key_is_kept_and_the_key_is_returned() {
        let some = metadata(&[
            ("c", "1"),
            ("b", "2"),
            ("a", "3"),
            ("b", "4"),
            ("d", "5"),
            ("c", "6"),
            ("b", "7"),
        ]);
        assert_eq!(some.duplicate(), Some("b"));
        let (kept, twice) = some.last_of_each();
        assert_eq!(kept, metadata(&[("a", "3"), ("d", "5"), ("c", "6"), ("b", "7")]));
        assert_eq!(twice, ["b", "c"]);
        assert_eq!(kept.duplicate(), None);
        assert_eq!(kept.clone().last_of_each(), (kept, Vec::new()));
    }
}
