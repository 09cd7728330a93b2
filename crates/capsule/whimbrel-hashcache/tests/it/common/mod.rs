//! Images of distinguishable pages, and a cache over them.

// Every test program uses a part of it.
#![allow(dead_code)]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_hashcache::{Added, CacheError, Geometry, HashCache, OnMissing, Progress, SourceKind};

pub(crate) fn onward(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Page with this number; number zero is the zero page.
pub(crate) fn page(number: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    let mut state = number;
    for word in page.chunks_exact_mut(8).take(if number == 0 { 0 } else { PAGE_SIZE }) {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(number | 1);
        word.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
    }
    page
}

pub(crate) fn image(numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
    numbers.into_iter().flat_map(page).collect()
}

pub(crate) struct Fixture {
    pub(crate) folder: TempDir,
    pub(crate) cache: HashCache,
}

impl Fixture {
    pub(crate) fn new(pages: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let geometry = Geometry::for_pages(pages);
        let path = folder.path().join("table");
        let cache = HashCache::open_seeded(&path, OnMissing::Create(geometry), 7).unwrap();
        Self { folder, cache }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, numbers: impl IntoIterator<Item = u64>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, image(numbers)).unwrap();
        path
    }

    pub(crate) fn add(&self, path: &Path) -> Result<Added, CacheError> {
        self.cache.add(path, SourceKind::Raw, None, &onward)
    }

    pub(crate) fn entries(&self, path: &Path) -> u64 {
        self.cache.stats().sources.iter().find(|source| source.path == path).map_or(0, |source| source.pages)
    }
}

/// Requests a page; returns whether it was found. Panics on wrong bytes.
pub(crate) fn found(cache: &HashCache, number: u64) -> bool {
    let wanted = page(number);
    let mut got = [0xee; PAGE_SIZE];
    let found = cache.get(&Digest::of(&wanted), &mut got);
    assert!(!found || got == wanted, "wrong bytes for page {number}");
    found
}

pub(crate) fn count(cache: &HashCache, numbers: impl IntoIterator<Item = u64>) -> usize {
    numbers.into_iter().filter(|number| found(cache, *number)).count()
}
