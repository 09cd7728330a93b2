//! Tests of the throttle: a machine that writes faster than it can be copied is slowed down, and its rounds
//! are then judged without those before.

use crate::{
    AfterCapture, CaptureError, CaptureSource, Consumer, DirtyLog, RoundDecision, RoundStats, Scan,
    StopPolicy, StopReason, capture,
    engine_tests::{Copy, Fake, world},
};
use std::{ops::ControlFlow, time::Duration};
use whimbrel_machine::{Machine, MachineError};

const PAGES: usize = 400;

/// Hopeless after two rounds of the history unless little is left. So many pages may be left for the pause.
struct Impatient(u64);

impl StopPolicy for Impatient {
    fn decide(&self, history: &[RoundStats], left: u64) -> RoundDecision {
        match history.len() {
            _ if left < 20 => RoundDecision::Stop { rate: None, stop_reason: StopReason::LittleLeft },
            2.. => RoundDecision::Stop { rate: Some(7), stop_reason: StopReason::Plateau },
            _ => RoundDecision::Round { rate: None },
        }
    }
    fn downtime(&self, history: &[RoundStats], left: u64) -> Option<Duration> {
        history.last().map(|_| Duration::from_millis(left))
    }
    fn scan(&self) -> Scan {
        Scan::Ascending
    }
    fn pause_pages_max(&self) -> u64 {
        self.0
    }
}

/// Machine that writes all the time, less each time it is asked, as often as it agrees.
struct Stubborn {
    fake: Fake,
    agrees: usize,
    asked: Vec<Duration>,
    pauses: usize,
}

impl Machine for Stubborn {
    fn slow_down(&mut self, predicted: Duration) -> bool {
        self.asked.push(predicted);
        let mut world = self.fake.0.lock().unwrap();
        world.always = 0..world.always.end / 4;
        self.asked.len() <= self.agrees
    }
    fn pause(&mut self) -> Result<(), MachineError> {
        self.pauses += 1;
        self.fake.pause()
    }
    fn unpause(&mut self) -> Result<(), MachineError> {
        self.fake.unpause()
    }
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.fake.device_state()
    }
}

fn moved(agrees: usize) -> (Vec<RoundStats>, StopReason, Vec<Duration>) {
    let fake = world(1, PAGES, 0);
    fake.0.lock().unwrap().always = 0..200;
    let mut ledger = DirtyLog::new(Box::new(fake.clone()));
    ledger.attach_all(Consumer::Migration).unwrap();
    let mut copy = Copy { versions: vec![0; PAGES], batches: 0, fail_after: u64::MAX };
    let mut machine = Stubborn { fake, agrees, asked: vec![], pauses: 0 };
    let mut subject = CaptureSource {
        machine: &mut machine,
        dirty_logs: std::slice::from_mut(&mut ledger),
        consumer: Consumer::Migration,
    };
    let observe = &mut |_| ControlFlow::Continue(());
    let captured =
        capture(&mut subject, &mut copy, &Impatient(u64::MAX), AfterCapture::StayPaused, observe).unwrap();
    assert_eq!(copy.versions, captured.device_state);
    (captured.rounds, captured.stop_reason, machine.asked)
}

#[test]
fn rounds_go_on_as_long_as_a_machine_slows_down() {
    let (rounds, why, asked) = moved(5);
    // 200 pages, asked, 50, asked, 12.
    assert_eq!(why, StopReason::LittleLeft);
    assert_eq!(asked, [Duration::from_millis(200), Duration::from_millis(50)]);
    assert_eq!(rounds.last().unwrap().pages, 12);
}

#[test]
fn a_machine_that_does_not_slow_down_is_paused_as_before() {
    let (rounds, why, asked) = moved(0);
    assert_eq!((why, asked.len()), (StopReason::Plateau, 1));
    assert_eq!(rounds.len(), 3, "two rounds, and the last one");
    assert_eq!(moved(1).2.len(), 2, "it is asked again, and not for ever");
}

#[test]
fn a_machine_that_would_stand_still_for_too_long_is_not_paused_and_all_of_it_is_dirty_again() {
    let fake = world(1, PAGES, 0);
    fake.0.lock().unwrap().always = 0..200;
    let mut ledger = DirtyLog::new(Box::new(fake.clone()));
    ledger.attach_all(Consumer::Standby).unwrap();
    let mut copy = Copy { versions: vec![0; PAGES], batches: 0, fail_after: u64::MAX };
    let mut machine = Stubborn { fake, agrees: 1, asked: vec![], pauses: 0 };
    let mut subject = CaptureSource {
        machine: &mut machine,
        dirty_logs: std::slice::from_mut(&mut ledger),
        consumer: Consumer::Standby,
    };
    let observe = &mut |_| ControlFlow::Continue(());
    let error = capture(&mut subject, &mut copy, &Impatient(30), AfterCapture::Unpause, observe).unwrap_err();
    assert!(matches!(error, CaptureError::TooMuchLeft { pages: 50 }), "{error}");
    assert_eq!(machine.asked.len(), 2, "it was slowed down first, and asked once more");
    assert_eq!(machine.pauses, 0);
    assert_eq!(ledger.collect(Consumer::Standby).unwrap().count(), PAGES as u64);
}
