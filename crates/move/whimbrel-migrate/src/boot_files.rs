//! Pages of memory that lie in a file which the machine boots from: both hosts have those files, so such a
//! page travels as a place in one.
//!
//! A boot loader puts a compressed kernel into low memory, where hardly anybody writes afterwards, and what
//! is unpacked of an initial RAM disk stays in the page cache as it was. Neither begins in memory where a
//! page begins in the file, so windows of the files are known by their hash, one each 256 bytes, and those of
//! a page are looked up at as many places. What is found is compared whole: a hash that is the same by chance
//! costs time and nothing else.
//!
//! A file that cannot be read is as if it were not there. Memory: 18 to 36 bytes a window, 5 MiB at most.

use crate::source::BoxError;
use serde::{Deserialize, Serialize};
use std::os::unix::fs::FileExt;
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};

/// Bytes from one known window of a file to the next.
const STRIDE: usize = 256;
/// Bytes of a window.
const WINDOW: usize = 16;
/// Bytes of files that are looked into; what lies behind is not known.
const FILES_MAX: u64 = 64 << 20;
/// Read at once. A multiple of the stride.
const PIECE: usize = 1 << 20;
/// Places that are compared with a page, at most.
const COMPARED_MAX: usize = 4;
/// Entries that are looked at for a window, at most: a crowded table gives up a few windows.
const PROBES_MAX: usize = 16;

/// A file that a machine boots from, as it lies here.
pub trait BootFile: Send + Sync {
    /// Fills `out` from `offset` on.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BoxError>;
}

impl BootFile for std::fs::File {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BoxError> {
        Ok(self.read_exact_at(out, offset)?)
    }
}

impl BootFile for Vec<u8> {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BoxError> {
        let from = self.get(usize::try_from(offset)?..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(from.ok_or("the file ends before")?);
        Ok(())
    }
}

/// Pages that are in a boot file, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRun {
    /// Which, as an index into the offer's blobs.
    pub file: u8,
    /// Where the first page begins in it.
    pub offset: u64,
    /// The pages of memory.
    pub pages: PageRun,
}

/// A place in a file where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileOffset {
    file: u8,
    offset: u64,
}

impl FileOffset {
    /// The one behind the page.
    pub(crate) fn next(self) -> Self {
        Self { offset: self.offset + PAGE_SIZE as u64, ..self }
    }
}

/// Adds a page to the end of `runs`, joining it to the last run where it follows in memory and in the file.
pub(crate) fn push(runs: &mut Vec<FileRun>, page: u64, place: FileOffset) {
    match runs.last_mut() {
        Some(last)
            if last.pages.end() == page
                && (last.file, last.offset + last.pages.bytes() as u64) == (place.file, place.offset) =>
        {
            last.pages.len += 1;
        }
        _ => runs.push(FileRun { file: place.file, offset: place.offset, pages: PageRun::new(page, 1) }),
    }
}

struct Known {
    file: u8,
    len: u64,
    /// The number of its first window among all.
    first: u32,
    content: Box<dyn BootFile>,
}

/// An entry of the table: more bits of a window's hash, and its number from 1 on; 0 where there is none.
#[derive(Clone, Copy, Default)]
struct Entry {
    tag: u32,
    window: u32,
}

/// The files of a machine.
#[derive(Default)]
pub(crate) struct BootFiles {
    files: Vec<Known>,
    table: Vec<Entry>,
    /// Bits of hashes that are in the table, 16 for each window: most lookups end here.
    seen: Vec<u64>,
}

impl BootFiles {
    /// Looks through the files of these digests and lengths.
    pub(crate) fn index(
        blobs: &[(Digest, u64)],
        open: &dyn Fn(Digest) -> Result<Box<dyn BootFile>, BoxError>,
    ) -> Self {
        let known = blobs.iter().map(|(_, len)| (*len).min(FILES_MAX)).sum::<u64>().min(FILES_MAX);
        let windows = (known as usize / STRIDE).max(32).next_power_of_two();
        let mut files = Self {
            files: Vec::new(),
            table: vec![Entry::default(); 2 * windows],
            seen: vec![0; windows / 4],
        };
        let (mut first, mut left) = (0, FILES_MAX);
        for (file, (digest, len)) in (0..).zip(blobs) {
            let known = (*len).min(left);
            let looked = open(*digest).and_then(|content| {
                files.look_through(&*content, known, first)?;
                files.files.push(Known { file, len: *len, first, content });
                Ok(())
            });
            if let Err(error) = looked {
                tracing::debug!(%digest, error = &*error, "pages are not looked for in a boot file");
            }
            left -= known;
            first += known.div_ceil(STRIDE as u64) as u32;
        }
        files
    }

    /// Enters the windows of a file up to `known`.
    fn look_through(&mut self, content: &dyn BootFile, known: u64, first: u32) -> Result<(), BoxError> {
        let mut piece = vec![0; PIECE.min(known as usize)];
        let mut offset = 0;
        while offset < known {
            let len = (known - offset).min(PIECE as u64) as usize;
            let piece = &mut piece[..len];
            content.read_at(offset, piece)?;
            let number = first + (offset / STRIDE as u64) as u32;
            for (number, window) in (number..).zip(piece.chunks(STRIDE)) {
                if let Some(hash) = window.first_chunk().and_then(hash) {
                    self.insert(hash, number + 1);
                }
            }
            offset += len as u64;
        }
        Ok(())
    }

    fn insert(&mut self, hash: u64, window: u32) {
        let (at, tag) = self.slot(hash);
        let mask = self.table.len() - 1;
        for probe in 0..PROBES_MAX {
            let entry = &mut self.table[(at + probe) & mask];
            if entry.window == 0 {
                *entry = Entry { tag, window };
                break;
            }
            // The first of those that are the same.
            if entry.tag == tag {
                break;
            }
        }
        let bit = self.bit(hash);
        self.seen[bit / 64] |= 1 << (bit % 64);
    }

    fn slot(&self, hash: u64) -> (usize, u32) {
        ((hash >> 32) as usize & (self.table.len() - 1), hash as u32)
    }

    fn bit(&self, hash: u64) -> usize {
        hash as usize & (self.seen.len() * 64 - 1)
    }

    /// Whether there is nothing to be found.
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Where a page is; `likely` is looked at first.
    pub(crate) fn find(&self, page: &[u8], likely: Option<FileOffset>) -> Option<FileOffset> {
        let mut buffer = [0; PAGE_SIZE];
        if let Some(place) = likely.filter(|place| self.is_at(*place, page, &mut buffer)) {
            return Some(place);
        }
        let mut compared = 0;
        for phase in 0..STRIDE {
            let hash = page[phase..].first_chunk().and_then(hash);
            let Some(place) =
                hash.and_then(|hash| self.look_up(hash)).and_then(|window| self.place(window, phase))
            else {
                continue;
            };
            if self.is_at(place, page, &mut buffer) {
                return Some(place);
            }
            compared += 1;
            if compared == COMPARED_MAX {
                break;
            }
        }
        None
    }

    fn look_up(&self, hash: u64) -> Option<u32> {
        let bit = self.bit(hash);
        if self.seen[bit / 64] >> (bit % 64) & 1 == 0 {
            return None;
        }
        let (at, tag) = self.slot(hash);
        let mask = self.table.len() - 1;
        let entries = (0..PROBES_MAX).map(|probe| self.table[(at + probe) & mask]);
        let mut entries = entries.take_while(|entry| entry.window != 0);
        entries.find(|entry| entry.tag == tag).map(|entry| entry.window - 1)
    }

    /// Where a page begins of which this window is `phase` bytes from the beginning.
    fn place(&self, window: u32, phase: usize) -> Option<FileOffset> {
        let known = self.files.iter().rev().find(|known| known.first <= window)?;
        let offset = u64::from(window - known.first) * STRIDE as u64;
        Some(FileOffset { file: known.file, offset: offset.checked_sub(phase as u64)? })
    }

    fn is_at(&self, place: FileOffset, page: &[u8], buffer: &mut [u8; PAGE_SIZE]) -> bool {
        let known = self.files.iter().find(|known| known.file == place.file);
        known.is_some_and(|known| {
            let fits = place.offset.checked_add(PAGE_SIZE as u64).is_some_and(|end| end <= known.len);
            fits && known.content.read_at(place.offset, buffer).is_ok() && buffer == page
        })
    }
}

/// Of a window. None of one that says nothing of where it is: the same byte over and over.
fn hash(window: &[u8; WINDOW]) -> Option<u64> {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| window[at + byte]));
    let (low, high) = (word(0), word(8));
    if low == high && low == low.rotate_left(8) {
        return None;
    }
    // Both multipliers from SplitMix64 (Steele et al., OOPSLA 2014), as a mixer of two words.
    let mixed = (low ^ high.rotate_left(29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(high);
    Some((mixed ^ mixed >> 31).wrapping_mul(0x94d0_49bb_1331_11eb))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn noise(len: usize, seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let byte = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..len).map(byte).collect()
    }

    fn index(files: &[Vec<u8>]) -> BootFiles {
        let blobs: Vec<_> = files.iter().map(|file| (Digest::of(file), file.len() as u64)).collect();
        BootFiles::index(&blobs, &|digest| {
            let file = files.iter().find(|file| Digest::of(file) == digest).ok_or("no such file")?;
            Ok(Box::new(file.clone()))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn a_page_of_a_file_is_found_wherever_it_begins_and_no_other(
            lens in prop::collection::vec(0..40_000usize, 1..3), which in any::<prop::sample::Index>(),
            at in any::<prop::sample::Index>(), touched in 0..PAGE_SIZE, seed: u64,
        ) {
            let files: Vec<_> = (0..).zip(&lens).map(|(file, len)| noise(*len, seed.wrapping_add(2 * file))).collect();
            let known = index(&files);
            let file = &files[which.index(files.len())];
            prop_assume!(file.len() >= PAGE_SIZE);
            let offset = at.index(file.len() - PAGE_SIZE + 1);
            let mut page = file[offset..][..PAGE_SIZE].to_vec();
            let place = known.find(&page, None).unwrap();
            prop_assert_eq!(&files[usize::from(place.file)][place.offset as usize..][..PAGE_SIZE], &page[..]);
            page[touched] ^= 1;
            prop_assert_eq!(known.find(&page, Some(place)), None, "a page that differs in a bit");
        }
    }

    #[test]
    fn neighbours_join_only_where_they_follow_in_both() {
        let place = |file, offset| FileOffset { file, offset };
        let mut runs = Vec::new();
        let (first, page) = (place(1, 700), PAGE_SIZE as u64);
        push(&mut runs, 5, first);
        push(&mut runs, 6, first.next());
        push(&mut runs, 8, first.next().next());
        push(&mut runs, 9, place(0, 700 + 3 * page));
        push(&mut runs, 10, place(0, 1));
        let runs: Vec<_> =
            runs.iter().map(|run| (run.file, run.offset, run.pages.start, run.pages.len)).collect();
        let expected = [(1, 700, 5, 2), (1, 700 + 2 * page, 8, 1), (0, 700 + 3 * page, 9, 1), (0, 1, 10, 1)];
        assert_eq!(runs, expected);
    }

    #[test]
    fn files_that_say_nothing_or_are_not_there_find_nothing() {
        assert!(BootFiles::default().is_empty());
        let same = index(&[vec![7; 9000]]);
        assert_eq!(same.find(&[7; PAGE_SIZE], None), None, "any place would do, and none is known");
        let gone = BootFiles::index(&[(Digest::of(b"gone"), 5000)], &|_| Err("gone".into()));
        assert!(gone.is_empty());
        assert_eq!(gone.find(&noise(PAGE_SIZE, 1), None), None);
        let short = BootFiles::index(&[(Digest::of(b"short"), 5000)], &|_| Ok(Box::new(noise(4999, 1))));
        assert!(short.is_empty(), "a file that ends before its length");
    }
}
