//! Complete protections of a fake machine over a link that breaks where a seed says, before or after the
//! standby
//! has heard.
//!
//! The fears: a standby that is of no one instant, output that is released although the standby lacks what it
//! tells of, a page that is lost when the standby is filled again from what it still has.

use crate::room::{Copy, DISK, MEMORY};
use bytes::Bytes;
use proptest::prelude::*;
use std::{
    ops::ControlFlow,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};
use whimbrel_capture::{CaptureSource, CheckpointPolicy, Consumer, DirtyLog};
use whimbrel_core::{ByteSize, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_machine::{Machine, MachineError};
use whimbrel_migrate::{
    link::{Answer, Link, LinkError},
    protocol::{Accepted, DEVICE_STATE_MAX, HandoverId, Offer, Offered},
};
use whimbrel_protect::{
    codec::{BlockSize, CodecOptions, encoder::Encoder},
    primary::EpochSender,
    protocol::{self, Compare, EpochEnd, EpochPages, ProtectionId, StartReply, StartRequest},
    standby::EpochReceiver,
};
use whimbrel_testkit::fake_machine::{FakeArray, FakeConfig, FakeMachine};

type Content = [Vec<u8>; 2];

/// The machine, and what it was each time its devices were asked for.
struct Watched {
    machine: FakeMachine,
    cuts: Arc<Mutex<Vec<Content>>>,
}

impl Machine for Watched {
    fn pause(&mut self) -> Result<(), MachineError> {
        self.machine.pause()
    }
    fn unpause(&mut self) -> Result<(), MachineError> {
        self.machine.unpause()
    }
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.machine.device_state()?;
        let mut cuts = self.cuts.lock().unwrap();
        cuts.push([self.machine.content(0), self.machine.content(1)]);
        Ok(state_of(cuts.len() - 1))
    }
}

/// Device state of a capture: its number, a page that stays, one that changes now and then, and an end of
/// another length each time.
fn state_of(cut: usize) -> Vec<u8> {
    let mut state = vec![7; 3 * PAGE_SIZE + 100 * (cut % 3)];
    state[..8].copy_from_slice(&(cut as u64).to_le_bytes());
    state[2 * PAGE_SIZE] = (cut / 4) as u8;
    state
}

/// A link that breaks at a message, whose answer is lost with it.
struct Flaky {
    receiver: Arc<Mutex<EpochReceiver>>,
    has_pages: bool,
    sent: AtomicU64,
    breaks_at: u64,
    heard: bool,
}

struct Said(Result<Bytes, LinkError>);

impl Answer for Said {
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError> {
        self.0
    }
}

impl Flaky {
    fn handle(&self, kind: u16, header: &[u8], payload: &[u8]) -> Result<Vec<u8>, String> {
        let mut receiver = self.receiver.lock().unwrap();
        let text = |error: whimbrel_protect::StandbyError| error.to_string();
        let reply = match kind {
            protocol::START => {
                let offered = Offered::Accepted(accepted());
                postcard::to_stdvec(&StartReply { offered, has_pages: self.has_pages })
            }
            protocol::COMPARE_DIGESTS => {
                let asked: Compare = postcard::from_bytes(header).unwrap();
                postcard::to_stdvec(&receiver.compare(&asked, payload).map_err(text)?)
            }
            protocol::EPOCH_PAGES => {
                let piece: EpochPages = postcard::from_bytes(header).unwrap();
                postcard::to_stdvec(&receiver.store_pages(&piece, payload).map_err(text)?)
            }
            protocol::EPOCH_END => {
                let seal: EpochEnd = postcard::from_bytes(header).unwrap();
                receiver.end_epoch(seal, payload.to_vec()).map_err(text)?;
                Ok(vec![])
            }
            kind => panic!("nobody sends {kind:#06x}"),
        };
        Ok(reply.unwrap())
    }
}

impl Link for Flaky {
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        let number = self.sent.fetch_add(1, Ordering::Relaxed);
        let lost = || LinkError::Lost { source: "on purpose".into() };
        if number > self.breaks_at || (number == self.breaks_at && !self.heard) {
            return Err(lost());
        }
        let answer = self.handle(kind, &header, &payload);
        if number == self.breaks_at {
            return Ok(Box::new(Said(Err(lost()))));
        }
        Ok(Box::new(Said(answer.map(Bytes::from).map_err(|reason| LinkError::Refused { reason }))))
    }
    fn bytes_sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

fn accepted() -> Accepted {
    Accepted { blobs_missing: vec![], begun_as: vec![] }
}

fn offer() -> Offer {
    let config = MachineConfig { machine: "pc".into(), ..MachineConfig::minimal(ByteSize(MEMORY * 4096)) };
    whimbrel_offer(config)
}

fn whimbrel_offer(config: MachineConfig) -> Offer {
    Offer {
        handover: HandoverId([1; 16]),
        name: "web".parse().unwrap(),
        config,
        arrays: vec![],
        vmgenid: String::new(),
        origin: None,
        blobs: vec![],
        qemu_version: String::new(),
        disk_bytes: 0,
        processor: String::new(),
        tunnel: None,
        bases: Vec::new(),
        leaves: None,
        files: Vec::new(),
        third: None,
        paused: false,
    }
}

/// A machine, what follows it, and what it was at each cut.
struct World {
    watched: Watched,
    ledgers: Vec<DirtyLog>,
    cuts: Arc<Mutex<Vec<Content>>>,
    copy: Copy,
    receiver: Arc<Mutex<EpochReceiver>>,
}

impl World {
    fn new(seed: u64) -> Self {
        let arrays = vec![("memory".to_owned(), MEMORY), ("disk0".to_owned(), DISK)];
        let config = FakeConfig { arrays, seed, writes_per_call: 4, fails_after: None };
        let (machine, arrays) = FakeMachine::new(&config);
        let ledgers = arrays.into_iter().map(|array: FakeArray| DirtyLog::new(Box::new(array))).collect();
        let (cuts, copy) = (Arc::new(Mutex::new(Vec::new())), Copy::new());
        let receiver =
            EpochReceiver::new(Box::new(copy.clone()), vec![MEMORY, DISK], vec![], HandoverId([1; 16]));
        let receiver = Arc::new(Mutex::new(receiver));
        Self { watched: Watched { machine, cuts: cuts.clone() }, ledgers, cuts, copy, receiver }
    }

    /// Protects for some epochs, or until the link breaks; the last cut whose output was released.
    fn protect(
        &mut self,
        coding: CodecOptions,
        (breaks_at, heard): (u64, bool),
        has_pages: bool,
        epochs: u64,
    ) -> Option<usize> {
        let receiver = self.receiver.clone();
        let link = Flaky { receiver, has_pages, sent: AtomicU64::new(0), breaks_at, heard };
        let mut sender = EpochSender::new(&link, ProtectionId([2; 16]), coding, 3, 1 << 20).unwrap();
        let begin = StartRequest {
            id: ProtectionId([2; 16]),
            offer: offer(),
            coding,
            lease_ms: 1000,
            witness: None,
            then: None,
            keep: None,
            heir: None,
        };
        let has_pages = sender.start(&begin, &|_| Err("there are none".into())).ok()?;
        sender.attach_consumer(&mut self.ledgers, has_pages).ok()?;
        let ports = || vec![vec![1, 2, 3]];
        let mut subject = CaptureSource {
            machine: &mut self.watched,
            dirty_logs: &mut self.ledgers,
            consumer: Consumer::Standby,
        };
        let pace = CheckpointPolicy { pages_left_max: 16, rounds_max: 3 };
        sender.seed(&mut subject, &pace, &ports, &mut |_| ControlFlow::Continue(())).ok()?;
        let mut released = self.cuts.lock().unwrap().len() - 1;
        for epoch in 0..epochs {
            let sent = match epoch % 3 {
                2 => {
                    let mut go_on = |_, _| ControlFlow::Continue(());
                    sender.large_epoch(&mut subject, &ports, &mut || {}, &mut go_on)
                }
                _ => sender.epoch(&mut subject, &ports, &mut || {}),
            };
            match sent {
                Ok(_) => released = self.cuts.lock().unwrap().len() - 1,
                Err(_) => break,
            }
        }
        Some(released)
    }

    /// The standby takes over: from which cut, with what.
    fn take_over(&self) -> Option<(usize, Content)> {
        self.receiver.lock().unwrap().take_over().ok()?;
        let copy = self.copy.0.lock().unwrap();
        let state = copy.1.as_ref().unwrap();
        let cut = u64::from_le_bytes(state[..8].try_into().unwrap()) as usize;
        assert!(*state == state_of(cut), "devices of no one instant");
        Some((cut, [copy.0[0].clone(), copy.0[1].clone()]))
    }
}

fn coding(which: u8) -> CodecOptions {
    let block = [BlockSize::B64, BlockSize::B128, BlockSize::B256, BlockSize::Page][which as usize % 4];
    if which >= 4 { CodecOptions::REMUS } else { CodecOptions::fine(block) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn the_standby_takes_over_from_a_whole_cut_that_is_not_older_than_what_was_seen(
        seed: u64, which in 0..5u8, breaks_at in 0..60u64, heard: bool,
    ) {
        let mut world = World::new(seed);
        let released = world.protect(coding(which), (breaks_at, heard), false, 12);
        prop_assert!(world.watched.machine.is_running(), "the primary goes on");
        match world.take_over() {
            None => prop_assert_eq!(released, None, "nothing was seen under protection"),
            Some((cut, content)) => {
                prop_assert!(content == world.cuts.lock().unwrap()[cut], "the standby is of no one instant");
                prop_assert!(released.is_none_or(|released| released <= cut), "{released:?} was seen, {cut} is there");
            }
        }
    }

    #[test]
    fn a_standby_that_comes_back_is_whole_again_from_what_it_has(
        seed: u64, which in 0..5u8, breaks_at in 5..60u64, heard: bool, again in 5..40u64,
    ) {
        let mut world = World::new(seed);
        world.protect(coding(which), (breaks_at, heard), false, 12);
        for ledger in &mut world.ledgers {
            ledger.detach(Consumer::Standby);
            // The machine runs on unprotected.
            (0..5).for_each(|_| ledger.refresh().unwrap());
        }
        world.receiver.lock().unwrap().restart();
        let released = world.protect(coding(which), (again, true), true, 6);
        if let Some((cut, content)) = world.take_over() {
            prop_assert!(content == world.cuts.lock().unwrap()[cut], "the standby is of no one instant");
            prop_assert!(released.is_none_or(|released| released <= cut));
        } else {
            prop_assert_eq!(released, None);
        }
    }
}

#[test]
fn garbage_from_a_primary_is_refused_and_leaves_the_last_epoch_as_it_was() {
    let mut world = World::new(5);
    assert!(world.protect(CodecOptions::fine(BlockSize::B64), (u64::MAX, true), false, 3).is_some());
    {
        let mut receiver = world.receiver.lock().unwrap();
        let id = ProtectionId([2; 16]);
        let piece = |epoch, array| EpochPages { id, epoch: Some(epoch), array, block: BlockSize::B64 };
        assert!(receiver.store_pages(&piece(4, 9), &[]).is_err(), "no such array");
        assert!(receiver.store_pages(&piece(4, 0), &[1; 50]).is_err(), "no piece");
        let seal = |epoch, pages| EpochEnd { id, epoch, pages, device_bytes: None, ports: vec![] };
        assert!(receiver.end_epoch(seal(4, 7), vec![]).is_err(), "pages that never came");
        assert!(receiver.end_epoch(seal(9, 0), vec![]).is_err(), "an epoch out of turn");
        assert!(receiver.end_epoch(seal(3, 0), vec![]).is_ok(), "repeated");
        let asked = Compare { id, array: 0, run: PageRun::new(u64::MAX, 2) };
        assert!(receiver.compare(&asked, &[0; 32]).is_err());
    }
    let (cut, content) = world.take_over().unwrap();
    assert!(content == world.cuts.lock().unwrap()[cut]);
}

#[test]
fn an_epoch_that_cannot_be_loaded_is_kept_and_loaded_again() {
    let mut world = World::new(7);
    assert!(world.protect(CodecOptions::fine(BlockSize::B64), (u64::MAX, true), false, 3).is_some());
    *world.copy.1.lock().unwrap() = true;
    assert!(world.take_over().is_none());
    *world.copy.1.lock().unwrap() = false;
    let (cut, content) = world.take_over().expect("the epoch is still here");
    assert!(content == world.cuts.lock().unwrap()[cut]);
}

#[test]
fn what_is_filled_anew_or_written_by_halves_is_nothing_to_take_over_from() {
    let mut world = World::new(6);
    assert!(world.protect(CodecOptions::fine(BlockSize::B64), (u64::MAX, true), false, 3).is_some());
    let mut receiver = world.receiver.lock().unwrap();
    let current = receiver.committed_epoch();
    assert_eq!(current.epoch().0, Some(3));
    let (id, page) = (ProtectionId([2; 16]), vec![7; PAGE_SIZE]);
    let mut encoder = Encoder::new(CodecOptions::fine(BlockSize::B64), 1, 1 << 20);
    let (payload, _) = encoder.encode(0, [(5, &page[..])].into_iter()).unwrap();
    let piece = |epoch| EpochPages { id, epoch, array: 0, block: BlockSize::B64 };
    let seal = |epoch, pages| EpochEnd { id, epoch, pages, device_bytes: None, ports: vec![] };
    receiver.store_pages(&piece(Some(4)), &payload).unwrap();
    *world.copy.1.lock().unwrap() = true;
    assert!(receiver.end_epoch(seal(4, 1), vec![1]).is_err(), "it cannot be written");
    assert_eq!(current.epoch().0, None);
    *world.copy.1.lock().unwrap() = false;

    receiver.end_epoch(seal(5, 0), vec![1]).unwrap();
    assert_eq!(current.epoch().0, Some(5), "filled again");
    receiver.store_pages(&piece(None), &payload).unwrap();
    assert_eq!(current.epoch().0, None);
    assert!(receiver.take_over().is_err());
}

#[test]
fn pages_of_zeros_are_bounded_too() {
    let pages = 1 << 21;
    let arrival = Box::new(Copy::new());
    let mut receiver = EpochReceiver::new(arrival, vec![pages], vec![], HandoverId([1; 16]));
    let id = ProtectionId([2; 16]);
    receiver
        .end_epoch(EpochEnd { id, epoch: 0, pages: 0, device_bytes: None, ports: vec![] }, vec![1])
        .unwrap();
    let mut encoder = Encoder::new(CodecOptions::fine(BlockSize::Page), 1, 1 << 20);
    let zero = vec![0; PAGE_SIZE];
    let mut took = 0;
    for first in (0..pages).step_by(1024) {
        let (payload, _) = encoder.encode(0, (first..first + 1024).map(|page| (page, &zero[..]))).unwrap();
        let piece = EpochPages { id, epoch: Some(1), array: 0, block: BlockSize::Page };
        match receiver.store_pages(&piece, &payload) {
            Ok(_) => took += 1024,
            Err(_) => break,
        }
    }
    let devices = (DEVICE_STATE_MAX / PAGE_SIZE) as u64;
    assert!((1 << 20..(1 << 20) + devices + 1024).contains(&took), "{took} pages of one epoch are held");
}
