//! The receiving side: holds an epoch aside until all of it is here and checked, then makes it the machine's
//! state.
//!
//! [`crate::epoch::StandbyEpochs`] says what comes when; this file does it to an [`IncomingMachine`], which
//! is what the target of a migration has: memory and disks of a QEMU that waits. Taking over is the end of
//! such a migration: load the device state, run.
//!
//! A failure to write in the middle of applying an epoch leaves neither the old state nor the new one: the
//! standby then refuses everything, so that the primary learns that it is unprotected.

use crate::{
    codec::{
        self,
        decoder::{Decoder, PageSink},
        shared_pages::PageReference,
    },
    epoch::{StandbyEpochAction, StandbyEpochs, StandbyEvent},
    epoch_snapshot::{EpochSnapshot, EpochSnapshots, SnapshotLost, SnapshotPages},
    error::{BoxError, StandbyError},
    protocol::{Compare, DEVICES, EPOCH_BYTES_MAX, EpochEnd, EpochPages, PagesToResend, ProtectionId},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};
use whimbrel_migrate::{
    protocol::{BLOB_MAX, BootFileRange, DEVICE_STATE_MAX, Finish, HandoverId},
    target::IncomingMachine,
};

/// Most ports whose addresses travel.
const PORTS_MAX: usize = 64;

/// Most pages of an epoch: also zeros, which take no room, are remembered one by one.
const HELD_PAGES_MAX: usize = (EPOCH_BYTES_MAX + DEVICE_STATE_MAX) / PAGE_SIZE;

/// What there is to take over from, for those who must know while the receiver is at work.
///
/// Cleared before the first byte is written that may leave the machine of no one instant, set once it is
/// whole again.
pub struct CommittedEpoch(Mutex<(Option<u64>, Instant)>);

impl CommittedEpoch {
    fn nothing() -> Self {
        Self(Mutex::new((None, Instant::now())))
    }

    /// The epoch that is whole here, if one is, and since when that is so.
    pub fn epoch(&self) -> (Option<u64>, Instant) {
        *self.lock()
    }

    /// From now on nothing is whole.
    pub fn clear(&self) {
        self.lock().0 = None;
    }

    fn set(&self, epoch: Option<u64>) {
        *self.lock() = (epoch, Instant::now());
    }

    fn lock(&self) -> MutexGuard<'_, (Option<u64>, Instant)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The receiving side of one protection.
pub struct EpochReceiver {
    arrival: Box<dyn IncomingMachine>,
    /// Lengths of the arrays, in pages.
    arrays: Vec<u64>,
    blobs: Vec<(Digest, u64)>,
    blob: Vec<u8>,
    decoder: Decoder,
    state: StandbyEpochs,
    current: Arc<CommittedEpoch>,
    held: Held,
    /// Of the last committed epoch.
    device_state: Vec<u8>,
    ports: Vec<Vec<u8>>,
    handover: HandoverId,
    /// If copies of epochs are wanted.
    keeping: Option<EpochSnapshots>,
}

/// Who has pages of other machines of the same primary.
pub trait SiblingPages {
    /// Reads a page of another protection's standby here, if it can be read now. What it returns may be of
    /// any moment.
    fn read(&self, name: &PageReference, out: &mut [u8]) -> bool;
}

/// There are no others.
pub struct NoSiblings;

impl SiblingPages for NoSiblings {
    fn read(&self, _: &PageReference, _: &mut [u8]) -> bool {
        false
    }
}

/// Pages of the epoch under way: where each is in the room, none for a zero page.
#[derive(Default)]
struct Held {
    pages: BTreeMap<(u32, u64), Option<usize>>,
    room: Vec<u8>,
}

/// Assembles the pages of one piece.
struct Assembling<'r> {
    arrival: &'r mut dyn IncomingMachine,
    state: &'r mut StandbyEpochs,
    current: &'r CommittedEpoch,
    held: &'r mut Held,
    keeping: Option<&'r mut EpochSnapshots>,
    /// The device state of the last epoch.
    devices: &'r [u8],
    neighbours: &'r dyn SiblingPages,
    /// Lengths of the arrays, in pages.
    arrays: &'r [u64],
    id: ProtectionId,
    array: u32,
    epoch: Option<u64>,
}

impl EpochReceiver {
    /// A standby whose arrival has room for arrays of these lengths.
    pub fn new(
        arrival: Box<dyn IncomingMachine>,
        arrays: Vec<u64>,
        blobs: Vec<(Digest, u64)>,
        handover: HandoverId,
    ) -> Result<Self, StandbyError> {
        Ok(Self {
            arrival,
            arrays,
            blobs,
            blob: Vec::new(),
            decoder: Decoder::new().map_err(StandbyError::Codec)?,
            state: StandbyEpochs::Filling,
            current: Arc::new(CommittedEpoch::nothing()),
            held: Held::default(),
            device_state: Vec::new(),
            ports: Vec::new(),
            handover,
            keeping: None,
        })
    }

    /// Whether it has a whole epoch, and which: to be looked at while this works.
    pub fn current(&self) -> Arc<CommittedEpoch> {
        self.current.clone()
    }

    /// Whether what it fills is still there.
    pub fn is_alive(&self) -> bool {
        self.arrival.is_alive()
    }

    /// The lengths of its arrays, and by which handover it is known.
    pub fn shape(&self) -> (&[u64], HandoverId) {
        (&self.arrays, self.handover)
    }

    /// Another protection of the same machine begins: what is here is older than it, and may be of no one
    /// instant.
    pub fn restart(&mut self) {
        self.current.clear();
        self.state = StandbyEpochs::Filling;
        self.held.clear();
        self.keeping.iter_mut().for_each(|keeping| keeping.abandon(SnapshotLost::Over));
    }

    /// Whether copies of epochs are wanted from now on. The first one has all that was ever written; whether
    /// it was the first is the answer. Of one that is `fresh` nothing was written yet.
    pub fn wants_snapshot(&mut self, wanted: bool, fresh: bool) -> bool {
        let first = self.keeping.is_none();
        match wanted {
            true => drop(self.keeping.get_or_insert_with(|| EpochSnapshots::new(&self.arrays, fresh))),
            false => self.keeping = None,
        }
        first
    }

    /// Begins a copy of the epoch that is whole here. None if none is, or a copy is in the making.
    pub fn start_snapshot(&mut self) -> Option<EpochSnapshot> {
        let epoch = self.state.committed()?;
        let copy = self.keeping.as_mut()?.start()?;
        Some(EpochSnapshot { copy, epoch, device_state: self.device_state.clone() })
    }

    /// The next pages of a copy, a few each time.
    pub fn kept_pages(&mut self, copy: u64) -> Result<SnapshotPages, SnapshotLost> {
        self.keeping.as_mut().ok_or(SnapshotLost::Over)?.next(&*self.arrival, copy)
    }

    /// A copy is stored; or is not, and its pages belong to the next one.
    pub fn snapshot_done(&mut self, copy: u64, stored: bool) {
        self.keeping.iter_mut().for_each(|keeping| keeping.end(copy, stored));
    }

    /// A piece of a boot file.
    pub fn blob_piece(&mut self, piece: &BootFileRange, data: &[u8]) -> Result<(), StandbyError> {
        let invalid = |what| StandbyError::Invalid { what };
        let known = self.blobs.iter().find(|(digest, _)| *digest == piece.digest);
        let (digest, size) = *known.ok_or(invalid("a blob that was not offered"))?;
        if piece.offset == 0 {
            self.blob.clear();
        }
        let end = piece.offset.saturating_add(data.len() as u64);
        if piece.offset != self.blob.len() as u64 || end > size.min(BLOB_MAX) {
            return Err(invalid("a blob piece out of order"));
        }
        self.blob.extend_from_slice(data);
        if (self.blob.len() as u64) < size {
            return Ok(());
        }
        let content = std::mem::take(&mut self.blob);
        if Digest::of(&content) != digest {
            return Err(invalid("a blob with another digest"));
        }
        self.arrival.put_blob(digest, content).map_err(StandbyError::Write)
    }

    /// Which pages differ from those whose digests came: one bit a page.
    pub fn compare(&self, asked: &Compare, checks: &[u8]) -> Result<Vec<u8>, StandbyError> {
        let invalid = |what| StandbyError::Invalid { what };
        let len = *self.arrays.get(asked.array as usize).ok_or(invalid("an array that was not offered"))?;
        let fits = asked.run.len <= crate::protocol::COMPARE_PAGES_MAX
            && asked.run.start.checked_add(asked.run.len).is_some_and(|end| end <= len)
            && checks.len() as u64 == asked.run.len * codec::CHECK_BYTES as u64;
        if !fits {
            return Err(invalid("a comparison of pages that are not there"));
        }
        let mut bits = vec![0u8; asked.run.len.div_ceil(8) as usize];
        let mut content = vec![0; 256 * PAGE_SIZE];
        let mut checks = checks.chunks_exact(codec::CHECK_BYTES);
        for part in asked.run.chunks(256) {
            let out = &mut content[..part.bytes()];
            self.arrival.read(asked.array as usize, part, out).map_err(StandbyError::Write)?;
            for (page, content) in part.pages().zip(out.chunks_exact(PAGE_SIZE)) {
                let at = (page - asked.run.start) as usize;
                if checks.next() != Some(&codec::check_of(content)) {
                    bits[at / 8] |= 1 << (at % 8);
                }
            }
        }
        Ok(bits)
    }

    /// Pages of an epoch, or of a first copy, of which none is another machine's.
    pub fn piece(&mut self, piece: &EpochPages, payload: &[u8]) -> Result<PagesToResend, StandbyError> {
        self.piece_among(piece, payload, &NoSiblings)
    }

    /// Pages of an epoch, or of a first copy.
    pub fn piece_among(
        &mut self,
        piece: &EpochPages,
        payload: &[u8],
        neighbours: &dyn SiblingPages,
    ) -> Result<PagesToResend, StandbyError> {
        let len = match (piece.array, piece.epoch) {
            (DEVICES, Some(_)) => (DEVICE_STATE_MAX / PAGE_SIZE) as u64,
            (array, _) => *self
                .arrays
                .get(array as usize)
                .ok_or(StandbyError::Invalid { what: "an array that was not offered" })?,
        };
        if let StandbyEpochs::Over { .. } = self.state {
            return Err(StandbyError::NotFollowing);
        }
        let mut into = Assembling {
            arrival: &mut *self.arrival,
            state: &mut self.state,
            current: &self.current,
            held: &mut self.held,
            keeping: self.keeping.as_mut(),
            devices: &self.device_state,
            neighbours,
            arrays: &self.arrays,
            id: piece.id,
            array: piece.array,
            epoch: piece.epoch,
        };
        let pages = self.decoder.decode(payload, piece.block, len, &mut into)?;
        Ok(PagesToResend { pages })
    }

    /// Reads a page for another machine's standby; whether it could be. What is in it is that one's to check.
    pub fn read_shared(&self, array: u32, page: u64, out: &mut [u8]) -> bool {
        let is_there = self.arrays.get(array as usize).is_some_and(|len| page < *len);
        // What was taken over is written by its guest, and not ours to look into.
        is_there
            && !matches!(self.state, StandbyEpochs::Over { .. })
            && self.arrival.read(array as usize, PageRun::new(page, 1), out).is_ok()
    }

    /// All of an epoch was sent. On success it is this machine's state, whole.
    pub fn seal(&mut self, seal: EpochEnd, payload: Vec<u8>) -> Result<(), StandbyError> {
        let device_len = seal.device_bytes.map_or(payload.len(), |len| len as usize);
        if device_len > DEVICE_STATE_MAX || seal.ports.len() > PORTS_MAX {
            return Err(StandbyError::Invalid { what: "a device state that is too large" });
        }
        let (next, action) = self.state.step(StandbyEvent::Seal { epoch: seal.epoch, pages: seal.pages });
        match action {
            StandbyEpochAction::Apply => {}
            StandbyEpochAction::Acknowledge => return Ok(()),
            _ if matches!(self.state, StandbyEpochs::Over { .. }) => return Err(StandbyError::NotFollowing),
            _ => return Err(StandbyError::Invalid { what: "the end of an epoch that is not here" }),
        }
        let device_state = match seal.device_bytes {
            Some(_) => self.held.devices(device_len, &self.device_state)?,
            None => payload,
        };
        self.current.clear();
        let applied = self.held.apply(&mut *self.arrival, self.keeping.as_mut());
        self.held.clear();
        if let Err(error) = applied {
            // Half of it is written: there is no state to take over from any more.
            self.state = StandbyEpochs::Filling;
            return Err(StandbyError::Write(error));
        }
        self.state = next;
        self.current.set(next.committed());
        self.device_state = device_state;
        self.ports = seal.ports;
        Ok(())
    }

    /// Loads the last whole epoch; what was on its way of a later one is void. Then [`EpochReceiver::run`].
    pub fn take_over(&mut self) -> Result<(), StandbyError> {
        let (next, action) = self.state.step(StandbyEvent::TakeOver);
        if action != StandbyEpochAction::Run {
            return Err(StandbyError::Invalid { what: "no epoch yet that is whole" });
        }
        self.state = next;
        self.held = Held::default();
        self.keeping = None;
        let finish = Finish { handover: self.handover, ports: std::mem::take(&mut self.ports) };
        self.arrival.prepare(&finish, &std::mem::take(&mut self.device_state)).map_err(StandbyError::TakeOver)
    }

    /// Lets the machine run that was loaded.
    pub fn run(&mut self) -> Result<(), StandbyError> {
        self.arrival.run().map_err(StandbyError::TakeOver)
    }

    /// What [`EpochReceiver::take_over`] could not load: frees what was reserved.
    pub fn release_pages(&mut self) {
        self.arrival.discard();
    }

    /// Ends it and frees what was reserved.
    pub fn discard(&mut self) {
        let (next, action) = self.state.step(StandbyEvent::End);
        if action == StandbyEpochAction::Discard {
            self.state = next;
            self.held = Held::default();
            self.keeping = None;
            self.arrival.discard();
        }
    }
}

impl Held {
    fn clear(&mut self) {
        self.pages.clear();
        self.room.clear();
        // After a large epoch the room is given back.
        self.room.shrink_to(32 << 20);
    }

    fn insert(&mut self, key: (u32, u64), content: Option<&[u8]>) -> Result<(), StandbyError> {
        if self.pages.len() >= HELD_PAGES_MAX && !self.pages.contains_key(&key) {
            return Err(StandbyError::Invalid { what: "more pages than an epoch may have" });
        }
        let Some(content) = content else {
            self.pages.insert(key, None);
            return Ok(());
        };
        if self.room.len() + content.len() > EPOCH_BYTES_MAX + DEVICE_STATE_MAX {
            return Err(StandbyError::Invalid { what: "more than an epoch may hold" });
        }
        self.pages.insert(key, Some(self.room.len()));
        self.room.extend_from_slice(content);
        Ok(())
    }

    /// The device state of the epoch, put together from its pages; those that did not come are as they were
    /// `before`.
    fn devices(&self, len: usize, before: &[u8]) -> Result<Vec<u8>, StandbyError> {
        let mut state = vec![0; len.next_multiple_of(PAGE_SIZE)];
        for (page, out) in (0..).zip(state.chunks_exact_mut(PAGE_SIZE)) {
            match self.pages.get(&(DEVICES, page)) {
                Some(Some(at)) => out.copy_from_slice(&self.room[*at..][..PAGE_SIZE]),
                Some(None) => {}
                None if page as usize * PAGE_SIZE < before.len() => devices_page(before, page, out),
                None => {
                    return Err(StandbyError::Invalid { what: "a device state of which pages are missing" });
                }
            }
        }
        state.truncate(len);
        Ok(state)
    }

    fn apply(
        &self,
        arrival: &mut dyn IncomingMachine,
        mut keeping: Option<&mut EpochSnapshots>,
    ) -> Result<(), BoxError> {
        for ((array, page), at) in self.pages.iter().filter(|((array, _), _)| *array != DEVICES) {
            keeping.iter_mut().for_each(|keeping| keeping.about_to_write(arrival, *array, *page));
            let run = PageRun::new(*page, 1);
            match at {
                Some(at) => arrival.write(*array as usize, run, &self.room[*at..][..PAGE_SIZE])?,
                None => arrival.zero(*array as usize, run)?,
            }
        }
        Ok(())
    }
}

/// A page of a device state, with zeros behind its end.
fn devices_page(state: &[u8], page: u64, out: &mut [u8]) {
    let from = state.len().min(page as usize * PAGE_SIZE);
    let known = &state[from..state.len().min(from + PAGE_SIZE)];
    out.fill(0);
    out[..known.len()].copy_from_slice(known);
}

impl Assembling<'_> {
    /// The version of a page of this machine that the primary sent last.
    fn own(&self, array: u32, page: u64, out: &mut [u8]) -> Result<(), StandbyError> {
        if let Some(at) = self.held.pages.get(&(array, page)) {
            match at {
                Some(at) => out.copy_from_slice(&self.held.room[*at..][..PAGE_SIZE]),
                None => out.fill(0),
            }
            return Ok(());
        }
        if array == DEVICES {
            devices_page(self.devices, page, out);
            return Ok(());
        }
        let read = self.arrival.read(array as usize, PageRun::new(page, 1), out);
        read.map_err(StandbyError::Write)
    }
}

impl PageSink for Assembling<'_> {
    type Error = StandbyError;

    fn older(&self, page: u64, out: &mut [u8]) -> Result<(), StandbyError> {
        self.own(self.array, page, out)
    }

    fn named(&self, name: &PageReference, out: &mut [u8]) -> bool {
        if name.of != self.id {
            return self.neighbours.read(name, out);
        }
        let is_there = self.arrays.get(name.array as usize).is_some_and(|len| name.page < *len);
        is_there && self.own(name.array, name.page, out).is_ok()
    }

    fn page(&mut self, page: u64, content: Option<&[u8]>) -> Result<(), StandbyError> {
        let key = (self.array, page);
        let event = match self.epoch {
            None => StandbyEvent::Fill,
            Some(epoch) => StandbyEvent::Page { epoch, new: !self.held.pages.contains_key(&key) },
        };
        let (next, action) = self.state.step(event);
        match action {
            StandbyEpochAction::Hold => {
                self.held.insert(key, content)?;
                *self.state = next;
            }
            StandbyEpochAction::Write => {
                // From here on nothing is whole, also if this fails.
                self.current.clear();
                self.held.clear();
                *self.state = next;
                let run = PageRun::new(page, 1);
                self.keeping
                    .iter_mut()
                    .for_each(|keeping| keeping.about_to_write(self.arrival, self.array, page));
                let written = match content {
                    Some(content) => self.arrival.write(self.array as usize, run, content),
                    None => self.arrival.zero(self.array as usize, run),
                };
                written.map_err(StandbyError::Write)?;
            }
            _ => return Err(StandbyError::Invalid { what: "a page of an epoch whose turn it is not" }),
        }
        Ok(())
    }
}
