//! What a move costs the daemons of its hosts, looked at while it lasts.
//!
//! Memory is what is theirs alone (`RssAnon`, proc_pid_status(5)): guests' memory is on a tmpfs and counts
//! elsewhere.

use super::migrate::Cost;
use crate::hosts::Daemon;
use anyhow::{Context as _, Result};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How often memory is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Looks at daemons until it is stopped.
pub(super) struct Meter<'a> {
    daemons: Vec<&'a Daemon>,
    cpu: f64,
    stop: Arc<AtomicBool>,
    looking: JoinHandle<u64>,
}

impl<'a> Meter<'a> {
    /// Begins with what they have used so far.
    pub(super) fn start(daemons: &[&'a Daemon]) -> Result<Self> {
        let pids = daemons.iter().map(|daemon| daemon.pid()).collect::<Result<Vec<_>>>()?;
        let before = pids.iter().map(|pid| anonymous(*pid)).collect::<Result<Vec<_>>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let look = move || {
            let mut most = 0;
            while !stopped.load(Ordering::Relaxed) {
                let grown = pids
                    .iter()
                    .zip(&before)
                    .map(|(pid, before)| anonymous(*pid).map_or(0, |now| now.saturating_sub(*before)));
                most = grown.max().unwrap_or(0).max(most);
                thread::sleep(LOOK);
            }
            most
        };
        let cpu = daemons.iter().map(|daemon| daemon.cpu()).sum::<Result<f64>>()?;
        Ok(Self { daemons: daemons.to_vec(), cpu, stop, looking: thread::spawn(look) })
    }

    /// What they used since.
    pub(super) fn stop(self) -> Result<Cost> {
        let cpu = self.daemons.iter().map(|daemon| daemon.cpu()).sum::<Result<f64>>()? - self.cpu;
        self.stop.store(true, Ordering::Relaxed);
        let most = self.looking.join().ok().context("the look at memory failed")?;
        Ok(Cost { cpu, memory: most as f64 / 1e6, gib: 0.0 })
    }
}

/// Bytes of memory that are a process's own.
fn anonymous(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no RssAnon")?;
    Ok(kib.parse::<u64>()? << 10)
}
