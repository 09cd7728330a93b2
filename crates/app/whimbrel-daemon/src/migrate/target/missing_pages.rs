//! Missing pages: machines here whose memory or disks are still partly on the source host.
//!
//! The set of missing disk pages is stored durably beside the record before the machine may run; the set of
//! missing memory pages is stored in the runtime directory and ends with the memory. Neither file changes:
//! overlays and the memory file show which pages have arrived. A machine that is switched off fetches the
//! rest of its disks at the next start. All of it is removed once every page is here.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::Record,
    },
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use whimbrel_api::Unit;
use whimbrel_core::{HostName, PAGE_SIZE, PageSet, lock};
use whimbrel_migrate::{
    link::LinkError,
    postcopy::{
        PageFetcher, decode_sets, encode_sets,
        messages::{OfferFetch, OfferFetchReply},
        page_fetcher::{FetchConnection, PendingReply},
    },
    protocol::HandoverId,
};
use whimbrel_vm::RunningMachine;
use whimbrel_wire::{CallError, Connection, Pending, Request, atomic_file};

/// Largest file of sets that is read.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Interval at which the progress of a fetch is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Part of a machine's record while some of its pages are on another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MissingPagesRecord {
    pub(crate) handover: HandoverId,
    pub(crate) from: HostName,
}

enum Entry {
    Ready(Arc<PageFetcher>),
    /// The stored sets cannot be read: the machine must not be used, and the source must not free its pages.
    Unreadable(Arc<str>),
}

#[derive(Default)]
pub(crate) struct PageFetchers {
    table: Mutex<HashMap<HandoverId, Entry>>,
    /// Whether all records of machines were read: only then does an unknown handover have no missing pages.
    all_loaded: AtomicBool,
}

impl PageFetchers {
    pub(crate) fn insert(&self, taking: Arc<PageFetcher>) {
        lock(&self.table).insert(taking.handover(), Entry::Ready(taking));
    }

    fn of(&self, handover: HandoverId) -> Option<Arc<PageFetcher>> {
        match lock(&self.table).get(&handover)? {
            Entry::Ready(taking) => Some(taking.clone()),
            Entry::Unreadable(_) => None,
        }
    }

    fn unreadable(&self, handover: HandoverId) -> Option<Arc<str>> {
        match lock(&self.table).get(&handover)? {
            Entry::Ready(_) => None,
            Entry::Unreadable(why) => Some(why.clone()),
        }
    }

    /// Removes a handover whose pages are all here, or whose machine never arrived.
    pub(crate) fn remove(&self, handover: HandoverId) -> Option<Arc<PageFetcher>> {
        match lock(&self.table).remove(&handover)? {
            Entry::Ready(taking) => Some(taking),
            Entry::Unreadable(_) => None,
        }
    }

    /// Records that all records of machines were read.
    pub(crate) fn mark_loaded(&self) {
        self.all_loaded.store(true, Ordering::Release);
    }

    /// Handles a fetch connection that a source offers.
    pub(crate) fn accept_connection(
        &self,
        from: &HostName,
        connection: Connection,
        attend: &OfferFetch,
    ) -> Result<OfferFetchReply, String> {
        if let Some(why) = self.unreadable(attend.handover) {
            return Err(why.to_string());
        }
        let Some(taking) = self.of(attend.handover) else {
            return match self.all_loaded.load(Ordering::Acquire) {
                true => Ok(OfferFetchReply::Whole),
                false => Err("the records of machines here have not been read".to_owned()),
            };
        };
        if taking.from() != from {
            return Err(format!("{from} has no pages of this machine"));
        }
        Ok(taking.accept_connection(attend.lane, Arc::new(PeerFetchConnection(connection))))
    }
}

struct PeerFetchConnection(Connection);

struct PeerPendingReply(Pending);

impl FetchConnection for PeerFetchConnection {
    fn request(&self, kind: u16, header: Vec<u8>) -> Result<Box<dyn PendingReply>, LinkError> {
        let request = Request::new(kind, header.into(), Bytes::new());
        let pending = self.0.send_blocking(request).map_err(link_error)?;
        Ok(Box::new(PeerPendingReply(pending)))
    }

    fn close(&self) {
        self.0.close();
    }
}

impl PendingReply for PeerPendingReply {
    fn wait(self: Box<Self>) -> Result<(Bytes, Bytes), LinkError> {
        self.0.wait().map(|reply| (reply.header, reply.payload)).map_err(link_error)
    }
}

fn link_error(error: CallError) -> LinkError {
    match error {
        CallError::Refused { source } => LinkError::Refused { reason: source.text },
        error => LinkError::Lost { source: error.into() },
    }
}

/// Lengths of a machine's arrays in pages: memory, then the disks.
fn lengths(record: &Record) -> Vec<u64> {
    let disks = record.config.disks.iter().map(|disk| disk.size.0 / PAGE_SIZE as u64);
    std::iter::once(record.config.memory_pages()).chain(disks).collect()
}

/// Prepares for an incoming machine whose pages may stay on its source.
pub(crate) fn add_incoming(host: &Daemon, record: &mut Record, handover: HandoverId, from: &HostName) {
    record.owed = Some(MissingPagesRecord { handover, from: from.clone() });
    host.fetchers.insert(Arc::new(PageFetcher::new(handover, from.clone(), &lengths(record))));
}

pub(crate) fn fetcher_of(host: &Daemon, record: &Record) -> Option<Arc<PageFetcher>> {
    host.fetchers.of(record.owed.as_ref()?.handover)
}

/// Stores the sets of missing pages, before the machine may run here.
pub(crate) fn save_sets(
    host: &Daemon,
    record: &Record,
    live: &RunningMachine,
    taking: &PageFetcher,
) -> Result<(), DaemonError> {
    let failed =
        |error: whimbrel_migrate::postcopy::PageSetCodecError| DaemonError::Memory { source: error.into() };
    let path = memory_file(live.runtime_path());
    let memory = encode_sets(&[(0, taking.missing_at_start(0))]).map_err(failed)?;
    std::fs::write(&path, memory).map_err(|source| DaemonError::io("write", &path, source))?;
    let disks = (1..=record.config.disks.len()).map(|index| (index as u32, taking.missing_at_start(index)));
    let disks: Vec<(u32, PageSet)> = disks.filter(|(_, set)| !set.is_empty()).collect();
    if disks.is_empty() {
        return Ok(());
    }
    let path = disks_file(host, record);
    let disks = encode_sets(&disks).map_err(failed)?;
    atomic_file::replace(&path, &disks).map_err(|source| DaemonError::io("write", &path, source))
}

fn memory_file(slot: &Path) -> PathBuf {
    slot.join("owed")
}

fn disks_file(host: &Daemon, record: &Record) -> PathBuf {
    host.directories.machine(&record.name).join("owed")
}

/// Restores the missing pages of a machine after a restart of the daemon.
pub(crate) fn restore(host: &Daemon, record: &Record) {
    let Some(owed) = &record.owed else { return };
    let taking = PageFetcher::new(owed.handover, owed.from.clone(), &lengths(record));
    let slot = record.process.as_ref().map(|process| host.directories.runtime_dir(&process.slot));
    for path in slot.map(|slot| memory_file(&slot)).into_iter().chain([disks_file(host, record)]) {
        match read_sets(&path, &lengths(record)) {
            Ok(sets) => taking.restore_missing(sets),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let why = format!(
                    "the missing pages of {} cannot be read from {}: {error}",
                    record.name,
                    path.display()
                );
                tracing::error!(why);
                lock(&host.fetchers.table).insert(owed.handover, Entry::Unreadable(why.into()));
                return;
            }
        }
    }
    host.fetchers.insert(Arc::new(taking));
}

/// Refuses a machine whose missing pages are unknown: the pages here would be taken for all of them.
pub(crate) fn check(host: &Daemon, record: &Record) -> Result<(), DaemonError> {
    let why = record.owed.as_ref().and_then(|owed| host.fetchers.unreadable(owed.handover));
    why.map_or(Ok(()), |why| Err(DaemonError::Memory { source: why.to_string().into() }))
}

fn read_sets(path: &Path, lengths: &[u64]) -> io::Result<Vec<(u32, PageSet)>> {
    if std::fs::metadata(path)?.len() > FILE_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    decode_sets(&std::fs::read(path)?, lengths)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

impl Daemon {
    /// Starts to fetch the missing pages of a running machine in the background.
    pub(crate) fn start_fetching(self: &Arc<Self>, machine: &Arc<Machine>, live: &mut RunningMachine) {
        let (host, machine) = (self.me.clone(), Arc::downgrade(machine));
        live.start_fetching(move || {
            // Not on the fetch thread: the holder of the machine lock may wait for that one to end.
            let settle = move || {
                let (Some(host), Some(machine)) = (host.upgrade(), machine.upgrade()) else { return };
                let mut turn = machine.lock("settling");
                if turn.running.as_ref().is_some_and(RunningMachine::is_complete) {
                    host.mark_complete(&mut turn);
                }
            };
            if let Err(error) = thread::Builder::new().name("settle".into()).spawn(settle) {
                tracing::error!(%error, "cannot start the thread that records a complete machine");
            }
        });
    }

    /// Starts to fetch the missing disk pages of a machine that was switched off and runs again.
    pub(crate) fn start_fetching_disks(self: &Arc<Self>, machine: &Arc<Machine>) {
        let mut turn = machine.lock("start");
        if turn.record.owed.is_some()
            && let Some(live) = &mut turn.running
        {
            self.start_fetching(machine, live);
        }
    }

    /// Records that all pages are here and durable, then notifies the source.
    pub(crate) fn mark_complete(&self, turn: &mut MachineLock<'_>) {
        let Some(owed) = turn.record.owed.take() else { return };
        if let Err(error) = turn.record.save(&self.directories) {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "cannot record that all pages of a machine are here"
            );
            turn.record.owed = Some(owed);
            return;
        }
        let _ = std::fs::remove_file(disks_file(self, &turn.record));
        tracing::info!(machine = %turn.record.name, from = %owed.from, "all pages of a machine are here");
        self.notify_complete(owed.handover);
    }

    /// Notifies the source that the pages of a machine are no longer needed.
    pub(crate) fn notify_complete(&self, handover: HandoverId) {
        let Some(taking) = self.fetchers.remove(handover) else { return };
        // The call may block on a lost connection. If it fails, the source learns it at its next attempt.
        let tell = move || taking.mark_complete();
        if let Err(error) = thread::Builder::new().name("release".into()).spawn(tell) {
            tracing::error!(%error, "cannot start the thread that notifies the source of a complete machine");
        }
    }

    /// Waits until a machine is complete, for operations that need all of it.
    pub(crate) fn wait_until_complete(
        &self,
        turn: &mut MachineLock<'_>,
        reporter: &ProgressReporter,
    ) -> Result<(), DaemonError> {
        let Some(owed) = turn.record.owed.clone() else { return Ok(()) };
        let Some(taking) = self.fetchers.of(owed.handover) else { return Ok(()) };
        let stage = format!("waiting for the remaining pages from {}", owed.from);
        while !turn.running()?.is_complete() {
            let view = taking.status();
            let here = view.missing_at_start.saturating_sub(view.progress.missing);
            reporter.progress(&stage, Unit::Pages, here, Some(view.missing_at_start));
            if reporter.is_cancelled() {
                return Err(DaemonError::Cancelled { left: "the machine keeps running here".into() });
            }
            if !turn.running()?.qemu.process().is_alive() {
                let name = turn.record.name.clone();
                return Err(DaemonError::State { name, state: "crashed", needed: "running" });
            }
            thread::sleep(POLL_INTERVAL);
        }
        self.mark_complete(turn);
        Ok(())
    }

    /// Discards the missing memory of a machine that has ended. If no disk page is missing either, the
    /// machine is complete.
    pub(crate) fn discard_missing_memory(&self, turn: &mut MachineLock<'_>) {
        let Some(taking) = fetcher_of(self, &turn.record) else { return };
        taking.drop_missing(0);
        if taking.status().missing_at_start == 0 {
            self.mark_complete(turn);
        }
    }
}
