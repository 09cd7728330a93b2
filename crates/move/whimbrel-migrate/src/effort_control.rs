//! Effort control: chooses how strongly pages are compressed, while they are sent.
//!
//! Encoder threads encode, wait for the link, or are idle. While they hardly wait, they limit the migration
//! and use less effort; while there is time for the next higher effort they use it, because it saves bytes on
//! the link. So a slow link gets small pages and a fast one quick ones, whatever else the processors do.
//!
//! The first megabytes go as fast as they are encoded, on any link, because they fill the buffers. They tell
//! nothing: until the link was waited for, or more was sent than can be in flight, the effort does not go
//! below its first value.
//!
//! Pure: durations in, an effort out.

use crate::page_batch::Effort;
use std::time::Duration;

/// Effort, with its time and its bytes per page relative to zstd level 1.
struct Step {
    effort: Effort,
    cost: f64,
    size: f64,
}

const fn step(effort: Effort, cost: f64, size: f64) -> Step {
    Step { effort, cost, size }
}

/// Measured on the memory of a small Linux guest, 96 MB without zeros, a MiB at a time: 46.0 MB at level 1
/// (929 MB/s on one processor), 44.5 at 3, 43.8 at 6, 43.7 at 9; 55.2 at level -5. 17 MB of it are noise.
/// Levels above 9 gain nothing for twice the time.
const STEPS: [Step; 6] = [
    step(Effort::None, 0.1, 2.2),
    step(Effort::Zstd(-5), 0.68, 1.2),
    step(Effort::Zstd(1), 1.0, 1.0),
    step(Effort::Zstd(3), 1.75, 0.97),
    step(Effort::Zstd(6), 5.3, 0.955),
    step(Effort::Zstd(9), 9.0, 0.95),
];
/// Level 3, with which one processor fills a Gbit/s.
const INITIAL_STEP: usize = 3;
/// Level 1: the most during the downtime. Below it bytes grow fast.
const DOWNTIME_STEP: usize = 2;
/// Encoders that are busy for more than this part of the time limit the migration.
const BUSY: f64 = 0.9;
/// Part of the time that they may be busy after a step up, at its expected cost.
const BUSY_NEXT: f64 = 0.7;
/// A link that is waited for during this part of the time is measured by the bytes sent over it.
const LINK_WAITED: f64 = 0.3;
/// Least gain in speed of a step that leaves encoders busy.
const GAIN: f64 = 1.1;
/// Least gain of a step below level 1: others use the link too.
const GAIN_BELOW: f64 = 1.3;
/// Bytes sent for each byte of memory above which no step over the first saves anything: the memory hardly
/// shrinks.
const SHRINKS_AT_MOST: f64 = 0.97;
/// More bytes than can be in flight: twice what the pipeline sends unanswered, for what the sockets buffer. A
/// link that accepted them without a wait is faster than the encoders.
const IN_FLIGHT_MAX: u64 = 32 << 20;

/// Time that encoders spent, and bytes that they handled.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct EncoderTime {
    pub(crate) encoding: Duration,
    /// Time spent waiting for the link to accept data.
    pub(crate) link: Duration,
    /// Time spent waiting for pages.
    pub(crate) idle: Duration,
    /// Bytes before encoding.
    pub(crate) raw: u64,
    /// Bytes after encoding.
    pub(crate) wire: u64,
}

/// Current effort, and the measurements for the next one.
#[derive(Debug)]
pub(crate) struct EffortControl {
    step: usize,
    spent: EncoderTime,
    sent: u64,
    /// Rate in bytes a second and encoder that the link accepted when it was waited for.
    link: Option<f64>,
}

/// Time of all encoders together between two decisions.
const WINDOW: Duration = Duration::from_millis(30);

impl EffortControl {
    pub(crate) fn new() -> Self {
        Self { step: INITIAL_STEP, spent: EncoderTime::default(), sent: 0, link: None }
    }

    /// Effort while the machine runs.
    pub(crate) fn effort(&self) -> Effort {
        STEPS[self.step].effort
    }

    /// Effort during the downtime, at most level 1, because encoding prolongs it.
    pub(crate) fn urgent_effort(&self) -> Effort {
        STEPS[self.step.min(DOWNTIME_STEP)].effort
    }

    /// Rate in bytes a second that the link accepts from one encoder, once it was waited for.
    pub(crate) fn link(&self) -> Option<f64> {
        self.link
    }

    /// Records time spent at the current effort.
    pub(crate) fn record(&mut self, more: EncoderTime) {
        self.sent += more.wire;
        let sum = &mut self.spent;
        sum.encoding += more.encoding;
        sum.link += more.link;
        sum.idle += more.idle;
        sum.raw += more.raw;
        sum.wire += more.wire;
        let total = sum.encoding + sum.link + sum.idle;
        if total >= WINDOW {
            let window = std::mem::take(sum);
            self.measure(&window, total.as_secs_f64());
        }
    }

    fn measure(&mut self, window: &EncoderTime, seconds: f64) {
        if window.link.as_secs_f64() > seconds * LINK_WAITED {
            self.link = Some(window.wire as f64 / seconds);
        }
        let now = &STEPS[self.step];
        let busy = window.encoding.as_secs_f64() / seconds;
        let rate = window.raw as f64 / seconds;
        let ratio = window.wire as f64 / window.raw.max(1) as f64;
        // Estimates the rate of another step: the least of what is encoded and what the link accepts.
        let gains = |step: &Step, least: f64| {
            let encoded = rate / busy.max(1e-3) * now.cost / step.cost;
            let ratio = (ratio * step.size / now.size).clamp(1e-3, 1.0);
            encoded.min(self.link.map_or(f64::INFINITY, |link| link / ratio)) > rate * least
        };
        let (less, more) = (self.step.checked_sub(1), STEPS.get(self.step + 1));
        let least = if self.step > DOWNTIME_STEP { GAIN } else { GAIN_BELOW };
        let knows = self.link.is_some() || self.sent > IN_FLIGHT_MAX || self.step > INITIAL_STEP;
        if busy > BUSY && knows && less.is_some_and(|less| gains(&STEPS[less], least)) {
            self.step -= 1;
        } else if (self.step < INITIAL_STEP || ratio < SHRINKS_AT_MOST)
            && more.is_some_and(|more| {
                busy * more.cost / now.cost <= BUSY_NEXT || self.link.is_some() && gains(more, GAIN)
            })
        {
            self.step += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Time of one of `threads` encoders, at `level1` bytes a second and thread, on a link of `link` bytes a
    /// second.
    fn window(at: &Step, link: f64, level1: f64, threads: f64) -> EncoderTime {
        let ratio = (0.45 * at.size).min(1.0);
        let encode = threads * level1 / at.cost;
        let through = encode.min(link / ratio);
        let encoding = WINDOW.mul_f64(through / encode);
        let raw = through * WINDOW.as_secs_f64() / threads;
        let (raw, wire) = (raw as u64, (raw * ratio) as u64);
        EncoderTime { encoding, link: WINDOW.saturating_sub(encoding), idle: Duration::ZERO, raw, wire }
    }

    /// Efforts of the last windows of many.
    fn candidates(link: f64, level1: f64, threads: f64) -> Vec<Effort> {
        let mut choice = EffortControl::new();
        let efforts = (0..200).map(|_| {
            choice.record(window(&STEPS[choice.step], link, level1, threads));
            choice.effort()
        });
        let mut last = efforts.skip(150).collect::<Vec<_>>();
        last.dedup();
        last
    }

    #[test]
    fn slow_links_get_small_pages_and_fast_ones_quick_pages_and_it_stays_so() {
        let (mb, gbit) = (1e6, 125e6);
        assert_eq!(candidates(0.1 * gbit, 400.0 * mb, 2.0), [Effort::Zstd(9)]);
        assert_eq!(candidates(gbit, 400.0 * mb, 2.0), [Effort::Zstd(3)]);
        assert_eq!(candidates(3.0 * gbit, 400.0 * mb, 2.0), [Effort::Zstd(1)]);
        assert_eq!(candidates(100.0 * gbit, 400.0 * mb, 2.0), [Effort::None]);
        assert_eq!(candidates(10.0 * gbit, 400.0 * mb, 16.0), [Effort::Zstd(3)]);
    }

    #[test]
    fn what_fits_into_buffers_says_nothing_of_the_link() {
        let mut choice = EffortControl::new();
        // Two otherwise idle processors fill 16 MB as fast as they encode; then a Gbit/s is waited for.
        let burst = |choice: &mut EffortControl| {
            let window = window(&STEPS[choice.step], f64::INFINITY, 500e6, 2.0);
            choice.record(window);
            window.wire
        };
        let mut sent = 0;
        while sent < 16_000_000 {
            sent += burst(&mut choice);
            assert_eq!(choice.effort(), STEPS[INITIAL_STEP].effort);
        }
        for _ in 0..20 {
            choice.record(window(&STEPS[choice.step], 125e6, 500e6, 2.0));
            assert!(choice.step >= INITIAL_STEP, "{:?}", choice.effort());
        }
        // A link that is never waited for is as fast as it looks.
        let mut choice = EffortControl::new();
        for _ in 0..200 {
            burst(&mut choice);
        }
        assert_eq!(choice.effort(), Effort::None);
    }

    #[test]
    fn nobody_waits_for_a_high_level_while_the_machine_stands_still() {
        let mut choice = EffortControl::new();
        let waits = EncoderTime { link: WINDOW, raw: 1 << 20, wire: 1 << 19, ..EncoderTime::default() };
        (0..20).for_each(|_| choice.record(waits));
        assert_eq!((choice.effort(), choice.urgent_effort()), (Effort::Zstd(9), Effort::Zstd(1)));
    }

    #[test]
    fn encoders_that_others_keep_from_working_do_not_send_more_than_the_link_takes() {
        let (mb, gbit) = (1e6, 125e6);
        let mut choice = EffortControl::new();
        (0..50).for_each(|_| choice.record(window(&STEPS[choice.step], gbit, 400.0 * mb, 2.0)));
        // A third of the processors is left: level 1 fills nine tenths of the link, level -5 all of it.
        let slow =
            |choice: &mut EffortControl| choice.record(window(&STEPS[choice.step], gbit, 130.0 * mb, 2.0));
        for _ in 0..100 {
            slow(&mut choice);
            assert_ne!(choice.effort(), Effort::None);
        }
    }

    #[test]
    fn memory_that_does_not_shrink_gets_no_more_effort() {
        let mut choice = EffortControl::new();
        let sent = EncoderTime { link: WINDOW, raw: 1 << 20, wire: 1 << 20, ..EncoderTime::default() };
        (0..20).for_each(|_| choice.record(sent));
        assert_eq!(choice.step, INITIAL_STEP);
    }

    proptest! {
        #[test]
        fn whatever_is_measured_there_is_an_effort(windows in prop::collection::vec(
            (0..100u64, 0..100u64, 0..100u64, 0..1u64 << 24, 0..1u64 << 24), 0..100,
        )) {
            let mut choice = EffortControl::new();
            for (encoding, link, idle, raw, wire) in windows {
                let ms = Duration::from_millis;
                choice.record(EncoderTime { encoding: ms(encoding), link: ms(link), idle: ms(idle), raw, wire });
                prop_assert!(STEPS.iter().any(|step| step.effort == choice.effort()));
            }
        }
    }
}
