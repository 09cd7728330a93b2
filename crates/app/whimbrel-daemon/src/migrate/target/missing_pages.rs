//! Machines of this host of which pages are still on the host that they came from: who keeps what, found
//! again after a restart, and struck out once all of it is here.
//!
//! What was owed of the disks is beside the machine's record, durable before the machine may run here; what
//! was owed of memory is in the slot, and ends with the memory. Neither changes: what is missing now,
//! overlays and RAM file know. A machine that is switched off meanwhile goes on fetching its disks when it is
//! started again.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::Record,
    },
    running::RunningMachine,
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use whimbrel_api::Unit;
use whimbrel_core::{HostName, PAGE_SIZE, PageSet};
use whimbrel_migrate::{
    link::LinkError,
    postcopy::{
        PageFetcher, decode_sets, encode_sets,
        messages::{OfferFetch, OfferFetchReply},
        page_fetcher::{FetchConnection, PendingReply},
    },
    protocol::HandoverId,
};
use whimbrel_wire::{CallError, Connection, Pending, Request, atomic_file};

/// Largest file of sets that is read.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// How often is looked whether all of a machine is here.
const LOOK: Duration = Duration::from_millis(50);

/// In a machine's record: part of it is elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MissingPagesRecord {
    /// The handover it came by.
    pub(crate) handover: HandoverId,
    /// Who keeps it.
    pub(crate) from: HostName,
}

/// What is known of one.
enum Entry {
    Known(Arc<PageFetcher>),
    /// What was written down cannot be read: nothing of it may be used, and its old host is to keep
    /// everything.
    Unreadable(Arc<str>),
}

/// All of them on this host.
#[derive(Default)]
pub(crate) struct PageFetchers {
    table: Mutex<HashMap<HandoverId, Entry>>,
    /// The records of machines were read: a handover that is not in the table owes nothing.
    known: AtomicBool,
}

impl PageFetchers {
    fn table(&self) -> MutexGuard<'_, HashMap<HandoverId, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn insert(&self, taking: Arc<PageFetcher>) {
        self.table().insert(taking.handover(), Entry::Known(taking));
    }

    fn of(&self, handover: HandoverId) -> Option<Arc<PageFetcher>> {
        match self.table().get(&handover)? {
            Entry::Known(taking) => Some(taking.clone()),
            Entry::Unreadable(_) => None,
        }
    }

    fn unreadable(&self, handover: HandoverId) -> Option<Arc<str>> {
        match self.table().get(&handover)? {
            Entry::Known(_) => None,
            Entry::Unreadable(why) => Some(why.clone()),
        }
    }

    /// Nothing is owed by this handover any more, or the machine never came.
    pub(crate) fn remove(&self, handover: HandoverId) -> Option<Arc<PageFetcher>> {
        match self.table().remove(&handover)? {
            Entry::Known(taking) => Some(taking),
            Entry::Unreadable(_) => None,
        }
    }

    /// All records were read.
    pub(crate) fn are_known(&self) {
        self.known.store(true, Ordering::Release);
    }

    /// The old host of a machine offers to send what it keeps of it.
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
            return match self.known.load(Ordering::Acquire) {
                true => Ok(OfferFetchReply::Whole),
                false => Err("the records of machines here cannot be read".to_owned()),
            };
        };
        if taking.from() != from {
            return Err(format!("{from} keeps nothing of this machine"));
        }
        Ok(taking.accept_connection(attend.lane, Arc::new(PeerLane(connection))))
    }
}

/// A connection that the old host made.
struct PeerLane(Connection);

struct PeerComing(Pending);

impl FetchConnection for PeerLane {
    fn ask(&self, kind: u16, header: Vec<u8>) -> Result<Box<dyn PendingReply>, LinkError> {
        let request = Request::new(kind, header.into(), Bytes::new());
        let pending = self.0.send_blocking(request).map_err(link_error)?;
        Ok(Box::new(PeerComing(pending)))
    }

    fn close(&self) {
        self.0.close();
    }
}

impl PendingReply for PeerComing {
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

/// A machine's arrays in pages: memory, then the disks.
fn lengths(record: &Record) -> Vec<u64> {
    let disks = record.config.disks.iter().map(|disk| disk.size.0 / PAGE_SIZE as u64);
    std::iter::once(record.config.memory_pages()).chain(disks).collect()
}

/// A machine that is arriving, of which pages may stay with its old host.
pub(crate) fn expect(host: &Daemon, record: &mut Record, handover: HandoverId, from: &HostName) {
    record.owed = Some(MissingPagesRecord { handover, from: from.clone() });
    host.owings.insert(Arc::new(PageFetcher::new(handover, from.clone(), &lengths(record))));
}

/// What a record says is owed, as of this daemon.
pub(crate) fn fetcher_of(host: &Daemon, record: &Record) -> Option<Arc<PageFetcher>> {
    host.owings.of(record.owed.as_ref()?.handover)
}

/// Writes down what is owed, before the machine may run here.
pub(crate) fn save_sets(
    host: &Daemon,
    record: &Record,
    live: &RunningMachine,
    taking: &PageFetcher,
) -> Result<(), DaemonError> {
    let failed =
        |error: whimbrel_migrate::postcopy::PageSetCodecError| DaemonError::Memory { source: error.into() };
    let path = memory_file(live.slot_dir());
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
    host.layout.machine(&record.name).join("owed")
}

/// Finds again what was owed when the last daemon ended.
pub(crate) fn recall(host: &Daemon, record: &Record) {
    let Some(owed) = &record.owed else { return };
    let taking = PageFetcher::new(owed.handover, owed.from.clone(), &lengths(record));
    let slot = record.process.as_ref().map(|process| host.layout.slot(&process.slot));
    for path in slot.map(|slot| memory_file(&slot)).into_iter().chain([disks_file(host, record)]) {
        match read_sets(&path, &lengths(record)) {
            Ok(sets) => taking.restore_missing(sets),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let why = format!(
                    "what is owed of {} cannot be read from {}: {error}",
                    record.name,
                    path.display()
                );
                tracing::error!(why);
                host.owings.table().insert(owed.handover, Entry::Unreadable(why.into()));
                return;
            }
        }
    }
    host.owings.insert(Arc::new(taking));
}

/// Refuses a machine of which it is not known what is elsewhere: what is here would be taken for all of it.
pub(crate) fn check(host: &Daemon, record: &Record) -> Result<(), DaemonError> {
    let why = record.owed.as_ref().and_then(|owed| host.owings.unreadable(owed.handover));
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
    /// Brings what is missing of a machine that runs here, in the background.
    pub(crate) fn start_fetching(self: &Arc<Self>, machine: &Arc<Machine>, live: &mut RunningMachine) {
        let (host, machine) = (self.me.clone(), Arc::downgrade(machine));
        live.start_fetching(move || {
            // Not on the thread that brings: whoever has the turn may wait for that one's end.
            let settle = move || {
                let (Some(host), Some(machine)) = (host.upgrade(), machine.upgrade()) else { return };
                let mut turn = machine.lock("settling");
                if turn.live.as_ref().is_some_and(RunningMachine::is_complete) {
                    host.mark_complete(&mut turn);
                }
            };
            if let Err(error) = thread::Builder::new().name("settle".into()).spawn(settle) {
                tracing::error!(%error, "no thread to write down that all of a machine is here");
            }
        });
    }

    /// The same for a machine that was switched off before all of its disks was here, and runs again.
    pub(crate) fn start_fetching_disks(self: &Arc<Self>, machine: &Arc<Machine>) {
        let mut turn = machine.lock("start");
        if turn.record.owed.is_some()
            && let Some(live) = &mut turn.live
        {
            self.start_fetching(machine, live);
        }
    }

    /// All of it is here and durable: writes that down, then tells the host that kept it.
    pub(crate) fn mark_complete(&self, turn: &mut MachineLock<'_>) {
        let Some(owed) = turn.record.owed.take() else { return };
        if let Err(error) = turn.record.save(&self.layout) {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "that all of a machine is here is not written down"
            );
            turn.record.owed = Some(owed);
            return;
        }
        let _ = std::fs::remove_file(disks_file(self, &turn.record));
        tracing::info!(machine = %turn.record.name, from = %owed.from, "all of a machine is here");
        self.release(owed.handover);
    }

    /// Tells the host that kept pages of a machine that nobody needs them any more.
    pub(crate) fn release(&self, handover: HandoverId) {
        let Some(taking) = self.owings.remove(handover) else { return };
        // An answer may take as long as a lost connection does; the other host hears it at its next attempt
        // if not now.
        let tell = move || taking.mark_complete();
        if let Err(error) = thread::Builder::new().name("release".into()).spawn(tell) {
            tracing::error!(%error, "no thread to tell that nothing is owed");
        }
    }

    /// Waits until all of a machine is here, for work that needs it whole.
    pub(crate) fn wait_until_complete(
        &self,
        turn: &mut MachineLock<'_>,
        reporter: &ProgressReporter,
    ) -> Result<(), DaemonError> {
        let Some(owed) = turn.record.owed.clone() else { return Ok(()) };
        let Some(taking) = self.owings.of(owed.handover) else { return Ok(()) };
        let stage = format!("waiting for the rest of it, which is on {}", owed.from);
        while !turn.live()?.is_complete() {
            let view = taking.status();
            let here = view.owed.saturating_sub(view.stand.missing);
            reporter.progress(&stage, Unit::Pages, here, Some(view.owed));
            if reporter.is_cancelled() {
                return Err(DaemonError::Cancelled { left: "the machine runs on here".into() });
            }
            if !turn.live()?.qemu.process().is_alive() {
                let name = turn.record.name.clone();
                return Err(DaemonError::State { name, state: "crashed", needed: "running" });
            }
            thread::sleep(LOOK);
        }
        self.mark_complete(turn);
        Ok(())
    }

    /// A machine has ended here: nobody needs what its memory lacked. If its disks lack nothing, nothing is
    /// owed any more.
    pub(crate) fn discard_missing_memory(&self, turn: &mut MachineLock<'_>) {
        let Some(taking) = fetcher_of(self, &turn.record) else { return };
        taking.waive(0);
        if taking.status().owed == 0 {
            self.mark_complete(turn);
        }
    }
}
