//! Content fetcher: requests content from the server once for all readers, and checks its version.
//!
//! A fetch request covers adjacent pages of a file. Readers wait for it; nobody waits for prefetch. Content
//! that a full cache does not store is still returned to those who waited.
//!
//! A read waits only for its own pages. The rest of their blocks follows for as long as the link has room, so
//! that reads near each other find it here, and many random reads at once do not queue behind pages that
//! nobody reads.

use crate::client::{
    connection::server_connection::CallFailure, dedup::read_dedup::DEFAULT_RATE, session::Core,
};
use crate::{
    cache::FileId,
    proto::{Attr, FileRef, PAGE, Range, Read, ReadCall, ReadDone, Time, unpack_pages},
};
use std::{
    collections::HashMap,
    ops,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};
use whimbrel_core::lock;

/// Largest request in bytes: large enough to fill a link, small enough that the first block does not wait
/// long.
const MAX_REQUEST: u64 = 1 << 20;
/// Bytes in transit below which the rest of a block is always requested: a link of which no rate is known, or
/// only that of a few small reads, would otherwise never be given more.
const MIN_IN_TRANSIT: u64 = 128 << 10;
/// Smallest rest of a block that is worth a request of its own, in pages.
const MIN_REST: u64 = 4;

pub(in crate::client) type FetchedContent = (Attr, Vec<u8>);

/// Offset and content that a request returned.
type FetchResult = Result<(u64, Arc<Vec<u8>>), CallFailure>;

pub(in crate::client) struct FetchRequest {
    /// Epoch of the file at the start: a reader that needs later content must ask again.
    epoch: Option<u64>,
    result: Mutex<Option<FetchResult>>,
    finished: Condvar,
}

impl FetchRequest {
    pub(in crate::client) fn wait(&self) -> FetchResult {
        let brought = lock(&self.result);
        let landed = self.finished.wait_while(brought, |brought| brought.is_none());
        landed.unwrap_or_else(PoisonError::into_inner).clone().unwrap_or(Err(CallFailure::InvalidReply))
    }

    fn finish(&self, brought: FetchResult) {
        *lock(&self.result) = Some(brought);
        self.finished.notify_all();
    }
}

/// Pages of a block, one bit each, and the request that brings them.
type PagesUnderWay = (u64, Arc<FetchRequest>);

/// Fetch requests in progress, by file and block.
#[derive(Default)]
pub(in crate::client) struct Fetcher {
    requests: Mutex<HashMap<(FileId, u64), Vec<PagesUnderWay>>>,
    /// Bytes that were requested and have not arrived.
    in_transit: AtomicU64,
}

impl Fetcher {
    /// The requests that bring some of these pages, and the pages that none of them brings.
    fn under_way(
        known: &[PagesUnderWay],
        epoch: Option<u64>,
        mut pages: u64,
    ) -> (Vec<Arc<FetchRequest>>, u64) {
        let mut found = Vec::new();
        for (brings, request) in known.iter().filter(|(_, request)| request.epoch == epoch) {
            if brings & pages != 0 {
                pages &= !brings;
                found.push(request.clone());
            }
        }
        (found, pages)
    }

    fn finished(&self, file: FileId, blocks: &[u64], request: &Arc<FetchRequest>) {
        let mut requests = lock(&self.requests);
        for block in blocks {
            if let Some(known) = requests.get_mut(&(file, *block)) {
                known.retain(|(_, other)| !Arc::ptr_eq(other, request));
                if known.is_empty() {
                    requests.remove(&(file, *block));
                }
            }
        }
    }
}

/// The bits of a block's pages from `first` up to `end`, of at most 64.
fn bits(first: u64, end: u64) -> u64 {
    u64::MAX.checked_shr(64 - (end - first) as u32).unwrap_or(0) << first
}

/// A file in the form in which it is requested.
#[derive(Clone)]
pub(in crate::client) struct FetchSubject {
    pub(in crate::client) file: FileId,
    pub(in crate::client) file_ref: FileRef,
    pub(in crate::client) size: u64,
}

impl Core {
    /// Starts fetching whole blocks, given in order. With `ahead`, nobody waits for them.
    pub(in crate::client) fn fetch(
        &self,
        source: &FetchSubject,
        blocks: &[u64],
        ahead: bool,
    ) -> Vec<Arc<FetchRequest>> {
        let pages = self.cache.block_size() / PAGE as u64;
        let whole: Vec<_> = blocks.iter().map(|block| block * pages..(block + 1) * pages).collect();
        self.fetch_pages(source, &whole, ahead)
    }

    /// Starts fetching what of these pages is not here, given in order, each range within a block.
    fn fetch_pages(
        &self,
        source: &FetchSubject,
        wanted: &[ops::Range<u64>],
        ahead: bool,
    ) -> Vec<Arc<FetchRequest>> {
        let in_block = self.cache.block_size() / PAGE as u64;
        self.fill_zeros(source, wanted.iter().map(|range| range.start / in_block));
        let epoch = self.cache.epoch(source.file);
        let mut requests = Vec::new();
        let mut started: Vec<(ops::Range<u64>, Arc<FetchRequest>)> = Vec::new();
        {
            let mut under_way = lock(&self.fetcher.requests);
            for range in wanted {
                let block = range.start / in_block;
                let first = block * in_block;
                let missing = self.cache.missing_pages(source.file, block, source.size).unwrap_or(u64::MAX);
                let pages = missing & bits(range.start - first, range.end - first);
                let known = under_way.entry((source.file, block)).or_default();
                let (found, pages) = Fetcher::under_way(known, epoch, pages);
                requests.extend(found);
                if pages == 0 {
                    if known.is_empty() {
                        under_way.remove(&(source.file, block));
                    }
                    continue;
                }
                let range =
                    first + u64::from(pages.trailing_zeros())..first + 64 - u64::from(pages.leading_zeros());
                let joins = started.last().is_some_and(|(run, _)| {
                    run.end == range.start && (range.end - run.start) * PAGE as u64 <= MAX_REQUEST
                });
                if !joins {
                    let request =
                        Arc::new(FetchRequest { epoch, result: Mutex::default(), finished: Condvar::new() });
                    started.push((range.start..range.start, request.clone()));
                    requests.push(request);
                }
                if let Some((run, request)) = started.last_mut() {
                    run.end = range.end;
                    known.push((bits(range.start - first, range.end - first), request.clone()));
                }
            }
        }
        for (run, request) in started {
            self.start(source.clone(), run, request, !ahead);
        }
        requests
    }

    /// Starts fetching what a read of some bytes lacks: its own pages of these blocks, to be waited for.
    pub(in crate::client) fn fetch_read(
        &self,
        source: &FetchSubject,
        blocks: &[u64],
        (offset, len): (u64, u64),
    ) -> Vec<Arc<FetchRequest>> {
        let pages = self.cache.block_size() / PAGE as u64;
        let (first, end) = (offset / PAGE as u64, (offset + len).div_ceil(PAGE as u64));
        let own: Vec<_> =
            blocks.iter().map(|block| (block * pages).max(first)..((block + 1) * pages).min(end)).collect();
        self.fetch_pages(source, &own, false)
    }

    /// Starts fetching the rest of these blocks, in so many bytes at most: the pages after the read, and then
    /// those before it.
    pub(in crate::client) fn fetch_rest(
        &self,
        source: &FetchSubject,
        blocks: &[u64],
        (offset, len): (u64, u64),
        room: u64,
    ) {
        let (pages, mut room) = (self.cache.block_size() / PAGE as u64, room / PAGE as u64);
        let (first, end) = (offset / PAGE as u64, (offset + len).div_ceil(PAGE as u64));
        for block in blocks {
            let whole = block * pages..((block + 1) * pages).min(source.size.div_ceil(PAGE as u64));
            let after = whole.start.max(end)..whole.end;
            let before = whole.start..whole.end.min(first);
            let after = after.start..after.end.min(after.start.saturating_add(room));
            room -= after.end.saturating_sub(after.start);
            let before = before.start.max(before.end.saturating_sub(room))..before.end;
            room -= before.end.saturating_sub(before.start);
            for range in [after, before] {
                if range.end.saturating_sub(range.start) >= MIN_REST {
                    self.fetch_pages(source, &[range], true);
                }
            }
        }
    }

    /// Bytes that may be requested although nobody waits for them: with them, the link is three quarters
    /// full, so that what is waited for hardly queues.
    pub(in crate::client) fn room(&self) -> u64 {
        let rate = self.connection.rate().unwrap_or(DEFAULT_RATE);
        let carries = rate * self.connection.round_trip().unwrap_or_default().as_secs_f64() * 0.75;
        (carries as u64).max(MIN_IN_TRANSIT).saturating_sub(self.fetcher.in_transit.load(Ordering::Relaxed))
    }

    fn start(&self, source: FetchSubject, run: ops::Range<u64>, request: Arc<FetchRequest>, waited: bool) {
        let Some(core) = self.me.upgrade() else { return request.finish(Err(CallFailure::Unreachable)) };
        let in_block = self.cache.block_size() / PAGE as u64;
        let blocks: Vec<u64> = (run.start / in_block..run.end.div_ceil(in_block)).collect();
        self.cache.mark_fetching(source.file, &blocks);
        let offset = run.start * PAGE as u64;
        let len = (run.end * PAGE as u64).min(source.size).saturating_sub(offset);
        self.fetcher.in_transit.fetch_add(len, Ordering::Relaxed);
        self.connection.runtime().spawn(async move {
            let range = Range { offset, len: len as u32 };
            let came = match core.fetch_by_digest(&source, range, waited).await {
                Some(came) => came,
                None => core.fetch_by_read(&source, range).await,
            };
            core.fetcher.in_transit.fetch_sub(len, Ordering::Relaxed);
            let landing = tokio::task::spawn_blocking(move || {
                let attr = came.as_ref().ok().map(|(attr, _)| *attr);
                let brought = came.and_then(|came| core.store_fetched(&source, request.epoch, offset, came));
                core.cache.unmark_fetching(source.file, &blocks);
                core.fetcher.finished(source.file, &blocks, &request);
                request.finish(brought.clone());
                // Nobody waits for this step.
                if let (Some(attr), Ok((offset, content))) = (attr, brought) {
                    core.record_content(source.file, &attr, offset, &content);
                }
            });
            drop(landing.await);
        });
    }

    /// Fetches the content of a range without digests.
    async fn fetch_by_read(
        &self,
        source: &FetchSubject,
        range: Range,
    ) -> Result<FetchedContent, CallFailure> {
        let read = Read { file: source.file_ref.clone(), range, level: self.connection.compression_level() };
        let (ReadDone { attr, pages }, packed) =
            self.connection.send_for_content::<ReadCall, _>(read).await?;
        let unpacked =
            tokio::task::spawn_blocking(move || unpack_pages(&pages, &packed, MAX_REQUEST as usize * 8))
                .await;
        match unpacked {
            Ok(Ok(content)) => Ok((attr, content)),
            Ok(Err(_)) => Err(CallFailure::InvalidReply),
            Err(_) => Err(CallFailure::Unreachable),
        }
    }

    /// Stores fetched content in the cache if the file is still the same version.
    fn store_fetched(
        &self,
        source: &FetchSubject,
        epoch: Option<u64>,
        offset: u64,
        came: FetchedContent,
    ) -> FetchResult {
        let (attr, content) = came;
        let epoch = match self.compare(source, &attr) {
            VersionOrder::Same => epoch,
            VersionOrder::Old => return Err(CallFailure::Outdated),
            VersionOrder::New => self.cache.epoch(source.file),
        };
        let Some(epoch) = epoch else { return Err(CallFailure::Outdated) };
        match self.cache.fill(source.file, epoch, offset, &content) {
            Ok(true) => {}
            Ok(false) => return Err(CallFailure::Outdated),
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot store fetched content in the cache"
                );
            }
        }
        Ok((offset, Arc::new(content)))
    }

    /// Whether the server's attributes are of the version that is known here.
    pub(in crate::client) fn is_same(&self, source: &FetchSubject, attr: &Attr) -> bool {
        matches!(self.compare(source, attr), VersionOrder::Same)
    }

    /// Compares the server's attributes with the version of the clean pages. If the server has newer content,
    /// the clean pages are dropped and dirty ones become a conflict.
    fn compare(&self, source: &FetchSubject, attr: &Attr) -> VersionOrder {
        let Some(record) = self.cache.file(source.file) else { return VersionOrder::Old };
        let sent = |stamp: &Time| stamp.is_stored_as(attr.mtime);
        let ours = record.base == attr.version()
            || (record.dirty && (record.base.mtime == attr.mtime || record.stamps.iter().any(sent)));
        if ours {
            return VersionOrder::Same;
        }
        if record.is_newer_than(attr) {
            return VersionOrder::Old;
        }
        self.adopt_or_conflict(source.file, attr);
        VersionOrder::New
    }
}

/// The server's version relative to the one known here.
enum VersionOrder {
    Same,
    Old,
    New,
}
