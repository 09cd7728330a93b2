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
        let late = Copies { runs: vec![Vec::new(); sets.len()], bytes: spare_room() };
        Ok(Self { early, late })
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
        let mut page = run.start;
        for (again, late) in self.late.within(array, run) {
            let mut before = self.early.within(array, PageRun::new(page, again.start - page));
            before.try_for_each(|(run, early)| each(run, early))?;
            each(again, late)?;
            page = again.end();
        }
        let mut rest = self.early.within(array, PageRun::new(page, run.end() - page));
        rest.try_for_each(|(run, early)| each(run, early))
    }
}

/// Pages of several arrays that were copied at one time.
struct Copies {
    /// Runs of each array, in order, and the offset of each run in `bytes`.
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
        Ok(Self { runs, bytes })
    }

    /// Copies of those pages of `run` that are here, in order.
    fn within(&self, array: usize, run: PageRun) -> impl Iterator<Item = (PageRun, &[u8])> {
        let runs = &self.runs[array];
        let first = runs.partition_point(|(copied, _)| copied.end() <= run.start);
        runs[first..].iter().take_while(move |(copied, _)| copied.start < run.end()).map(
            move |(copied, offset)| {
                let (start, end) = (run.start.max(copied.start), run.end().min(copied.end()));
                let piece = PageRun::new(start, end - start);
                let from = offset + PageRun::new(copied.start, start - copied.start).bytes();
                (piece, &self.bytes[from..from + piece.bytes()])
            },
        )
    }
}

/// Room that is written to once, so that the kernel has found memory for it before the pause.
fn spare_room() -> Vec<u8> {
    let mut room = vec![1; SPARE_PAGES * PAGE_SIZE];
    room.clear();
    room
}
