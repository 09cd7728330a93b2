//! Similarity index: finds among many pages one that resembles a given page.
//!
//! Finds pages that moved, and those of a program that runs again at other addresses. The features of a page
//! are the sixteen smallest hashes of the 16-byte windows at every eighth byte (min-hash: Broder, "On the
//! resemblance and containment of documents", 1997). The share of features that two pages have in common
//! estimates the share of windows. A wrong choice costs only compression.

use std::collections::HashMap;
use whimbrel_core::PAGE_SIZE;

const FEATURES: usize = 16;
/// Least number of common features for two pages to count as similar.
const MIN_COMMON_FEATURES: usize = 2;
/// Most pages remembered for one feature; a feature of many pages tells little.
const MAX_PER_FEATURE: usize = 8;
/// Least number of unchanged 8-byte words for a page to resemble its older version.
const MIN_UNCHANGED_WORDS: usize = 64;

/// Pages by their features.
#[derive(Debug, Default)]
pub struct SimilarityIndex {
    pages: HashMap<u64, Vec<u32>>,
}

impl SimilarityIndex {
    /// Adds `page` under `number`.
    pub fn add(&mut self, number: u32, page: &[u8; PAGE_SIZE]) {
        for feature in features(page) {
            let crowd = self.pages.entry(feature).or_default();
            if crowd.len() < MAX_PER_FEATURE {
                crowd.push(number);
            }
        }
    }

    /// The most similar page, if any is similar enough.
    pub fn closest(&self, page: &[u8; PAGE_SIZE]) -> Option<u32> {
        let mut found: Vec<u32> =
            features(page).iter().filter_map(|feature| self.pages.get(feature)).flatten().copied().collect();
        found.sort_unstable();
        let best = found.chunk_by(|a, b| a == b).max_by_key(|same| same.len())?;
        (best.len() >= MIN_COMMON_FEATURES).then(|| best[0])
    }
}

/// Whether enough words of `old` are unchanged in `new`.
pub fn resembles(new: &[u8; PAGE_SIZE], old: &[u8; PAGE_SIZE]) -> bool {
    let words = new.as_chunks::<8>().0.iter().zip(old.as_chunks::<8>().0);
    words.filter(|(new, old)| new == old && **new != [0; 8]).count() >= MIN_UNCHANGED_WORDS
}

fn features(page: &[u8; PAGE_SIZE]) -> Vec<u64> {
    let words = page.as_chunks::<8>().0;
    let pairs = words.iter().zip(&words[1..]);
    let hashes = pairs.filter(|(a, b)| **a != [0; 8] || **b != [0; 8]).map(|(a, b)| window_hash(*a, *b));
    let mut all: Vec<u64> = hashes.collect();
    if all.len() > FEATURES * 8 {
        // Sorting all of them would be most of the work, and the lowest quarter has more than enough.
        let low: Vec<u64> = all.iter().copied().filter(|hash| *hash < u64::MAX / 4).collect();
        all = if low.len() > FEATURES * 2 { low } else { all };
    }
    all.sort_unstable();
    all.dedup();
    all.truncate(FEATURES);
    all
}

/// Multiplicative hashing with the golden ratio (Knuth, 6.4), twice, so that the order of hashes does not
/// follow that of values.
fn window_hash(a: [u8; 8], b: [u8; 8]) -> u64 {
    const RATIO: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = u64::from_le_bytes(a).wrapping_mul(RATIO).rotate_left(31) ^ u64::from_le_bytes(b);
    let hash = mixed.wrapping_mul(RATIO);
    (hash ^ hash >> 32).wrapping_mul(RATIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64) -> [u8; PAGE_SIZE] {
        let mut state = seed;
        let mut page = [0; PAGE_SIZE];
        for byte in &mut page {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        page
    }

    #[test]
    fn a_page_that_moved_within_itself_is_found_and_a_stranger_is_not() {
        let mut similar = SimilarityIndex::default();
        (0..500).for_each(|seed| similar.add(seed, &noise(u64::from(seed))));
        let mut moved = noise(77);
        moved.copy_within(512.., 0);
        assert_eq!(similar.closest(&moved), Some(77));
        assert_eq!(similar.closest(&noise(10_000)), None);
        assert_eq!(similar.closest(&[0; PAGE_SIZE]), None);
    }

    #[test]
    fn a_page_resembles_its_older_version_as_long_as_words_stay() {
        let (old, mut new) = (noise(1), noise(2));
        assert!(!resembles(&new, &old));
        new[1000..1600].copy_from_slice(&old[1000..1600]);
        assert!(resembles(&new, &old));
        assert!(!resembles(&[0; PAGE_SIZE], &[0; PAGE_SIZE]), "zeros need no base");
    }
}
