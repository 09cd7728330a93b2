//! Content fetcher: requests content from the server once for all readers, and checks its version.
//!
//! A fetch request covers some blocks of a file. Readers wait for it; nobody waits for prefetch. Content that
//! a full cache does not store is still returned to those who waited.

use crate::client::{connection::server_connection::CallFailure, session::Core};
use crate::{
    cache::FileId,
    proto::{Attr, FileRef, Range, Read, ReadCall, ReadDone, Time, unpack_pages},
};
use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, PoisonError},
};
use whimbrel_core::lock;

/// Largest request in bytes: large enough to fill a link, small enough that the first block does not wait
/// long.
const MAX_REQUEST: u64 = 1 << 20;

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

/// Fetch requests in progress, by file and block.
#[derive(Default)]
pub(in crate::client) struct Fetcher {
    requests: Mutex<HashMap<(FileId, u64), Arc<FetchRequest>>>,
}

/// A file in the form in which it is requested.
#[derive(Clone)]
pub(in crate::client) struct FetchSubject {
    pub(in crate::client) file: FileId,
    pub(in crate::client) file_ref: FileRef,
    pub(in crate::client) size: u64,
}

impl Core {
    /// Starts fetching blocks, given in order. With `ahead`, blocks that are here are skipped.
    pub(in crate::client) fn fetch(
        &self,
        source: &FetchSubject,
        blocks: &[u64],
        ahead: bool,
    ) -> Vec<Arc<FetchRequest>> {
        let blocks = &self.fill_zeros(source, blocks);
        let block = self.cache.block_size();
        let epoch = self.cache.epoch(source.file);
        let mut flights = Vec::new();
        let mut started: Vec<(Vec<u64>, Arc<FetchRequest>)> = Vec::new();
        {
            let mut under_way = lock(&self.fetcher.requests);
            for number in blocks.iter().copied() {
                if let Some(flight) =
                    under_way.get(&(source.file, number)).filter(|flight| flight.epoch == epoch)
                {
                    flights.push(flight.clone());
                    continue;
                }
                if ahead && self.cache.has_block(source.file, number, source.size) {
                    continue;
                }
                let joins = started.last().is_some_and(|(run, _)| {
                    run.last() == Some(&number.wrapping_sub(1))
                        && (run.len() as u64) < MAX_REQUEST / block.min(MAX_REQUEST)
                });
                if !joins {
                    let flight =
                        Arc::new(FetchRequest { epoch, result: Mutex::default(), finished: Condvar::new() });
                    started.push((Vec::new(), flight.clone()));
                    flights.push(flight);
                }
                if let Some((run, flight)) = started.last_mut() {
                    run.push(number);
                    under_way.insert((source.file, number), flight.clone());
                }
            }
        }
        for (run, flight) in started {
            self.start(source.clone(), run, flight, !ahead);
        }
        flights
    }

    fn start(&self, source: FetchSubject, run: Vec<u64>, flight: Arc<FetchRequest>, waited: bool) {
        let Some(core) = self.me.upgrade() else { return flight.finish(Err(CallFailure::Unreachable)) };
        self.cache.mark_fetching(source.file, &run);
        self.connection.runtime().spawn(async move {
            let block = core.cache.block_size();
            let offset = run.first().map_or(0, |first| first * block);
            let len = (run.len() as u64 * block).min(source.size.saturating_sub(offset));
            let range = Range { offset, len: len as u32 };
            let came = match core.fetch_by_digest(&source, range, waited).await {
                Some(came) => came,
                None => core.fetch_by_read(&source, range).await,
            };
            let landing = tokio::task::spawn_blocking(move || {
                let attr = came.as_ref().ok().map(|(attr, _)| *attr);
                let brought = came.and_then(|came| core.store_fetched(&source, flight.epoch, offset, came));
                core.cache.unmark_fetching(source.file, &run);
                let mut under_way = lock(&core.fetcher.requests);
                for number in run {
                    let ours = under_way
                        .get(&(source.file, number))
                        .is_some_and(|known| Arc::ptr_eq(known, &flight));
                    if ours {
                        under_way.remove(&(source.file, number));
                    }
                }
                drop(under_way);
                flight.finish(brought.clone());
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
