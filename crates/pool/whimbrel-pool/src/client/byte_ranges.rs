//! Byte ranges of a file as a set. Pure.

use std::{collections::BTreeMap, ops::Range};

/// A set of ranges that neither touch nor overlap, as start and end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ByteRanges(BTreeMap<u64, u64>);

impl ByteRanges {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        let touching: Vec<u64> =
            self.0.range(..=end).filter(|(_, e)| **e >= start).map(|(s, _)| *s).collect();
        for old in touching {
            if let Some(old_end) = self.0.remove(&old) {
                (start, end) = (start.min(old), end.max(old_end));
            }
        }
        self.0.insert(start, end);
    }

    /// Removes everything from `at` on.
    pub(crate) fn cut(&mut self, at: u64) {
        self.0.split_off(&at);
        if let Some(mut last) = self.0.last_entry()
            && *last.get() > at
        {
            *last.get_mut() = at;
        }
    }

    pub(crate) fn within(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let found =
            self.0.range(..range.end).map(|(start, end)| (*start).max(range.start)..(*end).min(range.end));
        found.filter(|part| !part.is_empty()).collect()
    }

    #[cfg(test)]
    fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().map(|(start, end)| *start..*end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_bytes(
            steps in prop::collection::vec((0..60_u64, 0..20_u64, any::<bool>()), 0..40), from in 0..60_u64, len in 0..30_u64,
        ) {
            let (mut ranges, mut model) = (ByteRanges::default(), std::collections::BTreeSet::new());
            for (start, len, cut) in steps {
                if cut && len > 15 {
                    ranges.cut(start);
                    model.retain(|byte| *byte < start);
                } else {
                    ranges.add(start..start + len);
                    model.extend(start..start + len);
                }
            }
            let found: Vec<u64> = ranges.within(from..from + len).into_iter().flatten().collect();
            let expected: Vec<u64> = model.range(from..from + len).copied().collect();
            prop_assert_eq!(found, expected);
            let all: Vec<_> = ranges.iter().collect();
            prop_assert!(all.windows(2).all(|two| two[0].end < two[1].start));
        }
    }
}
