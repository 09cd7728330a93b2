//! Tests of the capture loop: a fake machine whose pages change while they are read, and sinks that fail.

use crate::*;
use proptest::prelude::*;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex},
};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{Machine, MachineError, PageArray, PageError, PageView};

/// Memory whose first byte of each page is its version; every call of the engine lets it write some more.
pub(crate) struct World {
    pub(crate) versions: Vec<u8>,
    dirty: PageSet,
    pub(crate) running: bool,
    rng: StdRng,
    writes_a_call: u64,
    /// Pages that every call writes.
    pub(crate) always: std::ops::Range<usize>,
}

impl World {
    fn live(&mut self) {
        for _ in 0..if self.running { self.writes_a_call } else { 0 } {
            let page = self.rng.random_range(0..self.versions.len());
            self.versions[page] = self.versions[page].wrapping_add(1);
            self.dirty.insert(page as u64);
        }
        for page in self.always.clone().filter(|_| self.running) {
            self.versions[page] = self.versions[page].wrapping_add(1);
            self.dirty.insert(page as u64);
        }
    }
}

#[derive(Clone)]
pub(crate) struct Fake(pub(crate) Arc<Mutex<World>>);

impl PageArray for Fake {
    fn name(&self) -> &str {
        "memory"
    }
    fn page_count(&self) -> u64 {
        self.0.lock().unwrap().versions.len() as u64
    }
    fn populated(&mut self) -> Result<PageSet, PageError> {
        Ok(PageSet::full(PageArray::page_count(self)))
    }
    fn take_dirty(&mut self) -> Result<PageSet, PageError> {
        let mut world = self.0.lock().unwrap();
        world.live();
        Ok(world.dirty.take())
    }
    fn put_back(&mut self, pages: &PageSet) {
        self.0.lock().unwrap().dirty.union(pages);
    }
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        let mut world = self.0.lock().unwrap();
        for (page, out) in run.pages().zip(out.chunks_exact_mut(PAGE_SIZE)) {
            out.fill(world.versions[page as usize]);
            world.live();
        }
        Ok(())
    }
}

impl Machine for Fake {
    fn pause(&mut self) -> Result<(), MachineError> {
        self.0.lock().unwrap().running = false;
        Ok(())
    }
    fn unpause(&mut self) -> Result<(), MachineError> {
        self.0.lock().unwrap().running = true;
        Ok(())
    }
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        let world = self.0.lock().unwrap();
        assert!(!world.running, "device state of a running machine");
        // The state names the versions of this very instant, so the test can compare the copy with it.
        Ok(world.versions.clone())
    }
}

/// View of the array whose pages begin 512 bytes earlier: one page more, the first and last with padding.
const SHIFT: usize = 512;

impl PageView for Fake {
    fn page_count(&self) -> u64 {
        PageArray::page_count(self) + 1
    }
    fn view_pages(&self, pages: &PageSet) -> PageSet {
        let mut cut = PageSet::empty(PageView::page_count(self));
        pages.runs().for_each(|run| cut.insert_run(PageRun::new(run.start, run.len + 1)));
        cut
    }
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        let mut page = [0; PAGE_SIZE];
        for (at, out) in run.pages().zip(out.chunks_exact_mut(PAGE_SIZE)) {
            out.fill(0);
            for (from, to, array) in [(PAGE_SIZE - SHIFT, 0, at.checked_sub(1)), (0, SHIFT, Some(at))] {
                let Some(array) = array.filter(|page| *page < PageArray::page_count(self)) else { continue };
                PageArray::read(self, PageRun::new(array, 1), &mut page)?;
                let len = PAGE_SIZE - from.max(to);
                out[to..to + len].copy_from_slice(&page[from..from + len]);
            }
        }
        Ok(())
    }
}

/// Sink that keeps the copy, and fails after `fail_after` batches.
pub(crate) struct Copy {
    pub(crate) versions: Vec<u8>,
    pub(crate) batches: u64,
    pub(crate) fail_after: u64,
}

impl Sink for Copy {
    fn write(&mut self, batch: PageBatch<'_>) -> Result<(), SinkError> {
        if self.batches == self.fail_after {
            return Err(SinkError { destination: "test".into(), source: "full".into() });
        }
        self.batches += 1;
        for (page, data) in batch.run.pages().zip(batch.data.chunks_exact(PAGE_SIZE)) {
            self.versions[page as usize] = data[0];
        }
        Ok(())
    }
    fn bytes_out(&self) -> u64 {
        self.batches
    }
}

pub(crate) fn world(seed: u64, pages: usize, writes_a_call: u64) -> Fake {
    let mut rng = StdRng::seed_from_u64(seed);
    let versions = (0..pages).map(|_| rng.random()).collect();
    let dirty = PageSet::empty(pages as u64);
    Fake(Arc::new(Mutex::new(World { versions, dirty, running: true, rng, writes_a_call, always: 0..0 })))
}

fn run(
    fake: &Fake,
    ledger: &mut DirtyLog,
    copy: &mut Copy,
    finish: AfterCapture,
) -> Result<Captured, CaptureError> {
    let mut machine = fake.clone();
    let mut subject = CaptureSource {
        machine: &mut machine,
        dirty_logs: std::slice::from_mut(ledger),
        consumer: Consumer::Store,
    };
    let pace = CheckpointPolicy { pages_left_max: 4, ..CheckpointPolicy::CHECKPOINT };
    capture(&mut subject, copy, &pace, finish, &mut |_| ControlFlow::Continue(()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The fear: a page lost on the second capture, or after a failed first one.
    #[test]
    fn every_copy_equals_the_machine_at_its_pause_also_after_failures(
        seed: u64, pages in 1..600usize, writes in 0..3u64, fails in prop::collection::vec(0..6u64, 0..4),
    ) {
        let fake = world(seed, pages, writes);
        let mut ledger = DirtyLog::new(Box::new(fake.clone()));
        ledger.attach_all(Consumer::Store).unwrap();
        let mut copy = Copy { versions: vec![0; pages], batches: 0, fail_after: u64::MAX };
        for fail_after in fails.into_iter().chain([u64::MAX, u64::MAX]) {
            copy.fail_after = copy.batches.saturating_add(fail_after);
            match run(&fake, &mut ledger, &mut copy, AfterCapture::Unpause) {
                Ok(captured) => prop_assert_eq!(&copy.versions, &captured.device_state),
                Err(error) => prop_assert!(matches!(error, CaptureError::Sink(_)), "{error}"),
            }
            prop_assert!(fake.0.lock().unwrap().running, "the machine goes on either way");
        }
    }

    #[test]
    fn a_machine_that_stays_paused_equals_its_copy(seed: u64, pages in 1..600usize, writes in 0..3u64) {
        let fake = world(seed, pages, writes);
        let mut ledger = DirtyLog::new(Box::new(fake.clone()));
        ledger.attach_all(Consumer::Store).unwrap();
        let mut copy = Copy { versions: vec![0; pages], batches: 0, fail_after: u64::MAX };
        run(&fake, &mut ledger, &mut copy, AfterCapture::StayPaused).unwrap();
        let world = fake.0.lock().unwrap();
        prop_assert!(!world.running);
        prop_assert_eq!(&copy.versions, &world.versions);
    }
}

/// Sink that keeps pages as the view groups them.
struct CutCopy(Vec<u8>, u64);

impl Sink for CutCopy {
    fn write(&mut self, batch: PageBatch<'_>) -> Result<(), SinkError> {
        self.1 =
            self.1.checked_sub(1).ok_or(SinkError { destination: "test".into(), source: "full".into() })?;
        self.0[batch.run.offset() as usize..][..batch.run.bytes()].copy_from_slice(batch.data);
        Ok(())
    }
    fn bytes_out(&self) -> u64 {
        0
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The fear: a write is lost that touches two pages of the view, or that the other consumer collected
    /// first.
    #[test]
    fn a_follower_with_other_pages_has_the_same_bytes_and_takes_nothing_from_the_other(
        seed: u64, pages in 1..300usize, writes in 0..3u64,
        steps in prop::collection::vec((any::<bool>(), any::<bool>(), 0..6u64), 0..6),
    ) {
        let fake = world(seed, pages, writes);
        let mut ledger = DirtyLog::new(Box::new(fake.clone()));
        ledger.set_view(Consumer::Store, Some(Box::new(fake.clone())));
        ledger.attach_all(Consumer::Store).unwrap();
        ledger.attach_all(Consumer::Migration).unwrap();
        prop_assert_eq!(ledger.page_count_for(Consumer::Store), pages as u64 + 1);
        prop_assert_eq!(ledger.page_count_for(Consumer::Migration), pages as u64);
        let mut stored = CutCopy(vec![0; (pages + 1) * PAGE_SIZE], 0);
        let mut sent = CutCopy(vec![0; pages * PAGE_SIZE], 0);
        let last = [(true, true, u64::MAX), (false, true, u64::MAX)];
        for (is_store, stays, batches) in steps.into_iter().chain(last) {
            let (copy, follower, from) = match is_store {
                true => (&mut stored, Consumer::Store, SHIFT),
                false => (&mut sent, Consumer::Migration, 0),
            };
            copy.1 = batches;
            fake.0.lock().unwrap().running = true;
            let mut machine = fake.clone();
            let ledgers = std::slice::from_mut(&mut ledger);
            let mut subject = CaptureSource { machine: &mut machine, dirty_logs: ledgers, consumer: follower };
            let finish = if stays { AfterCapture::StayPaused } else { AfterCapture::Unpause };
            let pace = CheckpointPolicy { pages_left_max: 4, ..CheckpointPolicy::CHECKPOINT };
            let go_on = &mut |_: Progress| ControlFlow::Continue(());
            if let Ok(captured) = capture(&mut subject, copy, &pace, finish, go_on) {
                let expected: Vec<u8> = captured.device_state.iter().flat_map(|v| [*v; PAGE_SIZE]).collect();
                prop_assert!(copy.0[from..from + pages * PAGE_SIZE] == expected);
                prop_assert!(copy.0[..from].iter().all(|byte| *byte == 0), "padding");
            }
        }
    }
}

#[test]
fn whoever_sees_other_pages_than_before_follows_anew() {
    let fake = world(3, 20, 0);
    let mut ledger = DirtyLog::new(Box::new(fake.clone()));
    ledger.attach_from(Consumer::Store, PageSet::empty(20)).unwrap();
    ledger.set_view(Consumer::Store, Some(Box::new(fake.clone())));
    assert!(!ledger.is_attached(Consumer::Store));
    ledger.attach_from(Consumer::Store, PageSet::empty(21)).unwrap();
    fake.0.lock().unwrap().dirty.insert(19);
    assert_eq!(ledger.collect(Consumer::Store).unwrap().iter().collect::<Vec<_>>(), [19, 20]);
    ledger.set_view(Consumer::Store, None);
    ledger.attach_all(Consumer::Store).unwrap();
    assert_eq!(ledger.dirty_pages(Consumer::Store).unwrap().len(), 20);
}

#[test]
fn whoever_follows_a_new_array_sees_what_was_written_before_the_first_scan() {
    let fake = world(5, 20, 0);
    let mut ledger = DirtyLog::new(Box::new(fake.clone()));
    fake.0.lock().unwrap().dirty.insert(7);
    ledger.attach_new(Consumer::Store);
    assert_eq!(ledger.collect(Consumer::Store).unwrap().iter().collect::<Vec<_>>(), [7]);
    fake.0.lock().unwrap().dirty.insert(8);
    ledger.collect(Consumer::Store).unwrap();
    ledger.attach_new(Consumer::Migration);
    assert_eq!(
        ledger.collect(Consumer::Migration).unwrap().count(),
        20,
        "what was scanned before is unknown to it"
    );
}

#[test]
fn cancelling_puts_every_page_back() {
    let fake = world(1, 500, 0);
    let mut ledger = DirtyLog::new(Box::new(fake.clone()));
    ledger.attach_all(Consumer::Store).unwrap();
    let mut copy = Copy { versions: vec![0; 500], batches: 0, fail_after: u64::MAX };
    let mut machine = fake.clone();
    let mut subject = CaptureSource {
        machine: &mut machine,
        dirty_logs: std::slice::from_mut(&mut ledger),
        consumer: Consumer::Store,
    };
    let error =
        capture(&mut subject, &mut copy, &CheckpointPolicy::CHECKPOINT, AfterCapture::Unpause, &mut |_| {
            ControlFlow::Break(())
        })
        .unwrap_err();
    assert!(matches!(error, CaptureError::Cancelled));
    assert_eq!(ledger.dirty_pages(Consumer::Store).unwrap().count(), 500);
}

#[test]
fn followers_do_not_take_each_others_pages() {
    let fake = world(7, 100, 0);
    let mut ledger = DirtyLog::new(Box::new(fake.clone()));
    ledger.attach_from(Consumer::Store, PageSet::empty(100)).unwrap();
    ledger.attach_from(Consumer::Migration, PageSet::empty(100)).unwrap();
    fake.0.lock().unwrap().dirty.insert(42);
    assert!(ledger.collect(Consumer::Migration).unwrap().contains(42));
    assert!(ledger.collect(Consumer::Store).unwrap().contains(42));
    assert!(ledger.collect(Consumer::Store).unwrap().is_empty());
}

/// Machine that stops, but whose pause reports a failure, as QEMU after a timeout.
struct LatePause(Fake);

impl Machine for LatePause {
    fn pause(&mut self) -> Result<(), MachineError> {
        self.0.pause()?;
        Err(MachineError::new("pause", "timed out"))
    }
    fn unpause(&mut self) -> Result<(), MachineError> {
        self.0.unpause()
    }
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.0.device_state()
    }
}

#[test]
fn a_machine_that_stopped_although_its_pause_failed_runs_on() {
    let fake = world(1, 10, 0);
    let mut ledger = DirtyLog::new(Box::new(fake.clone()));
    ledger.attach_all(Consumer::Store).unwrap();
    let mut copy = Copy { versions: vec![0; 10], batches: 0, fail_after: u64::MAX };
    let mut machine = LatePause(fake.clone());
    let mut subject = CaptureSource {
        machine: &mut machine,
        dirty_logs: std::slice::from_mut(&mut ledger),
        consumer: Consumer::Store,
    };
    let go_on = &mut |_: Progress| ControlFlow::Continue(());
    let captured =
        capture(&mut subject, &mut copy, &CheckpointPolicy::CHECKPOINT, AfterCapture::Unpause, go_on);
    assert!(matches!(captured, Err(CaptureError::Machine(_))));
    assert!(fake.0.lock().unwrap().running);
}
