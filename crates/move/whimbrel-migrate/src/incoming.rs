//! One handover on the target: carries out the actions of [`Target`] and the messages with its content.
//!
//! Everything in a message is checked against the offer before it is used. Each action gives the reply to the
//! message that caused it.

use crate::{
    error::TargetError,
    handover::{Target, TargetAction, TargetEvent},
    page_batch::PageBatch,
    postcopy::messages::MissingPages,
    protocol::{
        self, Accepted, BootFileRange, CommitReply, FilePages, Finish, FinishHeader, Offer, Offered,
        PageQuery, PagesHeader, Prepared, RunningSince,
    },
    target::{IncomingMachine, MEMORY, TargetHost},
};
use std::{sync::Arc, time::Instant};
use whimbrel_core::{Digest, HostName, PAGE_SIZE, PageRun};

/// One handover, with what its actions need.
pub(crate) struct Incoming {
    pub(crate) state: Target,
    /// Absent before it is reserved, and once it is discarded; of an ended handover the daemon has it.
    pub(crate) machine: Option<Box<dyn IncomingMachine>>,
    /// Offer and the host that it is from, until room for it is reserved.
    offer: Option<(Arc<dyn TargetHost>, Offer, HostName)>,
    /// End of the copy, its device state and its arrival, until they are loaded.
    finish: Option<(Finish, Vec<u8>, Instant)>,
    /// Lengths of the offered arrays, in pages.
    arrays: Vec<u64>,
    boot_files: Vec<(Digest, u64)>,
    boot_file: Vec<u8>,
    /// Early device state that the source sent.
    early_state: Vec<u8>,
}

const OUT_OF_ORDER: TargetError = TargetError::Invalid { what: "a message out of order" };
const BAD_STATE: TargetError = TargetError::Invalid { what: "a device state whose parts do not match" };

impl Incoming {
    /// A handover whose offer is not known here any more.
    pub(crate) fn ended(state: Target) -> Self {
        Self {
            state,
            machine: None,
            offer: None,
            finish: None,
            arrays: vec![],
            boot_files: vec![],
            boot_file: vec![],
            early_state: vec![],
        }
    }

    /// An accepted offer, and the reply to it.
    pub(crate) fn reserved(
        host: Arc<dyn TargetHost>,
        offer: Offer,
        from: &HostName,
    ) -> Result<(Self, Vec<u8>), TargetError> {
        let (state, actions) = Target::initial();
        let mut incoming = Self {
            arrays: offer.arrays.iter().map(|array| array.pages).collect(),
            boot_files: offer.blobs.clone(),
            offer: Some((host, offer, from.clone())),
            ..Self::ended(state)
        };
        let reply = incoming.execute_all(actions)?;
        Ok((incoming, reply.unwrap_or_default()))
    }

    /// Carries out the actions of an event; a message without any does not match the state. After a failure
    /// the message may be repeated; the state is as before, except that the machine may have been started.
    pub(crate) fn event(&mut self, event: TargetEvent) -> Result<Vec<u8>, TargetError> {
        let (next, actions) = self.state.step(event);
        let reply = self.execute_all(actions).inspect_err(|_| {
            if next == Target::Running {
                self.state = self.state.step(TargetEvent::StartFailed).0;
            }
        })?;
        self.state = next;
        reply.ok_or(TargetError::State { state: next })
    }

    /// Handles a commit, which `returnable` says may be answered with the machine's return. Returns the
    /// encoded reply.
    pub(crate) fn commit(&mut self, returnable: bool) -> Result<Vec<u8>, TargetError> {
        let ended = returnable && self.machine.as_ref().is_some_and(|machine| machine.has_ended());
        self.event(if ended { TargetEvent::CommitOfEnded } else { TargetEvent::Commit })?;
        let since = self.machine.as_ref().and_then(|machine| machine.runs_since());
        let since = since.map(|since| RunningSince { since: since.elapsed().as_micros() as u64 });
        Ok(match (returnable, self.state) {
            (true, Target::Returned) => encode_reply(&CommitReply::NeverRan),
            (true, _) => encode_reply(&CommitReply::Running(since.unwrap_or_default())),
            // Empty if the start was not observed here.
            (false, _) => since.map(|since| encode_reply(&since)).unwrap_or_default(),
        })
    }

    /// Carries out actions; returns the reply of the last.
    pub(crate) fn execute_all(&mut self, actions: &[TargetAction]) -> Result<Option<Vec<u8>>, TargetError> {
        actions.iter().try_fold(None, |_, action| self.execute(*action).map(Some))
    }

    fn execute(&mut self, action: TargetAction) -> Result<Vec<u8>, TargetError> {
        match action {
            TargetAction::ReserveAndAccept => {
                let (host, offer, from) = self.offer.take().ok_or(OUT_OF_ORDER)?;
                let machine =
                    host.reserve(&offer, &from).map_err(|source| TargetError::Refused { source })?;
                let (blobs_missing, begun_as) = (machine.boot_files_missing(), machine.baselines());
                self.machine = Some(machine);
                Ok(encode_reply(&Offered::Accepted(Accepted { blobs_missing, begun_as })))
            }
            TargetAction::LoadAndConfirmReady => {
                let (finish, state, begun) = self.finish.take().ok_or(OUT_OF_ORDER)?;
                // After a failure the machine stays until the source aborts: its own machine is paused until
                // this is answered.
                let loaded = machine(&mut self.machine)?.prepare(&finish, &state);
                loaded.map_err(|source| TargetError::Prepare { source })?;
                Ok(encode_reply(&Prepared { took: begun.elapsed().as_micros() as u64 }))
            }
            TargetAction::RunAndConfirm => {
                machine(&mut self.machine)?.run().map_err(|source| TargetError::Run { source })?;
                Ok(Vec::new())
            }
            TargetAction::RecordNeverRan => {
                let recorded = machine(&mut self.machine)?.record_never_ran();
                recorded.map_err(|source| TargetError::Return { source })?;
                Ok(Vec::new())
            }
            TargetAction::ConfirmRunning | TargetAction::ConfirmNeverRan => Ok(Vec::new()),
            TargetAction::Discard => {
                machine(&mut self.machine)?.discard();
                self.machine = None;
                Ok(Vec::new())
            }
            TargetAction::ConfirmDiscarded => Ok(Vec::new()),
        }
    }

    fn receiving(&self) -> Result<(), TargetError> {
        match self.state {
            Target::Receiving => Ok(()),
            state => Err(TargetError::State { state }),
        }
    }

    pub(crate) fn boot_file_range(&mut self, piece: &BootFileRange, data: &[u8]) -> Result<(), TargetError> {
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
        machine(&mut self.machine)?.store_boot_file(digest, content).map_err(TargetError::write)
    }

    pub(crate) fn pages(&mut self, pages: &PagesHeader, batch: &PageBatch) -> Result<(), TargetError> {
        self.receiving()?;
        let array = pages.batch.array as usize;
        let len =
            *self.arrays.get(array).ok_or(TargetError::Invalid { what: "an array that was not offered" })?;
        pages.batch.check(len)?;
        let mut rest = batch.whole();
        for run in &pages.batch.whole {
            let (data, after) = rest.split_at(run.bytes());
            machine(&mut self.machine)?.write(array, *run, data).map_err(TargetError::write)?;
            rest = after;
        }
        let (mut buffer, mut patches) = (Vec::new(), batch.patches());
        for run in &pages.batch.delta {
            buffer.resize(run.bytes(), 0);
            machine(&mut self.machine)?.read(array, *run, &mut buffer).map_err(TargetError::write)?;
            for (page, patch) in buffer.chunks_exact_mut(PAGE_SIZE).zip(&mut patches) {
                patch.apply(page);
            }
            machine(&mut self.machine)?.write(array, *run, &buffer).map_err(TargetError::write)?;
        }
        let machine = machine(&mut self.machine)?;
        pages.batch.zero.iter().try_for_each(|run| machine.zero(array, *run)).map_err(TargetError::write)
    }

    /// Copies pages of memory from the boot files. Nothing is stored unless all pages equal those on the
    /// source.
    pub(crate) fn file_pages(&mut self, pages: &FilePages) -> Result<(), TargetError> {
        self.receiving()?;
        if !pages.is_valid(self.arrays[MEMORY], &self.boot_files) {
            return Err(TargetError::Invalid { what: "pages that are in no boot file" });
        }
        let mut data = vec![0; pages.runs.iter().map(|run| run.pages.bytes()).sum()];
        let mut rest = &mut data[..];
        for run in &pages.runs {
            let (out, after) = rest.split_at_mut(run.pages.bytes());
            let (digest, _) = &self.boot_files[usize::from(run.file)];
            machine(&mut self.machine)?
                .read_boot_file(digest, run.offset, out)
                .map_err(TargetError::write)?;
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
            machine(&mut self.machine)?.write(MEMORY, run.pages, content).map_err(TargetError::write)?;
            rest = after;
        }
        Ok(())
    }

    /// Stores pages that were found here.
    pub(crate) fn store_found(
        &mut self,
        ask: &PageQuery,
        found: &[bool],
        content: &[u8],
    ) -> Result<(), TargetError> {
        self.receiving()?;
        let array = ask.array as usize;
        let len = self.arrays.get(array).copied().filter(|len| ask.is_valid(*len));
        len.ok_or(TargetError::Invalid { what: "a query for pages that were not offered" })?;
        let pages = ask.runs.iter().flat_map(|run| run.pages()).zip(content.chunks_exact(PAGE_SIZE));
        for ((page, content), _) in pages.zip(found).filter(|(_, found)| **found) {
            machine(&mut self.machine)?
                .write(array, PageRun::new(page, 1), content)
                .map_err(TargetError::write)?;
        }
        Ok(())
    }

    pub(crate) fn add_missing(&mut self, owed: &MissingPages, piece: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        if owed.array as usize >= self.arrays.len() {
            return Err(TargetError::Invalid { what: "pages of an array that was not offered" });
        }
        machine(&mut self.machine)?.add_missing(owed, piece).map_err(TargetError::write)
    }

    pub(crate) fn store_early_state(&mut self, packed: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        if !self.early_state.is_empty() {
            return Err(TargetError::Invalid { what: "a second early device state" });
        }
        let ahead = protocol::unpack_state(packed, protocol::DEVICE_STATE_MAX);
        self.early_state = ahead.ok_or(BAD_STATE)?;
        machine(&mut self.machine)?
            .expect_state(&self.early_state)
            .map_err(|source| TargetError::Prepare { source })
    }

    /// Joins the early device state and the rest.
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

    pub(crate) fn finish(&mut self, word: FinishHeader, rest: &[u8]) -> Result<Vec<u8>, TargetError> {
        self.receiving()?;
        let begun = Instant::now();
        let device_state = self.device_state(&word, rest)?;
        self.finish = Some((word.finish, device_state, begun));
        self.event(TargetEvent::Finished)
    }
}

fn machine(present: &mut Option<Box<dyn IncomingMachine>>) -> Result<&mut dyn IncomingMachine, TargetError> {
    match present {
        Some(machine) => Ok(&mut **machine),
        None => Err(OUT_OF_ORDER),
    }
}

pub(crate) fn encode_reply(answer: &impl serde::Serialize) -> Vec<u8> {
    postcard::to_stdvec(answer).expect("a reply is always encodable")
}
