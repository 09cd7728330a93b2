//! Swaps of the machine process under a guest that writes and verifies its memory and its disk.

use crate::lab::{Lab, Outcome};
use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};
use whimbrel_testkit::guest::{TestAgent, assert_same_life};

/// Swaps in the gate; `WHIMBREL_SWAPS` says otherwise.
const SWAPS: usize = 6;

/// Guest that writes memory and disk until it is stopped.
struct Writing {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<TestAgent>,
}

impl Writing {
    fn start(mut agent: TestAgent) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let before = agent.check().unwrap();
            agent.dirty(8, 4000, 64).unwrap();
            while !stopped.load(Ordering::Relaxed) {
                agent.write(20).unwrap();
                assert_same_life(&before, &agent.state().unwrap());
            }
            agent.calm().unwrap();
            agent
        });
        Self { stop, thread }
    }

    /// Stops writing, and verifies all that the guest ever wrote.
    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        let mut agent = self.thread.join().unwrap();
        let before = agent.state().unwrap();
        assert_same_life(&before, &agent.check().unwrap());
    }
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() * percent / 100).min(sorted.len() - 1)]
}

#[test]
fn a_guest_that_writes_passes_from_process_to_process_and_no_dirty_page_is_lost() {
    let swaps = env::var("WHIMBREL_SWAPS").map_or(SWAPS, |number| number.parse().unwrap());
    let (mut lab, agent) = Lab::boot();
    lab.copy();
    let writing = Writing::start(agent);
    let mut stops = Vec::new();
    for swap in 0..swaps {
        let outcome = lab.swap("", "");
        assert!(outcome.passed && outcome.complete, "{outcome:?}");
        stops.push(outcome.stopped);
        if swap % 16 == 3 {
            lab.copy();
        }
    }
    lab.verify("after the swaps");
    writing.end();
    lab.verify("at the end");
    stops.sort_unstable();
    eprintln!(
        "{swaps} swaps: the guest stood still for {:?} (median), {:?} (p99), {:?} (longest)",
        percentile(&stops, 50),
        percentile(&stops, 99),
        stops.last().unwrap()
    );
}

#[test]
fn a_new_process_that_is_late_is_not_killed_and_never_takes_the_machine_afterwards() {
    let (mut lab, agent) = Lab::boot();
    lab.copy();
    let writing = Writing::start(agent);
    let late = lab.offer_to_a_late_one("Ready");
    assert!(!late.passed && late.complete, "{late:?}");
    lab.verify("after the late one has ended");
    let whole = lab.swap("", "");
    assert!(whole.passed && whole.complete, "{whole:?}");
    writing.end();
    lab.verify("at the end");
}

#[test]
fn a_process_that_waits_has_the_machine_when_the_other_is_killed_long_after_its_offer() {
    let (mut lab, agent) = Lab::boot();
    lab.copy();
    let writing = Writing::start(agent);
    for _ in 0..3 {
        let waiting = lab.offer();
        // Much is written, and made durable, after the offer.
        lab.verify("while another process waits");
        let outcome = lab.die(waiting);
        assert!(outcome.passed && !outcome.complete, "{outcome:?}");
        lab.verify("after the death of the old process");
    }
    let whole = lab.swap("", "");
    assert!(whole.passed && whole.complete, "{whole:?}");
    writing.end();
    lab.verify("at the end");
}

#[test]
fn whichever_process_dies_at_whichever_step_the_other_has_the_machine_with_all_that_was_written() {
    // Who dies where, who has the machine then, and whether it knows the dirty pages.
    let cases = [
        ("Offered", "", true, false),
        ("Stopped", "", true, false),
        ("StateSent", "", true, true),
        ("Gave", "", true, true),
        ("", "Received", false, true),
        ("", "Ready", false, true),
        ("", "Prepared", false, false),
        ("", "Serving", false, false),
        ("", "Continued", false, false),
    ];
    let (mut lab, agent) = Lab::boot();
    lab.copy();
    let writing = Writing::start(agent);
    for (old, new, passed, complete) in cases {
        let Outcome { passed: has, complete: knows, .. } = lab.swap(old, new);
        assert_eq!((has, knows), (passed, complete), "old dies at {old:?}, new at {new:?}");
        lab.verify(&format!("old died at {old:?}, new at {new:?}"));
    }
    let whole = lab.swap("", "");
    assert!(whole.passed && whole.complete, "{whole:?}");
    writing.end();
    lab.verify("at the end");
}
