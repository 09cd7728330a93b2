//! Prefetch list: the pages of a capsule that its machine touched in the first seconds after a resume.
//!
//! A blob that the manifest names. Layout, integers as LEB128: version (1), number of images; for each image
//! the length of its name, the name, its pages and its number of runs; for each run the gap since the end of
//! the last one and its length. Gaps between runs and lengths are at least 1. The list is advice: a wrong one
//! costs time and nothing else.

use std::collections::BTreeMap;
use whimbrel_core::{PageRun, PageSet, varint};

const VERSION: u8 = 1;
const IMAGES_MAX: u64 = 64;
/// Most bytes of an image's name.
const NAME_MAX: u64 = 64;
const RUNS_MAX: u64 = 1 << 20;
/// Most pages of all images together: bitmaps of 32 MiB.
const PAGES_MAX: u64 = 1 << 28;

/// Pages to fetch first, by the name of their image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefetchList(pub BTreeMap<String, PageSet>);

/// The bytes are no prefetch list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the prefetch list has an invalid {field}")]
pub struct PrefetchListError {
    /// Part of the list that is invalid.
    pub field: &'static str,
}

impl PrefetchList {
    /// Encodes the list as a blob.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        varint::put(&mut out, self.0.len() as u64);
        for (name, pages) in &self.0 {
            varint::put(&mut out, name.len() as u64);
            out.extend(name.as_bytes());
            varint::put(&mut out, pages.len());
            varint::put(&mut out, pages.runs().count() as u64);
            let mut at = 0;
            for run in pages.runs() {
                varint::put(&mut out, run.start - at);
                varint::put(&mut out, run.len);
                at = run.end();
            }
        }
        out
    }

    /// Decodes a blob and checks it.
    pub fn decode(bytes: &[u8]) -> Result<Self, PrefetchListError> {
        let (version, mut bytes) = bytes.split_first().ok_or(PrefetchListError { field: "version" })?;
        if *version != VERSION {
            return Err(PrefetchListError { field: "version" });
        }
        let (mut sets, mut room) = (BTreeMap::new(), PAGES_MAX);
        for _ in 0..take(&mut bytes, "number of images", IMAGES_MAX)? {
            let len = take(&mut bytes, "name", NAME_MAX)? as usize;
            let (name, rest) = bytes.split_at_checked(len).ok_or(PrefetchListError { field: "name" })?;
            bytes = rest;
            let name = std::str::from_utf8(name).map_err(|_| PrefetchListError { field: "name" })?;
            let pages = take(&mut bytes, "number of pages", room)?;
            room -= pages;
            sets.insert(name.to_owned(), pages_of(&mut bytes, pages)?);
        }
        if bytes.is_empty() { Ok(Self(sets)) } else { Err(PrefetchListError { field: "end" }) }
    }

    /// Pages of an image, if the list has them and the image has the same length.
    pub fn of(&self, image: &str, pages: u64) -> Option<&PageSet> {
        self.0.get(image).filter(|set| set.len() == pages)
    }
}

fn pages_of(bytes: &mut &[u8], pages: u64) -> Result<PageSet, PrefetchListError> {
    let runs = take(bytes, "number of runs", RUNS_MAX)?;
    // A run takes two bytes or more, so the length of the blob bounds the work.
    if runs.saturating_mul(2) > bytes.len() as u64 {
        return Err(PrefetchListError { field: "number of runs" });
    }
    let (mut set, mut at) = (PageSet::empty(pages), 0);
    for run in 0..runs {
        let gap = take(bytes, "gap", pages - at)?;
        let len = take(bytes, "run", pages - at - gap)?;
        if len == 0 || (gap == 0 && run > 0) {
            return Err(PrefetchListError { field: "run" });
        }
        set.insert_run(PageRun::new(at + gap, len));
        at += gap + len;
    }
    Ok(set)
}

fn take(bytes: &mut &[u8], field: &'static str, max: u64) -> Result<u64, PrefetchListError> {
    varint::take(bytes).ok().filter(|number| *number <= max).ok_or(PrefetchListError { field })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read_and_cut_or_changed_bytes_never_panic(
            pages in 1..3000u64, picks in prop::collection::vec(any::<u16>(), 0..200), cut in any::<u16>(), flip in any::<u16>()
        ) {
            let mut set = PageSet::empty(pages);
            picks.iter().for_each(|pick| { set.insert(u64::from(*pick) % pages); });
            let sets = PrefetchList([("memory".to_owned(), set.clone()), ("disk0".to_owned(), PageSet::empty(7))].into());
            let bytes = sets.encode();
            prop_assert_eq!(&PrefetchList::decode(&bytes), &Ok(sets));
            prop_assert!(PrefetchList::decode(&bytes[..usize::from(cut) % bytes.len()]).is_err());
            let mut changed = bytes.clone();
            let at = usize::from(flip) % changed.len();
            changed[at] ^= 1 << (flip % 8);
            if let Ok(read) = PrefetchList::decode(&changed) {
                prop_assert_eq!(PrefetchList::decode(&read.encode()), Ok(read));
            }
        }
    }

    #[test]
    fn a_thousand_scattered_pages_take_a_few_kilobytes() {
        let mut set = PageSet::empty(131_072);
        (0..1000).for_each(|n| {
            set.insert(n * 7919 % 131_072);
        });
        let bytes = PrefetchList([("memory".to_owned(), set)].into()).encode();
        assert!(bytes.len() < 3200, "{}", bytes.len());
    }
}
