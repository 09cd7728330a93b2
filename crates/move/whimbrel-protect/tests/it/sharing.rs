//! Machines of one host that are protected at one other: what one standby has is not sent for the next, and
//! whatever becomes of the one in between, the other is what its machine was.
//!
//! The fears: a page that is taken from a neighbour who has another one by now, and a copy that fails because
//! a neighbour is gone.

use crate::room::{Copy, DISK, MEMORY};
use bytes::Bytes;
use proptest::prelude::*;
use std::{
    cell::Cell,
    ops::ControlFlow,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};
use whimbrel_capture::{CaptureSource, CheckpointPolicy, Consumer, DirtyLog};
use whimbrel_core::PAGE_SIZE;
use whimbrel_machine::{Machine, MachineError};
use whimbrel_migrate::{
    link::{Answer, Link, LinkError},
    protocol::HandoverId,
};
use whimbrel_protect::{
    codec::{
        BlockSize, CodecOptions,
        shared_pages::{PageReference, SharedPages},
    },
    primary::EpochSender,
    protocol::{self, EpochEnd, EpochPages, ProtectionId},
    standby::{EpochReceiver, SiblingPages},
};
use whimbrel_testkit::fake_machine::{FakeArray, FakeConfig, FakeMachine};

/// What a neighbour does when it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Neighbour {
    /// Reads what it has.
    Lends,
    /// Is gone, or busy.
    Silent,
    /// Has written every third page since.
    Writes,
}

/// The standby of the first machine, as the second one's sees it.
struct Beside {
    first: Arc<Mutex<EpochReceiver>>,
    does: Neighbour,
    asked: Cell<u64>,
}

impl SiblingPages for Beside {
    fn read(&self, name: &PageReference, out: &mut [u8]) -> bool {
        assert_eq!(name.of, id(1), "only the first machine is a neighbour");
        self.asked.set(self.asked.get() + 1);
        if self.does == Neighbour::Silent
            || !self.first.lock().unwrap().read_shared(name.array, name.page, out)
        {
            return false;
        }
        if self.does == Neighbour::Writes && name.page.is_multiple_of(3) {
            out[7] ^= 1;
        }
        true
    }
}

/// A link that loses nothing, to a standby that may have a neighbour.
struct Wire {
    receiver: Arc<Mutex<EpochReceiver>>,
    beside: Option<Mutex<Beside>>,
    bytes: AtomicU64,
}

struct Said(Result<Bytes, LinkError>);

impl Answer for Said {
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError> {
        self.0
    }
}

impl Link for Wire {
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        self.bytes.fetch_add(payload.len() as u64, Ordering::Relaxed);
        let mut receiver = self.receiver.lock().unwrap();
        let answer = match (kind, &self.beside) {
            (protocol::EPOCH_PAGES, beside) => {
                let piece: EpochPages = postcard::from_bytes(&header).unwrap();
                let done = match beside {
                    Some(beside) => receiver.store_pages_among(&piece, &payload, &*beside.lock().unwrap()),
                    None => receiver.store_pages(&piece, &payload),
                };
                done.map(|again| postcard::to_stdvec(&again).unwrap())
            }
            (protocol::EPOCH_END, _) => {
                let seal: EpochEnd = postcard::from_bytes(&header).unwrap();
                receiver.end_epoch(seal, payload.to_vec()).map(|()| Vec::new())
            }
            (kind, _) => panic!("nobody sends {kind:#06x}"),
        };
        let answer = answer.map_err(|error| LinkError::Refused { reason: error.to_string() });
        Ok(Box::new(Said(answer.map(Bytes::from))))
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

fn id(number: u8) -> ProtectionId {
    ProtectionId([number; 16])
}

/// The machine, and what it was when its devices were asked for last.
struct Watched {
    machine: FakeMachine,
    cut: Vec<Vec<u8>>,
}

impl Machine for Watched {
    fn pause(&mut self) -> Result<(), MachineError> {
        self.machine.pause()
    }
    fn unpause(&mut self) -> Result<(), MachineError> {
        self.machine.unpause()
    }
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.cut = vec![self.machine.content(0), self.machine.content(1)];
        self.machine.device_state()
    }
}

/// A machine that began from the image that `seed` stands for, and its standby.
struct Protected {
    machine: Watched,
    ledgers: Vec<DirtyLog>,
    copy: Copy,
    wire: Wire,
}

impl Protected {
    fn new(seed: u64, writes_per_call: u64, beside: Option<Beside>) -> Self {
        let arrays = vec![("memory".to_owned(), MEMORY), ("disk0".to_owned(), DISK)];
        let config = FakeConfig { arrays, seed, writes_per_call, fails_after: None };
        let (machine, arrays) = FakeMachine::new(&config);
        let ledgers = arrays.into_iter().map(|array: FakeArray| DirtyLog::new(Box::new(array))).collect();
        let copy = Copy::new();
        let receiver =
            EpochReceiver::new(Box::new(copy.clone()), vec![MEMORY, DISK], vec![], HandoverId([1; 16]));
        let receiver = Arc::new(Mutex::new(receiver));
        let wire = Wire { receiver, beside: beside.map(Mutex::new), bytes: AtomicU64::new(0) };
        Self { machine: Watched { machine, cut: Vec::new() }, ledgers, copy, wire }
    }

    /// Fills the standby and sends some epochs, then does something while it is still protected: bytes of the
    /// first copy.
    fn protect(
        &mut self,
        number: u8,
        coding: CodecOptions,
        known: &SharedPages,
        epochs: u64,
        meanwhile: &mut dyn FnMut(),
    ) -> u64 {
        let mut sender = EpochSender::new(&self.wire, id(number), coding, 3, 1 << 20).unwrap();
        sender.share_with(known.join(id(number)).unwrap());
        sender.attach_consumer(&mut self.ledgers, false).unwrap();
        let ports = Vec::new;
        let mut subject = CaptureSource {
            machine: &mut self.machine,
            dirty_logs: &mut self.ledgers,
            consumer: Consumer::Standby,
        };
        let pace = CheckpointPolicy { pages_left_max: 16, rounds_max: 3 };
        sender.seed(&mut subject, &pace, &ports, &mut |_| ControlFlow::Continue(())).unwrap();
        let first = self.wire.bytes_sent();
        for _ in 0..epochs {
            sender.epoch(&mut subject, &ports, &mut || {}).unwrap();
        }
        meanwhile();
        first
    }

    /// Whether the standby is what the machine was at its last cut.
    fn is_whole(&self) -> bool {
        self.copy.0.lock().unwrap().0 == self.machine.cut
    }
}

fn coding(which: u8) -> CodecOptions {
    let block = [BlockSize::B64, BlockSize::B128, BlockSize::B256, BlockSize::Page][which as usize % 4];
    if which >= 4 { CodecOptions::REMUS } else { CodecOptions::fine(block) }
}

/// Two machines, the second protected while the first one is: bytes of their first copies, pages that were
/// named of the first one, and whether both standbys are whole.
fn both(
    seeds: [u64; 2],
    writes_per_call: u64,
    coding: CodecOptions,
    epochs: u64,
    does: Neighbour,
) -> ([u64; 2], u64, bool) {
    let known = SharedPages::new(5);
    let mut one = Protected::new(seeds[0], writes_per_call, None);
    let beside = Beside { first: one.wire.receiver.clone(), does, asked: Cell::new(0) };
    let mut other = Protected::new(seeds[1], writes_per_call, Some(beside));
    let mut second = 0;
    let first = one.protect(1, coding, &known, epochs, &mut || {
        second = other.protect(2, coding, &known, epochs, &mut || {});
    });
    assert_eq!(known.places(), 0, "nothing is remembered of machines that are not protected");
    let asked = other.wire.beside.as_ref().unwrap().lock().unwrap().asked.get();
    ([first, second], asked, one.is_whole() && other.is_whole())
}

#[test]
fn of_two_machines_from_one_image_the_second_travels_as_names() {
    let ([whole, named], asked, are_whole) = both([9, 9], 0, coding(0), 2, Neighbour::Lends);
    assert!(
        are_whole && asked > 0 && named * 4 < whole,
        "{named} bytes against {whole}, {asked} pages named"
    );
    let ([_, nothing], asked, are_whole) = both([9, 9], 0, CodecOptions::REMUS, 2, Neighbour::Lends);
    assert!(are_whole && asked == 0 && nothing > whole, "what shares nothing names nothing");
}

#[test]
fn a_machine_that_was_taken_over_lends_nothing() {
    let known = SharedPages::new(5);
    let mut one = Protected::new(9, 0, None);
    one.protect(1, coding(0), &known, 2, &mut || {});
    let mut page = vec![0; PAGE_SIZE];
    assert!(one.wire.receiver.lock().unwrap().read_shared(0, 3, &mut page));
    assert!(!one.wire.receiver.lock().unwrap().read_shared(0, MEMORY, &mut page), "outside");
    assert!(!one.wire.receiver.lock().unwrap().read_shared(7, 0, &mut page), "no such array");
    one.wire.receiver.lock().unwrap().take_over().unwrap();
    assert!(!one.wire.receiver.lock().unwrap().read_shared(0, 3, &mut page));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn whatever_becomes_of_the_neighbour_the_standby_is_the_machine(
        seed: u64, which in 0..5u8, does in prop::sample::select(vec![Neighbour::Lends, Neighbour::Silent, Neighbour::Writes]),
        epochs in 0..6u64, same: bool,
    ) {
        let seeds = [seed, if same { seed } else { seed ^ 1 }];
        let (_, _, are_whole) = both(seeds, 4, coding(which), epochs, does);
        prop_assert!(are_whole);
    }
}
