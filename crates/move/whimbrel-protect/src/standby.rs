//! Epoch receiver: the receiving side, which buffers an epoch until it is complete and checked, then applies
//! it.
//!
//! [`crate::epoch::StandbyEpochs`] decides what comes when; this module does it to an [`IncomingMachine`], as
//! in a migration: memory and disks of a QEMU that waits. A takeover ends like a migration: load the device
//! state, run.
//!
//! A failed write while an epoch is applied leaves neither the old state nor the new one. The standby then
//! refuses everything, so the primary learns that it is unprotected.

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
    protocol::{BOOT_FILE_MAX, BootFileRange, DEVICE_STATE_MAX, Finish, HandoverId},
    target::IncomingMachine,
};

/// Most network ports whose addresses are stored.
const PORTS_MAX: usize = 64;

/// Most pages of an epoch. Zero pages count too, for each has an entry.
const BUFFERED_PAGES_MAX: usize = (EPOCH_BYTES_MAX + DEVICE_STATE_MAX) / PAGE_SIZE;

/// The epoch to take over from, readable while the receiver works.
///
/// Cleared before the first write that may leave the machine at no one instant, set once it is complete
/// again.
pub struct CommittedEpoch(Mutex<(Option<u64>, Instant)>);

impl CommittedEpoch {
    fn none() -> Self {
        Self(Mutex::new((None, Instant::now())))
    }

    /// The complete epoch, if there is one, and since when.
    pub fn epoch(&self) -> (Option<u64>, Instant) {
        *self.lock()
    }

    /// Records that no epoch is complete any more.
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
    machine: Box<dyn IncomingMachine>,
    /// Lengths of the arrays, in pages.
    arrays: Vec<u64>,
    blobs: Vec<(Digest, u64)>,
    blob: Vec<u8>,
    decoder: Decoder,
    state: StandbyEpochs,
    committed: Arc<CommittedEpoch>,
    buffered: BufferedEpoch,
    /// Device state of the last committed epoch.
    device_state: Vec<u8>,
    ports: Vec<Vec<u8>>,
    handover: HandoverId,
    /// Present if epoch snapshots are wanted.
    snapshots: Option<EpochSnapshots>,
}

/// Access to pages of other machines of the same primary.
pub trait SiblingPages {
    /// Reads a page of another protection's standby here, if it can be read now. The content may be of any
    /// time.
    fn read(&self, name: &PageReference, out: &mut [u8]) -> bool;
}

/// A host without other standbys of this primary.
pub struct NoSiblings;

impl SiblingPages for NoSiblings {
    fn read(&self, _: &PageReference, _: &mut [u8]) -> bool {
        false
    }
}

/// Buffered pages of the epoch in flight: the offset of each in the buffer, none for a zero page.
#[derive(Default)]
struct BufferedEpoch {
    pages: BTreeMap<(u32, u64), Option<usize>>,
    buffer: Vec<u8>,
}

struct BatchSink<'r> {
    machine: &'r mut dyn IncomingMachine,
    state: &'r mut StandbyEpochs,
    current: &'r CommittedEpoch,
    buffered: &'r mut BufferedEpoch,
    snapshots: Option<&'r mut EpochSnapshots>,
    /// Device state of the last epoch.
    devices: &'r [u8],
    siblings: &'r dyn SiblingPages,
    /// Lengths of the arrays, in pages.
    arrays: &'r [u64],
    id: ProtectionId,
    array: u32,
    epoch: Option<u64>,
}

impl EpochReceiver {
    /// A standby whose incoming machine has arrays of these lengths.
    pub fn new(
        arrival: Box<dyn IncomingMachine>,
        arrays: Vec<u64>,
        blobs: Vec<(Digest, u64)>,
        handover: HandoverId,
    ) -> Self {
        Self {
            machine: arrival,
            arrays,
            blobs,
            blob: Vec::new(),
            decoder: Decoder::default(),
            state: StandbyEpochs::Seeding,
            committed: Arc::new(CommittedEpoch::none()),
            buffered: BufferedEpoch::default(),
            device_state: Vec::new(),
            ports: Vec::new(),
            handover,
            snapshots: None,
        }
    }

    /// The complete epoch, readable while the receiver works.
    pub fn committed_epoch(&self) -> Arc<CommittedEpoch> {
        self.committed.clone()
    }

    /// Whether the waiting QEMU is alive.
    pub fn is_alive(&self) -> bool {
        self.machine.is_alive()
    }

    /// Lengths of the arrays, and the id of the handover.
    pub fn shape(&self) -> (&[u64], HandoverId) {
        (&self.arrays, self.handover)
    }

    /// Prepares for another protection of the same machine: the content here is older, and may be of no one
    /// instant.
    pub fn restart(&mut self) {
        self.committed.clear();
        self.state = StandbyEpochs::Seeding;
        self.buffered.clear();
        self.snapshots.iter_mut().for_each(|keeping| keeping.abandon(SnapshotLost::Over));
    }

    /// Turns epoch snapshots on or off. The first snapshot has all pages ever written, none of them yet if
    /// the machine is `fresh`. Returns whether there were no snapshots before.
    pub fn wants_snapshot(&mut self, wanted: bool, fresh: bool) -> bool {
        let first = self.snapshots.is_none();
        match wanted {
            true => drop(self.snapshots.get_or_insert_with(|| EpochSnapshots::new(&self.arrays, fresh))),
            false => self.snapshots = None,
        }
        first
    }

    /// Starts a snapshot of the complete epoch. None if there is none, or a snapshot is in progress.
    pub fn start_snapshot(&mut self) -> Option<EpochSnapshot> {
        let epoch = self.state.committed()?;
        let copy = self.snapshots.as_mut()?.start()?;
        Some(EpochSnapshot { copy, epoch, device_state: self.device_state.clone() })
    }

    /// Returns the next few pages of a snapshot.
    pub fn snapshot_pages(&mut self, copy: u64) -> Result<SnapshotPages, SnapshotLost> {
        self.snapshots.as_mut().ok_or(SnapshotLost::Over)?.next(&*self.machine, copy)
    }

    /// Ends a snapshot. If it was not stored, its pages go to the next one.
    pub fn snapshot_done(&mut self, copy: u64, stored: bool) {
        self.snapshots.iter_mut().for_each(|keeping| keeping.end(copy, stored));
    }

    /// Stores a range of a boot file.
    pub fn store_boot_file_range(&mut self, piece: &BootFileRange, data: &[u8]) -> Result<(), StandbyError> {
        let invalid = |what| StandbyError::Invalid { what };
        let known = self.blobs.iter().find(|(digest, _)| *digest == piece.digest);
        let (digest, size) = *known.ok_or(invalid("a boot file that was not offered"))?;
        if piece.offset == 0 {
            self.blob.clear();
        }
        let end = piece.offset.saturating_add(data.len() as u64);
        if piece.offset != self.blob.len() as u64 || end > size.min(BOOT_FILE_MAX) {
            return Err(invalid("a range of a boot file out of order"));
        }
        self.blob.extend_from_slice(data);
        if (self.blob.len() as u64) < size {
            return Ok(());
        }
        let content = std::mem::take(&mut self.blob);
        if Digest::of(&content) != digest {
            return Err(invalid("a boot file with another digest"));
        }
        self.machine.store_boot_file(digest, content).map_err(StandbyError::Write)
    }

    /// Compares pages with digests: one bit a page, set if it differs.
    pub fn compare(&self, asked: &Compare, checks: &[u8]) -> Result<Vec<u8>, StandbyError> {
        let invalid = |what| StandbyError::Invalid { what };
        let len = *self.arrays.get(asked.array as usize).ok_or(invalid("an array that was not offered"))?;
        let fits = asked.run.len <= crate::protocol::COMPARE_PAGES_MAX
            && asked.run.start.checked_add(asked.run.len).is_some_and(|end| end <= len)
            && checks.len() as u64 == asked.run.len * codec::DIGEST_BYTES as u64;
        if !fits {
            return Err(invalid("a comparison of pages outside the array"));
        }
        let mut bits = vec![0u8; asked.run.len.div_ceil(8) as usize];
        let mut content = vec![0; 256 * PAGE_SIZE];
        let mut checks = checks.chunks_exact(codec::DIGEST_BYTES);
        for part in asked.run.chunks(256) {
            let out = &mut content[..part.bytes()];
            self.machine.read(asked.array as usize, part, out).map_err(StandbyError::Write)?;
            for (page, content) in part.pages().zip(out.chunks_exact(PAGE_SIZE)) {
                let at = (page - asked.run.start) as usize;
                if checks.next() != Some(&codec::page_digest(content)) {
                    bits[at / 8] |= 1 << (at % 8);
                }
            }
        }
        Ok(bits)
    }

    /// Handles a batch of pages without pages of other machines to refer to.
    pub fn store_pages(&mut self, piece: &EpochPages, payload: &[u8]) -> Result<PagesToResend, StandbyError> {
        self.store_pages_among(piece, payload, &NoSiblings)
    }

    /// Handles a batch of pages of an epoch or of seeding.
    pub fn store_pages_among(
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
            return Err(StandbyError::Ended);
        }
        let mut into = BatchSink {
            machine: &mut *self.machine,
            state: &mut self.state,
            current: &self.committed,
            buffered: &mut self.buffered,
            snapshots: self.snapshots.as_mut(),
            devices: &self.device_state,
            siblings: neighbours,
            arrays: &self.arrays,
            id: piece.id,
            array: piece.array,
            epoch: piece.epoch,
        };
        let pages = self.decoder.decode(payload, piece.block, len, &mut into)?;
        Ok(PagesToResend { pages })
    }

    /// Reads a page for another machine's standby, which checks the content. Returns whether it could be
    /// read.
    pub fn read_shared(&self, array: u32, page: u64, out: &mut [u8]) -> bool {
        let is_there = self.arrays.get(array as usize).is_some_and(|len| page < *len);
        // After a takeover the guest writes to it, and its content is private.
        is_there
            && !matches!(self.state, StandbyEpochs::Over { .. })
            && self.machine.read(array as usize, PageRun::new(page, 1), out).is_ok()
    }

    /// Handles the end of an epoch. On success the machine has the state of that epoch.
    pub fn end_epoch(&mut self, seal: EpochEnd, payload: Vec<u8>) -> Result<(), StandbyError> {
        let device_len = seal.device_bytes.map_or(payload.len(), |len| len as usize);
        if device_len > DEVICE_STATE_MAX || seal.ports.len() > PORTS_MAX {
            return Err(StandbyError::Invalid { what: "a device state that is too large" });
        }
        let (next, action) = self.state.step(StandbyEvent::EpochEnd { epoch: seal.epoch, pages: seal.pages });
        match action {
            StandbyEpochAction::Apply => {}
            StandbyEpochAction::Acknowledge => return Ok(()),
            _ if matches!(self.state, StandbyEpochs::Over { .. }) => return Err(StandbyError::Ended),
            _ => return Err(StandbyError::Invalid { what: "the end of an incomplete epoch" }),
        }
        let device_state = match seal.device_bytes {
            Some(_) => self.buffered.devices(device_len, &self.device_state)?,
            None => payload,
        };
        self.committed.clear();
        let applied = self.buffered.apply(&mut *self.machine, self.snapshots.as_mut());
        self.buffered.clear();
        if let Err(error) = applied {
            // Half of it is written, so there is no state to take over from.
            self.state = StandbyEpochs::Seeding;
            return Err(StandbyError::Write(error));
        }
        self.state = next;
        self.committed.set(next.committed());
        self.device_state = device_state;
        self.ports = seal.ports;
        Ok(())
    }

    /// Loads the last committed epoch and drops the next one. [`EpochReceiver::run`] must follow.
    pub fn take_over(&mut self) -> Result<(), StandbyError> {
        let (next, action) = self.state.step(StandbyEvent::TakeOver);
        if action != StandbyEpochAction::Run {
            return Err(StandbyError::Invalid { what: "a takeover without a complete epoch" });
        }
        self.state = next;
        self.buffered = BufferedEpoch::default();
        self.snapshots = None;
        let finish = Finish { handover: self.handover, ports: std::mem::take(&mut self.ports) };
        self.machine.prepare(&finish, &std::mem::take(&mut self.device_state)).map_err(StandbyError::TakeOver)
    }

    /// Runs the loaded machine.
    pub fn run(&mut self) -> Result<(), StandbyError> {
        self.machine.run().map_err(StandbyError::TakeOver)
    }

    /// Frees what was reserved after [`EpochReceiver::take_over`] failed.
    pub fn release_pages(&mut self) {
        self.machine.discard();
    }

    /// Ends the protection and frees what was reserved.
    pub fn discard(&mut self) {
        let (next, action) = self.state.step(StandbyEvent::End);
        if action == StandbyEpochAction::Discard {
            self.state = next;
            self.buffered = BufferedEpoch::default();
            self.snapshots = None;
            self.machine.discard();
        }
    }
}

impl BufferedEpoch {
    fn clear(&mut self) {
        self.pages.clear();
        self.buffer.clear();
        // Memory of a large epoch is freed.
        self.buffer.shrink_to(32 << 20);
    }

    fn insert(&mut self, key: (u32, u64), content: Option<&[u8]>) -> Result<(), StandbyError> {
        if self.pages.len() >= BUFFERED_PAGES_MAX && !self.pages.contains_key(&key) {
            return Err(StandbyError::Invalid { what: "more pages than an epoch may have" });
        }
        let Some(content) = content else {
            self.pages.insert(key, None);
            return Ok(());
        };
        if self.buffer.len() + content.len() > EPOCH_BYTES_MAX + DEVICE_STATE_MAX {
            return Err(StandbyError::Invalid { what: "more than an epoch may hold" });
        }
        self.pages.insert(key, Some(self.buffer.len()));
        self.buffer.extend_from_slice(content);
        Ok(())
    }

    /// Assembles the device state of the epoch; pages that were not sent are as in `before`.
    fn devices(&self, len: usize, before: &[u8]) -> Result<Vec<u8>, StandbyError> {
        let mut state = vec![0; len.next_multiple_of(PAGE_SIZE)];
        for (page, out) in (0..).zip(state.chunks_exact_mut(PAGE_SIZE)) {
            match self.pages.get(&(DEVICES, page)) {
                Some(Some(at)) => out.copy_from_slice(&self.buffer[*at..][..PAGE_SIZE]),
                Some(None) => {}
                None if page as usize * PAGE_SIZE < before.len() => devices_page(before, page, out),
                None => {
                    return Err(StandbyError::Invalid { what: "a device state with missing pages" });
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
                Some(at) => arrival.write(*array as usize, run, &self.buffer[*at..][..PAGE_SIZE])?,
                None => arrival.zero(*array as usize, run)?,
            }
        }
        Ok(())
    }
}

/// Reads a page of a device state, padded with zeros.
fn devices_page(state: &[u8], page: u64, out: &mut [u8]) {
    let from = state.len().min(page as usize * PAGE_SIZE);
    let known = &state[from..state.len().min(from + PAGE_SIZE)];
    out.fill(0);
    out[..known.len()].copy_from_slice(known);
}

impl BatchSink<'_> {
    /// Reads the version of a page that the primary sent last.
    fn read_own(&self, array: u32, page: u64, out: &mut [u8]) -> Result<(), StandbyError> {
        if let Some(at) = self.buffered.pages.get(&(array, page)) {
            match at {
                Some(at) => out.copy_from_slice(&self.buffered.buffer[*at..][..PAGE_SIZE]),
                None => out.fill(0),
            }
            return Ok(());
        }
        if array == DEVICES {
            devices_page(self.devices, page, out);
            return Ok(());
        }
        let read = self.machine.read(array as usize, PageRun::new(page, 1), out);
        read.map_err(StandbyError::Write)
    }
}

impl PageSink for BatchSink<'_> {
    type Error = StandbyError;

    fn older(&self, page: u64, out: &mut [u8]) -> Result<(), StandbyError> {
        self.read_own(self.array, page, out)
    }

    fn referenced(&self, name: &PageReference, out: &mut [u8]) -> bool {
        if name.of != self.id {
            return self.siblings.read(name, out);
        }
        let is_there = self.arrays.get(name.array as usize).is_some_and(|len| name.page < *len);
        is_there && self.read_own(name.array, name.page, out).is_ok()
    }

    fn page(&mut self, page: u64, content: Option<&[u8]>) -> Result<(), StandbyError> {
        let key = (self.array, page);
        let event = match self.epoch {
            None => StandbyEvent::SeedPage,
            Some(epoch) => StandbyEvent::Page { epoch, new: !self.buffered.pages.contains_key(&key) },
        };
        let (next, action) = self.state.step(event);
        match action {
            StandbyEpochAction::Buffer => {
                self.buffered.insert(key, content)?;
                *self.state = next;
            }
            StandbyEpochAction::Write => {
                // No epoch is complete from here on, also if this fails.
                self.current.clear();
                self.buffered.clear();
                *self.state = next;
                let run = PageRun::new(page, 1);
                self.snapshots
                    .iter_mut()
                    .for_each(|keeping| keeping.about_to_write(self.machine, self.array, page));
                let written = match content {
                    Some(content) => self.machine.write(self.array as usize, run, content),
                    None => self.machine.zero(self.array as usize, run),
                };
                written.map_err(StandbyError::Write)?;
            }
            _ => return Err(StandbyError::Invalid { what: "a page of an unexpected epoch" }),
        }
        Ok(())
    }
}
