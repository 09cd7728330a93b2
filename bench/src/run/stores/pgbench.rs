//! `pgbench` of the distribution, outside the guest: its transactions, when each of them was committed, and
//! whether its own books balance afterwards.
//!
//! Each of its transactions moves an amount in three tables and writes it down in a fourth ("TPC-B (sort of)"
//! in its manual), so the sums of all four are the same whatever was committed, and the fourth has at least
//! as many rows as transactions were answered.

use crate::hosts::GUEST;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;
use whimbrel_testkit::lab::{Namespace, Process};

/// Its connections.
const CLIENTS: &str = "4";
/// Longer than anything that is measured: it is told when to end.
const FOR_EVER: &str = "86400";
const SUMS: &str = "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers), \
     (SELECT sum(bbalance) FROM pgbench_branches), (SELECT coalesce(sum(delta), 0) FROM pgbench_history), \
     (SELECT count(*) FROM pgbench_history)";

/// A running one.
pub(in crate::run) struct Pgbench {
    network: Namespace,
    process: Process,
    folder: TempDir,
}

/// What became of it.
pub(in crate::run) struct Transactions {
    /// When each was committed, in order.
    pub(in crate::run) committed: Vec<Instant>,
    /// Of those that were acknowledged, how many the server has not; one more if its books do not balance.
    pub(in crate::run) lost: u64,
    /// Whether a connection broke.
    pub(in crate::run) broke: bool,
}

impl Pgbench {
    /// Starts it in `network`.
    pub(in crate::run) fn start(network: &Namespace) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("pgbench").tempdir()?;
        let mut command = Command::new("pgbench");
        command.args(["--host", GUEST, "--username", "postgres", "--client", CLIENTS, "--time", FOR_EVER]);
        command.args(["--no-vacuum", "--log", "postgres"]).current_dir(folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Ok(Self { network: network.clone(), process: network.start(command)?, folder })
    }

    /// Ends it as if its time were over, after the transactions that are under way, and looks into its books.
    pub(in crate::run) fn stop(mut self) -> Result<Transactions> {
        let pid = self.process.id().to_string();
        // What `--time` does (alarm(2)).
        let status = Command::new("kill").args(["-ALRM", &pid]).status()?;
        ensure!(status.success(), "pgbench has ended before");
        let mut words = String::new();
        self.process.stderr.take().context("no output")?.read_to_string(&mut words)?;
        let broke = !self.process.wait()?.success();
        if broke {
            eprintln!("    pgbench: {}", words.trim());
        }
        let committed = self.committed()?;
        let query = [
            "--host",
            GUEST,
            "--username",
            "postgres",
            "--tuples-only",
            "--no-align",
            "--command",
            SUMS,
            "postgres",
        ];
        let row = self.network.output("psql", &query)?;
        let sums = row.trim().split('|').map(str::parse::<i64>).collect::<Result<Vec<_>, _>>()?;
        let [accounts, tellers, branches, history, rows] = sums[..] else { anyhow::bail!("no sums: {row}") };
        let balanced = accounts == tellers && tellers == branches && branches == history;
        if !balanced {
            eprintln!("    PostgreSQL: the books of pgbench do not balance: {row}");
        }
        let lost = (committed.len() as u64).saturating_sub(rows as u64) + u64::from(!balanced);
        Ok(Transactions { committed, lost, broke })
    }

    /// When each transaction was committed, from its log: `client number latency script seconds
    /// microseconds`.
    fn committed(&self) -> Result<Vec<Instant>> {
        let (now, here) = (SystemTime::now(), Instant::now());
        let mut committed = Vec::new();
        for entry in fs::read_dir(self.folder.path())? {
            for line in fs::read_to_string(entry?.path())?.lines() {
                let mut words = line.split(' ').skip(4).map(str::parse::<u64>);
                let mut word = || words.next().context("a short line in pgbench's log")?.context("no number");
                let at =
                    SystemTime::UNIX_EPOCH + Duration::from_secs(word()?) + Duration::from_micros(word()?);
                committed.push(here - now.duration_since(at)?);
            }
        }
        committed.sort();
        Ok(committed)
    }
}
