//! Rule: at every instant at most one copy of a machine runs, and there is a copy for as long as its owner
//! has not removed it.

use crate::{report::violation, world::log};
use std::collections::BTreeSet;

/// The hosts on which the machine runs.
#[derive(Debug, Default)]
pub(crate) struct MachineWatch {
    running: BTreeSet<&'static str>,
}

impl MachineWatch {
    /// The machine runs on a host from now on. Fails if it runs on another, too.
    pub(crate) fn runs(&mut self, host: &'static str) -> Result<(), String> {
        self.running.insert(host);
        let both: Vec<&str> = self.running.iter().copied().collect();
        if both.len() < 2 { Ok(()) } else { Err(format!("the machine runs on {}", both.join(" and "))) }
    }

    pub(crate) fn stops(&mut self, host: &'static str) {
        self.running.remove(host);
    }

    pub(crate) fn is_running(&self, host: &str) -> bool {
        self.running.contains(host)
    }
}

/// Ends the seed if two copies run.
pub(crate) fn demand(result: Result<(), String>) {
    if let Err(text) = result {
        log(&text);
        violation("one_runs", &text);
    }
}
