//! Scan sequence: the order in which the clusters of pages of a round are visited.
//!
//! Arrays are visited from the last to the first. Memory is the first: the guest writes to it much faster
//! than to its disks, and what is copied at the end of a round has had the least time to be written again.
//!
//! Pages are dirtied in clusters, so a scan in order finds many neighbours clean and then many dirty; a
//! pseudo-random order within each array spreads that over the round (Clark et al., NSDI 2005, section 5.4).
//! The order depends on the round's number alone, so a failing test fails again.

use whimbrel_core::PageSet;

/// Neighbouring pages of one array that are visited together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cluster {
    pub(crate) array: usize,
    pub(crate) start: u64,
    /// End of the cluster, exclusive.
    pub(crate) end: u64,
}

/// Clusters of `size` pages in which `sets` have pages, the last array first, each in ascending order.
pub(crate) fn ascending(sets: &[PageSet], size: u64) -> Vec<Cluster> {
    let mut clusters: Vec<Cluster> = Vec::new();
    for (array, set) in sets.iter().enumerate().rev() {
        for run in set.runs() {
            let first = run.start / size;
            let known = clusters.last().is_some_and(|last| last.array == array && last.start == first * size);
            let more = (first + u64::from(known))..run.end().div_ceil(size);
            clusters.extend(more.map(|index| Cluster {
                array,
                start: index * size,
                end: set.len().min((index + 1) * size),
            }));
        }
    }
    clusters
}

/// Shuffles the clusters of each array (Fisher and Yates) with a generator seeded with `round` (splitmix64:
/// Steele et al., OOPSLA 2014).
pub(crate) fn shuffle(clusters: &mut [Cluster], round: u32) {
    let mut state = u64::from(round);
    let arrays = clusters.chunk_by_mut(|one, next| one.array == next.array);
    arrays.for_each(|clusters| shuffle_array(clusters, &mut state));
}

fn shuffle_array(clusters: &mut [Cluster], state: &mut u64) {
    for last in (1..clusters.len()).rev() {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        clusters.swap(last, ((mixed ^ (mixed >> 31)) % (last as u64 + 1)) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_page_lies_in_exactly_one_cluster_in_any_order(
            pages in prop::collection::vec(any::<bool>(), 1..2000), size in 1..300u64, round: u32,
        ) {
            let mut set = PageSet::empty(pages.len() as u64);
            for (page, _) in pages.iter().enumerate().filter(|(_, is)| **is) { set.insert(page as u64); }
            let sets = [set.clone(), PageSet::empty(7), set];
            let sorted = ascending(&sets, size);
            let mut shuffled = sorted.clone();
            shuffle(&mut shuffled, round);
            for clusters in [&sorted, &shuffled] {
                prop_assert!(clusters.is_sorted_by_key(|cluster| std::cmp::Reverse(cluster.array)));
                for (array, set) in sets.iter().enumerate() {
                    let mut seen = PageSet::empty(set.len());
                    for cluster in clusters.iter().filter(|cluster| cluster.array == array) {
                        prop_assert!((cluster.start..cluster.end).any(|page| set.contains(page)), "an empty cluster");
                        for page in cluster.start..cluster.end {
                            prop_assert!(seen.insert(page), "page {page} twice");
                        }
                    }
                    prop_assert!(set.iter().all(|page| seen.contains(page)));
                }
            }
            shuffled.sort_by_key(|cluster| (std::cmp::Reverse(cluster.array), cluster.start));
            prop_assert_eq!(shuffled, sorted);
        }
    }

    #[test]
    fn rounds_are_visited_in_different_orders() {
        let clusters = ascending(&[PageSet::full(256 * 100)], 256);
        let mut orders = [clusters.clone(), clusters.clone(), clusters];
        (1..).zip(&mut orders[1..]).for_each(|(round, order)| shuffle(order, round));
        assert!(orders[0] != orders[1] && orders[1] != orders[2]);
    }
}
