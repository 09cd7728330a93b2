//! Image writer: writes one image of a capsule, pages in any order; the last write of a page wins.
//!
//! `put` copies pages into batches for the workers and returns; it waits only when the workers are behind.
//! Digests come back with the number of their batch, so `finish` can tell which version of a page is the
//! last.

use crate::{
    capsule_writer::WorkerThreads,
    error::{Result, StoreError},
    page_worker::{Candidate, Framer, PageBatch, usable_base},
    remote_objects::AllNodes,
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};
use whimbrel_image::{
    pack_frame::Kind,
    tree::{self, NewNode},
};

const BATCH_PAGES: usize = 256;
/// Nodes of a plain frame.
const NODES: usize = 8;
const DELTA_NODES: usize = 32;

type Digested = Vec<(u64, Option<Digest>)>;

pub(crate) struct ImageState {
    pub(crate) base: Option<Digest>,
    pub(crate) pages: u64,
    delta_budget: AtomicU64,
    results: Mutex<Vec<(u64, Digested)>>,
    outstanding: Mutex<usize>,
    idle: Condvar,
}

/// Counts a batch as done when dropped, also if its worker panicked.
pub(crate) struct BatchGuard(Arc<ImageState>);

impl Drop for BatchGuard {
    fn drop(&mut self) {
        *self.0.outstanding.lock().unwrap_or_else(|e| e.into_inner()) -= 1;
        self.0.idle.notify_all();
    }
}

impl ImageState {
    pub(crate) fn done_on_drop(self: &Arc<Self>) -> BatchGuard {
        BatchGuard(self.clone())
    }

    pub(crate) fn record(&self, order: u64, digests: Digested) {
        self.results.lock().unwrap_or_else(|e| e.into_inner()).push((order, digests));
    }

    /// Number of the last batch of every page written so far.
    pub(crate) fn last_puts(&self) -> HashMap<u64, u64> {
        let results = self.results.lock().unwrap_or_else(|e| e.into_inner());
        let mut last = HashMap::new();
        for (order, digested) in results.iter() {
            for (page, _) in digested {
                let newest = last.entry(*page).or_insert(*order);
                *newest = (*newest).max(*order);
            }
        }
        last
    }

    /// Takes one page from the budget for deltas; false if it is exhausted.
    pub(crate) fn may_try_delta(&self) -> bool {
        self.delta_budget
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
    }

    fn wait(&self) {
        let outstanding = self.outstanding.lock().unwrap_or_else(|e| e.into_inner());
        drop(self.idle.wait_while(outstanding, |n| *n > 0).unwrap_or_else(|e| e.into_inner()));
    }

    /// Last digest of every page that was written, by page.
    fn take_changes(&self, batches: u64) -> Result<Digested> {
        let mut results = std::mem::take(&mut *self.results.lock().unwrap_or_else(|e| e.into_inner()));
        if results.len() as u64 != batches {
            return Err(StoreError::Latched { action: "worker" });
        }
        results.sort_unstable_by_key(|(order, _)| *order);
        let mut changes: Digested = results.into_iter().flat_map(|(_, digests)| digests).rev().collect();
        changes.sort_by_key(|(page, _)| *page);
        changes.dedup_by_key(|(page, _)| *page);
        Ok(changes)
    }
}

/// Finished image, as the manifest refers to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FinishedImage {
    /// Root digest of the tree; none if every page is zero.
    pub root: Option<Digest>,
    /// Length in pages.
    pub pages: u64,
    /// Number of pages that were written, each counted once.
    pub put: u64,
}

/// Writes one image; see [`CapsuleWriter::image`](crate::CapsuleWriter::image).
pub struct ImageWriter {
    pool: Arc<WorkerThreads>,
    state: Arc<ImageState>,
    pages: Vec<u64>,
    data: Vec<u8>,
    order: u64,
}

whimbrel_core::opaque_debug!(ImageWriter);

impl ImageWriter {
    pub(crate) fn new(pool: Arc<WorkerThreads>, base: Option<Digest>, pages: u64) -> Self {
        let delta_budget = AtomicU64::new(pool.context.inner.options.delta_pages);
        let (results, outstanding, idle) = Default::default();
        let state = Arc::new(ImageState { base, pages, delta_budget, results, outstanding, idle });
        Self { pool, state, pages: Vec::new(), data: Vec::new(), order: 0 }
    }

    /// Length in pages.
    pub fn page_count(&self) -> u64 {
        self.state.pages
    }

    /// Writes the pages of `run` from the concatenation `data`. Any order; the last write of a page wins.
    pub fn put(&mut self, run: PageRun, data: &[u8]) -> Result<()> {
        self.check(run)?;
        assert_eq!(data.len(), run.bytes(), "data of the length of the run");
        let mut data = data;
        let mut page = run.start;
        while !data.is_empty() {
            if self.data.capacity() == 0 {
                self.data.reserve_exact(BATCH_PAGES * PAGE_SIZE);
            }
            let take = (BATCH_PAGES - self.pages.len()).min(data.len() / PAGE_SIZE);
            let (now, later) = data.split_at(take * PAGE_SIZE);
            self.pages.extend(page..page + take as u64);
            self.data.extend_from_slice(now);
            (data, page) = (later, page + take as u64);
            if self.pages.len() == BATCH_PAGES {
                self.dispatch()?;
            }
        }
        Ok(())
    }

    fn check(&self, run: PageRun) -> Result<()> {
        let pages = self.state.pages;
        match run.start.checked_add(run.len).is_some_and(|end| end <= pages) {
            true => Ok(()),
            false => Err(StoreError::OutOfRange { start: run.start, len: run.len, pages }),
        }
    }

    fn dispatch(&mut self) -> Result<()> {
        self.pool.context.check()?;
        if self.pages.is_empty() {
            return Ok(());
        }
        let (pages, data) = (std::mem::take(&mut self.pages), std::mem::take(&mut self.data));
        let batch = PageBatch { image: self.state.clone(), order: self.order, pages, data };
        self.order += 1;
        *self.state.outstanding.lock().unwrap_or_else(|e| e.into_inner()) += 1;
        self.pool.submit(batch)
    }

    /// Waits until the workers have nothing to do for this image. Pages of a batch that is not full yet stay.
    pub fn wait_idle(&self) {
        self.state.wait();
    }

    /// Waits for all pages and builds the tree. The image becomes durable with the next commit.
    pub fn finish(mut self) -> Result<FinishedImage> {
        self.dispatch()?;
        self.state.wait();
        self.pool.frame_changed()?;
        self.pool.context.check()?;
        let changes = self.state.take_changes(self.order)?;
        let (session, base, pages) = (&self.pool.context, self.state.base, self.state.pages);
        let mut nodes = Vec::new();
        let root = tree::update(&AllNodes(&session.inner), base, pages, &changes, &mut |node| {
            nodes.push(node);
            Ok(())
        })?;
        self.store_nodes(&nodes)?;
        if let Some(root) = root {
            self.pool.remember_root(root, pages);
        }
        Ok(FinishedImage { root, pages, put: changes.len() as u64 })
    }

    fn store_nodes(&self, nodes: &[NewNode]) -> Result<()> {
        let session = &self.pool.context;
        let indexes = session.inner.objects.indexes.snapshot();
        let (mut plain, mut deltas) = (Vec::new(), Vec::new());
        for node in nodes.iter().filter(|node| session.claim(&node.digest, &indexes)) {
            let bytes = node.bytes.as_slice();
            let old = node.replaces.map(|old| usable_base(session, &old, Kind::Nodes)).transpose()?.flatten();
            match old {
                Some(old) => deltas.push(Candidate { digest: node.digest, bytes, old }),
                None => plain.push((node.digest, bytes)),
            }
        }
        let mut framer = Framer::new(&session.inner, self.pool.pack());
        framer.plain(Kind::Nodes, &plain, NODES)?;
        framer.deltas(Kind::Nodes, &deltas, DELTA_NODES, NODES)
    }
}
