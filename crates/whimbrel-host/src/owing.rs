//! Machines of this host of which pages are still on the host that they came from: who keeps what, found again after a
//! restart, and struck out once all of it is here.
//!
//! What was owed of the disks is beside the machine's record, durable before the machine may run here; what was owed of memory
//! is in the slot, and ends with the memory. Neither changes: what is missing now, overlays and RAM file know. A machine that
//! is switched off meanwhile goes on fetching its disks when it is started again.

use crate::{
    error::HostError,
    host::Host,
    live::Live,
    machine::{Machine, Turn},
    operation::Reporter,
    record::Record,
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
        Taking, decode_sets, encode_sets,
        messages::{Attend, Attended},
        taking::{Coming, Lane},
    },
    protocol::HandoverId,
};
use whimbrel_wire::{CallError, Connection, Pending, Request, durable};

/// Largest file of sets that is read.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// How often is looked whether all of a machine is here.
const LOOK: Duration = Duration::from_millis(50);

/// In a machine's record: part of it is elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owed {
    /// The handover it came by.
    pub(crate) handover: HandoverId,
    /// Who keeps it.
    pub(crate) from: HostName,
}

/// What is known of one.
enum Entry {
    Known(Arc<Taking>),
    /// What was written down cannot be read: nothing of it may be used, and its old host is to keep everything.
    Unreadable(Arc<str>),
}

/// All of them on this host.
#[derive(Default)]
pub(crate) struct Owings {
    table: Mutex<HashMap<HandoverId, Entry>>,
    /// The records of machines were read: a handover that is not in the table owes nothing.
    known: AtomicBool,
}

impl Owings {
    fn table(&self) -> MutexGuard<'_, HashMap<HandoverId, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn enter(&self, taking: Arc<Taking>) {
        self.table().insert(taking.handover(), Entry::Known(taking));
    }

    fn of(&self, handover: HandoverId) -> Option<Arc<Taking>> {
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
    pub(crate) fn strike(&self, handover: HandoverId) -> Option<Arc<Taking>> {
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
    pub(crate) fn attend(
        &self,
        from: &HostName,
        connection: Connection,
        attend: &Attend,
    ) -> Result<Attended, String> {
        if let Some(why) = self.unreadable(attend.handover) {
            return Err(why.to_string());
        }
        let Some(taking) = self.of(attend.handover) else {
            return match self.known.load(Ordering::Acquire) {
                true => Ok(Attended::Whole),
                false => Err("the records of machines here cannot be read".to_owned()),
            };
        };
        if taking.from() != from {
            return Err(format!("{from} keeps nothing of this machine"));
        }
        Ok(taking.attend(attend.lane, Arc::new(PeerLane(connection))))
    }
}

/// A connection that the old host made.
struct PeerLane(Connection);

struct PeerComing(Pending);

impl Lane for PeerLane {
    fn ask(&self, kind: u16, header: Vec<u8>) -> Result<Box<dyn Coming>, LinkError> {
        let request = Request::new(kind, header.into(), Bytes::new());
        let pending = self.0.send_blocking(request).map_err(link_error)?;
        Ok(Box::new(PeerComing(pending)))
    }

    fn close(&self) {
        self.0.close();
    }
}

impl Coming for PeerComing {
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
pub(crate) fn expect(host: &Host, record: &mut Record, handover: HandoverId, from: &HostName) {
    record.owed = Some(Owed { handover, from: from.clone() });
    host.owings.enter(Arc::new(Taking::new(handover, from.clone(), &lengths(record))));
}

/// What a record says is owed, as of this daemon.
pub(crate) fn taking_of(host: &Host, record: &Record) -> Option<Arc<Taking>> {
    host.owings.of(record.owed.as_ref()?.handover)
}

/// Writes down what is owed, before the machine may run here.
pub(crate) fn keep_sets(host: &Host, record: &Record, live: &Live, taking: &Taking) -> Result<(), HostError> {
    let failed = |error: whimbrel_migrate::postcopy::SetError| HostError::Memory { source: error.into() };
    let path = memory_file(live.slot_dir());
    let memory = encode_sets(&[(0, taking.owed(0))]).map_err(failed)?;
    std::fs::write(&path, memory).map_err(|source| HostError::io("write", &path, source))?;
    let disks = (1..=record.config.disks.len()).map(|index| (index as u32, taking.owed(index)));
    let disks: Vec<(u32, PageSet)> = disks.filter(|(_, set)| !set.is_empty()).collect();
    if disks.is_empty() {
        return Ok(());
    }
    let path = disks_file(host, record);
    let disks = encode_sets(&disks).map_err(failed)?;
    durable::replace(&path, &disks).map_err(|source| HostError::io("write", &path, source))
}

fn memory_file(slot: &Path) -> PathBuf {
    slot.join("owed")
}

fn disks_file(host: &Host, record: &Record) -> PathBuf {
    host.layout.machine(&record.name).join("owed")
}

/// Finds again what was owed when the last daemon ended.
pub(crate) fn recall(host: &Host, record: &Record) {
    let Some(owed) = &record.owed else { return };
    let taking = Taking::new(owed.handover, owed.from.clone(), &lengths(record));
    let slot = record.process.as_ref().map(|process| host.layout.slot(&process.slot));
    for path in slot.map(|slot| memory_file(&slot)).into_iter().chain([disks_file(host, record)]) {
        match read_sets(&path, &lengths(record)) {
            Ok(sets) => taking.restore(sets),
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
    host.owings.enter(Arc::new(taking));
}

/// Refuses a machine of which it is not known what is elsewhere: what is here would be taken for all of it.
pub(crate) fn check(host: &Host, record: &Record) -> Result<(), HostError> {
    let why = record.owed.as_ref().and_then(|owed| host.owings.unreadable(owed.handover));
    why.map_or(Ok(()), |why| Err(HostError::Memory { source: why.to_string().into() }))
}

fn read_sets(path: &Path, lengths: &[u64]) -> io::Result<Vec<(u32, PageSet)>> {
    if std::fs::metadata(path)?.len() > FILE_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    decode_sets(&std::fs::read(path)?, lengths)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

impl Host {
    /// Brings what is missing of a machine that runs here, in the background.
    pub(crate) fn bring_the_rest(self: &Arc<Self>, machine: &Arc<Machine>, live: &mut Live) {
        let (host, machine) = (self.me.clone(), Arc::downgrade(machine));
        live.bring_the_rest(move || {
            // Not on the thread that brings: whoever has the turn may wait for that one's end.
            let settle = move || {
                let (Some(host), Some(machine)) = (host.upgrade(), machine.upgrade()) else { return };
                let mut turn = machine.begin_when_free("settling");
                if turn.live.as_ref().is_some_and(Live::is_brought) {
                    host.settle_owed(&mut turn);
                }
            };
            if let Err(error) = thread::Builder::new().name("settle".into()).spawn(settle) {
                tracing::error!(%error, "no thread to write down that all of a machine is here");
            }
        });
    }

    /// The same for a machine that was switched off before all of its disks was here, and runs again.
    pub(crate) fn bring_the_rest_of_disks(self: &Arc<Self>, machine: &Arc<Machine>) {
        let mut turn = machine.begin_when_free("start");
        if turn.record.owed.is_some()
            && let Some(live) = &mut turn.live
        {
            self.bring_the_rest(machine, live);
        }
    }

    /// All of it is here and durable: writes that down, then tells the host that kept it.
    pub(crate) fn settle_owed(&self, turn: &mut Turn<'_>) {
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
        let Some(taking) = self.owings.strike(handover) else { return };
        // An answer may take as long as a lost connection does; the other host hears it at its next attempt if not now.
        let tell = move || taking.is_whole();
        if let Err(error) = thread::Builder::new().name("release".into()).spawn(tell) {
            tracing::error!(%error, "no thread to tell that nothing is owed");
        }
    }

    /// Waits until all of a machine is here, for work that needs it whole.
    pub(crate) fn wait_for_the_rest(
        &self,
        turn: &mut Turn<'_>,
        reporter: &Reporter,
    ) -> Result<(), HostError> {
        let Some(owed) = turn.record.owed.clone() else { return Ok(()) };
        let Some(taking) = self.owings.of(owed.handover) else { return Ok(()) };
        let stage = format!("waiting for the rest of it, which is on {}", owed.from);
        while !turn.live()?.is_brought() {
            let view = taking.view();
            let here = view.owed.saturating_sub(view.stand.missing);
            reporter.progress(&stage, Unit::Pages, here, Some(view.owed));
            if reporter.is_cancelled() {
                return Err(HostError::Cancelled { left: "the machine runs on here".into() });
            }
            if !turn.live()?.qemu.process().is_alive() {
                let name = turn.record.name.clone();
                return Err(HostError::State { name, state: "crashed", needed: "running" });
            }
            thread::sleep(LOOK);
        }
        self.settle_owed(turn);
        Ok(())
    }

    /// A machine has ended here: nobody needs what its memory lacked. If its disks lack nothing, nothing is owed any more.
    pub(crate) fn memory_is_gone(&self, turn: &mut Turn<'_>) {
        let Some(taking) = taking_of(self, &turn.record) else { return };
        taking.waive(0);
        if taking.view().owed == 0 {
            self.settle_owed(turn);
        }
    }
}
