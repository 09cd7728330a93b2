//! Carrying what is written to a disk while it is copied: a thread a disk, beside the rounds and over the
//! same link.
//!
//! What is carried is page messages like any other. Which page may set out when is the mirror's to say
//! (`whimbrel_block::Mirror`): a page has one version under way at most, whoever sent it, so the target needs
//! to know of nothing. A carrier that fails has failed the migration; it says so before it lets the writers
//! go, so a copy that lacks a write is never taken for whole.

use crate::{
    link::Answer,
    page_batch::{BATCH_PAGES_MAX, Encoder},
    page_sender::Pipeline,
    protocol::{self, PagesHeader},
    source::BoxError,
    target_contents::PageEncoding,
};
use std::{collections::VecDeque, sync::Arc, thread};
use whimbrel_block::{Mirror, MirroredWrite, NextWrites};
use whimbrel_core::{PAGE_SIZE, PageRun};

/// Pages of a mirrored disk that a message of a round brings to the target.
#[derive(Default)]
pub(crate) struct MirroredBatch(Option<(Arc<Mirror>, Vec<PageRun>)>);

impl MirroredBatch {
    pub(crate) fn new<'r>(mirror: Option<&Arc<Mirror>>, runs: impl Iterator<Item = &'r PageRun>) -> Self {
        Self(mirror.map(|mirror| (mirror.clone(), runs.copied().collect())))
    }

    /// They are there.
    pub(crate) fn arrived(self) {
        if let Some((mirror, runs)) = self.0 {
            mirror.arrived(&runs);
        }
    }
}

/// A message that carries writes.
struct Carried {
    /// None if the target has all of it.
    answer: Option<Box<dyn Answer>>,
    runs: Vec<PageRun>,
}

impl Pipeline<'_> {
    /// Carries what is written to a disk, until its mirror ends.
    pub(crate) fn carry(&self, array: usize, mirror: &Mirror) {
        let _over = Over(self, mirror);
        if let Err(error) = self.carry_all(array, mirror) {
            self.fail(error);
        }
    }

    fn carry_all(&self, array: usize, mirror: &Mirror) -> Result<(), BoxError> {
        let mut encoder = Encoder::new()?;
        let mut sent: VecDeque<Carried> = VecDeque::new();
        loop {
            match mirror.take(BATCH_PAGES_MAX, sent.is_empty()) {
                NextWrites::Ended => return Ok(()),
                NextWrites::Pieces(pieces) => {
                    sent.push_back(self.send_pieces(&mut encoder, array, pieces)?)
                }
                NextWrites::Nothing => {
                    let Some(Carried { answer, runs }) = sent.pop_front() else { continue };
                    answer.map(Answer::wait).transpose()?;
                    mirror.arrived(&runs);
                    mirror.carried(runs.iter().map(|run| run.bytes() as u64).sum());
                }
            }
        }
    }

    fn send_pieces(
        &self,
        encoder: &mut Encoder,
        array: usize,
        pieces: Vec<MirroredWrite>,
    ) -> Result<Carried, BoxError> {
        let mut runs = Vec::with_capacity(pieces.len());
        for (run, data) in pieces {
            // Written now, so perhaps soon again.
            let hot = vec![true; run.len as usize];
            let verdicts = self.known.pages(array, &[run], &data, &hot)?;
            for ((page, content), verdict) in run.pages().zip(data.chunks_exact(PAGE_SIZE)).zip(verdicts) {
                match verdict {
                    PageEncoding::There => {}
                    PageEncoding::Changed(blocks) => encoder.delta(page, content, blocks),
                    PageEncoding::Whole => encoder.whole(page, content),
                }
            }
            runs.push(run);
        }
        if encoder.is_empty() {
            return Ok(Carried { answer: None, runs });
        }
        let (batch, payload) = encoder.finish(array as u32, self.effort())?;
        let header = postcard::to_stdvec(&PagesHeader { handover: self.handover, batch })?;
        let answer = self.link.send(protocol::PAGES, header, payload.into())?;
        Ok(Carried { answer: Some(answer), runs })
    }
}

/// Nobody carries any more, however that came.
struct Over<'a>(&'a Pipeline<'a>, &'a Mirror);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail("what carries writes failed".into());
        }
        self.1.end();
    }
}
