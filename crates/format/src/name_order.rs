//! The order of many names.

use alloc::vec::Vec;
use core::ops::Range;

use crate::extent::{index, to_u32};

/// Two entries of one name, by their numbers; that of the lower one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SameName(pub(crate) usize, pub(crate) usize);

/// Bytes of a name that are compared at a time.
const KEY_NBYTES: usize = 8;

/// Groups that are compared name by name: cutting them up further costs more.
const SMALL: usize = 12;

/// One name, on its way to its place.
#[derive(Clone, Copy)]
struct Item {
    /// The next bytes of the name, the first one highest; zeros after its end.
    key: u64,
    /// How many of them are the name's.
    nbytes: u8,
    number: u32,
    /// Where the name lies among all: looked up once, since names far apart are what sorting waits for.
    begin: u32,
    end: u32,
}

impl Item {
    /// What is left of the name after its first `depth` bytes.
    #[inline]
    fn rest<'n>(&self, names: &'n [u8], depth: usize) -> &'n [u8] {
        &names[index(self.begin) + depth..index(self.end)]
    }
}

/// The numbers of names in the order of the names, byte by byte. They lie back to back in `names`, and end at `ends`.
///
/// Names of one model begin alike, and their order in a file is seldom this one. So they are not compared as wholes:
/// those that agree so far are sorted by their next eight bytes, as numbers. Every byte is looked at once, and names
/// chosen to collide cost nothing extra, as they would in a hash table.
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
                    // They end here, all of them.
                    refuse_same(same, |_, _| true)?;
                }
                groups.push((begin..end, depth + KEY_NBYTES));
            }
            begin = end;
        }
    }
    Ok(items.into_iter().map(|item| item.number).collect())
}

/// The first bytes of `rest`, and how many there are.
#[inline]
fn key(rest: &[u8]) -> (u64, u8) {
    match rest.first_chunk::<KEY_NBYTES>() {
        Some(bytes) => (u64::from_be_bytes(*bytes), 8),
        None => {
            let mut bytes = [0; KEY_NBYTES];
            bytes[..rest.len()].copy_from_slice(rest);
            // Fewer than eight.
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

    /// Names that begin alike, end within each other, and hold zeros, which is what short keys are filled with.
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
