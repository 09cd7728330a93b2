//! `replace.gap`: how long a guest waits for a write to its disk at most, while the process that has its
//! machine is replaced: by the daemon that `whimbrel upgrade` asks, and by `whimbrel vm` when that is told to
//! stop.

use crate::harness::{Goal, Row, Samples};
use crate::hosts::Daemon;
use crate::run::{Context, campaign::agent, machine_process};
use anyhow::{Result, ensure};
use std::thread::sleep;
use std::time::Duration;

/// What the guest goes on for after each replacement.
const REST: Duration = Duration::from_millis(500);

/// The row.
pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let mut hosts = machine_process::start()?;
    let mut inside = agent(&hosts)?;
    // The guest begins to write.
    inside.longest_write()?;
    // The first process.
    hosts.get_mut("alpha")?.ask_to_end()?;
    hosts.get_mut("alpha")?.begin()?;
    let mut gaps = Vec::new();
    for _ in 0..context.times(50, 10) {
        for replace in [machine_process::upgrade, Daemon::ask_to_end] {
            replace(hosts.get_mut("alpha")?)?;
            sleep(REST);
            gaps.push(inside.longest_write()?.as_secs_f64() * 1e3);
        }
        hosts.get_mut("alpha")?.begin()?;
    }
    let log = hosts.get("alpha")?.log_text();
    ensure!(!log.contains("adopting it"), "a machine did not pass: {log}");
    let (gaps, case) = (Samples::new(gaps), "the longest write of a guest to its disk, a replacement each");
    let row = Row::new("replace.gap", case, "ms", &gaps).percentile(100, &gaps);
    Ok(vec![row.goal(Goal::AtMost(250.0))])
}
