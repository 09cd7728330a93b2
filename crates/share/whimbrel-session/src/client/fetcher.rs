//! Content from the server: asked for once however many want it, and checked against what the file was.
//!
//! A flight is one request for some blocks of a file. Readers wait for flights; nobody waits for what is only
//! fetched ahead. What a full cache does not keep is still in the flight for those who waited.

use super::{server_connection::CallFailure, session::Core};
use crate::{
    cache::FileId,
    proto::{Attr, FileRef, Range, Read, ReadCall, ReadDone, unpack_pages},
};
use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// Most bytes of one request: large enough to fill a line, small enough that the first block does not wait
/// long.
const REQUEST: u64 = 1 << 20;

/// What came for a stretch: the file as it was, and the content.
pub(super) type FetchedContent = (Attr, Vec<u8>);

/// What a flight brought: where it begins and what it is.
type Brought = Result<(u64, Arc<Vec<u8>>), CallFailure>;

/// One request.
pub(super) struct FetchRequest {
    /// The file's count when it began: who needs the content as it is later has to ask again.
    epoch: Option<u64>,
    brought: Mutex<Option<Brought>>,
    landed: Condvar,
}

impl FetchRequest {
    pub(super) fn wait(&self) -> Brought {
        let brought = self.brought.lock().unwrap_or_else(PoisonError::into_inner);
        let landed = self.landed.wait_while(brought, |brought| brought.is_none());
        landed.unwrap_or_else(PoisonError::into_inner).clone().unwrap_or(Err(CallFailure::Nonsense))
    }

    fn land(&self, brought: Brought) {
        *self.brought.lock().unwrap_or_else(PoisonError::into_inner) = Some(brought);
        self.landed.notify_all();
    }
}

/// Requests under way, by file and block.
#[derive(Default)]
pub(super) struct Fetcher {
    flights: Mutex<HashMap<(FileId, u64), Arc<FetchRequest>>>,
}

impl Fetcher {
    fn flights(&self) -> MutexGuard<'_, HashMap<(FileId, u64), Arc<FetchRequest>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file as it is asked for.
#[derive(Clone)]
pub(super) struct FetchSubject {
    pub(super) file: FileId,
    pub(super) wanted: FileRef,
    pub(super) size: u64,
}

impl Core {
    /// Has these blocks (in order) on their way. Those that are here already are not asked for if `ahead`.
    pub(super) fn fetch(&self, source: &FetchSubject, blocks: &[u64], ahead: bool) -> Vec<Arc<FetchRequest>> {
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
                // Nobody waits for this.
                if let (Some(attr), Ok((offset, content))) = (attr, brought) {
                    core.note_content(source.file, &attr, offset, &content);
                }
            });
            drop(landing.await);
        });
    }

    /// The content of a stretch, as it is.
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

    /// Content has come: it goes into the cache if the file is still what it was.
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
                    "the cache did not take what was fetched"
                );
            }
        }
        Ok((offset, Arc::new(content)))
    }

    /// Whether what the server says of a file is what is known here.
    pub(super) fn is_same(&self, source: &FetchSubject, attr: &Attr) -> bool {
        matches!(self.compare(source, attr), Content::Same)
    }

    /// Compares what the server says of a file with what its clean pages are of. If the server has a newer
    /// content, those are void, and what is dirty is kept aside.
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

/// What the server says, beside what is known.
enum Content {
    Same,
    Old,
    New,
}
