//! Target of a migration: the incoming machines, and the effect of each message on them.
//!
//! Each incoming machine has a lock of its own. Everything in a message is checked against the offer before
//! it is used. The states are those of [`crate::handover::Target`]; this module turns its actions into calls
//! of [`IncomingMachine`], which the daemon implements.

use crate::{
    baseline::Baseline,
    compatibility::Incompatibility,
    error::TargetError,
    handover::{Target, TargetAction, TargetEvent},
    late_frames::{self, LateFrame, LateFramesHeader},
    page_batch::PageBatch,
    postcopy::{self, messages::MissingPages},
    protocol::{
        self, Accepted, BootFileRange, FilePages, Finish, FinishHeader, HandoverId, Offer, Offered,
        PageQuery, PageQueryReply, PagesHeader, Prepared, RunningSince,
    },
};
use bytes::Bytes;
use std::{
    collections::{HashMap, HashSet, VecDeque},
    error::Error,
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};

/// Index of memory among the arrays of an offer.
pub(crate) const MEMORY: usize = 0;

/// Error of the daemon while it serves an incoming machine.
pub type HostError = Box<dyn Error + Send + Sync>;

/// Host that accepts machines: reserves resources for them.
pub trait TargetHost: Send + Sync {
    /// Reserves name, memory, disks and devices for `offer`, or returns the reason why not; an
    /// [`Incompatibility`] is sent to the source as a value.
    fn reserve(&self, offer: &Offer) -> Result<Box<dyn IncomingMachine>, HostError>;

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

    /// Runs the machine, opens its network and announces it.
    fn run(&mut self) -> Result<(), HostError>;

    /// Instant at which its CPUs began to run here, from which the source computes the downtime.
    fn runs_since(&self) -> Option<Instant> {
        None
    }

    /// Kills the machine and frees what was reserved.
    fn discard(&mut self);
}

struct Incoming {
    state: Target,
    machine: Box<dyn IncomingMachine>,
    /// Lengths of the offered arrays, in pages.
    arrays: Vec<u64>,
    boot_files: Vec<(Digest, u64)>,
    boot_file: Vec<u8>,
    /// Early device state that the source sent.
    early_state: Vec<u8>,
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
            Target::Discarded | Target::Receiving | Target::Prepared => {}
        }
    }
}

impl IncomingMigrations {
    /// Creates the table without incoming machines.
    pub fn new(host: Arc<dyn TargetHost>) -> Self {
        Self { host, table: Mutex::default(), ended: Mutex::default() }
    }

    /// Adds an incoming machine that an earlier daemon had prepared: it waits for the source's commit or
    /// abort.
    pub fn adopt_prepared(
        &self,
        handover: HandoverId,
        arrival: Box<dyn IncomingMachine>,
    ) -> Result<(), TargetError> {
        let state = Target::Prepared;
        let arriving = Incoming {
            state,
            machine: arrival,
            arrays: vec![],
            boot_files: vec![],
            boot_file: vec![],
            early_state: vec![],
        };
        self.table().insert(handover, Arc::new(Mutex::new(arriving)));
        Ok(())
    }

    /// Adds a handover by which, according to its record, a machine of this host arrived: a repeated commit
    /// is answered.
    pub fn adopt_arrived(&self, handover: HandoverId) {
        self.ended().insert(handover, Target::Running);
    }

    /// Handles one message and returns the reply's header. Blocks while the incoming machine works.
    pub fn handle(&self, kind: u16, header: &[u8], payload: Bytes) -> Result<Vec<u8>, TargetError> {
        match kind {
            protocol::OFFER => self.offer(parse(header)?),
            protocol::BOOT_FILE => {
                let piece: BootFileRange = parse(header)?;
                self.with(piece.handover, |arriving| arriving.boot_file_range(&piece, &payload))
            }
            protocol::PAGES => {
                let pages: PagesHeader = parse(header)?;
                // Decoded before the lock is taken.
                let batch = PageBatch::decode(&pages.batch, &payload)?;
                self.with(pages.handover, |arriving| arriving.pages(&pages, &batch))
            }
            protocol::BOOT_FILE_PAGES => {
                let pages: FilePages = parse(header)?;
                self.with(pages.handover, |arriving| arriving.file_pages(&pages))
            }
            protocol::QUERY_PAGES => self.query_pages(&parse(header)?),
            postcopy::messages::MISSING_PAGES => {
                let owed: MissingPages = parse(header)?;
                self.with(owed.handover, |arriving| arriving.add_missing(&owed, &payload))
            }
            protocol::EARLY_STATE => {
                self.with(parse(header)?, |arriving| arriving.store_early_state(&payload))
            }
            protocol::FINISH => {
                let word: FinishHeader = parse(header)?;
                let begun = Instant::now();
                self.with(word.finish.handover, |arriving| arriving.finish(&word, &payload))?;
                Ok(encode_reply(&Prepared { took: begun.elapsed().as_micros() as u64 }))
            }
            protocol::LATE_FRAMES => {
                let head: LateFramesHeader = parse(header)?;
                self.host.deliver_late_frames(head.handover, late_frames::decode(&head, &payload)?);
                Ok(Vec::new())
            }
            protocol::COMMIT => self.handle_outcome(parse(header)?, TargetEvent::Commit),
            protocol::ABORT => self.handle_outcome(parse(header)?, TargetEvent::Abort),
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

    /// Handles a commit or abort. It may come at any time, over any connection, and repeatedly.
    fn handle_outcome(&self, handover: HandoverId, event: TargetEvent) -> Result<Vec<u8>, TargetError> {
        let mut runs_since = None;
        let done = self.with(handover, |arriving| {
            arriving.event(event)?;
            runs_since = arriving.machine.runs_since();
            Ok(())
        });
        self.remove_ended(handover);
        if let (Ok(_), TargetEvent::Commit, Some(since)) = (&done, event, runs_since) {
            return Ok(encode_reply(&RunningSince { since: since.elapsed().as_micros() as u64 }));
        }
        let Err(TargetError::Unknown { .. }) = done else { return done };
        if event == TargetEvent::Abort && self.record_unknown(handover) {
            return Ok(Vec::new());
        }
        let Some(state) = self.ended().of(handover) else { return done };
        match (state.step(event).0, event) {
            (Target::Running, TargetEvent::Commit) | (Target::Discarded, TargetEvent::Abort) => {
                Ok(Vec::new())
            }
            (state, _) => Err(TargetError::State { state }),
        }
    }

    /// Records the end of an unknown handover, because its offer may still arrive or be in progress. Returns
    /// whether it was unknown.
    fn record_unknown(&self, handover: HandoverId) -> bool {
        // The lock is held until the handover is recorded, so that no offer comes in between.
        let table = self.table();
        let unknown = !table.contains_key(&handover) && self.ended().of(handover).is_none();
        if unknown {
            self.ended().insert(handover, Target::discard_unknown().0);
        }
        unknown
    }

    fn offer(&self, offer: Offer) -> Result<Vec<u8>, TargetError> {
        check_offer(&offer)?;
        if self.table().contains_key(&offer.handover) {
            return Err(TargetError::Invalid { what: "a second offer of one handover" });
        }
        if let Some(state) = self.ended().of(offer.handover) {
            return Err(TargetError::State { state });
        }
        let arrival = match self.host.reserve(&offer).map_err(|error| error.downcast::<Incompatibility>()) {
            Ok(arrival) => arrival,
            Err(Ok(misfit)) => return Ok(reply(&Offered::Misfit(*misfit))),
            Err(Err(source)) => return Err(TargetError::Refused { source }),
        };
        let (blobs_missing, begun_as) = (arrival.boot_files_missing(), arrival.baselines());
        let accepted = Offered::Accepted(Accepted { blobs_missing, begun_as });
        let arrays = offer.arrays.iter().map(|array| array.pages).collect();
        // `reserve` has carried out the actions; the reply is the rest.
        let ((state, _), blobs) = (Target::initial(), offer.blobs);
        let mut arriving = Incoming {
            state,
            machine: arrival,
            arrays,
            boot_files: blobs,
            boot_file: vec![],
            early_state: vec![],
        };
        let mut table = self.table();
        // Copied into a local: the lock on ended handovers is not held while the machine is discarded.
        let ended = self.ended().of(offer.handover);
        if let Some(state) = ended {
            // The source aborted, or disconnected, while resources were reserved.
            drop(table);
            arriving.event(TargetEvent::Abort)?;
            return Err(TargetError::State { state });
        }
        table.insert(offer.handover, Arc::new(Mutex::new(arriving)));
        Ok(reply(&accepted))
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

    fn with(
        &self,
        handover: HandoverId,
        act: impl FnOnce(&mut Incoming) -> Result<(), TargetError>,
    ) -> Result<Vec<u8>, TargetError> {
        let arriving = self.table().get(&handover).cloned().ok_or(TargetError::Unknown { handover })?;
        let mut arriving = arriving.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        act(&mut arriving).map(|()| Vec::new())
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

impl Incoming {
    fn event(&mut self, event: TargetEvent) -> Result<(), TargetError> {
        let (next, actions) = self.state.step(event);
        for action in actions {
            match action {
                TargetAction::RunAndConfirm => {
                    self.machine.run().map_err(|source| TargetError::Run { source })?;
                }
                TargetAction::Discard => self.machine.discard(),
                // `reserve` and `prepare` have done it; the reply to the message tells the source.
                TargetAction::ReserveAndAccept
                | TargetAction::MarkAndConfirmReady
                | TargetAction::ConfirmRunning
                | TargetAction::ConfirmDiscarded => {}
            }
        }
        self.state = next;
        match (event, next) {
            (TargetEvent::Commit, Target::Running) | (TargetEvent::Abort | TargetEvent::Failed, _) => Ok(()),
            (TargetEvent::Loaded, Target::Prepared) => Ok(()),
            _ => Err(TargetError::State { state: next }),
        }
    }

    fn receiving(&self) -> Result<(), TargetError> {
        match self.state {
            Target::Receiving => Ok(()),
            state => Err(TargetError::State { state }),
        }
    }

    fn boot_file_range(&mut self, piece: &BootFileRange, data: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        let known = self.boot_files.iter().find(|(digest, _)| *digest == piece.digest);
        let (digest, size) = *known.ok_or(TargetError::Invalid { what: "an unknown boot file" })?;
        if piece.offset == 0 {
            self.boot_file.clear();
        }
        if piece.offset != self.boot_file.len() as u64 || piece.offset + data.len() as u64 > size {
            return Err(TargetError::Invalid { what: "a boot file range out of order" });
        }
        self.boot_file.extend_from_slice(data);
        if (self.boot_file.len() as u64) < size {
            return Ok(());
        }
        let content = std::mem::take(&mut self.boot_file);
        if Digest::of(&content) != digest {
            return Err(TargetError::Invalid { what: "a boot file with another digest" });
        }
        self.machine.store_boot_file(digest, content).map_err(TargetError::write)
    }

    fn pages(&mut self, pages: &PagesHeader, batch: &PageBatch) -> Result<(), TargetError> {
        self.receiving()?;
        let array = pages.batch.array as usize;
        let len =
            *self.arrays.get(array).ok_or(TargetError::Invalid { what: "an array that was not offered" })?;
        pages.batch.check(len)?;
        let mut rest = batch.whole();
        for run in &pages.batch.whole {
            let (data, after) = rest.split_at(run.bytes());
            self.machine.write(array, *run, data).map_err(TargetError::write)?;
            rest = after;
        }
        let (mut buffer, mut patches) = (Vec::new(), batch.patches());
        for run in &pages.batch.delta {
            buffer.resize(run.bytes(), 0);
            self.machine.read(array, *run, &mut buffer).map_err(TargetError::write)?;
            for (page, patch) in buffer.chunks_exact_mut(PAGE_SIZE).zip(&mut patches) {
                patch.apply(page);
            }
            self.machine.write(array, *run, &buffer).map_err(TargetError::write)?;
        }
        pages.batch.zero.iter().try_for_each(|run| self.machine.zero(array, *run)).map_err(TargetError::write)
    }

    /// Copies pages of memory from the boot files. Nothing is stored unless all pages equal those on the
    /// source.
    fn file_pages(&mut self, pages: &FilePages) -> Result<(), TargetError> {
        self.receiving()?;
        if !pages.is_valid(self.arrays[MEMORY], &self.boot_files) {
            return Err(TargetError::Invalid { what: "pages that are in no boot file" });
        }
        let mut data = vec![0; pages.runs.iter().map(|run| run.pages.bytes()).sum()];
        let mut rest = &mut data[..];
        for run in &pages.runs {
            let (out, after) = rest.split_at_mut(run.pages.bytes());
            let (digest, _) = &self.boot_files[usize::from(run.file)];
            self.machine.read_boot_file(digest, run.offset, out).map_err(TargetError::write)?;
            rest = after;
        }
        if FilePages::check_of(&data) != pages.check {
            return Err(TargetError::Invalid {
                what: "pages of a boot file that differ here: one of the two copies is damaged",
            });
        }
        let mut rest = &data[..];
        for run in &pages.runs {
            let (content, after) = rest.split_at(run.pages.bytes());
            self.machine.write(MEMORY, run.pages, content).map_err(TargetError::write)?;
            rest = after;
        }
        Ok(())
    }

    fn store_found(&mut self, ask: &PageQuery, found: &[bool], content: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        let array = ask.array as usize;
        let len = self.arrays.get(array).copied().filter(|len| ask.is_valid(*len));
        len.ok_or(TargetError::Invalid { what: "a query for pages that were not offered" })?;
        let pages = ask.runs.iter().flat_map(|run| run.pages()).zip(content.chunks_exact(PAGE_SIZE));
        for ((page, content), _) in pages.zip(found).filter(|(_, found)| **found) {
            self.machine.write(array, PageRun::new(page, 1), content).map_err(TargetError::write)?;
        }
        Ok(())
    }

    fn add_missing(&mut self, owed: &MissingPages, piece: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        if owed.array as usize >= self.arrays.len() {
            return Err(TargetError::Invalid { what: "pages of an array that was not offered" });
        }
        self.machine.add_missing(owed, piece).map_err(TargetError::write)
    }

    fn store_early_state(&mut self, packed: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        if !self.early_state.is_empty() {
            return Err(TargetError::Invalid { what: "a second early device state" });
        }
        let ahead = protocol::unpack_state(packed, protocol::DEVICE_STATE_MAX);
        self.early_state = ahead.ok_or(BAD_STATE)?;
        self.machine.expect_state(&self.early_state).map_err(|source| TargetError::Prepare { source })
    }

    fn device_state(&mut self, word: &FinishHeader, rest: &[u8]) -> Result<Vec<u8>, TargetError> {
        let (ahead, len) = (word.ahead as usize, word.rest as usize);
        if ahead > self.early_state.len() || ahead.saturating_add(len) > protocol::DEVICE_STATE_MAX {
            return Err(BAD_STATE);
        }
        let rest = protocol::unpack_state(rest, len).filter(|rest| rest.len() == len).ok_or(BAD_STATE)?;
        let mut state = std::mem::take(&mut self.early_state);
        state.truncate(ahead);
        state.extend(rest);
        Ok(state)
    }

    fn finish(&mut self, word: &FinishHeader, rest: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        let device_state = self.device_state(word, rest)?;
        // After a failure the machine stays until the source aborts: its own machine is paused until this is
        // answered.
        let prepared = self.machine.prepare(&word.finish, &device_state);
        prepared.map_err(|source| TargetError::Prepare { source })?;
        self.event(TargetEvent::Loaded)
    }
}

fn parse<'a, T: serde::Deserialize<'a>>(header: &'a [u8]) -> Result<T, TargetError> {
    postcard::from_bytes(header).map_err(|source| TargetError::Header { source })
}

fn reply(offered: &Offered) -> Vec<u8> {
    encode_reply(offered)
}

fn encode_reply(answer: &impl serde::Serialize) -> Vec<u8> {
    postcard::to_stdvec(answer).expect("a reply is always encodable")
}

const BAD_STATE: TargetError = TargetError::Invalid { what: "a device state whose parts do not match" };

/// Checks an offer as far as possible without the host.
fn check_offer(offer: &Offer) -> Result<(), TargetError> {
    let disks = offer.config.disks.iter().map(|disk| disk.size.0 / PAGE_SIZE as u64);
    let expected: Vec<u64> = std::iter::once(offer.config.memory_pages()).chain(disks).collect();
    let arrays: Vec<u64> = offer.arrays.iter().map(|array| array.pages).collect();
    if arrays.len() > protocol::ARRAYS_MAX || arrays != expected {
        return Err(TargetError::Invalid { what: "arrays that do not match the machine's configuration" });
    }
    if offer.blobs.len() > 2 || offer.blobs.iter().any(|(_, size)| *size > protocol::BOOT_FILE_MAX) {
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
