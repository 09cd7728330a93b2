//! Boot files: pages of memory that are also in a file which the machine boots from. Both hosts have the
//! files, so such a page is sent as an offset in one.
//!
//! A boot loader puts a compressed kernel into low memory, which is seldom overwritten, and the unpacked
//! initial RAM disk stays unchanged in the page cache. Neither is aligned to the pages of the file, so the
//! files are indexed by the hashes of windows, one every 256 bytes, and a page is looked up at that many
//! offsets. A match is compared in full: an equal hash by chance costs only time.
//!
//! A file that cannot be read is ignored. Memory: 18 to 36 bytes a window, 5 MiB at most.

use crate::source::BoxError;
use serde::{Deserialize, Serialize};
use std::os::unix::fs::FileExt;
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};

/// Distance of the indexed windows of a file.
const STRIDE: usize = 256;
const WINDOW: usize = 16;
/// Bytes of all files that are indexed; the rest is ignored.
const FILES_MAX: u64 = 64 << 20;
/// Bytes read at once. A multiple of the stride.
const READ_BYTES: usize = 1 << 20;
/// Most offsets that are compared with one page.
const COMPARED_MAX: usize = 4;
/// Pages that are looked up without success before only one in [`STRIDE_OF_MISSES`] is: pages of a file come
/// in runs, and a lookup takes as long as a page takes over 30 Gbit/s.
const MISSES: usize = 16;
const STRIDE_OF_MISSES: usize = 4;
/// Most table entries examined for a window: a crowded table loses a few windows.
const PROBES_MAX: usize = 16;

/// File that a machine boots from, on this host.
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
        out.copy_from_slice(from.ok_or("the file is too short")?);
        Ok(())
    }
}

/// Consecutive pages that are in a boot file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRun {
    /// Index of the file in the offer's boot files.
    pub file: u8,
    /// Offset of the first page in the file.
    pub offset: u64,
    /// Pages of memory.
    pub pages: PageRun,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileOffset {
    file: u8,
    offset: u64,
}

impl FileOffset {
    pub(crate) fn next(self) -> Self {
        Self { offset: self.offset + PAGE_SIZE as u64, ..self }
    }
}

/// Appends a page to `runs`, joining it to the last run if it follows that in memory and in the file.
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

struct IndexedFile {
    file: u8,
    len: u64,
    /// Number of the file's first window among all.
    first: u32,
    content: Box<dyn BootFile>,
}

/// Table entry: more bits of a window's hash, and its number from 1 on; 0 if the entry is empty.
#[derive(Clone, Copy, Default)]
struct Entry {
    tag: u32,
    window: u32,
}

/// Boot files of a machine, indexed.
#[derive(Default)]
pub(crate) struct BootFiles {
    files: Vec<IndexedFile>,
    table: Vec<Entry>,
    /// Bloom filter of the hashes in the table, 16 bits for each window: most lookups end here.
    seen: Vec<u64>,
}

impl BootFiles {
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
                files.index_file(&*content, known, first)?;
                files.files.push(IndexedFile { file, len: *len, first, content });
                Ok(())
            });
            if let Err(error) = looked {
                tracing::debug!(%digest, error = &*error, "a boot file is not searched for pages");
            }
            left -= known;
            first += known.div_ceil(STRIDE as u64) as u32;
        }
        files
    }

    fn index_file(&mut self, content: &dyn BootFile, known: u64, first: u32) -> Result<(), BoxError> {
        let mut piece = vec![0; READ_BYTES.min(known as usize)];
        let mut offset = 0;
        while offset < known {
            let len = (known - offset).min(READ_BYTES as u64) as usize;
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
            // The first of several equal windows stays.
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

    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Finds pages, given with their numbers, in their order. Runs of fewer than four pages may be missed
    /// where most are in no file.
    pub(crate) fn find_all(&self, pages: &[(u64, &[u8])]) -> Vec<(usize, FileOffset)> {
        let (mut found, mut misses, mut likely) = (Vec::new(), 0, None);
        let mut at = 0;
        while let Some((_, content)) = pages.get(at) {
            let Some(place) = self.find(content, likely.take()) else {
                misses += 1;
                at += if misses > MISSES { STRIDE_OF_MISSES } else { 1 };
                continue;
            };
            let skipped = if misses > MISSES { STRIDE_OF_MISSES - 1 } else { 0 };
            let mut before: Vec<_> = (at.saturating_sub(skipped)..at)
                .rev()
                .map_while(|at| Some((at, self.find(pages[at].1, None)?)))
                .collect();
            before.reverse();
            found.append(&mut before);
            found.push((at, place));
            (misses, likely) = (0, Some(place.next()));
            at += 1;
        }
        found
    }

    /// Finds the file and offset of a page; `likely` is tried first.
    fn find(&self, page: &[u8], likely: Option<FileOffset>) -> Option<FileOffset> {
        let mut buffer = [0; PAGE_SIZE];
        if let Some(place) = likely.filter(|place| self.is_at(*place, page, &mut buffer)) {
            return Some(place);
        }
        let mut compared = 0;
        for phase in 0..STRIDE {
            let hash = page[phase..].first_chunk().and_then(hash);
            let Some(place) = hash
                .and_then(|hash| self.look_up(hash))
                .and_then(|window| self.offset_of_page(window, phase))
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

    /// Offset of the page of which this window is at byte `phase`.
    fn offset_of_page(&self, window: u32, phase: usize) -> Option<FileOffset> {
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

/// Hash of a window. None for a window of one repeated byte, which identifies no place.
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
    fn runs_are_found_whole_between_pages_that_are_in_no_file() {
        let (file, other) = (noise(40 * PAGE_SIZE, 3), noise(400 * PAGE_SIZE, 9));
        let known = index(std::slice::from_ref(&file));
        for start in 90..99 {
            let mut memory = other.clone();
            memory[start * PAGE_SIZE..][..40 * PAGE_SIZE].copy_from_slice(&file);
            let pages: Vec<_> = (0..).zip(memory.chunks_exact(PAGE_SIZE)).collect();
            let found: Vec<_> =
                known.find_all(&pages).into_iter().map(|(at, place)| (at, place.offset)).collect();
            let expected: Vec<_> = (0..40).map(|page| (start + page, (page * PAGE_SIZE) as u64)).collect();
            assert_eq!(found, expected);
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
