//! Stored image: random access to pages, presence, and restoring all of it.
//!
//! Opening reads nothing. Nodes and frames are loaded when first needed and cached in the store; any number
//! of threads may read at once.

use crate::{
    error::{Result, StoreError},
    extent_reader::ExtentReader,
    remote_objects::{AllNodes, LocalNodes, MissingObjects, ObjectWant, fetch_objects, fetch_pages},
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
use whimbrel_image::{Node, ShortDigest, pack_frame::Kind, tree};

const EXTENT: u64 = EXTENT_PAGES as u64;
/// Most pages requested of another host at once.
const FETCH_PAGES: usize = 1024;
/// Most nodes requested of another host at once.
const FETCH_NODES: usize = 256;

/// Image of pages in a store.
#[derive(Clone)]
pub struct StoredImage {
    inner: Arc<Inner>,
    root: Option<Digest>,
    pages: u64,
    fetches_missing: bool,
    /// Root of an older version that is here, so that only differences are fetched.
    similar: Option<Digest>,
}

whimbrel_core::opaque_debug!(StoredImage);

impl Store {
    /// Returns the image of `pages` pages with this root. Costs nothing; if the root is missing, the first
    /// read fails.
    pub fn image(&self, root: Option<Digest>, pages: u64) -> StoredImage {
        StoredImage { inner: self.inner.clone(), root, pages, fetches_missing: false, similar: None }
    }
}

impl StoredImage {
    /// Length in pages.
    pub fn page_count(&self) -> u64 {
        self.pages
    }

    /// Root digest of the tree; none if every page is zero.
    pub fn root(&self) -> Option<Digest> {
        self.root
    }

    /// Lets the image fetch missing pages, as a difference from the image `similar` of the same length where
    /// that is here.
    pub fn with_remote_fetch(self, similar: Option<Digest>) -> Self {
        Self { fetches_missing: true, similar: similar.filter(|root| Some(*root) != self.root), ..self }
    }

    /// Whether missing pages are fetched.
    pub fn fetches_missing(&self) -> bool {
        self.fetches_missing
    }

    fn leaf(&self, extent: u64) -> Result<Option<Arc<Node>>> {
        match self.fetches_missing {
            true => tree::leaf(&AllNodes(&self.inner), self.root, self.pages, extent),
            false => tree::leaf(&self.inner.objects, self.root, self.pages, extent),
        }
    }

    /// Leaf of the older version for the same extent, if there is one.
    fn similar_leaf(&self, extent: u64) -> Option<Digest> {
        tree::leaf_digest(&LocalNodes(&self.inner), Some(self.similar?), self.pages, extent).ok().flatten()
    }

    /// Fetches the missing pages of `runs`, in as few requests as their size allows.
    fn fetch_runs(&self, runs: impl Iterator<Item = PageRun>) -> Result<()> {
        let here = LocalNodes(&self.inner);
        let mut missing = MissingObjects::default();
        for run in runs {
            let mut page = run.start;
            while page < run.end() {
                let extent = page / EXTENT;
                let end = run.end().min((extent + 1) * EXTENT);
                if let Some(leaf) = self.leaf(extent)? {
                    let slots = (page % EXTENT) as usize..=((end - 1) % EXTENT) as usize;
                    missing.add(&here, &leaf, slots, self.similar_leaf(extent));
                }
                page = end;
                if missing.pages >= FETCH_PAGES {
                    fetch_pages(&self.inner, &std::mem::take(&mut missing))?;
                }
            }
        }
        fetch_pages(&self.inner, &missing)
    }

    /// Fetches the missing pages among `pages`: first the nodes that list them, then the pages, in large
    /// requests.
    pub fn fetch(&self, pages: &PageSet) -> Result<()> {
        self.fetch_leaves(pages)?;
        self.fetch_runs(pages.runs())
    }

    fn fetch_leaves(&self, pages: &PageSet) -> Result<()> {
        let mut wants = Vec::new();
        let mut last = None;
        for run in pages.runs() {
            for extent in run.start / EXTENT..=(run.end() - 1) / EXTENT {
                if last.replace(extent) == Some(extent) {
                    continue;
                }
                let leaf = tree::leaf_digest(&AllNodes(&self.inner), self.root, self.pages, extent)?;
                if let Some(digest) = leaf.filter(|digest| !LocalNodes(&self.inner).has(digest)) {
                    wants.push(ObjectWant { digest, similar: self.similar_leaf(extent) });
                }
            }
        }
        wants.chunks(FETCH_NODES).try_for_each(|wants| fetch_objects(&self.inner, Kind::Nodes, wants))
    }

    /// Pages that may be non-zero, without fetching: under missing nodes all of them.
    pub fn possibly_present(&self) -> Result<PageSet> {
        let (here, mut set) = (LocalNodes(&self.inner), PageSet::empty(self.pages));
        tree::walk(&here, self.root, self.pages, &mut |visit| match visit {
            tree::Visit::Node { digest, level, page } if !here.has(&digest) => {
                let len = tree::span(level + 1).min(self.pages - page);
                set.insert_run(PageRun::new(page, len));
                Ok(false)
            }
            tree::Visit::Node { .. } => Ok(true),
            tree::Visit::Page { page, .. } => {
                set.insert(page);
                Ok(true)
            }
        })?;
        Ok(set)
    }

    /// Number of pages known to be missing here, and whether there may be more under missing nodes.
    pub fn missing(&self) -> Result<(u64, bool)> {
        let (here, mut pages, mut more) = (LocalNodes(&self.inner), 0, false);
        tree::walk(&here, self.root, self.pages, &mut |visit| match visit {
            tree::Visit::Node { digest, .. } if !here.has(&digest) => {
                more = true;
                Ok(false)
            }
            tree::Visit::Node { .. } => Ok(true),
            tree::Visit::Page { digest, .. } => {
                pages += u64::from(!here.has(&digest));
                Ok(true)
            }
        })?;
        Ok((pages, more))
    }

    fn check(&self, run: PageRun) -> Result<()> {
        match run.start.checked_add(run.len).is_some_and(|end| end <= self.pages) {
            true => Ok(()),
            false => Err(StoreError::OutOfRange { start: run.start, len: run.len, pages: self.pages }),
        }
    }

    /// Reads the pages of `run` into `out`, which has `run.bytes()` bytes. Every page is checked against its
    /// digest.
    pub fn read(&self, run: PageRun, out: &mut [u8]) -> Result<()> {
        self.check(run)?;
        assert_eq!(out.len(), run.bytes(), "a buffer of the length of the run");
        if self.fetches_missing {
            self.fetch_runs(std::iter::once(run))?;
        }
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
        if self.fetches_missing
            && let Some(bytes) = self.inner.fetched.get(digest).filter(|bytes| bytes.len() == out.len())
        {
            out.copy_from_slice(&bytes);
            return Ok(());
        }
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

    /// Bitmap of the pages of an extent that are not zero; page `i` is bit `i % 64` of word `i / 64`.
    pub fn present_in(&self, extent: u64) -> Result<[u64; 4]> {
        self.check(PageRun::new(extent.saturating_mul(EXTENT), 1))?;
        Ok(self.leaf(extent)?.map_or([0; 4], |leaf| *leaf.present()))
    }

    /// All pages that are not zero. Reads every leaf: 8 KiB for each used extent.
    pub fn present(&self) -> Result<PageSet> {
        let mut set = PageSet::empty(self.pages);
        tree::walk(&LocalNodes(&self.inner), self.root, self.pages, &mut |visit| {
            if let tree::Visit::Page { page, .. } = visit {
                set.insert(page);
            }
            Ok(true)
        })?;
        Ok(set)
    }

    /// Pages around `page` in the same frame, which cost almost nothing to read with it. Zero pages between
    /// them are included. If `page` is zero or not found, the run has only that page.
    pub fn preferred_run(&self, page: u64) -> Result<PageRun> {
        self.check(PageRun::new(page, 1))?;
        let (extent, slot) = (page / EXTENT, (page % EXTENT) as usize);
        let alone = PageRun::new(page, 1);
        let Some(leaf) = self.leaf(extent)? else { return Ok(alone) };
        let place = |digest: Digest| {
            self.inner.objects.indexes.find(ShortDigest::from(&digest)).first().map(|l| l.frame)
        };
        let Some(digest) = leaf.child(slot) else { return Ok(alone) };
        let Some(here) = place(digest) else { return Ok(self.cluster(page)) };
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

    /// Pages to fetch with a missing one: as many as the link sends in about a round trip.
    fn cluster(&self, page: u64) -> PageRun {
        let source = self.inner.remote.get().filter(|_| self.fetches_missing);
        let pages = source.map_or(1, |source| source.cluster()).clamp(1, EXTENT);
        let start = page - page % pages;
        PageRun::new(start, pages.min(self.pages - start).min(EXTENT - start % EXTENT))
    }

    /// Passes every page that is not zero to `receive`, in runs within an extent, from `threads` threads at
    /// once. `receive` gets each page once, in no order.
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
            let mut reader = ExtentReader::new(&self.inner.objects);
            loop {
                let extent = next.fetch_add(1, Ordering::Relaxed);
                if extent >= self.pages.div_ceil(EXTENT) || stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let restored = self.restore_extent(extent, &mut reader, &mut buffer, &receive);
                if restored.is_err() {
                    stop.store(true, Ordering::Relaxed);
                    return restored;
                }
            }
        };
        thread::scope(|scope| {
            let start = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
            let threads: Vec<_> = (0..threads.max(1)).filter_map(start).collect();
            if threads.is_empty() {
                return work();
            }
            let results = threads
                .into_iter()
                .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            results.collect::<Vec<_>>().into_iter().collect()
        })
    }

    fn restore_extent<E>(
        &self,
        extent: u64,
        reader: &mut ExtentReader<'_>,
        buffer: &mut [u8],
        receive: &impl Fn(PageRun, &[u8]) -> Result<(), E>,
    ) -> Result<()>
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let Some(leaf) = self.leaf(extent)? else { return Ok(()) };
        let start = extent * EXTENT;
        let mut present = PageSet::empty(EXTENT);
        for (slot, _) in leaf.children() {
            present.insert(slot as u64);
        }
        for (slot, digest) in reader.read(&leaf, buffer) {
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
