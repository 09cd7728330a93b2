//! Content fetcher: requests content from the server once for all readers, and checks its version.
//!
//! A fetch request covers some blocks of a file. Readers wait for it; nobody waits for prefetch. Content that
//! a full cache does not store is still returned to those who waited.

use crate::client::{connection::server_connection::CallFailure, session::Core};
use crate::{
    cache::FileId,
    proto::{Attr, FileRef, Range, Read, ReadCall, ReadDone, unpack_pages},
};
use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// Largest request in bytes: large enough to fill a link, small enough that the first block does not wait
/// long.
const REQUEST: u64 = 1 << 20;

/// Attributes and content of a fetched range.
pub(in crate::client) type FetchedContent = (Attr, Vec<u8>);

/// Offset and content that a request returned.
type Brought = Result<(u64, Arc<Vec<u8>>), CallFailure>;

/// One fetch request in progress.
pub(in crate::client) struct FetchRequest {
    /// Epoch of the file at the start: a reader that needs later content must ask again.
    epoch: Option<u64>,
    brought: Mutex<Option<Brought>>,
    landed: Condvar,
}

impl FetchRequest {
    pub(in crate::client) fn wait(&self) -> Brought {
        let brought = self.brought.lock().unwrap_or_else(PoisonError::into_inner);
        let landed = self.landed.wait_while(brought, |brought| brought.is_none());
        landed.unwrap_or_else(PoisonError::into_inner).clone().unwrap_or(Err(CallFailure::Nonsense))
    }

    fn land(&self, brought: Brought) {
        *self.brought.lock().unwrap_or_else(PoisonError::into_inner) = Some(brought);
        self.landed.notify_all();
    }
}

/// Fetch requests in progress, by file and block.
#[derive(Default)]
pub(in crate::client) struct Fetcher {
    flights: Mutex<HashMap<(FileId, u64), Arc<FetchRequest>>>,
}

impl Fetcher {
    fn flights(&self) -> MutexGuard<'_, HashMap<(FileId, u64), Arc<FetchRequest>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file in the form in which it is requested.
#[derive(Clone)]
pub(in crate::client) struct FetchSubject {
    pub(in crate::client) file: FileId,
    pub(in crate::client) wanted: FileRef,
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
        let blocks = &self.without_zeros(source, blocks);
        let block = self.cache.block_size();
        let epoch = self.cache.epoch(source.file);
        let mut flights = Vec::new();
        let mut started: Vec<(Vec<u64>, Arc<FetchRequest>)> = Vec::new();
        {
            let mut under_way = self.fetcher.flights();
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
                        && (run.len() as u64) < REQUEST / block.min(REQUEST)
                });
                if !joins {
                    let flight =
                        Arc::new(FetchRequest { epoch, brought: Mutex::default(), landed: Condvar::new() });
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
        let Some(core) = self.me.upgrade() else { return flight.land(Err(CallFailure::Gone)) };
        self.cache.takes_off(source.file, &run);
        self.link.runtime().spawn(async move {
            let block = core.cache.block_size();
            let offset = run.first().map_or(0, |first| first * block);
            let len = (run.len() as u64 * block).min(source.size.saturating_sub(offset));
            let range = Range { offset, len: len as u32 };
            let came = match core.by_digest(&source, range, waited).await {
                Some(came) => came,
                None => core.by_read(&source, range).await,
            };
            let landing = tokio::task::spawn_blocking(move || {
                let attr = came.as_ref().ok().map(|(attr, _)| *attr);
                let brought = came.and_then(|came| core.take_in(&source, flight.epoch, offset, came));
                core.cache.arrived(source.file, &run);
                let mut under_way = core.fetcher.flights();
                for number in run {
                    let ours = under_way
                        .get(&(source.file, number))
                        .is_some_and(|known| Arc::ptr_eq(known, &flight));
                    if ours {
                        under_way.remove(&(source.file, number));
                    }
                }
                drop(under_way);
                flight.land(brought.clone());
                // Nobody waits for this step.
                if let (Some(attr), Ok((offset, content))) = (attr, brought) {
                    core.note_content(source.file, &attr, offset, &content);
                }
            });
            drop(landing.await);
        });
    }

    /// Fetches the content of a range without digests.
    async fn by_read(&self, source: &FetchSubject, range: Range) -> Result<FetchedContent, CallFailure> {
        let read = Read { file: source.wanted.clone(), range, level: self.link.level() };
        let (ReadDone { attr, pages }, packed) = self.link.ask_content::<ReadCall, _>(read).await?;
        let unpacked =
            tokio::task::spawn_blocking(move || unpack_pages(&pages, &packed, REQUEST as usize * 8)).await;
        match unpacked {
            Ok(Ok(content)) => Ok((attr, content)),
            Ok(Err(_)) => Err(CallFailure::Nonsense),
            Err(_) => Err(CallFailure::Gone),
        }
    }

    /// Stores fetched content in the cache if the file is still the same version.
    fn take_in(
        &self,
        source: &FetchSubject,
        epoch: Option<u64>,
        offset: u64,
        came: FetchedContent,
    ) -> Brought {
        let (attr, content) = came;
        let epoch = match self.compare(source, &attr) {
            Content::Same => epoch,
            Content::Old => return Err(CallFailure::Old),
            Content::New => self.cache.epoch(source.file),
        };
        let Some(epoch) = epoch else { return Err(CallFailure::Old) };
        match self.cache.fill(source.file, epoch, offset, &content) {
            Ok(true) => {}
            Ok(false) => return Err(CallFailure::Old),
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
        matches!(self.compare(source, attr), Content::Same)
    }

    /// Compares the server's attributes with the version of the clean pages. If the server has newer content,
    /// the clean pages are dropped and dirty ones become a conflict.
    fn compare(&self, source: &FetchSubject, attr: &Attr) -> Content {
        let Some(record) = self.cache.file(source.file) else { return Content::Old };
        let ours = record.base == attr.version()
            || (record.dirty && (record.base.mtime == attr.mtime || record.stamps.contains(&attr.mtime)));
        if ours {
            return Content::Same;
        }
        if record.is_newer_than(attr) {
            return Content::Old;
        }
        self.server_changed(source.file, attr);
        Content::New
    }
}

/// The server's version relative to the one known here.
enum Content {
    Same,
    Old,
    New,
}
