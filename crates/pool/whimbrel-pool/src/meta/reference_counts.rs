//! Reference counts of chunks, updated only by the differences between versions. Pure.
//!
//! Versions that were written one over the other form a chain. A chunk counts once for each run of
//! consecutive versions in a chain that all have it, not once for each version. So a new version counts only
//! the chunks that the previous one lacks, and the rows of unchanged chunks of a large file are not touched.
//! Removing a version ends the runs of that version alone and joins runs that it separated. A chunk's count
//! is zero exactly if no version has it.

use crate::{chunk_map::ChunkRef, protocol::ChunkId};

/// The distinct chunks of a map, in order.
pub(crate) fn numbers(pieces: &[ChunkRef]) -> Vec<ChunkId> {
    let mut numbers: Vec<ChunkId> = pieces.iter().map(|piece| piece.chunk).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// The items of `these` that are in `those` (`kept`) or not in it. Both are sorted.
fn part(these: &[ChunkId], those: &[ChunkId], kept: bool) -> Vec<ChunkId> {
    let (mut out, mut rest) = (Vec::new(), those);
    for number in these {
        while rest.first().is_some_and(|first| first < number) {
            rest = &rest[1..];
        }
        if (rest.first() == Some(number)) == kept {
            out.push(*number);
        }
    }
    out
}

pub(crate) fn without(these: &[ChunkId], those: &[ChunkId]) -> Vec<ChunkId> {
    part(these, those, false)
}

pub(crate) fn both(these: &[ChunkId], those: &[ChunkId]) -> Vec<ChunkId> {
    part(these, those, true)
}

/// The chunks whose count decreases when a version is removed between two others, if there are any.
pub(crate) fn counted_less(before: &[ChunkId], leaving: &[ChunkId], after: &[ChunkId]) -> Vec<ChunkId> {
    let mut out = without(&without(leaving, before), after);
    out.extend(without(&both(before, after), leaving));
    out.sort_unstable();
    out
}

/// Runs `first..=last` of sorted numbers.
pub(crate) fn runs(numbers: &[ChunkId]) -> Vec<(ChunkId, ChunkId)> {
    let mut out: Vec<(ChunkId, ChunkId)> = Vec::new();
    for number in numbers {
        match out.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => out.push((*number, *number)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    proptest! {
        /// Versions are added at the end of a chain and removed anywhere.
        #[test]
        fn a_chunk_counts_nothing_exactly_when_no_version_has_it(
            steps in prop::collection::vec((prop::collection::btree_set(0..12_u64, 0..9), any::<u8>()), 1..60),
        ) {
            let (mut chain, mut counts): (Vec<Vec<u64>>, BTreeMap<u64, i64>) = Default::default();
            for (content, luck) in steps {
                if luck % 3 == 0 && !chain.is_empty() {
                    let at = usize::from(luck) % chain.len();
                    let leaving = chain.remove(at);
                    let neighbour = |at: Option<usize>| at.and_then(|at| chain.get(at)).cloned().unwrap_or_default();
                    let less = counted_less(&neighbour(at.checked_sub(1)), &leaving, &neighbour(Some(at)));
                    less.iter().for_each(|chunk| *counts.entry(*chunk).or_default() -= 1);
                } else {
                    let new: Vec<u64> = content.into_iter().collect();
                    let fresh = without(&new, chain.last().map_or(&[], |last| last));
                    fresh.iter().for_each(|chunk| *counts.entry(*chunk).or_default() += 1);
                    chain.push(new);
                }
                let used: BTreeSet<u64> = chain.iter().flatten().copied().collect();
                for chunk in 0..12 {
                    let mut stretches = 0;
                    let mut inside = false;
                    for version in &chain {
                        let has = version.contains(&chunk);
                        stretches += i64::from(has && !inside);
                        inside = has;
                    }
                    let count = counts.get(&chunk).copied().unwrap_or(0);
                    prop_assert_eq!(count, stretches);
                    prop_assert_eq!(count > 0, used.contains(&chunk));
                }
            }
        }
    }

    #[test]
    fn runs_name_every_chunk_once() {
        let pieces =
            [5, 6, 7, 6, 1, 9].map(|chunk| ChunkRef { chunk, length: 1, encrypted: false, digest: None });
        assert_eq!(runs(&numbers(&pieces)), [(1, 1), (5, 7), (9, 9)]);
    }
}
