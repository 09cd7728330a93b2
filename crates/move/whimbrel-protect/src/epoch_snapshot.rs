//! Copies of whole epochs, made on the standby while it follows on.
//!
//! A copy has every page that was written since the one before, as of the end of one epoch. It is read little
//! by little; a page that a later epoch writes over before its turn has come is put aside first. So an epoch
//! waits for nothing but the copying of such pages, and never for whoever stores the copy: who is too slow
//! loses it, and the next one has its pages too.
//!
//! Memory: three bits a page of the machine, and [`ASIDE_BYTES_MAX`].

use crate::error::BoxError;
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_migrate::target::IncomingMachine;

/// Most bytes of pages that are put aside.
pub const ASIDE_BYTES_MAX: usize = 64 << 20;
/// Pages that are looked at and read together.
const GRANULE: u64 = 64;
/// Granules that are looked at without finding a page: an epoch that ends meanwhile waits for as long as that
/// takes, or reading one.
const LOOKED_MAX: usize = 1024;
/// Pages put aside that are handed on at once.
const HANDED_MAX: usize = 1024;

/// The end of an epoch of which a copy begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpochSnapshot {
    /// Names the copy.
    pub copy: u64,
    /// Which epoch.
    pub epoch: u64,
    /// The machine's device state at its end.
    pub device_state: Vec<u8>,
}

/// Some pages of a copy, or none for the moment; in no order, each once.
#[derive(Debug, Default)]
pub struct SnapshotPages {
    /// Array and number of each.
    pub pages: Vec<(u32, u64)>,
    /// Their contents, one after the other.
    pub data: Vec<u8>,
    /// Whether there are no more.
    pub last: bool,
}

/// There is no such copy any more: its pages are in the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotLost {
    /// More of it was written over than may be put aside.
    #[error("the machine writes faster than its copy is stored")]
    TooSlow,
    /// The machine was taken over, the protection began anew or has ended.
    #[error("the standby does not follow any more")]
    Over,
    /// A page could not be read.
    #[error("a page cannot be read")]
    Unreadable,
}

/// What was written since the last copy, and the copy in the making.
#[derive(Debug)]
pub(crate) struct EpochSnapshots {
    since: Vec<PageSet>,
    copying: Option<Copying>,
    copies: u64,
    /// Why the last copy that was given up was.
    lost: SnapshotLost,
}

#[derive(Debug)]
struct Copying {
    copy: u64,
    /// All of its pages.
    taken: Vec<PageSet>,
    /// Those that were neither read nor put aside, how many they are, and where the next of them may be.
    left: Vec<PageSet>,
    count: u64,
    next: (usize, u64),
    aside: Vec<(u32, u64)>,
    room: Vec<u8>,
}

impl EpochSnapshots {
    /// Arrays of these lengths. What is in them is in no copy yet: nothing if they are `fresh`, which is all
    /// zeros.
    pub(crate) fn new(arrays: &[u64], fresh: bool) -> Self {
        let set = |pages: &u64| if fresh { PageSet::empty(*pages) } else { PageSet::full(*pages) };
        Self { since: arrays.iter().map(set).collect(), copying: None, copies: 0, lost: SnapshotLost::Over }
    }

    /// Begins a copy of what the arrays are now, unless one is in the making. Its name.
    pub(crate) fn start(&mut self) -> Option<u64> {
        if self.copying.is_some() {
            return None;
        }
        self.copies += 1;
        let taken: Vec<PageSet> = self.since.iter_mut().map(PageSet::take).collect();
        let (copy, left) = (self.copies, taken.clone());
        let count = left.iter().map(PageSet::count).sum();
        let (aside, room) = Default::default();
        self.copying = Some(Copying { copy, taken, left, count, next: (0, 0), aside, room });
        Some(copy)
    }

    /// A page is about to be written.
    pub(crate) fn about_to_write(&mut self, arrival: &dyn IncomingMachine, array: u32, page: u64) {
        let Some(since) = self.since.get_mut(array as usize) else { return };
        since.insert(page);
        let Some(copying) = &mut self.copying else { return };
        if !copying.left[array as usize].contains(page) {
            return;
        }
        if let Err(lost) = copying.put_aside(arrival, array, page) {
            self.abandon(lost);
        }
    }

    /// The next pages of a copy.
    pub(crate) fn next(
        &mut self,
        arrival: &dyn IncomingMachine,
        copy: u64,
    ) -> Result<SnapshotPages, SnapshotLost> {
        let lost = self.lost;
        let copying = self.copying.as_mut().filter(|copying| copying.copy == copy).ok_or(lost)?;
        let next = copying.next(arrival);
        if let Err(lost) = &next {
            self.abandon(*lost);
        }
        next
    }

    /// The copy is stored, or nothing came of it.
    pub(crate) fn end(&mut self, copy: u64, stored: bool) {
        if self.copying.as_ref().is_some_and(|copying| copying.copy == copy) {
            match stored {
                true => self.copying = None,
                false => self.abandon(SnapshotLost::Over),
            }
        }
    }

    /// Nobody gets the rest of the copy in the making: all of its pages go to the next one.
    pub(crate) fn abandon(&mut self, why: SnapshotLost) {
        if let Some(copying) = self.copying.take() {
            self.since.iter_mut().zip(&copying.taken).for_each(|(since, taken)| since.union(taken));
            self.lost = why;
        }
    }
}

impl Copying {
    fn put_aside(
        &mut self,
        arrival: &dyn IncomingMachine,
        array: u32,
        page: u64,
    ) -> Result<(), SnapshotLost> {
        if self.room.len() + PAGE_SIZE > ASIDE_BYTES_MAX {
            return Err(SnapshotLost::TooSlow);
        }
        read(arrival, array, PageRun::new(page, 1), &mut self.room)?;
        self.aside.push((array, page));
        self.left[array as usize].remove(page);
        self.count -= 1;
        Ok(())
    }

    /// What was put aside goes first, so that there is room again.
    fn next(&mut self, arrival: &dyn IncomingMachine) -> Result<SnapshotPages, SnapshotLost> {
        let mut next = SnapshotPages::default();
        if self.aside.is_empty() {
            self.read_on(arrival, &mut next)?;
        } else {
            let from = self.aside.len().saturating_sub(HANDED_MAX);
            next.pages = self.aside.split_off(from);
            next.data = self.room.split_off(from * PAGE_SIZE);
        }
        next.last = self.aside.is_empty() && self.count == 0;
        Ok(next)
    }

    fn read_on(
        &mut self,
        arrival: &dyn IncomingMachine,
        into: &mut SnapshotPages,
    ) -> Result<(), SnapshotLost> {
        for _ in 0..LOOKED_MAX {
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
        tracing::warn!(error = &*error as &dyn std::error::Error, "a page of a standby cannot be read");
        SnapshotLost::Unreadable
    })
}
