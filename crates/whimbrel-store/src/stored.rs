//! Reading an image: random access to pages, presence, restoring whole.
//!
//! Opening reads nothing. Nodes and frames are loaded when first needed and kept in the store's caches; any number of
//! threads may read at once.

use crate::{
    error::{Result, StoreError},
    store::{Inner, Store},
};
use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};
use whimbrel_core::{Digest, EXTENT_PAGES, EXTENT_SIZE, PAGE_SIZE, PageRun, PageSet};
use whimbrel_image::{Key, Node, tree};

const EXTENT: u64 = EXTENT_PAGES as u64;

/// An image in a store.
#[derive(Clone)]
pub struct StoredImage {
    inner: Arc<Inner>,
    root: Option<Digest>,
    pages: u64,
}

impl std::fmt::Debug for StoredImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoredImage").field("root", &self.root).field("pages", &self.pages).finish()
    }
}

impl Store {
    /// The image of `pages` pages with this root. Costs nothing; a root that is not here fails the first read.
    pub fn image(&self, root: Option<Digest>, pages: u64) -> StoredImage {
        StoredImage { inner: self.inner.clone(), root, pages }
    }
}

impl StoredImage {
    /// Length in pages.
    pub fn page_count(&self) -> u64 {
        self.pages
    }

    /// Root of its tree; none when every page is zero.
    pub fn root(&self) -> Option<Digest> {
        self.root
    }

    fn leaf(&self, extent: u64) -> Result<Option<Arc<Node>>> {
        tree::leaf(&self.inner.objects, self.root, self.pages, extent)
    }

    fn check(&self, run: PageRun) -> Result<()> {
        match run.start.checked_add(run.len).is_some_and(|end| end <= self.pages) {
            true => Ok(()),
            false => Err(StoreError::OutOfRange { start: run.start, len: run.len, pages: self.pages }),
        }
    }

    /// Reads the pages of `run` into `out`, which is `run.bytes()` long. Every page was checked against its digest.
    pub fn read(&self, run: PageRun, out: &mut [u8]) -> Result<()> {
        self.check(run)?;
        assert_eq!(out.len(), run.bytes(), "a buffer of the length of the run");
        let mut leaf = None;
        for (page, out) in run.pages().zip(out.chunks_exact_mut(PAGE_SIZE)) {
            let extent = page / EXTENT;
            if leaf.as_ref().is_none_or(|(at, _)| *at != extent) {
                leaf = Some((extent, self.leaf(extent)?));
            }
            let node = leaf.as_ref().and_then(|(_, node)| node.as_ref());
            match node.and_then(|node| node.child((page % EXTENT) as usize)) {
                Some(digest) => self.read_page(&digest, out)?,
                None => out.fill(0),
            }
        }
        Ok(())
    }

    fn read_page(&self, digest: &Digest, out: &mut [u8]) -> Result<()> {
        let object = self.inner.objects.get(digest)?;
        match object.bytes().len() == out.len() {
            true => out.copy_from_slice(object.bytes()),
            false => return Err(StoreError::Missing { digest: *digest }),
        }
        Ok(())
    }

    /// Digest of a page, none if it is zero.
    pub fn digest(&self, page: u64) -> Result<Option<Digest>> {
        self.check(PageRun::new(page, 1))?;
        Ok(self.leaf(page / EXTENT)?.and_then(|leaf| leaf.child((page % EXTENT) as usize)))
    }

    /// Whether a page is zero, without reading it.
    pub fn is_zero(&self, page: u64) -> Result<bool> {
        self.digest(page).map(|digest| digest.is_none())
    }

    /// Which of the 256 pages of an extent are not zero; bit `i % 64` of word `i / 64`.
    pub fn present_in(&self, extent: u64) -> Result<[u64; 4]> {
        self.check(PageRun::new(extent.saturating_mul(EXTENT), 1))?;
        Ok(self.leaf(extent)?.map_or([0; 4], |leaf| *leaf.present()))
    }

    /// All pages that are not zero. Reads every leaf: 8 KiB a used extent.
    pub fn present(&self) -> Result<PageSet> {
        let mut set = PageSet::empty(self.pages);
        tree::walk(&self.inner.objects, self.root, self.pages, &mut |visit| {
            if let tree::Visit::Page { page, .. } = visit {
                set.insert(page);
            }
            Ok(true)
        })?;
        Ok(set)
    }

    /// The pages around `page` that lie in the same frame, so that they come almost for free with it. Zero pages between
    /// them are included. A page that is zero or not found stands alone.
    pub fn preferred_run(&self, page: u64) -> Result<PageRun> {
        self.check(PageRun::new(page, 1))?;
        let (extent, slot) = (page / EXTENT, (page % EXTENT) as usize);
        let alone = PageRun::new(page, 1);
        let Some(leaf) = self.leaf(extent)? else { return Ok(alone) };
        let place =
            |digest: Digest| self.inner.objects.catalog.find(Key::from(&digest)).first().map(|l| l.place);
        let Some(here) = leaf.child(slot).and_then(place) else { return Ok(alone) };
        let last = |slots: &mut dyn Iterator<Item = usize>| {
            let same = slots.map(|slot| (slot, leaf.child(slot))).take_while(|(_, digest)| {
                digest.is_none_or(|digest| place(digest).is_some_and(|there| there == here))
            });
            same.filter(|(_, digest)| digest.is_some()).last().map_or(slot, |(slot, _)| slot)
        };
        let end = last(&mut (slot + 1..EXTENT_PAGES));
        let start = last(&mut (0..slot).rev());
        Ok(PageRun::new(extent * EXTENT + start as u64, (end - start + 1) as u64))
    }

    /// Hands every page that is not zero to `receive`, in runs within an extent, from `threads` threads at once.
    /// `receive` gets each page once, in no order.
    pub fn restore<E>(
        &self,
        threads: usize,
        receive: impl Fn(PageRun, &[u8]) -> Result<(), E> + Sync,
    ) -> Result<()>
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let next = AtomicU64::new(0);
        let stop = AtomicBool::new(false);
        let work = || {
            let mut buffer = vec![0; EXTENT_SIZE];
            loop {
                let extent = next.fetch_add(1, Ordering::Relaxed);
                if extent >= self.pages.div_ceil(EXTENT) || stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let restored = self.restore_extent(extent, &mut buffer, &receive);
                if restored.is_err() {
                    stop.store(true, Ordering::Relaxed);
                    return restored;
                }
            }
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
            let results = threads
                .into_iter()
                .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            results.collect::<Vec<_>>().into_iter().collect()
        })
    }

    fn restore_extent<E>(
        &self,
        extent: u64,
        buffer: &mut [u8],
        receive: &impl Fn(PageRun, &[u8]) -> Result<(), E>,
    ) -> Result<()>
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let Some(leaf) = self.leaf(extent)? else { return Ok(()) };
        let start = extent * EXTENT;
        let mut present = PageSet::empty(EXTENT);
        for (slot, digest) in leaf.children() {
            present.insert(slot as u64);
            self.read_page(&digest, &mut buffer[slot * PAGE_SIZE..(slot + 1) * PAGE_SIZE])?;
        }
        for run in present.runs() {
            let data = &buffer[run.offset() as usize..][..run.bytes()];
            let received = receive(PageRun::new(start + run.start, run.len), data);
            received.map_err(|source| StoreError::Receiver { source: source.into() })?;
        }
        Ok(())
    }
}
