//! Tests of mirrored writes: a machine writes to a disk all the time, faster than rounds send it, over a link
//! that fails where a seed says.
//!
//! The fears: a disk that differs on the target, rounds that never end, a write of the guest that fails or
//! waits for ever because the target is gone, a later migration that lacks what an earlier one sent as
//! mirrored.

use crate::record::Record;
use bytes::Bytes;
use proptest::prelude::*;
use std::{
    ops::ControlFlow,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};
use whimbrel_block::{Device, DiskPages, MemDevice, Mirror, MirrorLayer, TrackedDevice};
use whimbrel_capture::{
    CaptureSource, Consumer, DirtyLog, RoundDecision, RoundStats, Scan, StopPolicy, StopReason,
};
use whimbrel_core::{ByteSize, Digest, DiskConfig, HostName, MachineConfig, PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{Machine, MachineError, PageArray, PageError};
use whimbrel_migrate::{
    Budget, MigrationJob,
    link::{Answer, Link, LinkError},
    migrate,
    protocol::{Finish, HandoverId, Offer, PAGES},
    target::{HostError, IncomingMachine, IncomingMigrations, TargetHost},
};

const MEMORY: u64 = 256;
const DISK: u64 = 512;

/// Memory of zeros that is never written.
struct Memory;

impl PageArray for Memory {
    fn name(&self) -> &str {
        "memory"
    }
    fn page_count(&self) -> u64 {
        MEMORY
    }
    fn populated(&mut self) -> Result<PageSet, PageError> {
        Ok(PageSet::empty(MEMORY))
    }
    fn take_dirty(&mut self) -> Result<PageSet, PageError> {
        Ok(PageSet::empty(MEMORY))
    }
    fn put_back(&mut self, _: &PageSet) {}
    fn read(&self, _: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        out.fill(0);
        Ok(())
    }
}

/// Whether the guest runs, and whether its thread is in the middle of a write.
#[derive(Default)]
struct Cpu {
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Cpu {
    fn set(&self, runs: bool) {
        let mut state = self.state.lock().unwrap();
        state.0 = runs;
        self.changed.notify_all();
        // As QEMU does: what is under way is finished first.
        while !runs && state.1 {
            state = self.changed.wait(state).unwrap();
        }
    }

    /// Does `write` if the guest runs.
    fn when_running(&self, write: impl FnOnce()) {
        let mut state = self.state.lock().unwrap();
        if !state.0 {
            drop(self.changed.wait_timeout(state, Duration::from_millis(1)).unwrap());
            return;
        }
        state.1 = true;
        drop(state);
        write();
        self.state.lock().unwrap().1 = false;
        self.changed.notify_all();
    }
}

struct Guest {
    cpu: Arc<Cpu>,
    disk: Arc<TrackedDevice>,
}

fn content(disk: &dyn Device) -> Vec<u8> {
    let mut content = vec![0; DISK as usize * PAGE_SIZE];
    disk.read_at(0, &mut content).unwrap();
    content
}

impl Machine for Guest {
    fn pause(&mut self) -> Result<(), MachineError> {
        self.cpu.set(false);
        Ok(())
    }
    fn unpause(&mut self) -> Result<(), MachineError> {
        self.cpu.set(true);
        Ok(())
    }
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        Ok(Digest::of(&content(&*self.disk)).0.to_vec())
    }
}

/// Writes runs of one to four pages, the first of them in part.
fn write_on(cpu: &Cpu, disk: &MirrorLayer, seed: u64, (wrote, over): (&AtomicU64, &AtomicBool)) {
    let mut state = seed;
    let mut below = |end: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % end
    };
    while !over.load(SeqCst) {
        let (page, len, byte) = (below(DISK - 4), 1 + below(4), below(256) as u8);
        let (at, bytes) = (page * PAGE_SIZE as u64, len as usize * PAGE_SIZE);
        cpu.when_running(|| {
            disk.write_at(at + 7, &vec![byte; bytes - 7]).unwrap();
            wrote.fetch_add(1, SeqCst);
        });
    }
}

/// Ends the writer, also if a test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

struct Landings;

struct Landed(Vec<u8>);

impl TargetHost for Landings {
    fn reserve(&self, _: &Offer, _: &HostName) -> Result<Box<dyn IncomingMachine>, HostError> {
        Ok(Box::new(Landed(vec![0; DISK as usize * PAGE_SIZE])))
    }
}

impl Landed {
    fn place(&mut self, run: PageRun) -> &mut [u8] {
        &mut self.0[run.offset() as usize..][..run.bytes()]
    }
}

impl IncomingMachine for Landed {
    fn boot_files_missing(&self) -> Vec<Digest> {
        Vec::new()
    }
    fn store_boot_file(&mut self, _: Digest, _: Vec<u8>) -> Result<(), HostError> {
        Ok(())
    }
    fn write(&mut self, array: usize, run: PageRun, data: &[u8]) -> Result<(), HostError> {
        assert_eq!(array, 1);
        self.place(run).copy_from_slice(data);
        Ok(())
    }
    fn zero(&mut self, array: usize, run: PageRun) -> Result<(), HostError> {
        assert_eq!(array, 1);
        self.place(run).fill(0);
        Ok(())
    }
    fn read(&self, _: usize, run: PageRun, out: &mut [u8]) -> Result<(), HostError> {
        out.copy_from_slice(&self.0[run.offset() as usize..][..run.bytes()]);
        Ok(())
    }
    fn prepare(&mut self, _: &Finish, device_state: &[u8]) -> Result<(), HostError> {
        assert_eq!(Digest::of(&self.0).0, device_state, "the disk is not the one at the pause");
        Ok(())
    }
    fn run(&mut self) -> Result<(), HostError> {
        Ok(())
    }
    fn discard(&mut self) {}
}

/// Link that delivers some messages, and none after them. It is slower than the guest writes.
struct Flaky {
    /// Number of writes of the guest.
    wrote: Arc<AtomicU64>,
    arrivals: IncomingMigrations,
    left: AtomicU64,
}

struct Now(Result<Bytes, LinkError>);

impl Answer for Now {
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError> {
        thread::yield_now();
        self.0
    }
}

impl Link for Flaky {
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        let before = self.wrote.load(SeqCst);
        // Not for ever: a guest that is paused, or waits for this message, does not write.
        for _ in 0..20 {
            if kind != PAGES || self.wrote.load(SeqCst) > before + 100 {
                break;
            }
            thread::sleep(Duration::from_micros(100));
        }
        let left = self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        let answer = match left {
            Err(_) => Err(LinkError::Lost { source: "cut".into() }),
            Ok(_) => self
                .arrivals
                .handle(&"alpha".parse().expect("a name"), kind, &header, payload)
                .map(Bytes::from)
                .map_err(|error| LinkError::Refused { reason: error.to_string() }),
        };
        Ok(Box::new(Now(answer)))
    }
    fn bytes_sent(&self) -> u64 {
        0
    }
}

fn offer(attempt: u8) -> Offer {
    let config = MachineConfig {
        disks: vec![DiskConfig { size: ByteSize(DISK * PAGE_SIZE as u64) }],
        ..MachineConfig::minimal(ByteSize(MEMORY * PAGE_SIZE as u64))
    };
    Offer::of(HandoverId([attempt; 16]), "guest".parse().unwrap(), config)
}

/// As many rounds as it takes: without a mirror hundreds of pages are left after each. With one a batch
/// leaves what the one writer was writing when it was read; there are two batches. The mirror knows of the
/// third round and those after it.
struct Patient;

const LITTLE: u64 = 16;
const ROUNDS: usize = 8;

impl StopPolicy for Patient {
    fn decide(&self, history: &[RoundStats], left: u64) -> RoundDecision {
        match (left <= LITTLE && history.len() >= ROUNDS, history.len() < 1000) {
            (true, _) => RoundDecision::Stop { rate: None, stop_reason: StopReason::LittleLeft },
            (false, true) => RoundDecision::Round { rate: None },
            (false, false) => RoundDecision::Stop { rate: None, stop_reason: StopReason::RoundsOver },
        }
    }
    fn downtime(&self, _: &[RoundStats], _: u64) -> Option<Duration> {
        None
    }
    fn scan(&self) -> Scan {
        Scan::DeferHot { scan_interval: Duration::ZERO }
    }
}

/// Tries to migrate the machine over a link that delivers `messages`; returns the pages of the last round if
/// it succeeded, and the number of mirrored writes.
fn attempt(
    number: u8,
    guest: &mut Guest,
    ledgers: &mut [DirtyLog],
    (disk, wrote): (&MirrorLayer, &Arc<AtomicU64>),
    messages: u64,
) -> (Option<u64>, u64) {
    let (arrivals, left) = (IncomingMigrations::new(Arc::new(Landings)), AtomicU64::new(messages));
    let link = Flaky { wrote: wrote.clone(), arrivals, left };
    let mirror = Arc::new(Mirror::new(DISK));
    let mut subject = CaptureSource { machine: guest, dirty_logs: ledgers, consumer: Consumer::Migration };
    let mut armed = false;
    let job = MigrationJob {
        link: &link,
        offer: &offer(number),
        open_boot_file: &|_| unreachable!("there are no boot files"),
        open_baseline: &|_, _| unreachable!("it begins as zeros"),
        seed: 7,
        ports: &Vec::new,
        take_late_frames: &mut Vec::new,
        policy: &Patient,
        deferred: None,
        backup: None,
        mirrors: &[(1, mirror.clone())],
        budget: &Budget::UNLIMITED,
        observe: &mut |progress| {
            if progress.ended.is_some() && !armed {
                armed = true;
                disk.set(Some(mirror.clone()));
                mirror.arm(64 << 10);
            }
            ControlFlow::Continue(())
        },
    };
    let outcome = migrate(&mut subject, &mut Record::new(|| Ok(())), job);
    mirror.end();
    disk.set(None);
    let last = outcome.ok().map(|done| done.rounds.last().map_or(0, |round| round.pages));
    (last, mirror.cost().writes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_disk_that_is_written_all_the_time_arrives_whole_or_is_written_on_here(
        seed: u64, breaks in prop::collection::vec(2..60u64, 0..3),
    ) {
        let tracked = Arc::new(TrackedDevice::new(Arc::new(MemDevice::new(vec![0; DISK as usize * PAGE_SIZE]))));
        let (disk, cpu) = (MirrorLayer::new(tracked.clone()), Arc::new(Cpu::default()));
        let (wrote, over) = (Arc::new(AtomicU64::new(0)), AtomicBool::new(false));
        let pages = DiskPages { name: "disk0".to_owned(), device: tracked.clone() };
        let mut ledgers = [DirtyLog::new(Box::new(Memory)), DirtyLog::new(Box::new(pages))];
        let mut guest = Guest { cpu: cpu.clone(), disk: tracked.clone() };
        ledgers[1].attach_from(Consumer::Store, PageSet::empty(DISK)).unwrap();
        let arrived = thread::scope(|scope| {
            scope.spawn(|| write_on(&cpu, &disk, seed, (&wrote, &over)));
            let _over = Over(&over);
            cpu.set(true);
            while wrote.load(SeqCst) == 0 {
                thread::yield_now();
            }
            let mut arrived = None;
            for (number, messages) in (1..).zip(breaks.into_iter().chain([u64::MAX])) {
                let (last, carried) = attempt(number, &mut guest, &mut ledgers, (&disk, &wrote), messages);
                if let Some(pages) = last {
                    arrived = Some((pages, carried));
                    break;
                }
                assert!(cpu.state.lock().unwrap().0, "it runs on here");
            }
            arrived
        });
        // The target compares the disks when it is to load the machine.
        let Some((last, carried)) = arrived else { panic!("the last link never breaks") };
        // The rest of a round, and what was written to its pages before the pause.
        prop_assert!(last <= 2 * LITTLE, "{last} pages were left for the pause, {carried} writes were carried");
        let store = ledgers[1].collect(Consumer::Store).unwrap();
        prop_assert!(!store.is_empty(), "what was carried is still to be stored");
    }
}
