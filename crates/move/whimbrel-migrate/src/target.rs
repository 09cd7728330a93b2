//! Target of a migration: the incoming machines, and the effect of each message on them.
//!
//! Each incoming machine has a lock of its own. The states are those of [`crate::handover::Target`];
//! `incoming.rs` carries out its actions through [`TargetHost`] and [`IncomingMachine`], which the daemon
//! implements.

use crate::{
    baseline::Baseline,
    compatibility::Incompatibility,
    error::TargetError,
    handover::{PausedIncoming, Target, TargetEvent, TargetRecord},
    incoming::{Incoming, encode_reply},
    late_frames::{self, LateFrame, LateFramesHeader},
    page_batch::PageBatch,
    postcopy::{self, messages::MissingPages},
    protocol::{
        self, BootFileRange, FilePages, Finish, FinishHeader, HandoverId, Offer, Offered, PageQuery,
        PageQueryReply, PagesHeader,
    },
};
use bytes::Bytes;
use std::{
    collections::{HashMap, HashSet, VecDeque},
    error::Error,
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};
use whimbrel_core::{Digest, HostName, PAGE_SIZE, PageRun};

/// Index of memory among the arrays of an offer.
pub(crate) const MEMORY: usize = 0;

/// Error of the daemon while it serves an incoming machine.
pub type HostError = Box<dyn Error + Send + Sync>;

/// Host that accepts machines: reserves resources for them.
pub trait TargetHost: Send + Sync {
    /// Reserves name, memory, disks and devices for the offer of host `from`, or returns the reason why not;
    /// an [`Incompatibility`] is sent to the source as a value.
    fn reserve(&self, offer: &Offer, from: &HostName) -> Result<Box<dyn IncomingMachine>, HostError>;

    /// Fills `out` with the page of this digest, if it is anywhere on this host. The implementation has
    /// checked the digest.
    fn find_page(&self, _digest: &Digest, _out: &mut [u8; PAGE_SIZE]) -> bool {
        false
    }

    /// Delivers late frames to a machine that is incoming or has arrived, once it runs. Frames that cannot be
    /// delivered are dropped.
    fn deliver_late_frames(&self, _handover: HandoverId, _strays: Vec<LateFrame>) {}
}

/// Incoming machine: its arrays are here and being filled, and it does not run yet.
pub trait IncomingMachine: Send {
    /// Boot files of the offer that are not here yet.
    fn boot_files_missing(&self) -> Vec<Digest>;

    /// Baselines of the arrays; zeros for those beyond the list. Only baselines that the offer names.
    fn baselines(&self) -> Vec<Baseline> {
        Vec::new()
    }

    /// Stores a complete boot file whose digest was checked.
    fn store_boot_file(&mut self, digest: Digest, content: Vec<u8>) -> Result<(), HostError>;

    /// Reads a boot file of the offer that is here.
    fn read_boot_file(&self, digest: &Digest, offset: u64, out: &mut [u8]) -> Result<(), HostError> {
        let _ = (offset, out);
        Err(format!("cannot read the boot file {digest} here").into())
    }

    /// Stores pages of an array.
    fn write(&mut self, array: usize, run: PageRun, data: &[u8]) -> Result<(), HostError>;

    /// Makes pages of an array zero.
    fn zero(&mut self, array: usize, run: PageRun) -> Result<(), HostError>;

    /// Reads pages of an array back.
    fn read(&self, array: usize, run: PageRun, out: &mut [u8]) -> Result<(), HostError>;

    /// Records missing pages, which this side fetches once the machine runs; `piece` as in `page_set_codec`.
    fn add_missing(&mut self, owed: &MissingPages, piece: &[u8]) -> Result<(), HostError> {
        let _ = (owed, piece);
        Err("this host accepts no machine with missing pages".into())
    }

    /// Whether the process that holds the machine is alive: pages written to one that has ended are lost
    /// without an error.
    fn is_alive(&self) -> bool {
        true
    }

    /// Passes on the probable beginning of the device state, so that it can be loaded early. The final state
    /// may differ.
    fn expect_state(&mut self, ahead: &[u8]) -> Result<(), HostError> {
        let _ = ahead;
        Ok(())
    }

    /// Loads the device state into a paused machine and records durably that it waits here.
    fn prepare(&mut self, finish: &Finish, device_state: &[u8]) -> Result<(), HostError>;

    /// Makes a file for pages that are not to be written to the machine yet. It is gone once it is closed.
    fn spill_file(&self) -> Result<std::fs::File, HostError> {
        Err("this host holds no pages in a file".into())
    }

    /// Makes ready for another attempt after a failed [`IncomingMachine::prepare`]. The pages stay.
    fn restart(&mut self) -> Result<(), HostError> {
        Err("this host loads a machine once".into())
    }

    /// Runs the machine, opens its network and announces it.
    fn run(&mut self) -> Result<(), HostError>;

    /// Whether the process of the prepared machine has ended, and the source may have the machine back if its
    /// CPUs never ran here.
    fn has_ended(&self) -> bool {
        false
    }

    /// Records durably that the machine never ran here and never will. Its pages stay until it is discarded.
    fn record_never_ran(&mut self) -> Result<(), HostError> {
        Err("this host gives no machine back".into())
    }

    /// Instant at which its CPUs began to run here, from which the source computes the downtime.
    fn runs_since(&self) -> Option<Instant> {
        None
    }

    /// Kills the machine and frees what was reserved.
    fn discard(&mut self);
}

/// Most aborted handovers that are remembered to refuse their late offers. One is needed only as long as the
/// connection of its offer lives.
const ABORTED_MAX: usize = 4096;

/// All machines that are incoming at this host, and the outcome of earlier ones.
pub struct IncomingMigrations {
    host: Arc<dyn TargetHost>,
    table: Mutex<HashMap<HandoverId, Arc<Mutex<Incoming>>>>,
    ended: Mutex<Ended>,
}

/// Handovers that have ended, as far as messages about them may still arrive.
#[derive(Default)]
struct Ended {
    /// Completed handovers, for which a repeated commit is answered.
    arrived: HashSet<HandoverId>,
    /// Aborted handovers, for which a late offer is refused.
    aborted: VecDeque<HandoverId>,
}

impl Ended {
    fn of(&self, handover: HandoverId) -> Option<Target> {
        let arrived = self.arrived.contains(&handover).then_some(Target::Running);
        arrived.or_else(|| self.aborted.contains(&handover).then_some(Target::Discarded))
    }

    fn insert(&mut self, handover: HandoverId, state: Target) {
        match state {
            Target::Running => drop(self.arrived.insert(handover)),
            Target::Discarded if !self.aborted.contains(&handover) => {
                self.aborted.push_back(handover);
                if self.aborted.len() > ABORTED_MAX {
                    self.aborted.pop_front();
                }
            }
            Target::Discarded
            | Target::Receiving
            | Target::Prepared
            | Target::PerhapsStarted
            | Target::Returned => {}
        }
    }
}

impl IncomingMigrations {
    /// Creates the table without incoming machines.
    pub fn new(host: Arc<dyn TargetHost>) -> Self {
        Self { host, table: Mutex::default(), ended: Mutex::default() }
    }

    /// Adds the handover of an incoming machine that an earlier daemon left, or discards the machine.
    pub fn recover(
        &self,
        handover: HandoverId,
        (record, waiting): (TargetRecord, PausedIncoming),
        machine: Box<dyn IncomingMachine>,
    ) -> Result<(), TargetError> {
        let (state, actions) = Target::recovered(record, waiting);
        let mut incoming = Incoming::ended(state);
        incoming.machine = Some(machine);
        incoming.execute_all(actions)?;
        self.table().insert(handover, Arc::new(Mutex::new(incoming)));
        self.remove_ended(handover);
        Ok(())
    }

    /// Adds a handover by which, according to its record, a machine of this host arrived: a repeated commit
    /// is answered.
    pub fn adopt_arrived(&self, handover: HandoverId) {
        let (state, _) = Target::recovered(TargetRecord::Ours, PausedIncoming::Gone);
        self.ended().insert(handover, state);
    }

    /// Handles one message of host `from` and returns the reply's header. Blocks while the incoming machine
    /// works.
    pub fn handle(
        &self,
        from: &HostName,
        kind: u16,
        header: &[u8],
        payload: Bytes,
    ) -> Result<Vec<u8>, TargetError> {
        match kind {
            protocol::OFFER => self.offer(parse(header)?, from),
            protocol::BOOT_FILE => {
                let piece: BootFileRange = parse(header)?;
                self.with(piece.handover, |arriving| arriving.boot_file_range(&piece, &payload)).map(no_reply)
            }
            protocol::PAGES => {
                let pages: PagesHeader = parse(header)?;
                // Decoded before the lock is taken.
                let batch = PageBatch::decode(&pages.batch, payload)?;
                self.with(pages.handover, |arriving| arriving.pages(&pages, &batch)).map(no_reply)
            }
            protocol::BOOT_FILE_PAGES => {
                let pages: FilePages = parse(header)?;
                self.with(pages.handover, |arriving| arriving.file_pages(&pages)).map(no_reply)
            }
            protocol::QUERY_PAGES => self.query_pages(&parse(header)?),
            postcopy::messages::MISSING_PAGES => {
                let owed: MissingPages = parse(header)?;
                self.with(owed.handover, |arriving| arriving.add_missing(&owed, &payload)).map(no_reply)
            }
            protocol::EARLY_STATE => {
                self.with(parse(header)?, |arriving| arriving.store_early_state(&payload)).map(no_reply)
            }
            protocol::FINISH => {
                let word: FinishHeader = parse(header)?;
                self.with(word.finish.handover, |arriving| arriving.finish(word, &payload))
            }
            protocol::LATE_FRAMES => {
                let head: LateFramesHeader = parse(header)?;
                self.host.deliver_late_frames(head.handover, late_frames::decode(&head, &payload)?);
                Ok(Vec::new())
            }
            protocol::COMMIT => self.handle_outcome(parse(header)?, |arriving| arriving.commit(false)),
            protocol::COMMIT_OR_RETURN => {
                self.handle_outcome(parse(header)?, |arriving| arriving.commit(true))
            }
            protocol::ABORT => {
                let handover = parse(header)?;
                let abort = |arriving: &mut Incoming| arriving.event(TargetEvent::Abort);
                match self.handle_outcome(handover, abort) {
                    Err(TargetError::Unknown { .. }) => {
                        self.record_unknown(handover);
                        self.handle_outcome(handover, abort)
                    }
                    done => done,
                }
            }
            kind => Err(TargetError::Kind { kind }),
        }
    }

    /// Handles the loss of the connection of `handover`.
    pub fn connection_lost(&self, handover: HandoverId) {
        let done = self.with(handover, |arriving| arriving.event(TargetEvent::Failed));
        self.remove_ended(handover);
        if let Err(TargetError::Unknown { .. }) = done
            && self.record_unknown(handover)
        {
            tracing::debug!(%handover, "the connection of an offer was lost before its reply");
        }
    }

    /// Runs a machine whose source is gone, because a person has decided so.
    pub fn decide_here(&self, handover: HandoverId) -> Result<(), TargetError> {
        let kept = self.with(handover, |arriving| arriving.event(TargetEvent::Decided));
        self.remove_ended(handover);
        kept.map(drop)
    }

    /// Handles a commit or abort. It may come at any time, over any connection, and repeatedly.
    fn handle_outcome(
        &self,
        handover: HandoverId,
        handle: impl Fn(&mut Incoming) -> Result<Vec<u8>, TargetError>,
    ) -> Result<Vec<u8>, TargetError> {
        let done = self.with(handover, &handle);
        self.remove_ended(handover);
        let Err(TargetError::Unknown { .. }) = done else { return done };
        let Some(state) = self.ended().of(handover) else { return done };
        handle(&mut Incoming::ended(state))
    }

    /// Records the end of a handover if it is unknown, because its offer may still arrive or be in progress.
    /// Returns whether it was unknown.
    fn record_unknown(&self, handover: HandoverId) -> bool {
        // The lock is held until the handover is recorded, so that no offer comes in between.
        let table = self.table();
        let unknown = !table.contains_key(&handover) && self.ended().of(handover).is_none();
        if unknown {
            self.ended().insert(handover, Target::discard_unknown().0);
        }
        unknown
    }

    fn offer(&self, offer: Offer, from: &HostName) -> Result<Vec<u8>, TargetError> {
        check_offer(&offer)?;
        if self.table().contains_key(&offer.handover) {
            return Err(TargetError::Invalid { what: "a second offer of one handover" });
        }
        if let Some(state) = self.ended().of(offer.handover) {
            return Err(TargetError::State { state });
        }
        let handover = offer.handover;
        let (mut arriving, accepted) = match Incoming::reserved(self.host.clone(), offer, from) {
            Ok(reserved) => reserved,
            Err(TargetError::Refused { source }) => {
                let misfit = source.downcast::<Incompatibility>();
                return misfit
                    .map(|misfit| encode_reply(&Offered::Misfit(*misfit)))
                    .map_err(|source| TargetError::Refused { source });
            }
            Err(error) => return Err(error),
        };
        let mut table = self.table();
        // Copied into a local: the lock on ended handovers is not held while the machine is discarded.
        let ended = self.ended().of(handover);
        if let Some(state) = ended {
            // The source aborted, or disconnected, while resources were reserved.
            drop(table);
            arriving.event(TargetEvent::Abort)?;
            return Err(TargetError::State { state });
        }
        table.insert(handover, Arc::new(Mutex::new(arriving)));
        Ok(accepted)
    }

    /// Looks for pages on this host and stores those that are found in the array.
    fn query_pages(&self, ask: &PageQuery) -> Result<Vec<u8>, TargetError> {
        let invalid = || TargetError::Invalid { what: "an invalid page query" };
        // Checked for any array before the search, and for this array before the pages are stored.
        if !ask.is_valid(u64::MAX) {
            return Err(invalid());
        }
        let mut found = Vec::with_capacity(ask.digests.len());
        let mut content = vec![0; ask.digests.len() * PAGE_SIZE];
        for (digest, out) in ask.digests.iter().zip(content.as_chunks_mut::<PAGE_SIZE>().0) {
            found.push(self.host.find_page(digest, out));
        }
        if found.contains(&true) {
            self.with(ask.handover, |arriving| arriving.store_found(ask, &found, &content))?;
        }
        Ok(postcard::to_stdvec(&PageQueryReply::of(&found)).expect("a reply is always encodable"))
    }

    fn with<T>(
        &self,
        handover: HandoverId,
        act: impl FnOnce(&mut Incoming) -> Result<T, TargetError>,
    ) -> Result<T, TargetError> {
        let arriving = self.table().get(&handover).cloned().ok_or(TargetError::Unknown { handover })?;
        let mut arriving = arriving.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        act(&mut arriving)
    }

    /// Removes an incoming machine whose handover has ended, and records the outcome.
    fn remove_ended(&self, handover: HandoverId) {
        let Some(arriving) = self.table().get(&handover).cloned() else { return };
        let state = arriving.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).state;
        if let Target::Running | Target::Discarded = state {
            self.ended().insert(handover, state);
            self.table().remove(&handover);
        }
    }

    fn ended(&self) -> MutexGuard<'_, Ended> {
        self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn table(&self) -> MutexGuard<'_, HashMap<HandoverId, Arc<Mutex<Incoming>>>> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn parse<'a, T: serde::Deserialize<'a>>(header: &'a [u8]) -> Result<T, TargetError> {
    postcard::from_bytes(header).map_err(|source| TargetError::Header { source })
}

fn no_reply((): ()) -> Vec<u8> {
    Vec::new()
}

/// Checks an offer as far as possible without the host.
fn check_offer(offer: &Offer) -> Result<(), TargetError> {
    let disks = offer.config.disks.iter().map(|disk| disk.size.0 / PAGE_SIZE as u64);
    let expected: Vec<u64> = std::iter::once(offer.config.memory_pages()).chain(disks).collect();
    let arrays: Vec<u64> = offer.arrays.iter().map(|array| array.pages).collect();
    if arrays.len() > protocol::ARRAYS_MAX || arrays != expected {
        return Err(TargetError::Invalid { what: "arrays that do not match the machine's configuration" });
    }
    if offer.blobs.len() > protocol::BOOT_FILES_MAX
        || offer.blobs.iter().any(|(_, size)| *size > protocol::BOOT_FILE_MAX)
    {
        return Err(TargetError::Invalid { what: "too many or too large boot files" });
    }
    if offer
        .third
        .as_ref()
        .is_some_and(|third| third.request.len() > protocol::PROTECTION_REQUEST_MAX || offer.leaves.is_none())
    {
        return Err(TargetError::Invalid { what: "an unneeded or too long protection request" });
    }
    let long = |file: &protocol::SharedFile| file.path.len().max(file.mark.len()) > protocol::PATH_MAX;
    if offer.bases.len() > protocol::BASES_MAX
        || offer.files.len() > offer.config.disks.len()
        || offer.files.iter().any(long)
    {
        return Err(TargetError::Invalid { what: "too many baselines or too long file paths" });
    }
    Ok(())
}
