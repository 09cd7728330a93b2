//! Tests of late messages: those about a handover that no longer exists, or not yet.
//!
//! The fears: a machine that waits for ever because its commit or abort came before its offer; a source that
//! waits for ever because the target forgot that the machine arrived.

use bytes::Bytes;
use std::sync::{
    Arc, Mutex, OnceLock, Weak,
    atomic::{AtomicBool, AtomicU32, Ordering},
};
use whimbrel_core::{ByteSize, Digest, HostName, MachineConfig, PageRun};
use whimbrel_migrate::{
    handover::{PausedIncoming, TargetRecord},
    protocol::{self, CommitReply, Finish, FinishHeader, HandoverId, Offer, RunningSince},
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
    /// Whether its process has ended, and whether a start and a record fail.
    ended: AtomicBool,
    start_fails: AtomicBool,
    record_fails: AtomicBool,
    returned: AtomicU32,
    arrivals: OnceLock<Weak<IncomingMigrations>>,
    meanwhile: Option<fn(&IncomingMigrations)>,
}

struct Room(Arc<Counts>);

fn source() -> HostName {
    "alpha".parse().expect("a name")
}

impl TargetHost for Room {
    fn reserve(&self, _: &Offer, _: &HostName) -> Result<Box<dyn IncomingMachine>, HostError> {
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
        if self.0.start_fails.load(Ordering::Relaxed) {
            return Err("it answers nothing".into());
        }
        self.0.run.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn has_ended(&self) -> bool {
        self.0.ended.load(Ordering::Relaxed)
    }
    fn record_never_ran(&mut self) -> Result<(), HostError> {
        if self.0.record_fails.load(Ordering::Relaxed) {
            return Err("the disk is full".into());
        }
        self.0.returned.fetch_add(1, Ordering::Relaxed);
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
    arrivals.handle(&source(), protocol::OFFER, &header, Bytes::new()).is_ok()
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
    arrivals.handle(&source(), kind, &header.expect("a header"), Bytes::new()).is_ok()
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
    arrivals.handle(&source(), protocol::EARLY_STATE, &id, packed(b"head, as it was")).expect("it is kept");
    let seen = |counts: &Counts| counts.states.lock().expect("nobody panics").clone();
    assert_eq!(seen(&counts), [b"head, as it was"]);
    let finish = Finish { handover: ID, ports: vec![] };
    let word = postcard::to_stdvec(&FinishHeader { finish, ahead: 6, rest: 7 }).expect("a header");
    arrivals.handle(&source(), protocol::FINISH, &word, packed(b"devices")).expect("it is loaded");
    assert_eq!(seen(&counts), [&b"head, as it was"[..], b"head, devices"]);
}

#[test]
fn a_state_whose_beginning_does_not_load_fails_while_the_machine_still_runs_elsewhere() {
    let (arrivals, counts) = target(None);
    assert!(offer(&arrivals));
    let packed = protocol::pack_state(b"nonsense").expect("a state that packs");
    let id = postcard::to_stdvec(&ID).expect("a header");
    assert!(arrivals.handle(&source(), protocol::EARLY_STATE, &id, packed.into()).is_err());
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
    assert!(arrivals.handle(&source(), protocol::FINISH, &word, packed.into()).is_err());
    assert_eq!(counts.discarded.load(Ordering::Relaxed), 0, "its machine stands still meanwhile");
    assert!(!say(&arrivals, protocol::COMMIT), "it was never ready");
    assert!(say(&arrivals, protocol::ABORT));
    assert_eq!((counts.run.load(Ordering::Relaxed), counts.discarded.load(Ordering::Relaxed)), (0, 1));
}

/// Outcome of a commit of a source that would take the machine back; none if it is refused.
fn commit_or_return(arrivals: &IncomingMigrations) -> Option<CommitReply> {
    let header = postcard::to_stdvec(&ID).expect("a header");
    let reply = arrivals.handle(&source(), protocol::COMMIT_OR_RETURN, &header, Bytes::new()).ok()?;
    Some(postcard::from_bytes(&reply).expect("a reply"))
}

const RUNS: Option<CommitReply> = Some(CommitReply::Running(RunningSince { since: 0 }));
const NEVER_RAN: Option<CommitReply> = Some(CommitReply::NeverRan);

#[test]
fn a_machine_whose_process_ended_before_the_commit_goes_back_and_never_runs_here() {
    let (arrivals, counts) = target(None);
    assert!(offer(&arrivals) && say(&arrivals, protocol::FINISH));
    counts.ended.store(true, Ordering::Relaxed);
    counts.record_fails.store(true, Ordering::Relaxed);
    assert_eq!(commit_or_return(&arrivals), None, "what is not recorded is not said");
    counts.record_fails.store(false, Ordering::Relaxed);
    assert_eq!(commit_or_return(&arrivals), NEVER_RAN);
    assert_eq!(commit_or_return(&arrivals), NEVER_RAN, "the same answer again");
    assert!(!say(&arrivals, protocol::COMMIT), "the source may run it already");
    assert_eq!(counts.discarded.load(Ordering::Relaxed), 0, "its pages stay until the source has it");
    assert!(say(&arrivals, protocol::ABORT) && say(&arrivals, protocol::ABORT));
    assert_eq!(commit_or_return(&arrivals), None, "it is forgotten");
    let counted =
        [&counts.run, &counts.returned, &counts.discarded].map(|count| count.load(Ordering::Relaxed));
    assert_eq!(counted, [0, 1, 1]);
}

#[test]
fn a_machine_that_may_have_run_is_not_returned() {
    let (arrivals, counts) = target(None);
    assert!(offer(&arrivals) && say(&arrivals, protocol::FINISH));
    counts.start_fails.store(true, Ordering::Relaxed);
    assert_eq!(commit_or_return(&arrivals), None, "its start failed, perhaps after its CPUs had run");
    counts.start_fails.store(false, Ordering::Relaxed);
    counts.ended.store(true, Ordering::Relaxed);
    assert_eq!(commit_or_return(&arrivals), RUNS, "it stays, as crashed");

    let (arrivals, counts) = target(None);
    let machine = Box::new(Counted(counts.clone()));
    counts.ended.store(true, Ordering::Relaxed);
    arrivals.recover(ID, (TargetRecord::Arriving, PausedIncoming::Complete), machine).expect("it waits here");
    assert_eq!(commit_or_return(&arrivals), RUNS, "an earlier daemon may have run it");
    assert_eq!(counts.returned.load(Ordering::Relaxed), 0);
}

#[test]
fn a_later_daemon_still_returns_a_machine_and_a_person_may_keep_it() {
    for keeps in [false, true] {
        let (arrivals, counts) = target(None);
        let machine = Box::new(Counted(counts.clone()));
        counts.ended.store(true, Ordering::Relaxed);
        arrivals.recover(ID, (TargetRecord::NeverRan, PausedIncoming::Gone), machine).expect("it waits here");
        assert_eq!(commit_or_return(&arrivals), NEVER_RAN);
        match keeps {
            true => {
                arrivals.decide_here(ID).expect("a person decides");
                assert_eq!(commit_or_return(&arrivals), RUNS);
                assert!(!say(&arrivals, protocol::ABORT), "it is this host's");
            }
            false => assert!(say(&arrivals, protocol::ABORT)),
        }
        assert_eq!(counts.run.load(Ordering::Relaxed), u32::from(keeps));
    }
}

#[test]
fn an_older_source_keeps_what_was_agreed_with_it() {
    let (arrivals, counts) = target(None);
    assert!(offer(&arrivals) && say(&arrivals, protocol::FINISH));
    counts.ended.store(true, Ordering::Relaxed);
    assert!(say(&arrivals, protocol::COMMIT), "the machine stays here, as crashed");
    assert_eq!((counts.run.load(Ordering::Relaxed), counts.returned.load(Ordering::Relaxed)), (1, 0));
}
