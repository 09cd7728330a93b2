//! Tests of rewritten pages: a page that is written again before it is read waits, and none is lost.

use crate::{
    AfterCapture, CaptureError, CaptureSource, CheckpointPolicy, Consumer, DirtyLog, PageBatch, Phase,
    RoundDecision, RoundStats, Scan, Sink, SinkError, StopPolicy, capture,
    engine_tests::{Copy, Fake, world},
};
use proptest::prelude::*;
use std::{ops::ControlFlow, time::Duration};
use whimbrel_core::PageSet;

/// Rounds as for a checkpoint, with a scan before every cluster.
struct Looking(CheckpointPolicy);

impl StopPolicy for Looking {
    fn decide(&self, history: &[RoundStats], left: u64) -> RoundDecision {
        self.0.decide(history, left)
    }
    fn downtime(&self, _: &[RoundStats], left: u64) -> Option<Duration> {
        Some(Duration::from_micros(left))
    }
    fn scan(&self) -> Scan {
        Scan::DeferHot { scan_interval: Duration::ZERO }
    }
}

/// Sink that keeps the copy and records the order of the pages.
struct Noting {
    copy: Copy,
    wants_first: bool,
    order: Vec<u64>,
    rates: Vec<Option<u64>>,
}

impl Sink for Noting {
    fn write(&mut self, batch: PageBatch<'_>) -> Result<(), SinkError> {
        let run = batch.run;
        self.copy.write(batch)?;
        self.order.extend(run.pages());
        Ok(())
    }
    fn wants_first_versions(&self) -> bool {
        self.wants_first
    }
    fn limit_rate(&mut self, rate: Option<u64>) {
        self.rates.push(rate);
    }
    fn bytes_out(&self) -> u64 {
        self.copy.bytes_out()
    }
}

fn noting(pages: usize, wants_first: bool) -> Noting {
    let copy = Copy { versions: vec![0; pages], batches: 0, fail_after: u64::MAX };
    Noting { copy, wants_first, order: vec![], rates: vec![] }
}

fn run(
    fake: &Fake,
    ledger: &mut DirtyLog,
    sink: &mut Noting,
    finish: AfterCapture,
    ended: &mut Vec<RoundStats>,
) -> Result<crate::Captured, CaptureError> {
    let mut machine = fake.clone();
    let ledgers = std::slice::from_mut(ledger);
    let mut subject =
        CaptureSource { machine: &mut machine, dirty_logs: ledgers, consumer: Consumer::Migration };
    let policy = Looking(CheckpointPolicy { pages_left_max: 4, rounds_max: 6 });
    capture(&mut subject, sink, &policy, finish, &mut |progress| {
        assert!(progress.done <= progress.total);
        ended.extend(progress.ended.filter(|_| matches!(progress.phase, Phase::Round(_))));
        ControlFlow::Continue(())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// The fear: a page that waited is lost, for this consumer, for another one, or by a failure in
    /// between.
    #[test]
    fn pages_that_wait_are_never_lost(
        seed: u64, pages in 1..2000usize, writes in 0..3u64, wants_first: bool, stays: bool,
        fails in prop::collection::vec(0..12u64, 0..4),
    ) {
        let fake = world(seed, pages, writes);
        let mut ledger = DirtyLog::new(Box::new(fake.clone()));
        ledger.attach_from(Consumer::Store, PageSet::empty(pages as u64)).unwrap();
        ledger.attach_all(Consumer::Migration).unwrap();
        let before = fake.0.lock().unwrap().versions.clone();
        let mut sink = noting(pages, wants_first);
        for fail_after in fails.into_iter().chain([u64::MAX]) {
            sink.copy.fail_after = sink.copy.batches.saturating_add(fail_after);
            let finish = if stays { AfterCapture::StayPaused } else { AfterCapture::Unpause };
            match run(&fake, &mut ledger, &mut sink, finish, &mut vec![]) {
                Ok(captured) => prop_assert_eq!(&sink.copy.versions, &captured.device_state),
                Err(error) => prop_assert!(matches!(error, CaptureError::Sink(_)), "{error}"),
            }
            fake.0.lock().unwrap().running = true;
        }
        let for_the_store = ledger.collect(Consumer::Store).unwrap();
        let now = fake.0.lock().unwrap().versions.clone();
        for (page, (then, now)) in before.iter().zip(&now).enumerate() {
            prop_assert!(then == now || for_the_store.contains(page as u64), "page {page} is lost to the store");
        }
    }

    #[test]
    fn rounds_account_for_every_page(seed: u64, pages in 1..2000usize, writes in 0..3u64, wants_first: bool) {
        let fake = world(seed, pages, writes);
        let mut ledger = DirtyLog::new(Box::new(fake.clone()));
        ledger.attach_all(Consumer::Migration).unwrap();
        let (mut sink, mut ended) = (noting(pages, wants_first), vec![]);
        let captured = run(&fake, &mut ledger, &mut sink, AfterCapture::StayPaused, &mut ended).unwrap();
        let (last, rounds) = captured.rounds.split_last().unwrap();
        prop_assert_eq!(rounds, &ended[..], "every round is told when it ends");
        prop_assert_eq!(sink.order.len() as u64, captured.rounds.iter().map(|round| round.pages).sum::<u64>());
        prop_assert_eq!(sink.rates.len(), captured.rounds.len(), "every round has its limit");
        let mut to_do = pages as u64;
        for round in rounds {
            prop_assert_eq!(round.pages + round.skipped, to_do);
            prop_assert!(round.left >= round.skipped && round.downtime == Some(Duration::from_micros(round.left)));
            to_do = round.left;
        }
        prop_assert_eq!(last.skipped, 0, "nothing waits in the last round");
    }
}

#[test]
fn a_page_that_is_written_all_the_time_waits_for_the_pause() {
    // Twenty pages of 2000 are written at every step, so every scan finds all of them.
    let fake = world(3, 2000, 0);
    fake.0.lock().unwrap().always = 100..120;
    let mut sent = vec![];
    for wants_first in [false, true] {
        fake.0.lock().unwrap().running = true;
        let mut ledger = DirtyLog::new(Box::new(fake.clone()));
        ledger.attach_all(Consumer::Migration).unwrap();
        let (mut sink, mut ended) = (noting(2000, wants_first), vec![]);
        let captured = run(&fake, &mut ledger, &mut sink, AfterCapture::StayPaused, &mut ended).unwrap();
        assert_eq!(sink.copy.versions, captured.device_state);
        sent.push(sink.order.iter().filter(|page| **page == 110).count());
        assert!(sink.order.windows(2).any(|pair| pair[0] > pair[1]), "clusters come in pseudo-random order");
    }
    assert_eq!(sent, [1, 2], "once, in the pause; with a first version for whom that helps");
}
