//! The set of bytes that were written.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of bytes, as ranges that do not touch.
#[derive(Clone, Debug, Default)]
pub(super) struct Coverage {
    /// The end of each range, by its start.
    ends: BTreeMap<u64, u64>,
}

impl Coverage {
    /// Add `range`, which is not empty. False when some of it is there already; then nothing is added.
    pub(super) fn add(&mut self, range: &Range<u64>) -> bool {
        let before = self
            .ends
            .range(..=range.start)
            .next_back()
            .map(|(&begin, &end)| begin..end);
        let after = self
            .ends
            .range(range.start..)
            .next()
            .map(|(&begin, &end)| begin..end);
        if before.as_ref().is_some_and(|before| before.end > range.start)
            || after.as_ref().is_some_and(|after| after.start < range.end)
        {
            return false;
        }
        let mut whole = range.clone();
        if let Some(before) = before.filter(|before| before.end == range.start) {
            whole.start = before.start;
        }
        if let Some(after) = after.filter(|after| after.start == range.end) {
            self.ends.remove(&after.start);
            whole.end = after.end;
        }
        self.ends.insert(whole.start, whole.end);
        true
    }

    /// Remove `range`, which the set contains entirely.
    pub(super) fn remove(&mut self, range: &Range<u64>) {
        let Some((&begin, &end)) = self.ends.range(..=range.start).next_back() else {
            return;
        };
        self.ends.remove(&begin);
        if begin < range.start {
            self.ends.insert(begin, range.start);
        }
        if range.end < end {
            self.ends.insert(range.end, end);
        }
    }

    /// How many bytes of `range` are there.
    pub(super) fn within(&self, range: &Range<u64>) -> u64 {
        let first = self.ends.range(..range.start).next_back();
        first
            .into_iter()
            .chain(self.ends.range(range.clone()))
            .map(|(&begin, &end)| end.min(range.end).saturating_sub(begin.max(range.start)))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_the_set_of_bytes(
            steps in proptest::collection::vec((0..40_u64, 1..12_u64, any::<bool>()), 0..40),
            (begin, len) in (0..40_u64, 0..20_u64),
        ) {
            let mut coverage = Coverage::default();
            let mut naive = BTreeSet::new();
            for (begin, len, adds) in steps {
                let range = begin..begin + len;
                if adds {
                    let is_free = range.clone().all(|byte| !naive.contains(&byte));
                    prop_assert_eq!(coverage.add(&range), is_free);
                    if is_free {
                        naive.extend(range);
                    }
                } else if range.clone().all(|byte| naive.contains(&byte)) {
                    coverage.remove(&range);
                    naive.retain(|byte| !range.contains(byte));
                }
            }
            let range = begin..begin + len;
            prop_assert_eq!(coverage.within(&range), u64::try_from(naive.range(range).count()).unwrap());
        }
    }

    #[test]
    fn neighbours_become_one() {
        let mut coverage = Coverage::default();
        for range in [0..2, 4..6, 2..4] {
            assert!(coverage.add(&range));
        }
        assert_eq!(coverage.ends.len(), 1);
    }
}
