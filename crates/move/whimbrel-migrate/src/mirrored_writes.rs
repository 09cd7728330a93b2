//! Mirrored writes: sends the writes to a mirrored disk while it is copied. One thread a disk, beside the
//! rounds and over the same link.
//!
//! Writes are sent as page messages like any others. The mirror (`whimbrel_block::Mirror`) decides when a
//! page may be sent: each page has at most one version in flight, whichever thread sent it, so the target
//! needs no extra rules. An error of such a thread fails the migration before the blocked writers continue,
//! so a copy that lacks a write never counts as complete.

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

/// Pages of a mirrored disk in one message of a round.
#[derive(Default)]
pub(crate) struct MirroredBatch(Option<(Arc<Mirror>, Vec<PageRun>)>);

impl MirroredBatch {
    pub(crate) fn new<'r>(mirror: Option<&Arc<Mirror>>, runs: impl Iterator<Item = &'r PageRun>) -> Self {
        Self(mirror.map(|mirror| (mirror.clone(), runs.copied().collect())))
    }

    /// Reports to the mirror that the pages have arrived.
    pub(crate) fn arrived(self) {
        if let Some((mirror, runs)) = self.0 {
            mirror.arrived(&runs);
        }
    }
}

struct SentWrites {
    /// Reply to the message; none if the target already had all of it.
    answer: Option<Box<dyn Answer>>,
    runs: Vec<PageRun>,
}

impl Pipeline<'_> {
    /// Sends the writes to a disk until its mirror ends.
    pub(crate) fn send_writes(&self, array: usize, mirror: &Mirror) {
        let _over = EndMirrorOnDrop(self, mirror);
        if let Err(error) = self.send_all_writes(array, mirror) {
            self.fail(error);
        }
    }

    fn send_all_writes(&self, array: usize, mirror: &Mirror) -> Result<(), BoxError> {
        let mut encoder = Encoder::default();
        let mut sent: VecDeque<SentWrites> = VecDeque::new();
        loop {
            match mirror.take(BATCH_PAGES_MAX, sent.is_empty()) {
                NextWrites::Ended => return Ok(()),
                NextWrites::Writes(pieces) => {
                    sent.push_back(self.send_mirrored(&mut encoder, array, pieces)?)
                }
                NextWrites::Nothing => {
                    let Some(SentWrites { answer, runs }) = sent.pop_front() else { continue };
                    answer.map(Answer::wait).transpose()?;
                    mirror.arrived(&runs);
                    mirror.delivered(runs.iter().map(|run| run.bytes() as u64).sum());
                }
            }
        }
    }

    fn send_mirrored(
        &self,
        encoder: &mut Encoder,
        array: usize,
        pieces: Vec<MirroredWrite>,
    ) -> Result<SentWrites, BoxError> {
        let mut runs = Vec::with_capacity(pieces.len());
        for (run, data) in pieces {
            // Written now, so perhaps soon again.
            let hot = vec![true; run.len as usize];
            let verdicts = self.target_contents.pages(array, &[run], &data, &hot)?;
            for ((page, content), verdict) in run.pages().zip(data.chunks_exact(PAGE_SIZE)).zip(verdicts) {
                match verdict {
                    PageEncoding::Present => {}
                    PageEncoding::Changed(blocks) => encoder.delta(page, content, blocks),
                    PageEncoding::Whole => encoder.whole(page, content),
                }
            }
            runs.push(run);
        }
        if encoder.is_empty() {
            return Ok(SentWrites { answer: None, runs });
        }
        let (batch, payload) = encoder.finish(array as u32, self.effort())?;
        let header = postcard::to_stdvec(&PagesHeader { handover: self.handover, batch })?;
        let answer = self.link.send(protocol::PAGES, header, payload.into())?;
        Ok(SentWrites { answer: Some(answer), runs })
    }
}

/// Ends the mirror when its thread ends, even by a panic.
struct EndMirrorOnDrop<'a>(&'a Pipeline<'a>, &'a Mirror);

impl Drop for EndMirrorOnDrop<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail("the thread that sends mirrored writes panicked".into());
        }
        self.1.end();
    }
}
