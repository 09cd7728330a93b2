//! Report of a seed: how it ended, and what a reader needs if a rule was broken. The child writes it to its
//! parent through one pipe and ends at once.

use crate::{
    raw,
    world::{elapsed, with},
};
use serde::{Deserialize, Serialize};

/// Descriptor of the pipe to the parent.
pub(crate) const PIPE: i32 = 3;

/// A rule that was broken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Violation {
    pub(crate) rule: String,
    pub(crate) text: String,
}

/// How a seed ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// What two runs of a seed are compared by: every call with its time and thread.
    pub(crate) digest: u64,
    pub(crate) steps: u64,
    /// Simulated time in nanoseconds.
    pub(crate) elapsed: u64,
    /// Changes of thread by chance.
    pub(crate) switches: u64,
    /// Number of faults that struck.
    pub(crate) faults: u64,
    pub(crate) violation: Option<Violation>,
    /// What happened, and the last calls before the end; only after a violation.
    pub(crate) story: Vec<String>,
}

/// A rule does not hold: ends the seed.
pub(crate) fn violation(rule: &str, text: &str) -> ! {
    finish(Some(Violation { rule: rule.to_owned(), text: text.to_owned() }))
}

pub(crate) fn finish(violation: Option<Violation>) -> ! {
    let elapsed = elapsed();
    let bytes = with(|world| {
        let story = violation.as_ref().map(|_| {
            let lines = world.story.lines.iter().cloned();
            let calls = world.story.last_calls();
            lines.chain([String::from("the last calls:")]).chain(calls).collect()
        });
        let outcome = Outcome {
            digest: world.story.digest,
            steps: world.story.steps,
            elapsed,
            switches: world.schedule.switches,
            faults: world.faults.struck,
            violation,
            story: story.unwrap_or_default(),
        };
        serde_json::to_vec(&outcome).unwrap_or_default()
    });
    raw::write_all(PIPE, &bytes);
    raw::exit(0)
}

/// Makes a panic of the program a violation.
pub(crate) fn watch_panics() {
    std::panic::set_hook(Box::new(|panic| violation("no_panic", &panic.to_string())));
}
