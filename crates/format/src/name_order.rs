//! Sorting of many names.

use alloc::vec::Vec;
use core::ops::Range;

use crate::extent::{index, to_u32};

/// Two entries of one name, by their numbers, the lower one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SameName(pub(crate) usize, pub(crate) usize);

/// Bytes of a name that are compared at a time.
const KEY_NBYTES: usize = 8;

/// Groups of up to this size are compared name by name, since splitting them further costs more.
const SMALL: usize = 12;

/// One name while it is being sorted.
#[derive(Clone, Copy)]
struct Item {
    /// The next bytes of the name, the first one in the highest byte, padded with zeros.
    key: u64,
    /// Bytes of `key` that belong to the name.
    nbytes: u8,
    number: u32,
    /// Position of the name in the arena. Kept here because sorting is bound by looking up names that are far apart.
    begin: u32,
    end: u32,
}

impl Item {
    /// Returns the name without its first `depth` bytes.
    #[inline]
    fn rest<'n>(&self, names: &'n [u8], depth: usize) -> &'n [u8] {
        &names[index(self.begin) + depth..index(self.end)]
    }
}

/// Returns the numbers of the names in byte order. The names are back to back in `names`, and end at `ends`.
///
/// Names of one model have common prefixes, and their order in a file is seldom byte order. So names are not compared
/// as a whole: names with an equal prefix are sorted by their next eight bytes, as numbers. Every byte is read once,
/// and names chosen to collide cost nothing extra, as they would in a hash table.
pub(crate) fn order(names: &str, ends: impl ExactSizeIterator<Item = u32>) -> Result<Vec<u32>, SameName> {
    let names = names.as_bytes();
    let count = ends.len();
    let mut items = Vec::with_capacity(count);
    let mut begin = 0;
    for (number, end) in (0..to_u32(count)).zip(ends) {
        items.push(Item {
            key: 0,
            nbytes: 0,
            number,
            begin,
            end,
        });
        begin = end;
    }
    let mut groups: Vec<(Range<usize>, usize)> = alloc::vec![(0..count, 0)];
    while let Some((range, depth)) = groups.pop() {
        let group = &mut items[range.clone()];
        if group.len() <= SMALL {
            group.sort_unstable_by(|a, b| a.rest(names, depth).cmp(b.rest(names, depth)));
            refuse_same(group, |a, b| a.rest(names, depth) == b.rest(names, depth))?;
            continue;
        }
        for item in &mut *group {
            (item.key, item.nbytes) = key(item.rest(names, depth));
        }
        let place = |item: &Item| (item.key, item.nbytes);
        if group.iter().any(|item| place(item) != place(&group[0])) {
            group.sort_unstable_by_key(place);
        }
        let mut begin = range.start;
        for same in group.chunk_by(|a, b| place(a) == place(b)) {
            let end = begin + same.len();
            if same.len() > 1 {
                if usize::from(same[0].nbytes) < KEY_NBYTES {
                    // All of these names end here.
                    refuse_same(same, |_, _| true)?;
                }
                groups.push((begin..end, depth + KEY_NBYTES));
            }
            begin = end;
        }
    }
    Ok(items.into_iter().map(|item| item.number).collect())
}

/// Returns the first bytes of `rest` and their number.
#[inline]
fn key(rest: &[u8]) -> (u64, u8) {
    match rest.first_chunk::<KEY_NBYTES>() {
        Some(bytes) => (u64::from_be_bytes(*bytes), 8),
        None => {
            let mut bytes = [0; KEY_NBYTES];
            bytes[..rest.len()].copy_from_slice(rest);
            // Fewer than eight bytes.
            (u64::from_be_bytes(bytes), u8::try_from(rest.len()).unwrap_or(0))
        }
    }
}

fn refuse_same(sorted: &[Item], is_same: impl Fn(&Item, &Item) -> bool) -> Result<(), SameName> {
    match sorted.windows(2).find(|pair| is_same(&pair[0], &pair[1])) {
        None => Ok(()),
        Some(pair) => {
            let (a, b) = (index(pair[0].number), index(pair[1].number));
            Err(SameName(a.min(b), a.max(b)))
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::String;
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn sorted(names: &[String]) -> Result<Vec<u32>, SameName> {
        let mut end = 0;
        let ends = names.iter().map(|name| {
            end += to_u32(name.len());
            end
        });
        order(&names.concat(), ends)
    }

    /// The slow, obvious way.
    fn sorted_plainly(names: &[String]) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..to_u32(names.len())).collect();
        numbers.sort_by_key(|&number| &names[index(number)]);
        numbers
    }

    /// Names with common prefixes, some a prefix of another, some with zero bytes, since zeros also pad short keys.
    fn names() -> impl Strategy<Value = Vec<String>> {
        let name =
            (0..4_usize, "[ab\0é.]{0,12}").prop_map(|(count, end)| "model.layers.".repeat(count) + &end);
        proptest::collection::vec(name, 0..80)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_order_is_that_of_whole_names(mut names in names()) {
            let mut seen = alloc::collections::BTreeSet::new();
            names.retain(|name| seen.insert(name.clone()));
            prop_assert_eq!(sorted(&names), Ok(sorted_plainly(&names)));
        }

        #[test]
        fn a_name_that_is_there_twice_is_found(mut names in names(), again in any::<proptest::sample::Index>()) {
            prop_assume!(!names.is_empty());
            names.push(names[again.index(names.len())].clone());
            let SameName(first, second) = sorted(&names).expect_err("two are the same");
            prop_assert!(first < second);
            prop_assert_eq!(&names[first], &names[second]);
        }
    }
}
