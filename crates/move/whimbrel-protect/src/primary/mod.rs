//! Epoch sender: the sending side of a protection, which seeds the standby and then sends epochs.
//!
//! [`crate::epoch::PrimaryEpochs`] decides what comes when; this module does it over a [`Link`]. One epoch is
//! in flight at a time, so memory is bounded by one capture, and a link that is too slow makes epochs longer.
//! After a failure every page of the epoch is dirty again, and the contents of the standby count as unknown.

mod seeding;

use crate::stats::EpochPause;
use crate::{
    codec::{BATCH_PAGES_MAX, ByteCounts, CodecOptions, encoder::Encoder, shared_pages::SharingMachine},
    epoch::{PrimaryAction, PrimaryEpochs, PrimaryEvent},
    epoch_capture::{ArrayPages, EpochCapture},
    error::{BoxError, PrimaryError},
    protocol::{
        self, Blob, COMPARE_PAGES_MAX, Compare, DEVICES, EpochEnd, EpochPages, PagesToResend, ProtectionId,
        StartReply, StartRequest,
    },
};
use bytes::Bytes;
use std::{collections::VecDeque, ops::ControlFlow, time::Instant};
use whimbrel_capture::{
    AfterCapture, CaptureError, CaptureSource, Captured, Consumer, DirtyLog, PageBatch, Progress, Sink,
    SinkError, StopPolicy, capture,
};
use whimbrel_core::{Digest, PAGE_SIZE, PageSet};
use whimbrel_migrate::{
    link::{Answer, Link, LinkError},
    protocol::{BOOT_FILE_RANGE_MAX, BootFileRange, Offered},
};

/// Most batches without a reply during seeding: 4 MiB each, and as much again for referenced pages.
const UNANSWERED_MAX: usize = 8;

/// Pages in a batch of an epoch: the standby decodes one while the next is encoded. A smaller batch would
/// find fewer shared blocks, and cost a message each.
const EPOCH_BATCH_PAGES: usize = 256;

/// The sending side of one protection.
pub struct EpochSender<'a> {
    link: &'a dyn Link,
    id: ProtectionId,
    coding: CodecOptions,
    encoder: Encoder,
    state: PrimaryEpochs,
    capture: EpochCapture,
    captured_at: Instant,
    /// The device state that the standby has, padded to whole pages; empty if unknown.
    devices: Vec<u8>,
}

/// A committed epoch: its output may leave.
#[derive(Debug, Clone, Copy)]
pub struct Committed {
    /// Number of the epoch.
    pub epoch: u64,
    /// Counts of pages and bytes.
    pub volume: ByteCounts,
    /// Pages that the standby requested again.
    pub resent_pages: u64,
    /// Bytes of its device state on the wire.
    pub device_bytes: u64,
}

impl Committed {
    fn count(&mut self, array: u32, sent: ByteCounts) {
        if array == DEVICES {
            self.device_bytes += sent.sent;
            self.volume.sent += sent.sent;
        } else {
            self.volume.add(sent);
        }
    }
}

impl<'a> EpochSender<'a> {
    /// A sender that has sent nothing yet. Its table of hashes takes at most `hash_bytes_max`.
    pub fn new(
        link: &'a dyn Link,
        id: ProtectionId,
        coding: CodecOptions,
        seed: u64,
        hash_bytes_max: usize,
    ) -> Result<Self, PrimaryError> {
        let encoder = Encoder::new(coding, seed, hash_bytes_max);
        let (cut, cut_at) = (EpochCapture::default(), Instant::now());
        Ok(Self {
            link,
            id,
            coding,
            encoder,
            state: PrimaryEpochs::Lost,
            capture: cut,
            captured_at: cut_at,
            devices: Vec::new(),
        })
    }

    /// From now on, refers to pages that the standby host has of this or another machine.
    pub fn share_with(&mut self, member: SharingMachine) {
        self.encoder.share_with(member);
    }

    /// Offers the machine and sends its boot files. Returns whether the standby has pages of the previous
    /// protection.
    pub fn start(
        &self,
        begin: &StartRequest,
        blob: &dyn Fn(Digest) -> Result<Vec<u8>, BoxError>,
    ) -> Result<bool, PrimaryError> {
        let reply = call(self.link, protocol::START, begin, Bytes::new()).map_err(PrimaryError::Start)?;
        let begun: StartReply = postcard::from_bytes(&reply).map_err(PrimaryError::Answer)?;
        let accepted = match begun.offered {
            Offered::Accepted(accepted) => accepted,
            Offered::Misfit(misfit) => return Err(PrimaryError::Incompatible(misfit)),
        };
        for digest in accepted.blobs_missing {
            let content = Bytes::from(blob(digest).map_err(PrimaryError::Blob)?);
            let mut offset = 0;
            while offset < content.len() {
                let end = content.len().min(offset + BOOT_FILE_RANGE_MAX);
                let piece = BootFileRange { handover: begin.offer.handover, digest, offset: offset as u64 };
                let header = Blob { id: self.id, piece };
                call(self.link, protocol::BLOB, &header, content.slice(offset..end))
                    .map_err(|error| PrimaryError::Blob(error.into()))?;
                offset = end;
            }
        }
        Ok(begun.has_pages)
    }

    /// Attaches the standby's consumer to each dirty log, starting from what the standby lacks: everything,
    /// or the pages that differ.
    pub fn attach_consumer(&self, ledgers: &mut [DirtyLog], has_pages: bool) -> Result<(), PrimaryError> {
        for (array, ledger) in ledgers.iter_mut().enumerate() {
            match has_pages {
                true => self.compare(array as u32, ledger)?,
                false => ledger.attach_all(Consumer::Standby)?,
            }
        }
        Ok(())
    }

    /// Attaches the standby's consumer, starting from the pages that differ there. Pages are read while the
    /// machine runs: what it writes to a page after it was read is in a later set.
    fn compare(&self, array: u32, ledger: &mut DirtyLog) -> Result<(), PrimaryError> {
        let mut differs = PageSet::empty(ledger.page_count());
        let mut content = vec![0; 256 * PAGE_SIZE];
        let all = whimbrel_core::PageRun::new(0, ledger.page_count());
        // Writes from here on are dirty for the standby, whatever the comparison says.
        ledger.attach_from(Consumer::Standby, PageSet::empty(ledger.page_count()))?;
        for run in all.chunks(COMPARE_PAGES_MAX) {
            let mut checks = Vec::with_capacity(run.len as usize * crate::codec::DIGEST_BYTES);
            for part in run.chunks(256) {
                let out = &mut content[..part.bytes()];
                ledger.read(part, out)?;
                checks.extend(out.chunks_exact(PAGE_SIZE).flat_map(crate::codec::page_digest));
            }
            let header = Compare { id: self.id, array, run };
            let reply = call(self.link, protocol::COMPARE_DIGESTS, &header, checks.into())?;
            let bits: Vec<u8> = postcard::from_bytes(&reply).map_err(PrimaryError::Answer)?;
            for (at, page) in run.pages().enumerate() {
                // Pages that the reply leaves out count as different.
                if bits.get(at / 8).is_none_or(|byte| byte >> (at % 8) & 1 == 1) {
                    differs.insert(page);
                }
            }
        }
        ledger.put_back(Consumer::Standby, &differs);
        Ok(())
    }

    /// Seeds the standby: copies everything that is dirty, in rounds while the machine runs and a last one
    /// after a pause, and ends that as epoch 0. The machine of `subject` must start to buffer its output
    /// before it runs on after the pause.
    pub fn seed(
        &mut self,
        subject: &mut CaptureSource<'_>,
        policy: &dyn StopPolicy,
        ports: &dyn Fn() -> Vec<Vec<u8>>,
        observe: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Captured, PrimaryError> {
        self.encoder.set_seeding(true);
        self.devices.clear();
        self.captured_at = Instant::now();
        subject.consumer = Consumer::Standby;
        let mut sink =
            SeedSink { sender: self, list: Vec::new(), data: Vec::new(), unanswered: VecDeque::new() };
        let captured = capture(subject, &mut sink, policy, AfterCapture::Unpause, observe);
        self.encoder.set_seeding(false);
        let captured = captured.map_err(PrimaryError::Seeding)?;
        self.end_epoch(0, 0, captured.device_state.clone(), ports())?;
        self.devices = whole_pages(&captured.device_state);
        self.state = PrimaryEpochs::initial();
        Ok(captured)
    }

    /// Captures the next epoch and sends it; returns when the standby has committed it. `stopped` is called
    /// during the pause.
    pub fn epoch(
        &mut self,
        subject: &mut CaptureSource<'_>,
        ports: &dyn Fn() -> Vec<Vec<u8>>,
        stopped: &mut dyn FnMut(),
    ) -> Result<Committed, PrimaryError> {
        let (state, action) = self.state.step(PrimaryEvent::Due);
        let Some(PrimaryAction::CaptureAndSend(epoch)) = action else {
            return Err(PrimaryError::Link(LinkError::Lost { source: "the standby is lost already".into() }));
        };
        subject.consumer = Consumer::Standby;
        self.capture.take(subject, stopped)?;
        self.captured_at = Instant::now();
        self.state = state;
        match self.send(epoch, ports()) {
            Ok(committed) => {
                self.state = self.state.step(PrimaryEvent::Committed(epoch)).0;
                Ok(committed)
            }
            Err(error) => {
                self.state = self.state.step(PrimaryEvent::Failed).0;
                Err(error)
            }
        }
    }

    /// The last epoch's pause, and the time at which the machine ran on.
    pub fn last_pause(&self) -> (EpochPause, Instant) {
        (self.capture.pause, self.captured_at)
    }

    /// Bytes that the table of hashes takes.
    pub fn hash_bytes(&self) -> usize {
        self.encoder.hash_bytes()
    }

    fn send(&mut self, epoch: u64, ports: Vec<Vec<u8>>) -> Result<Committed, PrimaryError> {
        let cut = std::mem::take(&mut self.capture);
        let before = std::mem::take(&mut self.devices);
        let sent = self.send_capture(epoch, &cut, &before, ports);
        if sent.is_ok() {
            self.devices = whole_pages(&cut.device_state);
        }
        self.capture = cut;
        sent
    }

    /// Sends the pages and the end of an epoch. Of the device state, only pages are sent that differ from
    /// `before`, which the standby has.
    ///
    /// The end follows the pages at once. A standby that got a page wrong refuses it, and it is sent again
    /// after that page.
    fn send_capture(
        &mut self,
        epoch: u64,
        cut: &EpochCapture,
        before: &[u8],
        ports: Vec<Vec<u8>>,
    ) -> Result<Committed, PrimaryError> {
        let now = whole_pages(&cut.device_state);
        let old = before.chunks_exact(PAGE_SIZE).map(Some).chain(std::iter::repeat(None));
        let devices = (0..).zip(now.chunks_exact(PAGE_SIZE)).zip(old);
        let devices: ArrayPages<'_> =
            devices.filter(|((_, now), old)| Some(*now) != *old).map(|(page, _)| page).collect();
        let (pages, device_bytes) = (cut.pages() + devices.len() as u64, cut.device_state.len() as u32);
        let seal = EpochEnd { id: self.id, epoch, pages, device_bytes: Some(device_bytes), ports };

        let mut committed =
            Committed { epoch, volume: ByteCounts::default(), resent_pages: 0, device_bytes: 0 };
        let mut under_way = Vec::new();
        for (array, pages) in cut.arrays().into_iter().chain([(DEVICES, devices)]) {
            for pages in pages.chunks(EPOCH_BATCH_PAGES) {
                let (answer, sent) = self.send_pages(Some(epoch), array, pages)?;
                committed.count(array, sent);
                under_way.push((array, pages.to_vec(), answer));
            }
        }
        let sealed = self.link.send(protocol::EPOCH_END, encoded(&seal), Bytes::new())?;
        self.resend(under_way, &mut committed)?;
        match committed.resent_pages {
            0 => drop(sealed.wait()?),
            _ => {
                // Refused because of the wrong pages; the reply to the next one tells the outcome.
                drop(sealed.wait());
                call(self.link, protocol::EPOCH_END, &seal, Bytes::new())?;
            }
        }
        Ok(committed)
    }

    /// Sends the pages again that the standby got wrong.
    fn resend(
        &mut self,
        under_way: Vec<(u32, ArrayPages<'_>, Box<dyn Answer>)>,
        committed: &mut Committed,
    ) -> Result<(), PrimaryError> {
        for (array, pages, answer) in under_way {
            let wrong = wrong_pages(answer)?;
            if wrong.is_empty() {
                continue;
            }
            committed.resent_pages += wrong.len() as u64;
            wrong.iter().for_each(|page| self.encoder.forget(array, *page));
            let pages: Vec<_> = pages.into_iter().filter(|(page, _)| wrong.contains(page)).collect();
            let (answer, sent) = self.send_pages(Some(committed.epoch), array, &pages)?;
            committed.volume.sent += sent.sent;
            if let Some(page) = wrong_pages(answer)?.first() {
                return Err(PrimaryError::WrongPage { array, page: *page });
            }
        }
        Ok(())
    }

    fn send_pages(
        &mut self,
        epoch: Option<u64>,
        array: u32,
        pages: &[(u64, &[u8])],
    ) -> Result<(Box<dyn Answer>, ByteCounts), PrimaryError> {
        let (payload, volume) =
            self.encoder.encode(array, pages.iter().copied()).map_err(PrimaryError::Encode)?;
        let header = EpochPages { id: self.id, epoch, array, block: self.coding.block };
        let answer = self.link.send(protocol::EPOCH_PAGES, encoded(&header), payload.into())?;
        Ok((answer, volume))
    }

    fn end_epoch(
        &self,
        epoch: u64,
        pages: u64,
        device_state: Vec<u8>,
        ports: Vec<Vec<u8>>,
    ) -> Result<(), PrimaryError> {
        let header = EpochEnd { id: self.id, epoch, pages, device_bytes: None, ports };
        call(self.link, protocol::EPOCH_END, &header, device_state.into())?;
        Ok(())
    }
}

struct SeedSink<'s, 'a> {
    sender: &'s mut EpochSender<'a>,
    /// Pages waiting for the next batch: array and number, and their contents in the same order.
    list: Vec<(u32, u64)>,
    data: Vec<u8>,
    unanswered: VecDeque<Unanswered>,
}

/// A batch sent during seeding.
struct Unanswered {
    answer: Box<dyn Answer>,
    array: u32,
    /// Referenced pages, which the standby may not have as assumed: at most those of the batch.
    referenced: Vec<(u64, Vec<u8>)>,
}

impl SeedSink<'_, '_> {
    fn flush(&mut self) -> Result<(), SinkError> {
        let Some(array) = self.list.first().map(|(array, _)| *array) else { return Ok(()) };
        let pages: Vec<(u64, &[u8])> =
            self.list.iter().map(|(_, page)| *page).zip(self.data.chunks_exact(PAGE_SIZE)).collect();
        let (answer, _) = self.sender.send_pages(None, array, &pages).map_err(undelivered)?;
        let mut named = self.sender.encoder.referenced().iter().peekable();
        let kept = pages.iter().filter(|(page, _)| named.next_if_eq(&page).is_some());
        let named = kept.map(|(page, content)| (*page, content.to_vec())).collect();
        self.list.clear();
        self.data.clear();
        self.unanswered.push_back(Unanswered { answer, array, referenced: named });
        self.wait(UNANSWERED_MAX)
    }

    fn wait(&mut self, unanswered_max: usize) -> Result<(), SinkError> {
        while self.unanswered.len() > unanswered_max
            && let Some(Unanswered { answer, array, referenced: named }) = self.unanswered.pop_front()
        {
            let wrong = wrong_pages(answer).map_err(undelivered)?;
            // Only a referenced page may be wrong. Other pages depend on nothing but the batch itself and
            // what the standby received before.
            let is_named = |page: &&u64| named.iter().any(|(named, _)| named == *page);
            if let Some(page) = wrong.iter().find(|page| !is_named(page)) {
                return Err(undelivered(PrimaryError::WrongPage { array, page: *page }));
            }
            if wrong.is_empty() {
                continue;
            }
            wrong.iter().for_each(|page| self.sender.encoder.forget(array, *page));
            let again = named.iter().filter(|(page, _)| wrong.contains(page));
            let again: Vec<(u64, &[u8])> = again.map(|(page, content)| (*page, &content[..])).collect();
            let (answer, _) = self.sender.send_pages(None, array, &again).map_err(undelivered)?;
            self.unanswered.push_back(Unanswered { answer, array, referenced: Vec::new() });
        }
        Ok(())
    }
}

impl Sink for SeedSink<'_, '_> {
    fn write(&mut self, batch: PageBatch<'_>) -> Result<(), SinkError> {
        for (page, content) in batch.run.pages().zip(batch.data.chunks_exact(PAGE_SIZE)) {
            let follows =
                self.list.last().is_none_or(|(array, last)| *array == batch.array as u32 && *last < page);
            if self.list.len() >= BATCH_PAGES_MAX || !follows {
                self.flush()?;
            }
            self.list.push((batch.array as u32, page));
            self.data.extend_from_slice(content);
        }
        Ok(())
    }

    fn limit_rate(&mut self, rate: Option<u64>) {
        self.sender.link.limit_rate(rate);
    }

    fn end_round(&mut self) -> Result<(), SinkError> {
        self.flush()?;
        self.wait(0)
    }

    fn bytes_out(&self) -> u64 {
        self.sender.link.bytes_sent()
    }
}

fn wrong_pages(answer: Box<dyn Answer>) -> Result<Vec<u64>, PrimaryError> {
    let reply = answer.wait()?;
    let again: PagesToResend = postcard::from_bytes(&reply).map_err(PrimaryError::Answer)?;
    Ok(again.pages)
}

fn undelivered(source: impl Into<BoxError>) -> SinkError {
    SinkError { destination: "the standby".to_owned(), source: source.into() }
}

/// Pads a device state with zeros to whole pages.
fn whole_pages(device_state: &[u8]) -> Vec<u8> {
    let mut pages = Vec::with_capacity(device_state.len().next_multiple_of(PAGE_SIZE));
    pages.extend_from_slice(device_state);
    pages.resize(device_state.len().next_multiple_of(PAGE_SIZE), 0);
    pages
}

fn encoded(header: &impl serde::Serialize) -> Vec<u8> {
    postcard::to_stdvec(header).expect("a header is always encodable")
}

/// Sends a request and waits for its reply.
pub fn call(
    link: &dyn Link,
    kind: u16,
    header: &impl serde::Serialize,
    payload: Bytes,
) -> Result<Bytes, LinkError> {
    link.send(kind, encoded(header), payload)?.wait()
}

/// Whether seeding failed because its observer cancelled it.
pub fn was_cancelled(error: &PrimaryError) -> bool {
    matches!(error, PrimaryError::Seeding(CaptureError::Cancelled))
}
