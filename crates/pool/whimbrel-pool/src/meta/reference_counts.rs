//! How many users a chunk has, counted by what changes from version to version. Pure.
//!
//! Versions that were written one over the other stand in a chain. A chunk counts once for each stretch of a
//! chain of which every version has it, and not once a version: a new version counts what it has and the one
//! before has not, and of the rest of a large file that hardly changed no row is touched. A version that
//! leaves a chain ends the stretches that were of it alone; where it was a gap in one, the two parts become
//! one. So a chunk counts nothing exactly when no version has it.

use crate::{chunk_map::ChunkRef, protocol::ChunkId};

/// The chunks of a map in order, each once.
pub(crate) fn numbers(pieces: &[ChunkRef]) -> Vec<ChunkId> {
    let mut numbers: Vec<ChunkId> = pieces.iter().map(|piece| piece.chunk).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// Those of `these` that are in `those` (`kept`), or that are not. Both are in order.
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

/// What is in `these` and not in `those`.
pub(crate) fn without(these: &[ChunkId], those: &[ChunkId]) -> Vec<ChunkId> {
    part(these, those, false)
}

/// What is in both.
pub(crate) fn both(these: &[ChunkId], those: &[ChunkId]) -> Vec<ChunkId> {
    part(these, those, true)
}

/// The chunks that count one less when a version leaves from between two others, either of which may be none.
pub(crate) fn counted_less(before: &[ChunkId], leaving: &[ChunkId], after: &[ChunkId]) -> Vec<ChunkId> {
    let mut out = without(&without(leaving, before), after);
    out.extend(without(&both(before, after), leaving));
    out.sort_unstable();
    out
}

/// Runs of numbers in order: `first..=last`.
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
        /// Versions come at the end of a chain and leave from anywhere.
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
        let pieces = [5, 6, 7, 6, 1, 9].map(|chunk| ChunkRef { chunk, length: 1, sealed: false });
        assert_eq!(runs(&numbers(&pieces)), [(1, 1), (5, 7), (9, 9)]);
    }
}
