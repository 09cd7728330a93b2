//! `faults`: members are killed (SIGKILL) at random instants while `cp` writes files to a mount; what it said
//! it wrote is there.
//!
//! A run writes one file and kills a benefactor, the manager, the client, or any two of these, two
//! benefactors too; then they start again on what their disks have. Replication is 2, pessimistic. A file
//! that `cp` could not write is not there, or whole: the answer of its commit may be what was lost. In the
//! end repair must have brought every chunk to two copies, which is proved by reading everything with each
//! benefactor away in turn.

use super::{Context, Processes, noise, processes::Mount};
use crate::harness::{Chance, Goal, Row, Samples};
use anyhow::{Result, ensure};
use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_pool::{chunk::Chunking, client::Pool, policy::Policy};

const BENEFACTORS: usize = 4;
const REPAIR: Duration = Duration::from_secs(300);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Benefactor(usize),
    Manager,
    Client,
}

impl Victim {
    fn any(chance: &mut Chance) -> Self {
        match chance.below(6) {
            0 => Self::Manager,
            1 => Self::Client,
            _ => Self::Benefactor(chance.below(BENEFACTORS as u64) as usize),
        }
    }

    /// One, or any two.
    fn some(chance: &mut Chance) -> Vec<Self> {
        let mut victims = vec![Self::any(chance)];
        if chance.below(3) == 0 {
            let second = Self::any(chance);
            victims.extend((second != victims[0]).then_some(second));
        }
        victims
    }
}

/// What should be in a file: made of its number, so that nothing is kept.
fn content(run: u64) -> Vec<u8> {
    let mut chance = Chance(run ^ 0x5eed);
    noise(1 + chance.below(6_000_000) as usize, run + 1)
}

fn name(run: u64) -> String {
    format!("f{run}")
}

fn copy(from: &Path, to: &Path) -> Result<Child> {
    Ok(Command::new("cp").arg(from).arg(to).stderr(Stdio::null()).spawn()?)
}

/// The pool under fire.
struct Range {
    pool: Processes,
    mount: Mount,
    committed: Vec<u64>,
    wrong: Vec<String>,
}

impl Range {
    fn check(&mut self, run: u64, when: &str) {
        let found = fs::read(self.mount.path.join(name(run)));
        if !matches!(&found, Ok(bytes) if *bytes == content(run)) {
            self.wrong.push(format!("f{run} {when}: {:?}", found.map(|bytes| bytes.len())));
        }
    }

    fn shoot(&mut self, victims: &[Victim]) {
        for victim in victims {
            match victim {
                Victim::Benefactor(number) => self.pool.kill_benefactor(*number),
                Victim::Manager => self.pool.kill_manager(),
                Victim::Client => self.mount.kill(),
            }
        }
    }

    fn raise(&mut self) -> Result<()> {
        self.pool.start_manager()?;
        (0..BENEFACTORS).try_for_each(|number| self.pool.start_benefactor(number))?;
        self.mount.start()
    }

    fn round(&mut self, run: u64, source: &Path) -> Result<()> {
        let mut chance = Chance(run.wrapping_mul(0x9e37_79b9) + 7);
        fs::write(source, content(run))?;
        let mut writer = copy(source, &self.mount.path.join(name(run)))?;
        sleep(Duration::from_millis(chance.below(150)));
        let victims = Victim::some(&mut chance);
        self.shoot(&victims);
        sleep(Duration::from_millis(chance.below(100)));
        self.raise()?;
        let said_done = writer.wait()?.success();
        self.pool.wait_online(BENEFACTORS)?;
        let there = self.mount.path.join(name(run)).exists();
        if said_done || there {
            self.check(run, &format!("after {victims:?}"));
            self.committed.push(run);
        }
        let older = self.committed.get(chance.below(self.committed.len().max(1) as u64) as usize).copied();
        older.into_iter().for_each(|older| self.check(older, &format!("in run {run}")));
        Ok(())
    }

    /// Waits for repair, and says how long that took.
    fn repaired(&self) -> Result<Duration> {
        let begun = Instant::now();
        loop {
            let status = self.pool.status()?;
            if status.repair == 0 {
                return Ok(begun.elapsed());
            }
            ensure!(begun.elapsed() < REPAIR, "repair does not end: {status:?}");
            sleep(Duration::from_millis(200));
        }
    }

    /// Everything is read with each benefactor away in turn, through a client with nothing cached.
    fn any_may_go(&mut self) -> Result<()> {
        for number in 0..BENEFACTORS {
            self.pool.kill_benefactor(number);
            self.mount.kill();
            self.mount.start()?;
            for run in self.committed.clone() {
                self.check(run, &format!("without b{number}"));
            }
            self.pool.start_benefactor(number)?;
            self.pool.wait_online(BENEFACTORS)?;
        }
        Ok(())
    }
}

/// Files lost or wrong, and the time of repair.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let runs = context.times(500, 40) as u64;
    let pool = Processes::start(BENEFACTORS, TempDir::new_in("/dev/shm")?)?;
    let policy = Policy { copies: 2, cutting: Chunking::Content { average: 64 << 10 }, ..Policy::default() };
    pool.ask(async move |pool: Pool| Ok(pool.set_policy(whimbrel_fuse::ROOT, Some(policy)).await?))?;
    let (mount, source) = (pool.mount("mnt")?, pool.dir.path().join("source"));
    let mut range = Range { pool, mount, committed: Vec::new(), wrong: Vec::new() };
    for number in 0..runs {
        range.round(number, &source)?;
    }
    let repair = range.repaired()?;
    range.any_may_go()?;
    let lost = range.pool.status()?.lost;
    range.wrong.iter().for_each(|wrong| eprintln!("    {wrong}"));
    let wrong = Samples::new(vec![range.wrong.len() as f64 + lost as f64]);
    let case = format!("lost or wrong in {runs} runs, {} files committed", range.committed.len());
    let seconds = Samples::new(vec![repair.as_secs_f64()]);
    Ok(vec![
        Row::new("faults", case, "files", &wrong).goal(Goal::AtMost(0.0)),
        Row::new("faults", "until every chunk had two copies again", "s", &seconds),
    ])
}
