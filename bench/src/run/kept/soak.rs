//! `soak`: what daemons and QEMUs gain in memory and open files by very many checkpoints, moves and seconds
//! of protection.
//!
//! Counted is what they have at the end above what they had after the first ten of each kind. A QEMU is new
//! after each move, so only checkpoints and protection count for it.

use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, Hosts, Machine, Resident};
use crate::run::Context;
use anyhow::Result;
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};

const NAME: &str = "web";
const MEMORY: ByteSize = ByteSize(128 << 20);
/// Checkpoints and seconds of protection; a quarter as many moves.
const COUNT: usize = 2000;
const COUNT_QUICK: usize = 60;
/// Of each kind, before the counting begins.
const FIRST: usize = 10;
/// Checkpoints between two collections.
const COLLECT: usize = 100;
/// Until what a daemon does afterwards is done.
const SETTLE: Duration = Duration::from_secs(3);

/// What a process has: megabytes and open files.
#[derive(Debug, Clone, Copy)]
struct Held {
    memory: f64,
    files: f64,
}

/// The rows.
pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let count = context.times(COUNT, COUNT_QUICK).max(2 * FIRST);
    let moves = (count / 4).max(FIRST + 2) / 2 * 2;
    let hosts = Hosts::start(&["alpha", "beta"])?;
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    let work = Work::Dirty { region_mib: 8, pages_per_second: 500, bytes_per_page: 64 };
    let options = GuestOptions { buffer_mib: 8, work, ..GuestOptions::default() };
    Machine::small(MEMORY, options).run(alpha, NAME)?;
    let checkpoint = |number: usize| -> Result<()> {
        alpha.run(&["checkpoint", NAME])?;
        number.is_multiple_of(COLLECT).then(|| alpha.run(&["gc"])).transpose().map(drop)
    };
    let place = [("alpha", alpha), ("beta", beta)];
    let step =
        |number: usize| place[number % 2].1.run(&["migrate", NAME, place[(number + 1) % 2].0]).map(drop);
    let second = |number: usize| -> Result<()> {
        if number == 0 {
            alpha.run(&["protect", NAME, "beta", "--lease", "10s"])?;
        }
        sleep(Duration::from_secs(1));
        Ok(())
    };
    let grown = [
        grown("checkpoints", count, &checkpoint, &[(alpha, true)])?,
        grown("moves", moves, &step, &[(alpha, false), (beta, false)])?,
        grown("seconds of protection", count, &second, &[(alpha, true), (beta, false)])?,
    ];
    let case = |what: &str| {
        format!("{what} of a daemon or a QEMU, {count} checkpoints, {moves} moves, {count} s of protection")
    };
    let most = |of: fn(&Held) -> f64| Samples::new(vec![grown.iter().map(of).fold(f64::MIN, f64::max)]);
    Ok(vec![
        Row::new("soak", case("memory"), "MB", &most(|held| held.memory)).goal(Goal::AtMost(40.0)),
        Row::new("soak", case("descriptors"), "descriptors", &most(|held| held.files))
            .goal(Goal::AtMost(20.0)),
    ])
}

/// Does something so many times. The most that one of these daemons gained, or its QEMU where that is said.
fn grown(
    what: &str,
    count: usize,
    step: &dyn Fn(usize) -> Result<()>,
    watched: &[(&Daemon, bool)],
) -> Result<Held> {
    (0..FIRST).try_for_each(step)?;
    sleep(SETTLE);
    let before = held(watched)?;
    (FIRST..count).try_for_each(step)?;
    sleep(SETTLE);
    let after = held(watched)?;
    eprintln!("    {count} {what}: {before:.1?} before, {after:.1?} after");
    let pairs = || after.iter().zip(&before);
    let most = |of: fn(&Held) -> f64| pairs().map(|(now, then)| of(now) - of(then)).fold(f64::MIN, f64::max);
    Ok(Held { memory: most(|held| held.memory), files: most(|held| held.files) })
}

fn held(watched: &[(&Daemon, bool)]) -> Result<Vec<Held>> {
    let mut all = Vec::new();
    for (daemon, with_qemu) in watched {
        let memory = Resident::of_daemon(daemon)?.0 as f64 / 1e6;
        all.push(Held { memory, files: daemon.descriptors()? as f64 });
        if *with_qemu {
            let memory = Resident::of_machines(daemon, NAME)?.0 as f64 / 1e6;
            all.push(Held { memory, files: 0.0 });
        }
    }
    Ok(all)
}
