//! Tests of complete migrations between two fake hosts over a link that fails where a seed says.
//!
//! The fears: a page lost or stale on the target, both sides running, the machine gone, a second migration
//! after a failed one that misses pages. The machine keeps writing while it is copied.

use crate::record::Record;
use bytes::Bytes;
use proptest::prelude::*;
use std::{
    ops::ControlFlow,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use whimbrel_capture::{CaptureSource, CheckpointPolicy, Consumer, DirtyLog};
use whimbrel_core::{
    Boot, ByteSize, CapsuleId, Digest, HostName, MachineConfig, PAGE_SIZE, PageRun, PageSet,
};
use whimbrel_machine::{Machine, MachineError, PageArray, PageError};
use whimbrel_migrate::{
    Budget, CommittedHost, Confirmed, HandedOver, HandoverRecord, MigrateError, MigrationJob, PendingCommit,
    baseline::{ArrayBaseline, Baseline, BaselineContent, MayDiffer},
    confirm,
    handover::AbortedAction,
    late_frames::LateFrame,
    link::{Answer, Link, LinkError},
    migrate,
    protocol::{self, FilePages, Finish, HandoverId, Offer},
    target::{HostError, IncomingMachine, IncomingMigrations, TargetHost},
};

const PAGES: u64 = 256;

/// Boot file of the machine. Some of it is in its memory, as a boot loader leaves it.
fn kernel() -> Vec<u8> {
    (0..40_000u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8 ^ (at >> 9) as u8).collect()
}

/// Pages of the kernel in memory, and where in it the first of them begins.
const KERNEL_PAGES: PageRun = PageRun::new(18, 6);
const KERNEL_FROM: usize = 1234;

/// Machine on the source: it writes a little whenever the engine scans it while it runs.
struct World {
    memory: Vec<u8>,
    dirty: PageSet,
    running: bool,
    /// Whether a pause reports a failure although it succeeds, as QEMU after a timeout.
    pause_fails: bool,
    seed: u64,
}

impl World {
    fn live(&mut self) {
        if !self.running {
            return;
        }
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let page = (self.seed >> 33) % 20; // a small working set, so that pages are sent again and again
        let at = page as usize * PAGE_SIZE + (self.seed >> 50) as usize % PAGE_SIZE;
        self.memory[at] = self.memory[at].wrapping_add(1);
        self.dirty.insert(page);
    }
}

#[derive(Clone)]
struct Guest(Arc<Mutex<World>>);

impl PageArray for Guest {
    fn name(&self) -> &str {
        "memory"
    }
    fn page_count(&self) -> u64 {
        PAGES
    }
    fn populated(&mut self) -> Result<PageSet, PageError> {
        Ok(PageSet::full(PAGES))
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
        out.copy_from_slice(&world.memory[run.offset() as usize..][..run.bytes()]);
        (0..run.len).for_each(|_| world.live());
        Ok(())
    }
}

impl Machine for Guest {
    fn pause(&mut self) -> Result<(), MachineError> {
        let mut world = self.0.lock().unwrap();
        world.running = false;
        if world.pause_fails { Err(MachineError::new("pause", "timeout")) } else { Ok(()) }
    }
    fn unpause(&mut self) -> Result<(), MachineError> {
        self.0.lock().unwrap().running = true;
        Ok(())
    }
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        let world = self.0.lock().unwrap();
        assert!(!world.running);
        Ok(Digest::of(&world.memory).0.to_vec())
    }
}

/// Content of the incoming machines on the target host.
#[derive(Default)]
struct FakeTarget {
    running: Mutex<Vec<Vec<u8>>>,
    reserved: AtomicU64,
    strays: AtomicU64,
    /// Baselines of an incoming machine; empty for zeros.
    base: Vec<u8>,
    /// Whether a byte of the kernel differs when it is read.
    is_damaged: bool,
}

struct Landed {
    host: Arc<FakeTarget>,
    memory: Vec<u8>,
    kernel: Option<Vec<u8>>,
}

struct Landings(Arc<FakeTarget>);

fn source() -> HostName {
    "alpha".parse().expect("a name")
}

impl TargetHost for Landings {
    fn reserve(&self, _: &Offer, _: &HostName) -> Result<Box<dyn IncomingMachine>, HostError> {
        self.0.reserved.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Landed {
            host: self.0.clone(),
            memory: match self.0.base.is_empty() {
                true => vec![0; PAGES as usize * PAGE_SIZE],
                false => self.0.base.clone(),
            },
            kernel: None,
        }))
    }

    fn deliver_late_frames(&self, _: HandoverId, strays: Vec<LateFrame>) {
        assert_eq!(strays, [late()]);
        self.0.strays.fetch_add(1, Ordering::Relaxed);
    }
}

/// Frames that arrive for the machine during the downtime.
fn late() -> LateFrame {
    LateFrame { port: 1, frame: (*b"late").into() }
}

impl IncomingMachine for Landed {
    fn baselines(&self) -> Vec<Baseline> {
        let begun = if self.host.base.is_empty() { Baseline::Zeros } else { Baseline::Capsule(BASE) };
        vec![begun]
    }
    fn boot_files_missing(&self) -> Vec<Digest> {
        vec![Digest::of(&kernel())]
    }
    fn store_boot_file(&mut self, _: Digest, content: Vec<u8>) -> Result<(), HostError> {
        self.kernel = Some(content);
        Ok(())
    }
    fn read_boot_file(&self, digest: &Digest, offset: u64, out: &mut [u8]) -> Result<(), HostError> {
        let kernel = self.kernel.as_ref().ok_or("pages came before the kernel")?;
        assert_eq!(Digest::of(kernel), *digest);
        out.copy_from_slice(&kernel[offset as usize..][..out.len()]);
        out[77] ^= u8::from(self.host.is_damaged);
        Ok(())
    }
    fn write(&mut self, _: usize, run: PageRun, data: &[u8]) -> Result<(), HostError> {
        self.memory[run.offset() as usize..][..run.bytes()].copy_from_slice(data);
        Ok(())
    }
    fn zero(&mut self, _: usize, run: PageRun) -> Result<(), HostError> {
        self.memory[run.offset() as usize..][..run.bytes()].fill(0);
        Ok(())
    }
    fn read(&self, _: usize, run: PageRun, out: &mut [u8]) -> Result<(), HostError> {
        out.copy_from_slice(&self.memory[run.offset() as usize..][..run.bytes()]);
        Ok(())
    }
    fn prepare(&mut self, _: &Finish, device_state: &[u8]) -> Result<(), HostError> {
        assert!(self.kernel == Some(kernel()));
        assert_eq!(Digest::of(&self.memory).0, device_state, "the copy is not the machine at its pause");
        Ok(())
    }
    fn run(&mut self) -> Result<(), HostError> {
        self.host.running.lock().unwrap().push(self.memory.clone());
        Ok(())
    }
    fn discard(&mut self) {
        self.host.reserved.fetch_sub(1, Ordering::Relaxed);
    }
}

const BASE: CapsuleId = CapsuleId(Digest([3; 32]));

/// Baseline as the source has it.
struct Base(Vec<u8>);

impl BaselineContent for Base {
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), HostError> {
        out.copy_from_slice(&self.0[run.offset() as usize..][..run.bytes()]);
        Ok(())
    }
    fn same(&self, run: PageRun, data: &[u8]) -> Result<Vec<bool>, HostError> {
        let base = self.0[run.offset() as usize..][..run.bytes()].chunks(PAGE_SIZE);
        Ok(base.zip(data.chunks(PAGE_SIZE)).map(|(base, data)| base == data).collect())
    }
}

/// An older version of `memory`: some pages as they are, some with a few bytes changed, some others, some
/// zero.
fn older(memory: &[u8], seed: u64) -> Vec<u8> {
    let mut old = memory.to_vec();
    for (page, content) in (0u64..).zip(old.chunks_exact_mut(PAGE_SIZE)) {
        match (page ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62 {
            0 => {}
            1 => content[(seed % 4000) as usize..][..90].fill(seed as u8 ^ 0x55),
            2 => content.iter_mut().for_each(|byte| *byte = byte.wrapping_mul(3).wrapping_add(7)),
            _ => content.fill(0),
        }
    }
    old
}

/// Delivers messages to the incoming machines until its budget is used up; the last one is lost on its way
/// there or, handled, on its way back.
struct Flaky {
    arrivals: Arc<IncomingMigrations>,
    budget: AtomicU64,
    lose_the_answer: bool,
    /// Number of pages of the kernel that were sent as offsets.
    named: AtomicU64,
}

impl Flaky {
    fn new(arrivals: &Arc<IncomingMigrations>, budget: u64, lose_the_answer: bool) -> Self {
        let (arrivals, budget) = (arrivals.clone(), AtomicU64::new(budget));
        Self { arrivals, budget, lose_the_answer, named: AtomicU64::new(0) }
    }
}

struct Now(Result<Bytes, LinkError>);

impl Answer for Now {
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError> {
        self.0
    }
}

impl Link for Flaky {
    fn gives_back(&self) -> bool {
        self.budget.load(Ordering::Relaxed).is_multiple_of(2)
    }

    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        let lost = || LinkError::Lost { source: "cut".into() };
        let left = self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        let arrives = match left {
            Ok(1) => self.lose_the_answer,
            Ok(_) => true,
            Err(_) => false,
        };
        if !arrives {
            return Ok(Box::new(Now(Err(lost()))));
        }
        if kind == protocol::BOOT_FILE_PAGES {
            let pages: FilePages = postcard::from_bytes(&header).unwrap();
            self.named.fetch_add(pages.runs.iter().map(|run| run.pages.len).sum(), Ordering::Relaxed);
        }
        let answer = self.arrivals.handle(&source(), kind, &header, payload);
        let answer =
            answer.map(Bytes::from).map_err(|error| LinkError::Refused { reason: error.to_string() });
        Ok(Box::new(Now(if left == Ok(1) { Err(lost()) } else { answer })))
    }
    fn bytes_sent(&self) -> u64 {
        0
    }
}

fn offer(handover: u64) -> Offer {
    let (kernel, len) = (Digest::of(&kernel()), kernel().len() as u64);
    let config = MachineConfig {
        boot: Some(Boot { kernel, initrd: None, append: String::new() }),
        ..MachineConfig::minimal(ByteSize(PAGES * PAGE_SIZE as u64))
    };
    let mut id = [0; 16];
    id[..8].copy_from_slice(&handover.to_le_bytes());
    Offer {
        blobs: vec![(kernel, len)],
        bases: vec![BASE],
        ..Offer::of(HandoverId(id), "guest".parse().unwrap(), config)
    }
}

fn memory(seed: u64) -> Vec<u8> {
    let mut memory: Vec<u8> =
        (0..PAGES as usize * PAGE_SIZE).map(|i| (i as u64 / 512).wrapping_mul(seed) as u8).collect();
    let there = &mut memory[KERNEL_PAGES.offset() as usize..][..KERNEL_PAGES.bytes()];
    there.copy_from_slice(&kernel()[KERNEL_FROM..][..there.len()]);
    memory
}

/// Source after the commit point, whose links break at first.
struct Committed<'a> {
    broken: &'a dyn Fn(u64) -> Flaky,
    attempts: AtomicU64,
    freed: u32,
}

impl CommittedHost for Committed<'_> {
    fn connect(&self) -> Result<Box<dyn Link>, HostError> {
        let left = self.attempts.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        Ok(Box::new((self.broken)(left.map_or(u64::MAX, |left| left % 2))))
    }
    fn wait(&self, _: Duration) -> bool {
        true
    }
    fn free_machine(&mut self) {
        self.freed += 1;
    }
    fn record_ours(&mut self) -> Result<(), HostError> {
        Err("nothing came back".into())
    }
    fn resume_here(&mut self) {}
    fn aborted(&mut self, _: AbortedAction) {}
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn one_side_runs_the_whole_machine_wherever_the_link_breaks(
        seed: u64, has_base: bool, breaks in prop::collection::vec((0..40u64, any::<bool>()), 0..4), commits_lost in 0..4u64,
    ) {
        let base = if has_base { older(&memory(seed), seed) } else { vec![] };
        let guest = guest(seed);
        let mut ledger = DirtyLog::new(Box::new(guest.clone()));
        ledger.attach_from(Consumer::Store, PageSet::empty(PAGES)).unwrap();
        let host = Arc::new(FakeTarget { base: base.clone(), ..FakeTarget::default() });
        let arrivals = Arc::new(IncomingMigrations::new(Arc::new(Landings(host.clone()))));

        let mut handed_over = None;
        for (attempt, (budget, lose_the_answer)) in breaks.into_iter().chain([(u64::MAX, false)]).enumerate() {
            let link = Flaky::new(&arrivals, budget, lose_the_answer);
            let offer = offer(attempt as u64);
            let mut machine = guest.clone();
            let mut subject = CaptureSource {
                machine: &mut machine, dirty_logs: std::slice::from_mut(&mut ledger), consumer: Consumer::Migration,
            };
            let (recorded, mut ran_before) = (AtomicBool::new(false), false);
            let mut record = Record::new(|| {
                recorded.store(true, Ordering::Relaxed);
                ran_before = !host.running.lock().unwrap().is_empty();
                Ok(())
            });
            let outcome = migrate(&mut subject, &mut record, MigrationJob {
                link: &link,
                offer: &offer,
                open_boot_file: &|_| Ok(Box::new(kernel())),
                open_baseline: &|_, begun| {
                    assert_eq!(*begun, Baseline::Capsule(BASE));
                    let may_differ = match seed % 2 {
                        0 => MayDiffer::TheseOrPopulated(PageSet::empty(PAGES)),
                        _ => MayDiffer::These(PageSet::full(PAGES)),
                    };
                    let content = (seed % 3 != 0).then(|| Arc::new(Base(base.clone())) as Arc<dyn BaselineContent>);
                    Ok(ArrayBaseline { may_differ, content })
                },
                seed: 7,
                ports: &Vec::new,
                take_late_frames: &mut || {
                    assert!(recorded.load(Ordering::Relaxed), "what came for it is the source's own until the commit");
                    vec![late()]
                },
                policy: &CheckpointPolicy { pages_left_max: 8, ..CheckpointPolicy::CHECKPOINT },
                deferred: None,
                backup: None,
                mirrors: &[],
        budget: &Budget::UNLIMITED,
                observe: &mut |_| ControlFlow::Continue(()),
            });
            let aborted = std::mem::take(&mut record.aborted);
            let running_here = guest.0.lock().unwrap().running;
            let recorded = recorded.load(Ordering::Relaxed);
            prop_assert_eq!(aborted.len(), usize::from(!recorded), "the target hears of one end only");
            prop_assert_eq!(outcome.is_ok(), recorded, "the record is the commit point");
            prop_assert_eq!(running_here, outcome.is_err(), "the source runs exactly if nothing was committed");
            let runs_there = !host.running.lock().unwrap().is_empty();
            prop_assert!(!ran_before && (recorded || !runs_there), "the target runs nothing without a commit");
            if let Ok(done) = outcome {
                let named = link.named.load(Ordering::Relaxed);
                // The first two are in the working set; of those with a base some are there already.
                prop_assert!(has_base || named >= KERNEL_PAGES.len - 2, "only {} pages by their place", named);
                // Over a link that breaks it may be lost, with the commit.
                let strays = host.strays.load(Ordering::Relaxed);
                prop_assert!(strays == 1 || strays == 0 && budget < u64::MAX, "{strays} times what came for it");
                handed_over = Some(done.handover);
                break;
            }
            arrivals.connection_lost(offer.handover);
            prop_assert!(!ledger.is_attached(Consumer::Migration));
        }

        let handover = handed_over.expect("the last link never breaks");
        let broken = |budget| Flaky::new(&arrivals, budget, true);
        let attempts = AtomicU64::new(commits_lost + 1);
        let mut source = Committed { broken: &broken, attempts, freed: 0 };
        let sent = PendingCommit::unsent();
        prop_assert!(matches!(confirm(handover, sent, &mut source), Confirmed::Runs(_)));
        prop_assert_eq!(source.freed, 1, "the machine is freed once, when the target has it");
        let running = host.running.lock().unwrap();
        prop_assert_eq!(running.len(), 1, "a repeated commit starts it once");
        prop_assert!(running[0] == guest.0.lock().unwrap().memory, "and it is the machine that was paused");
        let dirty_for_the_store = ledger.collect(Consumer::Store).unwrap();
        prop_assert!(!dirty_for_the_store.is_empty(), "what the store has not seen is not lost to the migration");
    }
}

/// Migrates a machine over a link that does not break.
fn attempt(
    guest: &Guest,
    host: &Arc<FakeTarget>,
    record: &mut dyn HandoverRecord,
) -> Result<HandedOver, MigrateError> {
    let arrivals = Arc::new(IncomingMigrations::new(Arc::new(Landings(host.clone()))));
    attempt_over(&Flaky::new(&arrivals, u64::MAX, false), guest, record, &Budget::UNLIMITED)
}

fn attempt_over(
    link: &dyn Link,
    guest: &Guest,
    record: &mut dyn HandoverRecord,
    budget: &Budget<'_>,
) -> Result<HandedOver, MigrateError> {
    let mut ledger = DirtyLog::new(Box::new(guest.clone()));
    let (offer, mut machine) = (offer(1), guest.clone());
    let mut source = CaptureSource {
        machine: &mut machine,
        dirty_logs: std::slice::from_mut(&mut ledger),
        consumer: Consumer::Migration,
    };
    let job = MigrationJob {
        link,
        offer: &offer,
        open_boot_file: &|_| Ok(Box::new(kernel())),
        open_baseline: &|_, _| Err("there is none".into()),
        seed: 7,
        ports: &Vec::new,
        take_late_frames: &mut Vec::new,
        policy: &CheckpointPolicy::CHECKPOINT,
        deferred: None,
        backup: None,
        mirrors: &[],
        budget,
        observe: &mut |_| ControlFlow::Continue(()),
    };
    migrate(&mut source, record, job)
}

fn guest(seed: u64) -> Guest {
    let (memory, dirty) = (memory(seed), PageSet::empty(PAGES));
    Guest(Arc::new(Mutex::new(World { memory, dirty, running: true, pause_fails: false, seed })))
}

/// Link to a target that loads for ever: the reply to the last message comes only when the link is closed.
struct Hung {
    link: Flaky,
    closed: Arc<(Mutex<bool>, Condvar)>,
    asked: AtomicBool,
}

struct HungAnswer(Arc<(Mutex<bool>, Condvar)>);

impl Answer for HungAnswer {
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError> {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |closed| !*closed).unwrap());
        Err(LinkError::Lost { source: "closed".into() })
    }
}

impl Link for Hung {
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        if kind != protocol::FINISH {
            return self.link.send(kind, header, payload);
        }
        self.asked.store(true, Ordering::Relaxed);
        Ok(Box::new(HungAnswer(self.closed.clone())))
    }
    fn bytes_sent(&self) -> u64 {
        self.link.bytes_sent()
    }
    fn close(&self) {
        *self.closed.0.lock().unwrap() = true;
        self.closed.1.notify_all();
    }
}

#[test]
fn a_machine_whose_target_hangs_in_the_pause_runs_on_when_its_budget_is_used_up_or_its_user_cancels() {
    let short = Some(Duration::from_millis(1));
    for (downtime, time, words) in
        [(short, None, "the downtime before"), (None, short, "the time before"), (None, None, "cancelled")]
    {
        let (guest, host) = (guest(5), Arc::new(FakeTarget::default()));
        let arrivals = Arc::new(IncomingMigrations::new(Arc::new(Landings(host.clone()))));
        let (closed, asked) = (Arc::default(), AtomicBool::new(false));
        let hung = Hung { link: Flaky::new(&arrivals, u64::MAX, false), closed, asked };
        let cancelled = || words == "cancelled" && hung.asked.load(Ordering::Relaxed);
        let budget = Budget { downtime, time, cancelled: &cancelled };
        let mut record = Record::new(|| Err("nothing is handed over".into()));
        let error = attempt_over(&hung, &guest, &mut record, &budget).map(|done| done.handover).unwrap_err();
        let found = whimbrel_core::error_chain(&error);
        assert!(found.contains(words), "{found}");
        assert_eq!(record.aborted, [AbortedAction::SendAbort]);
        assert!(guest.0.lock().unwrap().running, "{words}");
    }
}

#[test]
fn pages_of_a_damaged_boot_file_never_reach_a_machine() {
    let (guest, host) = (guest(5), Arc::new(FakeTarget { is_damaged: true, ..FakeTarget::default() }));
    let mut record = Record::new(|| Err("nothing is handed over".into()));
    let error = attempt(&guest, &host, &mut record).map(|done| done.handover).unwrap_err();
    let words = whimbrel_core::error_chain(&error);
    assert!(words.contains("damaged"), "{words}");
    assert!(guest.0.lock().unwrap().running && host.running.lock().unwrap().is_empty());
}

#[test]
fn a_machine_whose_handover_cannot_be_recorded_runs_on_once_its_own_record_is_durable_again() {
    let (guest, host) = (guest(5), Arc::new(FakeTarget::default()));
    let mut record = Record::new(|| Err("the disk is full".into()));
    assert!(matches!(attempt(&guest, &host, &mut record), Err(MigrateError::Record(_))));
    assert_eq!(record.aborted, [AbortedAction::SendAbort]);
    assert!(guest.0.lock().unwrap().running && host.running.lock().unwrap().is_empty());
}

#[test]
fn a_machine_of_which_no_record_can_be_written_runs_nowhere_and_nobody_is_told_anything() {
    let (guest, host) = (guest(5), Arc::new(FakeTarget::default()));
    let mut record = Record { reverts: false, ..Record::new(|| Err("the disk is full".into())) };
    assert!(matches!(attempt(&guest, &host, &mut record), Err(MigrateError::Record(_))));
    assert_eq!(record.aborted, [], "a later daemon may find the handover on the disk");
    assert!(!guest.0.lock().unwrap().running && host.running.lock().unwrap().is_empty());
}

#[test]
fn a_machine_whose_pause_failed_after_it_had_stopped_runs_on() {
    let (guest, host) = (guest(5), Arc::new(FakeTarget::default()));
    guest.0.lock().unwrap().pause_fails = true;
    let mut record = Record::new(|| Err("nothing is handed over".into()));
    assert!(matches!(attempt(&guest, &host, &mut record), Err(MigrateError::Capture(_))));
    assert!(guest.0.lock().unwrap().running);
}

#[test]
fn a_message_of_an_unknown_handover_is_refused() {
    let arrivals = IncomingMigrations::new(Arc::new(Landings(Arc::default())));
    let header = postcard::to_stdvec(&HandoverId([9; 16])).unwrap();
    assert!(arrivals.handle(&source(), protocol::COMMIT, &header, Bytes::new()).is_err());
    assert!(
        arrivals.handle(&source(), protocol::ABORT, &header, Bytes::new()).is_ok(),
        "nothing to give up is no error"
    );
    assert!(arrivals.handle(&source(), 0x01ff, &header, Bytes::new()).is_err());
}
