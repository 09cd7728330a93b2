//! Target contents: for each page, the version that the target has, either of the baseline or one that was
//! sent.

use crate::{
    baseline::{ArrayBaseline, BaselineContent},
    page_batch::{self, BLOCKS_CHANGED_MAX},
    sent_hashes::{BlockHashes, SentHashes},
    source::BoxError,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_image::delta_blocks;

/// As many zero pages as are compared at once.
static ZEROS: [u8; page_batch::BATCH_PAGES_MAX as usize * PAGE_SIZE] =
    [0; page_batch::BATCH_PAGES_MAX as usize * PAGE_SIZE];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageEncoding {
    /// The target has the page.
    Present,
    /// The target has the page except these blocks.
    Changed(u64),
    /// The complete page must be sent.
    Whole,
}

pub(crate) struct TargetContents {
    bases: Vec<Option<Arc<dyn BaselineContent>>>,
    state: Mutex<State>,
}

struct State {
    sent: SentHashes,
    /// For each array with a baseline: pages that are on the target as in the baseline.
    as_baseline: Vec<Option<PageSet>>,
    zero_hashes: BlockHashes,
}

impl TargetContents {
    /// Starts with these baselines; `room` bytes for the hashes of versions that were sent.
    pub(crate) fn new(bases: Vec<(u64, Option<&ArrayBaseline>)>, room: usize, seed: u64) -> Self {
        let sent = SentHashes::new(room, seed);
        let zero_marks = sent.hasher()(&[0; PAGE_SIZE]);
        let content = |base: Option<&ArrayBaseline>| base.and_then(|base| base.content.clone());
        let contents: Vec<_> = bases.iter().map(|(_, base)| content(*base)).collect();
        let fresh = bases.iter().zip(&contents);
        let fresh = fresh.map(|((pages, _), content)| content.as_ref().map(|_| PageSet::full(*pages)));
        let state = State { sent, as_baseline: fresh.collect(), zero_hashes: zero_marks };
        Self { bases: contents, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the hashes of another hot page can be stored, so that its next version can be sent as a delta.
    pub(crate) fn has_room(&self) -> bool {
        self.state().sent.has_room()
    }

    /// Returns the pages of `runs` that are not zero on the target, and records that they are zero from now
    /// on.
    pub(crate) fn zero(&self, array: usize, runs: &[PageRun]) -> Result<Vec<PageRun>, BoxError> {
        let mut left = Vec::new();
        for run in runs.iter().flat_map(|run| run.chunks(page_batch::BATCH_PAGES_MAX)) {
            let there = self.equals_baseline(array, run, &ZEROS[..run.bytes()])?;
            let mut state = self.state();
            for (page, _) in run.pages().zip(there).filter(|(_, there)| !there) {
                state.record_zero(array, page);
                page_batch::push(&mut left, page);
            }
        }
        Ok(left)
    }

    /// Encodings for the pages of `runs`, whose content is `data`. Records these versions as those of the
    /// target.
    pub(crate) fn pages(
        &self,
        array: usize,
        runs: &[PageRun],
        data: &[u8],
        hot: &[bool],
    ) -> Result<Vec<PageEncoding>, BoxError> {
        let mut verdicts = Vec::with_capacity(hot.len());
        let mut rest = data;
        for run in runs {
            let (data, after) = rest.split_at(run.bytes());
            self.run(array, *run, data, &hot[verdicts.len()..], &mut verdicts)?;
            rest = after;
        }
        Ok(verdicts)
    }

    fn run(
        &self,
        array: usize,
        run: PageRun,
        data: &[u8],
        hot: &[bool],
        verdicts: &mut Vec<PageEncoding>,
    ) -> Result<(), BoxError> {
        let there = self.equals_baseline(array, run, data)?;
        let against_base = self.changed_from_baseline(array, run, data, &there)?;
        let marks = self.state().sent.hasher();
        for (number, (page, content)) in run.pages().zip(data.chunks_exact(PAGE_SIZE)).enumerate() {
            if there[number] {
                verdicts.push(PageEncoding::Present);
                continue;
            }
            let now = marks(content);
            let mut state = self.state();
            let fresh = state.clear_as_baseline(array, page);
            let changed = match fresh {
                true => against_base[number],
                false => state.sent.changed(array as u32, page, &now),
            };
            state.sent.record(array as u32, page, &now, hot[number]);
            verdicts.push(match changed {
                Some(0) => PageEncoding::Present,
                Some(blocks) if blocks.count_ones() <= BLOCKS_CHANGED_MAX => PageEncoding::Changed(blocks),
                _ => PageEncoding::Whole,
            });
        }
        Ok(())
    }

    /// Whether each page of the run is on the target as in the baseline, and still equals it.
    fn equals_baseline(&self, array: usize, run: PageRun, data: &[u8]) -> Result<Vec<bool>, BoxError> {
        let fresh = self.is_as_baseline(array, run);
        let Some(content) = self.bases[array].as_ref().filter(|_| fresh.contains(&true)) else {
            return Ok(fresh);
        };
        let same = content.same(run, data)?;
        Ok(fresh.into_iter().zip(same).map(|(fresh, same)| fresh && same).collect())
    }

    fn is_as_baseline(&self, array: usize, run: PageRun) -> Vec<bool> {
        match &self.state().as_baseline[array] {
            Some(fresh) => run.pages().map(|page| fresh.contains(page)).collect(),
            None => vec![false; run.len as usize],
        }
    }

    /// For pages that are on the target as in the baseline: the blocks in which they differ from it.
    fn changed_from_baseline(
        &self,
        array: usize,
        run: PageRun,
        data: &[u8],
        there: &[bool],
    ) -> Result<Vec<Option<u64>>, BoxError> {
        let mut changed = vec![None; run.len as usize];
        let Some(content) = &self.bases[array] else { return Ok(changed) };
        let fresh = self.is_as_baseline(array, run);
        let mut old = vec![0; PAGE_SIZE];
        for (number, page) in run.pages().enumerate().filter(|(number, _)| fresh[*number] && !there[*number])
        {
            content.read(PageRun::new(page, 1), &mut old)?;
            changed[number] = Some(delta_blocks::changed(
                &old,
                &data[number * PAGE_SIZE..][..PAGE_SIZE],
                page_batch::BLOCK,
            ));
        }
        Ok(changed)
    }
}

impl State {
    fn clear_as_baseline(&mut self, array: usize, page: u64) -> bool {
        self.as_baseline[array].as_mut().is_some_and(|fresh| fresh.remove(page))
    }

    fn record_zero(&mut self, array: usize, page: u64) {
        self.clear_as_baseline(array, page);
        self.sent.update(array as u32, page, &self.zero_hashes);
    }
}
