//! Tests of hot pages: pages that are written all the time are sent once ahead, so that they are deltas in
//! the pause.

use crate::record::Record;
use bytes::Bytes;
use std::{
    ops::ControlFlow,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use whimbrel_capture::{
    CaptureSource, Consumer, DirtyLog, RoundDecision, RoundStats, Scan, StopPolicy, StopReason,
};
use whimbrel_core::{ByteSize, MachineConfig, PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{Machine, MachineError, PageArray, PageError};
use whimbrel_migrate::{
    Budget, MigrationJob,
    link::{Answer, Link, LinkError},
    migrate,
    protocol::{self, Accepted, HandoverId, Offer, Offered, PageQueryReply},
};

const PAGES: u64 = 2048;
const HOT: std::ops::Range<u64> = 700..900;

/// Memory of random bytes; every scan finds eight bytes of every hot page changed.
#[derive(Clone)]
struct Guest(Arc<Mutex<(Vec<u8>, bool)>>);

impl Guest {
    fn new() -> Self {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as u8
        };
        Self(Arc::new(Mutex::new(((0..PAGES as usize * PAGE_SIZE).map(|_| next()).collect(), true))))
    }
}

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
        let (memory, running) = &mut *self.0.lock().unwrap();
        let mut dirty = PageSet::empty(PAGES);
        for page in HOT.filter(|_| *running) {
            let at = page as usize * PAGE_SIZE + 64;
            memory[at..at + 8].iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
            dirty.insert(page);
        }
        Ok(dirty)
    }
    fn put_back(&mut self, _: &PageSet) {}
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        out.copy_from_slice(&self.0.lock().unwrap().0[run.offset() as usize..][..run.bytes()]);
        Ok(())
    }
}

impl Machine for Guest {
    fn pause(&mut self) -> Result<(), MachineError> {
        self.0.lock().unwrap().1 = false;
        Ok(())
    }
    fn unpause(&mut self) -> Result<(), MachineError> {
        self.0.lock().unwrap().1 = true;
        Ok(())
    }
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        Ok(vec![1])
    }
}

/// Target that accepts everything, has no page of any query, and counts.
#[derive(Default)]
struct Agreeable {
    bytes: AtomicU64,
    rates: Mutex<Vec<Option<u64>>>,
}

struct Now(Bytes);

impl Answer for Now {
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError> {
        Ok(self.0)
    }
}

impl Link for Agreeable {
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        self.bytes.fetch_add((header.len() + payload.len()) as u64, Ordering::Relaxed);
        let accepted = Offered::Accepted(Accepted { blobs_missing: vec![], begun_as: vec![] });
        let answer = match kind {
            protocol::OFFER => postcard::to_stdvec(&accepted).unwrap(),
            protocol::QUERY_PAGES => postcard::to_stdvec(&PageQueryReply { found: vec![] }).unwrap(),
            _ => vec![],
        };
        Ok(Box::new(Now(answer.into())))
    }
    fn limit_rate(&self, rate: Option<u64>) {
        self.rates.lock().unwrap().push(rate);
    }
    fn bytes_sent(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Three rounds, with a scan before every cluster.
struct Three;

impl StopPolicy for Three {
    fn decide(&self, history: &[RoundStats], _: u64) -> RoundDecision {
        match history.len() {
            0..3 => RoundDecision::Round { rate: Some(10_000_000) },
            _ => RoundDecision::Stop { rate: Some(50_000_000), stop_reason: StopReason::RoundsOver },
        }
    }
    fn downtime(&self, _: &[RoundStats], _: u64) -> Option<Duration> {
        None
    }
    fn scan(&self) -> Scan {
        Scan::DeferHot { scan_interval: Duration::ZERO }
    }
}

fn offer() -> Offer {
    let config = MachineConfig::minimal(ByteSize(PAGES * PAGE_SIZE as u64));
    Offer::of(HandoverId([7; 16]), "guest".parse().unwrap(), config)
}

#[test]
fn a_page_that_is_always_hot_travels_once_whole_and_in_the_pause_as_a_difference() {
    let (guest, link) = (Guest::new(), Agreeable::default());
    let mut ledger = DirtyLog::new(Box::new(guest.clone()));
    let mut machine = guest.clone();
    let ledgers = std::slice::from_mut(&mut ledger);
    let mut source =
        CaptureSource { machine: &mut machine, dirty_logs: ledgers, consumer: Consumer::Migration };
    let job = MigrationJob {
        link: &link,
        offer: &offer(),
        open_boot_file: &|_| Ok(Box::new(vec![])),
        open_baseline: &|_, _| Err("nothing is said to be there".into()),
        seed: 7,
        ports: &Vec::new,
        take_late_frames: &mut Vec::new,
        policy: &Three,
        deferred: None,
        backup: None,
        mirrors: &[],
        budget: &Budget::UNLIMITED,
        observe: &mut |_| ControlFlow::Continue(()),
    };
    let done = migrate(&mut source, &mut Record::new(|| Ok(())), job).unwrap();
    let hot = HOT.end - HOT.start;
    let pages: Vec<(u64, u64)> = done.rounds.iter().map(|round| (round.pages, round.skipped)).collect();
    assert_eq!(pages, [(PAGES, 0), (0, hot), (0, hot), (hot, 0)], "hot pages wait once they were sent");
    let in_the_pause = done.rounds[3].bytes;
    println!("{in_the_pause} bytes in the pause");
    assert!(in_the_pause < 20_000, "{in_the_pause} bytes for {hot} pages of which eight bytes changed");
    let (round, last) = (Some(10_000_000), Some(50_000_000));
    assert_eq!(*link.rates.lock().unwrap(), [round, round, round, last]);
}
