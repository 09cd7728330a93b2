//! Epoch snapshots: copies of complete epochs, made on the standby while replication continues.
//!
//! A snapshot has every page that was written since the one before, as of the end of one epoch. It is read
//! little by little; a page that a later epoch is about to overwrite is copied to a buffer first. An epoch
//! therefore waits only for copying such pages, never for the reader of the snapshot: a reader that is too
//! slow loses the snapshot, and the next one includes its pages.
//!
//! Memory: three bits a page of the machine, and [`BUFFER_BYTES_MAX`].

use crate::error::BoxError;
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_migrate::target::IncomingMachine;

/// Most bytes of pages that are buffered because an epoch overwrote them.
pub const BUFFER_BYTES_MAX: usize = 64 << 20;
/// Pages that are scanned and read together.
const GRANULE: u64 = 64;
/// Granules scanned in one call without finding a page; an epoch that ends meanwhile waits for the call.
const SCAN_MAX: usize = 1024;
/// Most buffered pages that one call returns.
const BATCH_PAGES_MAX: usize = 1024;

/// The start of a snapshot at the end of an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpochSnapshot {
    /// Number of this snapshot.
    pub copy: u64,
    /// Number of the epoch.
    pub epoch: u64,
    /// Device state at the end of the epoch.
    pub device_state: Vec<u8>,
}

/// Some pages of a snapshot, or none for the moment. Pages come in any order, each once.
#[derive(Debug, Default)]
pub struct SnapshotPages {
    /// Array and number of each page.
    pub pages: Vec<(u32, u64)>,
    /// Contents of the pages in the same order.
    pub data: Vec<u8>,
    /// Whether the snapshot has no more pages.
    pub last: bool,
}

/// A snapshot was abandoned; its pages are in the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotLost {
    /// More pages were overwritten than may be buffered.
    #[error("the machine writes faster than its epoch snapshot is stored")]
    TooSlow,
    /// The machine was taken over, or the protection restarted or ended.
    #[error("the standby no longer takes part in this protection")]
    Over,
    /// A page could not be read.
    #[error("cannot read a page of the standby")]
    Unreadable,
}

/// Pages written since the last snapshot, and the snapshot in progress.
#[derive(Debug)]
pub(crate) struct EpochSnapshots {
    written: Vec<PageSet>,
    current: Option<SnapshotInProgress>,
    copies: u64,
    /// Reason why the last snapshot was abandoned.
    lost: SnapshotLost,
}

#[derive(Debug)]
struct SnapshotInProgress {
    copy: u64,
    taken: Vec<PageSet>,
    /// Pages that were neither read nor buffered, their count, and where to look for the next.
    left: Vec<PageSet>,
    count: u64,
    next: (usize, u64),
    buffered: Vec<(u32, u64)>,
    buffer: Vec<u8>,
}

impl EpochSnapshots {
    /// State for arrays of these lengths. Their present content is in no snapshot yet; `fresh` arrays are all
    /// zeros.
    pub(crate) fn new(arrays: &[u64], fresh: bool) -> Self {
        let set = |pages: &u64| if fresh { PageSet::empty(*pages) } else { PageSet::full(*pages) };
        Self { written: arrays.iter().map(set).collect(), current: None, copies: 0, lost: SnapshotLost::Over }
    }

    /// Starts a snapshot of the present content, unless one is in progress. Returns its number.
    pub(crate) fn start(&mut self) -> Option<u64> {
        if self.current.is_some() {
            return None;
        }
        self.copies += 1;
        let taken: Vec<PageSet> = self.written.iter_mut().map(PageSet::take).collect();
        let (copy, left) = (self.copies, taken.clone());
        let count = left.iter().map(PageSet::count).sum();
        let (aside, room) = Default::default();
        self.current = Some(SnapshotInProgress {
            copy,
            taken,
            left,
            count,
            next: (0, 0),
            buffered: aside,
            buffer: room,
        });
        Some(copy)
    }

    /// Must be called before a page is written.
    pub(crate) fn about_to_write(&mut self, arrival: &dyn IncomingMachine, array: u32, page: u64) {
        let Some(since) = self.written.get_mut(array as usize) else { return };
        since.insert(page);
        let Some(copying) = &mut self.current else { return };
        if !copying.left[array as usize].contains(page) {
            return;
        }
        if let Err(lost) = copying.buffer_page(arrival, array, page) {
            self.abandon(lost);
        }
    }

    /// Returns the next pages of a snapshot.
    pub(crate) fn next(
        &mut self,
        arrival: &dyn IncomingMachine,
        copy: u64,
    ) -> Result<SnapshotPages, SnapshotLost> {
        let lost = self.lost;
        let copying = self.current.as_mut().filter(|copying| copying.copy == copy).ok_or(lost)?;
        let next = copying.next(arrival);
        if let Err(lost) = &next {
            self.abandon(*lost);
        }
        next
    }

    /// Ends a snapshot, which was stored or failed.
    pub(crate) fn end(&mut self, copy: u64, stored: bool) {
        if self.current.as_ref().is_some_and(|copying| copying.copy == copy) {
            match stored {
                true => self.current = None,
                false => self.abandon(SnapshotLost::Over),
            }
        }
    }

    /// Abandons the snapshot in progress; its pages go to the next one.
    pub(crate) fn abandon(&mut self, why: SnapshotLost) {
        if let Some(copying) = self.current.take() {
            self.written.iter_mut().zip(&copying.taken).for_each(|(since, taken)| since.union(taken));
            self.lost = why;
        }
    }
}

impl SnapshotInProgress {
    fn buffer_page(
        &mut self,
        arrival: &dyn IncomingMachine,
        array: u32,
        page: u64,
    ) -> Result<(), SnapshotLost> {
        if self.buffer.len() + PAGE_SIZE > BUFFER_BYTES_MAX {
            return Err(SnapshotLost::TooSlow);
        }
        read(arrival, array, PageRun::new(page, 1), &mut self.buffer)?;
        self.buffered.push((array, page));
        self.left[array as usize].remove(page);
        self.count -= 1;
        Ok(())
    }

    /// Buffered pages go first, to free the buffer.
    fn next(&mut self, arrival: &dyn IncomingMachine) -> Result<SnapshotPages, SnapshotLost> {
        let mut next = SnapshotPages::default();
        if self.buffered.is_empty() {
            self.read_on(arrival, &mut next)?;
        } else {
            let from = self.buffered.len().saturating_sub(BATCH_PAGES_MAX);
            next.pages = self.buffered.split_off(from);
            next.data = self.buffer.split_off(from * PAGE_SIZE);
        }
        next.last = self.buffered.is_empty() && self.count == 0;
        Ok(next)
    }

    fn read_on(
        &mut self,
        arrival: &dyn IncomingMachine,
        into: &mut SnapshotPages,
    ) -> Result<(), SnapshotLost> {
        for _ in 0..SCAN_MAX {
            let (array, start) = self.next;
            let Some(left) = self.left.get_mut(array) else { return Ok(()) };
            if start >= left.len() {
                self.next = (array + 1, 0);
                continue;
            }
            let end = left.len().min(start + GRANULE);
            self.next = (array, end);
            let mut page = start;
            while page < end {
                let len = (page..end).take_while(|page| left.contains(*page)).count() as u64;
                if len > 0 {
                    let run = PageRun::new(page, len);
                    read(arrival, array as u32, run, &mut into.data)?;
                    into.pages.extend(run.pages().map(|page| (array as u32, page)));
                    left.remove_run(run);
                    self.count -= len;
                }
                page += len.max(1);
            }
            if !into.pages.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }
}

fn read(
    arrival: &dyn IncomingMachine,
    array: u32,
    run: PageRun,
    to: &mut Vec<u8>,
) -> Result<(), SnapshotLost> {
    let from = to.len();
    to.resize(from + run.bytes(), 0);
    let done: Result<(), BoxError> = arrival.read(array as usize, run, &mut to[from..]);
    done.map_err(|error| {
        to.truncate(from);
        tracing::warn!(error = &*error as &dyn std::error::Error, "cannot read a page of a standby");
        SnapshotLost::Unreadable
    })
}
