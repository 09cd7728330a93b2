//! Page sender: the sink of a migration. Gathers batches, encodes them in several threads and keeps a bounded
//! number in flight.
//!
//! Within a round every page is sent once, so batches may overtake each other; at its end all of them are
//! answered. The next call returns any error.
//!
//! Writes to a mirrored disk are sent beside the rounds (`mirrored_writes.rs`); the disk's mirror orders the
//! two.
//!
//! Memory: a MiB for each batch that waits or is worked on, and hashes of what was sent
//! ([`crate::sent_hashes`]).

use crate::{
    baseline::ArrayBaseline,
    boot_files::{self, BootFiles},
    effort_control::{EffortControl, EncoderTime},
    hit_estimate::HitEstimate,
    link::{Answer, Link},
    mirrored_writes::MirroredBatch,
    page_batch::{BATCH_PAGES_MAX, Effort, Encoder, RUNS_MAX, push},
    protocol::{self, FilePages, HandoverId, PageQuery, PageQueryReply, PagesHeader},
    source::BoxError,
    target::MEMORY,
    target_contents::{PageEncoding, TargetContents},
};
use bytes::Bytes;
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, Scope},
    time::{Duration, Instant},
};
use whimbrel_block::Mirror;
use whimbrel_capture::{PageBatch, Sink, SinkError, StopReason};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet, lock};
use xxhash_rust::xxh3::Xxh3;

/// Most bytes of page messages that wait for a reply: a Gbit/s over 130 ms.
const UNANSWERED_MAX: usize = 16 << 20;
/// Limit while writes to a disk are mirrored, as the time to send it: a write to a page in flight waits for
/// that page's reply.
const UNANSWERED_MIRRORED: Duration = Duration::from_millis(50);
const UNANSWERED_MIRRORED_MIN: f64 = 256e3;
const UNANSWERED_MIRRORED_MAX: f64 = 4e6;
/// Memory for the hashes of pages that were sent: an eighth of these pages.
const HASHES_BYTES_MAX: usize = 24 << 20;
/// Most encoder threads; more fill 10 Gbit/s.
const ENCODERS_MAX: usize = 8;
/// Threads beside the encoders.
const QUERY_THREADS: usize = 2;
/// Pages of a batch during the downtime: small enough that all encoders get some. Also while writes are
/// mirrored, so that none is in flight for long.
const URGENT_PAGES: usize = 64;
/// Niceness of encoders while the machine runs: it comes first.
const NICE: i32 = 5;

/// Batch that is being gathered, or that waits for an encoder.
#[derive(Default)]
struct BatchJob {
    array: usize,
    zero: Vec<PageRun>,
    runs: Vec<PageRun>,
    data: Vec<u8>,
    hot: Vec<bool>,
}

impl BatchJob {
    fn is_empty(&self) -> bool {
        self.zero.is_empty() && self.runs.is_empty()
    }

    /// Hands the pages to the encoder, without their content.
    fn encode(&mut self, encoder: &mut Encoder, verdicts: &[PageEncoding]) {
        let content = std::mem::take(&mut self.data);
        if verdicts.iter().all(|verdict| *verdict == PageEncoding::Whole) {
            encoder.all_whole(&self.runs, content);
            return;
        }
        let pages = self.runs.iter().flat_map(|run| run.pages()).zip(content.chunks_exact(PAGE_SIZE));
        for ((page, content), verdict) in pages.zip(verdicts) {
            match verdict {
                PageEncoding::Present => {}
                PageEncoding::Changed(blocks) => encoder.delta(page, content, *blocks),
                PageEncoding::Whole => encoder.whole(page, content),
            }
        }
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<BatchJob>,
    /// Number of jobs that encoders have taken and not finished.
    busy: usize,
    unanswered: VecDeque<(Box<dyn Answer>, usize, MirroredBatch)>,
    unanswered_bytes: usize,
    failed: Option<BoxError>,
    closed: bool,
}

/// State that the encoders and the sink share.
pub(crate) struct Pipeline<'a> {
    pub(crate) link: &'a dyn Link,
    pub(crate) handover: HandoverId,
    pub(crate) target_contents: TargetContents,
    boot: BootFiles,
    pub(crate) mirrors: &'a [(usize, Arc<Mirror>)],
    /// Bytes of rounds that were answered.
    arrived: AtomicU64,
    /// Bytes of other messages when the mirrors were armed.
    other_bytes: OnceLock<u64>,
    effort_control: Mutex<EffortControl>,
    hit_estimate: Mutex<HitEstimate>,
    /// Limit in bytes a second; `u64::MAX` for none.
    limit: AtomicU64,
    urgent: AtomicBool,
    encoders: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl<'a> Pipeline<'a> {
    pub(crate) fn new(
        link: &'a dyn Link,
        handover: HandoverId,
        arrays: Vec<(u64, Option<&ArrayBaseline>)>,
        seed: u64,
    ) -> Self {
        let encoders = thread::available_parallelism().map_or(1, usize::from).min(ENCODERS_MAX);
        Self {
            link,
            handover,
            target_contents: TargetContents::new(arrays, HASHES_BYTES_MAX, seed),
            boot: BootFiles::default(),
            mirrors: &[],
            arrived: AtomicU64::new(0),
            other_bytes: OnceLock::new(),
            effort_control: Mutex::new(EffortControl::new()),
            hit_estimate: Mutex::default(),
            limit: AtomicU64::new(u64::MAX),
            urgent: AtomicBool::new(false),
            encoders,
            queue: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Adds the mirrors of these arrays: once they are armed, their writes are sent too.
    pub(crate) fn with_mirrors(self, mirrors: &'a [(usize, Arc<Mirror>)]) -> Self {
        Self { mirrors, ..self }
    }

    /// Sends offsets instead of pages of memory that are in these files.
    pub(crate) fn with_boot_files(self, boot: BootFiles) -> Self {
        Self { boot, ..self }
    }

    /// Most bytes of rounds that wait for a reply.
    fn unanswered_max(&self) -> usize {
        if !self.is_mirroring() {
            return UNANSWERED_MAX;
        }
        let rate = self.link_rate().unwrap_or(f64::INFINITY);
        let travels = rate * UNANSWERED_MIRRORED.as_secs_f64();
        travels.clamp(UNANSWERED_MIRRORED_MIN, UNANSWERED_MIRRORED_MAX) as usize
    }

    /// Whether writes are sent beside the rounds.
    fn is_mirroring(&self) -> bool {
        self.mirrors.iter().any(|(_, mirror)| mirror.is_armed())
    }

    pub(crate) fn mirror(&self, array: usize) -> Option<&'a Arc<Mirror>> {
        self.mirrors.iter().find(|(of, _)| *of == array).map(|(_, mirror)| mirror)
    }

    /// Starts the encoders; they end when the returned sink is dropped.
    pub(crate) fn start<'scope, 'd>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
    ) -> PageSender<'scope, 'd> {
        for _ in 0..self.threads() {
            scope.spawn(|| self.encode_all());
        }
        for (array, mirror) in self.mirrors {
            scope.spawn(|| self.send_writes(*array, mirror));
        }
        let bytes_before = self.link.bytes_sent();
        PageSender { pipeline: self, bytes_before, batch: BatchJob::default(), divide: None, is_last: false }
    }

    pub(crate) fn start_downtime(&self) {
        self.urgent.store(true, Ordering::Relaxed);
    }

    fn wait<'q>(&self, queue: MutexGuard<'q, Queue>) -> MutexGuard<'q, Queue> {
        self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    fn encode_all(&self) {
        // Niceness of this thread alone; pages are sent even if it cannot be changed.
        let usual = rustix::process::getpriority_process(None).unwrap_or(0);
        let _ = rustix::process::setpriority_process(None, usual + NICE);
        let mut is_nice = true;
        let mut encoder = Encoder::default();
        loop {
            let waiting = Instant::now();
            let Some(job) = self.next() else { return };
            let waited = waiting.elapsed();
            let _busy = Busy(self);
            if is_nice && self.urgent.load(Ordering::Relaxed) {
                let _ = rustix::process::setpriority_process(None, usual);
                is_nice = false;
            }
            if let Err(error) = self.encode_and_send(&mut encoder, job, waited) {
                self.fail(error);
            }
        }
    }

    fn next(&self) -> Option<BatchJob> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                queue.busy += 1;
                self.changed.notify_all();
                return Some(job);
            }
            if queue.closed {
                return None;
            }
            queue = self.wait(queue);
        }
    }

    fn encode_and_send(
        &self,
        encoder: &mut Encoder,
        mut job: BatchJob,
        waited: Duration,
    ) -> Result<(), BoxError> {
        let begun = Instant::now();
        let (effort, raw) = (self.effort(), job.data.len() as u64);
        let flight = MirroredBatch::new(self.mirror(job.array), job.zero.iter().chain(&job.runs));
        encoder.zero(&self.target_contents.zero(job.array, &job.zero)?);
        let mut verdicts = self.target_contents.pages(job.array, &job.runs, &job.data, &job.hot)?;
        let asked =
            self.send_boot_file_runs(&job, &mut verdicts)? + self.query_target(&job, &mut verdicts)?;
        job.encode(encoder, &verdicts);
        if encoder.is_empty() {
            flight.arrived();
            return Ok(());
        }
        let (batch, payload) = encoder.finish(job.array as u32, effort)?;
        let header = postcard::to_stdvec(&PagesHeader { handover: self.handover, batch })?;
        let (encoding, wire) = (begun.elapsed() - asked, (header.len() + payload.len()) as u64);
        let answer = self.link.send(protocol::PAGES, header, payload.into())?;
        self.wait_for_replies(self.unanswered_max(), Some((answer, wire as usize, flight)))?;
        let (link, idle) = (begun.elapsed() - encoding - asked, waited + asked);
        lock(&self.effort_control).record(EncoderTime { encoding, link, idle, raw, wire });
        Ok(())
    }

    /// Sends offsets for pages of memory that are in boot files instead of the pages; returns the time that
    /// the link took.
    fn send_boot_file_runs(
        &self,
        job: &BatchJob,
        verdicts: &mut [PageEncoding],
    ) -> Result<Duration, BoxError> {
        if job.array != MEMORY || self.boot.is_empty() {
            return Ok(Duration::ZERO);
        }
        let pages = job.runs.iter().flat_map(|run| run.pages()).zip(job.data.chunks_exact(PAGE_SIZE));
        let (places, pages): (Vec<_>, Vec<_>) =
            pages.enumerate().filter(|(at, _)| verdicts[*at] == PageEncoding::Whole).unzip();
        let (mut runs, mut check) = (Vec::new(), Xxh3::new());
        for (at, place) in self.boot.find_all(&pages) {
            let (page, content) = pages[at];
            boot_files::push(&mut runs, page, place);
            check.update(content);
            verdicts[places[at]] = PageEncoding::Present;
        }
        if runs.is_empty() {
            return Ok(Duration::ZERO);
        }
        let pages = FilePages { handover: self.handover, runs, check: check.digest() };
        let (header, begun) = (postcard::to_stdvec(&pages)?, Instant::now());
        let bytes = header.len();
        let answer = self.link.send(protocol::BOOT_FILE_PAGES, header, Bytes::new())?;
        self.wait_for_replies(self.unanswered_max(), Some((answer, bytes, MirroredBatch::default())))?;
        Ok(begun.elapsed())
    }

    /// Leaves out pages that the target has anywhere, if asking pays; returns the time that this took.
    fn query_target(&self, job: &BatchJob, verdicts: &mut [PageEncoding]) -> Result<Duration, BoxError> {
        let places: Vec<usize> =
            (0..verdicts.len()).filter(|at| verdicts[*at] == PageEncoding::Whole).collect();
        let urgent = self.urgent.load(Ordering::Relaxed);
        if urgent || !lock(&self.hit_estimate).wants(places.len(), self.link_rate()) {
            return Ok(Duration::ZERO);
        }
        let content: Vec<_> = places.iter().map(|at| &job.data.as_chunks::<PAGE_SIZE>().0[*at]).collect();
        let digests = whimbrel_image::page_digests(&content);
        let pages: Vec<u64> = job.runs.iter().flat_map(|run| run.pages()).collect();
        let mut runs = Vec::new();
        places.iter().for_each(|at| push(&mut runs, pages[*at]));
        let question = PageQuery { handover: self.handover, array: job.array as u32, runs, digests };
        let begun = Instant::now();
        let answer =
            self.link.ask(protocol::QUERY_PAGES, postcard::to_stdvec(&question)?, Bytes::new())?.wait()?;
        let has: PageQueryReply = postcard::from_bytes(&answer)?;
        let found = (0..).zip(&places).filter(|(number, _)| has.has(*number));
        let found = found.map(|(_, at)| verdicts[*at] = PageEncoding::Present).count();
        lock(&self.hit_estimate).answered(places.len() as u64, found as u64);
        Ok(begun.elapsed())
    }

    /// Rate of the link in bytes a second, if known: a limit is known before anything was sent.
    fn link_rate(&self) -> Option<f64> {
        let seen = lock(&self.effort_control).link().map(|link| link * self.threads() as f64);
        let limit = self.limit.load(Ordering::Relaxed);
        let limit = (limit != u64::MAX).then_some(limit as f64);
        seen.into_iter().chain(limit).reduce(f64::min)
    }

    /// Number of threads, more than processors: while some wait for a reply, others encode.
    fn threads(&self) -> usize {
        self.encoders + QUERY_THREADS
    }

    pub(crate) fn effort(&self) -> Effort {
        let choice = lock(&self.effort_control);
        if self.urgent.load(Ordering::Relaxed) { choice.urgent_effort() } else { choice.effort() }
    }

    /// Records a message of this many bytes without a reply, and waits until at most `max` bytes are
    /// outstanding.
    fn wait_for_replies(
        &self,
        max: usize,
        more: Option<(Box<dyn Answer>, usize, MirroredBatch)>,
    ) -> Result<(), BoxError> {
        let mut queue = lock(&self.queue);
        queue.unanswered_bytes += more.as_ref().map_or(0, |(_, bytes, _)| *bytes);
        queue.unanswered.extend(more);
        while queue.unanswered_bytes > max {
            let Some((oldest, bytes, flight)) = queue.unanswered.pop_front() else { break };
            drop(queue);
            oldest.wait()?;
            flight.arrived();
            self.arrived.fetch_add(bytes as u64, Ordering::Relaxed);
            queue = lock(&self.queue);
            // The bytes count until the reply is here, also while another thread checks the limit.
            queue.unanswered_bytes -= bytes;
        }
        Ok(())
    }

    pub(crate) fn fail(&self, error: BoxError) {
        lock(&self.queue).fail(error);
        self.changed.notify_all();
    }

    /// Queues a batch for the encoders; blocks while the queue is full.
    fn push(&self, job: BatchJob) -> Result<(), BoxError> {
        let mut queue = lock(&self.queue);
        while queue.failed.is_none() && queue.jobs.len() >= self.encoders {
            queue = self.wait(queue);
        }
        queue.check()?;
        queue.jobs.push_back(job);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until everything has arrived.
    fn finish(&self) -> Result<(), BoxError> {
        let mut queue = lock(&self.queue);
        while queue.failed.is_none() && (queue.busy > 0 || !queue.jobs.is_empty()) {
            queue = self.wait(queue);
        }
        queue.check()?;
        drop(queue);
        self.wait_for_replies(0, None)
    }
}

/// Guard of an encoder at work, released even by a panic.
struct Busy<'a>(&'a Pipeline<'a>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.0.queue);
        queue.busy -= 1;
        if thread::panicking() {
            queue.fail("an encoder failed".into());
        }
        self.0.changed.notify_all();
    }
}

impl Queue {
    fn fail(&mut self, error: BoxError) {
        self.jobs.clear();
        self.failed.get_or_insert(error);
    }

    fn check(&mut self) -> Result<(), BoxError> {
        match self.failed.take() {
            None => Ok(()),
            Some(error) => {
                self.failed = Some("an earlier batch did not arrive".into());
                Err(error)
            }
        }
    }
}

/// Sink of a migration.
pub(crate) struct PageSender<'a, 'd> {
    pipeline: &'a Pipeline<'a>,
    bytes_before: u64,
    batch: BatchJob,
    /// Decides which pages are not sent in the pause.
    pub(crate) divide: Option<&'d mut Divide<'d>>,
    /// Whether the machine is paused and everything was handed to the sink.
    is_last: bool,
}

/// Function behind [`Sink::defer_pages`].
pub(crate) type Divide<'a> = dyn FnMut(&mut [PageSet], &[PageSet], StopReason) + 'a;

impl PageSender<'_, '_> {
    fn batch_pages_max(&self) -> usize {
        match self.pipeline.urgent.load(Ordering::Relaxed) || self.pipeline.is_mirroring() {
            true => URGENT_PAGES,
            false => BATCH_PAGES_MAX as usize,
        }
    }

    fn is_full(&self) -> bool {
        let BatchJob { zero, runs, hot, .. } = &self.batch;
        hot.len() >= self.batch_pages_max() || zero.len() + runs.len() >= RUNS_MAX - 1
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        let job = std::mem::take(&mut self.batch);
        if job.is_empty() { Ok(()) } else { self.pipeline.push(job).map_err(undelivered) }
    }
}

impl Sink for PageSender<'_, '_> {
    fn write(&mut self, batch: PageBatch<'_>) -> Result<(), SinkError> {
        if self.batch.array != batch.array {
            self.flush()?;
        }
        for (page, content) in batch.run.pages().zip(batch.data.chunks_exact(PAGE_SIZE)) {
            if self.is_full() {
                self.flush()?;
            }
            self.batch.array = batch.array;
            if whimbrel_core::is_zero(content) {
                push(&mut self.batch.zero, page);
                continue;
            }
            push(&mut self.batch.runs, page);
            if self.batch.data.is_empty() {
                self.batch.data.reserve_exact(self.batch_pages_max() * PAGE_SIZE);
            }
            self.batch.data.extend_from_slice(content);
            self.batch.hot.push(batch.hot.is_some_and(|hot| hot.contains(page)));
        }
        Ok(())
    }

    fn limit_rate(&mut self, rate: Option<u64>) {
        self.pipeline.limit.store(rate.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.pipeline.link.limit_rate(rate);
    }

    /// The next version of a page is sent as a delta to the last one: while there is room for that one's
    /// hashes, even the hottest page is sent once before the pause.
    fn wants_first_versions(&self) -> bool {
        self.pipeline.target_contents.has_room()
    }

    fn collected(&mut self, found: &mut [PageSet]) {
        for (array, mirror) in self.pipeline.mirrors {
            found.get_mut(*array).into_iter().for_each(|found| mirror.collected(found));
        }
    }

    fn about_to_read(&mut self, array: usize, run: PageRun) {
        self.pipeline.mirror(array).into_iter().for_each(|mirror| mirror.about_to_read(run));
    }

    /// Waiting pages are not sent by the mirror either: a page that is written all the time would never
    /// arrive.
    fn hot_may_wait(&self, array: usize) -> bool {
        !self.pipeline.mirror(array).is_some_and(|mirror| mirror.is_armed())
    }

    fn defer_pages(&mut self, left: &mut [PageSet], fresh: &[PageSet], why: StopReason) {
        self.divide.iter_mut().for_each(|divide| divide(left, fresh, why));
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        self.is_last = true;
        self.flush()
    }

    fn end_round(&mut self) -> Result<(), SinkError> {
        self.flush()?;
        if self.is_last {
            self.pipeline.mirrors.iter().for_each(|(_, mirror)| mirror.wait_until_drained());
        }
        self.pipeline.finish().map_err(undelivered)
    }

    /// Counts rounds only: mirrored writes tell nothing about the bytes per page of a round. Mirrors are
    /// armed between two rounds, when all that was sent is answered, and nothing is mirrored yet.
    fn bytes_out(&self) -> u64 {
        let bytes = self.pipeline.link.bytes_sent() - self.bytes_before;
        if !self.pipeline.is_mirroring() && self.pipeline.other_bytes.get().is_none() {
            return bytes;
        }
        let arrived = self.pipeline.arrived.load(Ordering::Relaxed);
        self.pipeline.other_bytes.get_or_init(|| bytes.saturating_sub(arrived)) + arrived
    }
}

impl Drop for PageSender<'_, '_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.pipeline.queue);
        queue.closed = true;
        queue.jobs.clear();
        self.pipeline.changed.notify_all();
        drop(queue);
        self.pipeline.mirrors.iter().for_each(|(_, mirror)| mirror.end());
    }
}

fn undelivered(source: BoxError) -> SinkError {
    SinkError { destination: "the target".to_owned(), source }
}
