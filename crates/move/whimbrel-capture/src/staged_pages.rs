//! Staged pages: the last pages of a capture, copied aside so that the machine need not wait for the sink.
//!
//! Most of them are copied while the machine still runs. In the pause only those are copied (again) that were
//! written meanwhile.

use crate::{Consumer, DirtyLog};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::PageError;

/// Pages that a machine may write between the first copy and the pause, without more room being found for
/// them within it.
const SPARE_PAGES: usize = 512;

/// Copies of pages of several arrays.
pub(crate) struct StagedPages {
    /// Copied while the machine ran.
    early: Copies,
    /// Copied in the pause: of a page in both, this copy is the right one.
    late: Copies,
}

impl StagedPages {
    /// Copies the pages of `sets`, as `who` sees them, and prepares room for those written meanwhile.
    pub(crate) fn copy(logs: &[DirtyLog], who: Consumer, sets: &[PageSet]) -> Result<Self, PageError> {
        let early = Copies::read(logs, who, sets, Vec::new())?;
        let none = sets.iter().map(|set| PageSet::empty(set.len())).collect();
        Ok(Self { early, late: Copies { sets: none, runs: Vec::new(), bytes: spare_room() } })
    }

    /// Copies again what was written since; called while the machine is paused.
    pub(crate) fn copy_again(
        mut self,
        logs: &[DirtyLog],
        who: Consumer,
        fresh: &[PageSet],
    ) -> Result<Self, PageError> {
        self.late = Copies::read(logs, who, fresh, self.late.bytes)?;
        Ok(self)
    }

    /// Calls `each` with the copies of all pages of `run`, in pieces: each page once.
    pub(crate) fn pieces<E>(
        &self,
        array: usize,
        run: PageRun,
        mut each: impl FnMut(PageRun, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let late = &self.late.sets[array];
        let mut page = run.start;
        for again in late.runs_within(run) {
            if page < again.start {
                let before = PageRun::new(page, again.start - page);
                self.early.pieces(array, before, &mut each)?;
            }
            self.late.pieces(array, again, &mut each)?;
            page = again.end();
        }
        if page < run.end() {
            self.early.pieces(array, PageRun::new(page, run.end() - page), &mut each)?;
        }
        Ok(())
    }
}

/// Pages of several arrays that were copied at one time.
struct Copies {
    sets: Vec<PageSet>,
    /// Runs of each set, and the offset of each run in `bytes`.
    runs: Vec<Vec<(PageRun, usize)>>,
    bytes: Vec<u8>,
}

impl Copies {
    /// Reads the pages of `sets` into this room or a larger one.
    fn read(
        logs: &[DirtyLog],
        who: Consumer,
        sets: &[PageSet],
        mut bytes: Vec<u8>,
    ) -> Result<Self, PageError> {
        let pages: u64 = sets.iter().map(PageSet::count).sum();
        bytes.resize(pages as usize * PAGE_SIZE, 0);
        let (mut runs, mut offset) = (Vec::with_capacity(sets.len()), 0);
        for (log, set) in logs.iter().zip(sets) {
            let mut of_set = Vec::new();
            for run in set.runs() {
                log.read_for(who, run, &mut bytes[offset..offset + run.bytes()])?;
                of_set.push((run, offset));
                offset += run.bytes();
            }
            runs.push(of_set);
        }
        Ok(Self { sets: sets.to_vec(), runs, bytes })
    }

    /// Calls `each` with the copies of those pages of `run` that are here.
    fn pieces<E>(
        &self,
        array: usize,
        run: PageRun,
        each: &mut impl FnMut(PageRun, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let runs = &self.runs[array];
        let first = runs.partition_point(|(copied, _)| copied.end() <= run.start);
        for (copied, offset) in runs[first..].iter().take_while(|(copied, _)| copied.start < run.end()) {
            let (start, end) = (run.start.max(copied.start), run.end().min(copied.end()));
            let piece = PageRun::new(start, end - start);
            let from = offset + PageRun::new(copied.start, start - copied.start).bytes();
            each(piece, &self.bytes[from..from + piece.bytes()])?;
        }
        Ok(())
    }
}

/// Room that is written to once, so that the kernel has found memory for it before the pause.
fn spare_room() -> Vec<u8> {
    let mut room = vec![1; SPARE_PAGES * PAGE_SIZE];
    room.clear();
    room
}
