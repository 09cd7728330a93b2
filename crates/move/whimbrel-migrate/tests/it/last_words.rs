//! Tests of late messages: those about a handover that no longer exists, or not yet.
//!
//! The fears: a machine that waits for ever because its commit or abort came before its offer; a source that
//! waits for ever because the target forgot that the machine arrived.

use bytes::Bytes;
use std::sync::{
    Arc, Mutex, OnceLock, Weak,
    atomic::{AtomicU32, Ordering},
};
use whimbrel_core::{ByteSize, Digest, MachineConfig, PageRun};
use whimbrel_migrate::{
    protocol::{self, Finish, FinishHeader, HandoverId, Offer},
    target::{HostError, IncomingMachine, IncomingMigrations, TargetHost},
};

const ID: HandoverId = HandoverId([7; 16]);

/// Host that counts the outcomes of incoming machines, and may act while one is reserved.
#[derive(Default)]
struct Counts {
    discarded: AtomicU32,
    run: AtomicU32,
    /// Device state that it received: the early state, and all of it.
    states: Mutex<Vec<Vec<u8>>>,
    arrivals: OnceLock<Weak<IncomingMigrations>>,
    meanwhile: Option<fn(&IncomingMigrations)>,
}

struct Room(Arc<Counts>);

impl TargetHost for Room {
    fn reserve(&self, _: &Offer) -> Result<Box<dyn IncomingMachine>, HostError> {
        let arrivals = self.0.arrivals.get().and_then(Weak::upgrade);
        if let (Some(arrivals), Some(meanwhile)) = (arrivals, self.0.meanwhile) {
            meanwhile(&arrivals);
        }
        Ok(Box::new(Counted(self.0.clone())))
    }
}

struct Counted(Arc<Counts>);

impl IncomingMachine for Counted {
    fn boot_files_missing(&self) -> Vec<Digest> {
        Vec::new()
    }
    fn store_boot_file(&mut self, _: Digest, _: Vec<u8>) -> Result<(), HostError> {
        Ok(())
    }
    fn write(&mut self, _: usize, _: PageRun, _: &[u8]) -> Result<(), HostError> {
        Ok(())
    }
    fn zero(&mut self, _: usize, _: PageRun) -> Result<(), HostError> {
        Ok(())
    }
    fn read(&self, _: usize, _: PageRun, _: &mut [u8]) -> Result<(), HostError> {
        Ok(())
    }
    fn expect_state(&mut self, ahead: &[u8]) -> Result<(), HostError> {
        self.0.states.lock().expect("nobody panics").push(ahead.to_vec());
        if ahead == b"nonsense" { Err("no state begins so".into()) } else { Ok(()) }
    }
    fn prepare(&mut self, _: &Finish, state: &[u8]) -> Result<(), HostError> {
        self.0.states.lock().expect("nobody panics").push(state.to_vec());
        if state == b"nonsense" { Err("no state is so".into()) } else { Ok(()) }
    }
    fn run(&mut self) -> Result<(), HostError> {
        self.0.run.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn discard(&mut self) {
        self.0.discarded.fetch_add(1, Ordering::Relaxed);
    }
}

fn target(meanwhile: Option<fn(&IncomingMigrations)>) -> (Arc<IncomingMigrations>, Arc<Counts>) {
    let counts = Arc::new(Counts { meanwhile, ..Counts::default() });
    let arrivals = Arc::new(IncomingMigrations::new(Arc::new(Room(counts.clone()))));
    counts.arrivals.set(Arc::downgrade(&arrivals)).expect("set once");
    (arrivals, counts)
}

fn offer(arrivals: &IncomingMigrations) -> bool {
    let config = MachineConfig::minimal(ByteSize(4096));
    let offer = Offer::of(ID, "web".parse().expect("a name"), config);
    let header = postcard::to_stdvec(&offer).expect("an offer");
    arrivals.handle(protocol::OFFER, &header, Bytes::new()).is_ok()
}

fn say(arrivals: &IncomingMigrations, kind: u16) -> bool {
    let header = match kind {
        protocol::FINISH => postcard::to_stdvec(&FinishHeader {
            finish: Finish { handover: ID, ports: vec![] },
            ahead: 0,
            rest: 0,
        }),
        _ => postcard::to_stdvec(&ID),
    };
    arrivals.handle(kind, &header.expect("a header"), Bytes::new()).is_ok()
}

#[test]
fn an_offer_that_comes_after_its_abort_is_refused() {
    let (arrivals, _) = target(None);
    assert!(say(&arrivals, protocol::ABORT));
    assert!(!offer(&arrivals));
    assert!(say(&arrivals, protocol::ABORT), "the same word again");
}

#[test]
fn an_offer_that_is_given_up_while_room_is_made_for_it_leaves_nothing() {
    let ends: [fn(&IncomingMigrations); 2] =
        [|arrivals| assert!(say(arrivals, protocol::ABORT)), |arrivals| arrivals.connection_lost(ID)];
    for meanwhile in ends {
        let (arrivals, counts) = target(Some(meanwhile));
        assert!(!offer(&arrivals));
        assert_eq!(counts.discarded.load(Ordering::Relaxed), 1);
        assert!(!say(&arrivals, protocol::FINISH), "pages of a machine that was given up are taken");
    }
}

#[test]
fn an_offer_is_not_taken_twice_whatever_became_of_the_first() {
    let (arrivals, counts) = target(None);
    assert!(offer(&arrivals) && !offer(&arrivals));
    arrivals.connection_lost(ID);
    assert!(!offer(&arrivals));
    assert_eq!(counts.discarded.load(Ordering::Relaxed), 1);
}

#[test]
fn a_machine_that_came_runs_once_and_every_later_word_is_answered() {
    let (arrivals, counts) = target(None);
    assert!(offer(&arrivals) && say(&arrivals, protocol::FINISH));
    arrivals.connection_lost(ID);
    assert!(say(&arrivals, protocol::COMMIT) && say(&arrivals, protocol::COMMIT));
    assert!(!say(&arrivals, protocol::ABORT), "it runs, and cannot be given up");
    assert!(!offer(&arrivals));
    assert_eq!((counts.run.load(Ordering::Relaxed), counts.discarded.load(Ordering::Relaxed)), (1, 0));
}

#[test]
fn a_later_daemon_answers_a_source_that_has_not_heard_that_its_machine_came() {
    let (arrivals, _) = target(None);
    assert!(!say(&arrivals, protocol::COMMIT), "nobody knows of it");
    arrivals.adopt_arrived(ID);
    assert!(say(&arrivals, protocol::COMMIT));
    assert!(!say(&arrivals, protocol::ABORT));
}

#[test]
fn an_arrival_hears_how_its_state_begins_before_the_rest_of_it_has_come() {
    let (arrivals, counts) = target(None);
    let packed = |bytes: &[u8]| Bytes::from(protocol::pack_state(bytes).expect("a state that packs"));
    let id = postcard::to_stdvec(&ID).expect("a header");
    assert!(offer(&arrivals));
    arrivals.handle(protocol::EARLY_STATE, &id, packed(b"head, as it was")).expect("it is kept");
    let seen = |counts: &Counts| counts.states.lock().expect("nobody panics").clone();
    assert_eq!(seen(&counts), [b"head, as it was"]);
    let finish = Finish { handover: ID, ports: vec![] };
    let word = postcard::to_stdvec(&FinishHeader { finish, ahead: 6, rest: 7 }).expect("a header");
    arrivals.handle(protocol::FINISH, &word, packed(b"devices")).expect("it is loaded");
    assert_eq!(seen(&counts), [&b"head, as it was"[..], b"head, devices"]);
}

#[test]
fn a_state_whose_beginning_does_not_load_fails_while_the_machine_still_runs_elsewhere() {
    let (arrivals, counts) = target(None);
    assert!(offer(&arrivals));
    let packed = protocol::pack_state(b"nonsense").expect("a state that packs");
    let id = postcard::to_stdvec(&ID).expect("a header");
    assert!(arrivals.handle(protocol::EARLY_STATE, &id, packed.into()).is_err());
    assert!(say(&arrivals, protocol::ABORT));
    assert_eq!((counts.run.load(Ordering::Relaxed), counts.discarded.load(Ordering::Relaxed)), (0, 1));
}

#[test]
fn a_source_hears_that_its_machine_cannot_be_loaded_before_that_is_cleared_up() {
    let (arrivals, counts) = target(None);
    assert!(offer(&arrivals));
    let finish = Finish { handover: ID, ports: vec![] };
    let word = postcard::to_stdvec(&FinishHeader { finish, ahead: 0, rest: 8 }).expect("a header");
    let packed = protocol::pack_state(b"nonsense").expect("a state that packs");
    assert!(arrivals.handle(protocol::FINISH, &word, packed.into()).is_err());
    assert_eq!(counts.discarded.load(Ordering::Relaxed), 0, "its machine stands still meanwhile");
    assert!(!say(&arrivals, protocol::COMMIT), "it was never ready");
    assert!(say(&arrivals, protocol::ABORT));
    assert_eq!((counts.run.load(Ordering::Relaxed), counts.discarded.load(Ordering::Relaxed)), (0, 1));
}
