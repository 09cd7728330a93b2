//! Story: what a reader of a failed seed needs, and the digest by which two runs of a seed are compared.

use super::schedule::{BEGINNING, ThreadId};
use crate::raw;
use std::collections::VecDeque;

/// Calls that are remembered for the report.
const CALLS: usize = 40;
/// Lines of the story; a scene that tells more is told briefly.
const LINES: usize = 400;

#[derive(Debug)]
pub(crate) struct Story {
    pub(crate) digest: u64,
    pub(crate) steps: u64,
    pub(crate) lines: Vec<String>,
    calls: VecDeque<(u64, ThreadId, &'static str, u64)>,
    trace: bool,
}

impl Story {
    pub(crate) fn new(seed: u64, trace: bool) -> Self {
        Self { digest: seed, steps: 0, lines: Vec::new(), calls: VecDeque::new(), trace }
    }

    /// Records a call of the program.
    pub(crate) fn call(&mut self, now: u64, thread: ThreadId, call: &'static str, detail: u64) {
        self.steps += 1;
        for part in [now, thread.into(), call.len() as u64 ^ u64::from(call.as_bytes()[0]) << 8, detail] {
            self.digest = (self.digest ^ part).wrapping_mul(0x100_0000_01b3).rotate_left(17);
        }
        if self.calls.len() == CALLS {
            self.calls.pop_front();
        }
        if self.trace {
            raw::write_all(2, format!("{}\n", call_line(now, thread, call, detail)).as_bytes());
        }
        self.calls.push_back((now, thread, call, detail));
    }

    /// Says in a trace which path the next call is about.
    pub(crate) fn path(&self, path: &str) {
        if self.trace {
            raw::write_all(2, format!("{:>28}{path}\n", "").as_bytes());
        }
    }

    /// Records something that a reader should know.
    pub(crate) fn log(&mut self, now: u64, who: &str, text: &str) {
        let line = format!("{} {text}", stamp(now, who));
        if self.trace {
            raw::write_all(2, format!("{line}\n").as_bytes());
        }
        if self.lines.len() < LINES {
            self.lines.push(line);
        }
    }

    /// The last calls before now.
    pub(crate) fn last_calls(&self) -> Vec<String> {
        self.calls.iter().map(|&(now, thread, call, detail)| call_line(now, thread, call, detail)).collect()
    }
}

fn call_line(now: u64, thread: ThreadId, call: &str, detail: u64) -> String {
    format!("{} {call} {detail:x}", stamp(now, &format!("t{thread}")))
}

fn stamp(now: u64, who: &str) -> String {
    format!("{:>12.6} {who:<14}", (now - BEGINNING) as f64 / 1e9)
}
