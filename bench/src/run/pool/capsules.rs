//! `capsules`: a machine's versions into a pool, and a machine that lives from it, beside one that lives from
//! the host it was on.
//!
//! Hosts, manager and two benefactors on one switch, 1 Gbit/s each both ways. The guest has a disk and 64 MiB
//! that do not compress. Both hosts that it resumes on have nothing of it before; each is asked for it as a
//! person would, and waits for nothing but an answer on the machine's console.

use super::{Context, Place, Processes, admit};
use crate::{
    harness::{Row, Samples},
    hosts::{Daemon, Hosts, Machine, console, number},
};
use anyhow::Result;
use std::{
    thread::sleep,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::GuestOptions;
use whimbrel_wire::Identity;

const MBIT: u64 = 1000;
const MEMORY: ByteSize = ByteSize(512 << 20);
const DISK: ByteSize = ByteSize(256 << 20);
const PATIENCE: Duration = Duration::from_secs(60);
/// What the machine does between two versions: next to nothing, for so long.
const APART: Duration = Duration::from_secs(5);

/// Seconds, and megabytes on the line.
struct Pushed {
    seconds: f64,
    megabytes: f64,
}

/// Seconds until the command is done, which is when the machine runs, and until it has answered.
struct Resumed {
    runs: f64,
    answers: f64,
}

struct Life {
    first: Pushed,
    later: Pushed,
    from_pool: Resumed,
    from_host: Resumed,
}

/// The row.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let lives = (0..context.times(5, 2)).map(|_| life()).collect::<Result<Vec<_>>>()?;
    let of = |case: &str, unit: &'static str, part: fn(&Life) -> f64| {
        Row::new("capsules", case, unit, &Samples::of(&lives, part))
    };
    let beside = |row: Row, part: fn(&Life) -> f64| row.against("from its host", &Samples::of(&lives, part));
    let runs = of("resumed from the pool, until it runs", "s", |life| life.from_pool.runs);
    let answers = of("resumed from the pool, until it answers", "s", |life| life.from_pool.answers);
    Ok(vec![
        of("first version pushed, 512 MiB and a disk", "s", |life| life.first.seconds),
        of("first version pushed, 512 MiB and a disk: on the line", "MB", |life| life.first.megabytes),
        of("a version five seconds later", "s", |life| life.later.seconds),
        of("a version five seconds later: on the line", "MB", |life| life.later.megabytes),
        beside(runs, |life| life.from_host.runs),
        beside(answers, |life| life.from_host.answers),
    ])
}

fn life() -> Result<Life> {
    let hosts = Hosts::start(&["alpha", "beta", "gamma", "b0", "b1"])?;
    let place = |name: &str| Place {
        namespace: (**hosts.lab.host(name)).clone(),
        address: format!("{}:7500", hosts.lab.host(name).address()),
    };
    let dir = TempDir::new_in("/dev/shm")?;
    let (alpha, beta, gamma) = (hosts.get("alpha")?, hosts.get("beta")?, hosts.get("gamma")?);
    // The folder of the manager that is started below.
    let members = dir.path().join("manager");
    Identity::load_or_create(&members)?;
    [alpha, beta].into_iter().try_for_each(|host| admit(&members, host.name(), host.key()?.parse()?))?;
    let pool = Processes::at(place("client"), vec![place("b0"), place("b1")], place("client"), dir)?;
    let options = GuestOptions { buffer_mib: 64, ..GuestOptions::default() };
    Machine::small(MEMORY, options).with_blank_disk(hosts.disk(), DISK)?.run(alpha, "web")?;
    let all = ["alpha", "beta", "gamma", "b0", "b1", "client"];
    all.iter().try_for_each(|name| hosts.lab.limit(name, MBIT))?;
    let folder = format!("pool:{}/vms", pool.address());
    alpha.run(&["checkpoint", "web"])?;
    let first = push(alpha, &folder)?;
    sleep(APART);
    alpha.run(&["suspend", "web"])?;
    let later = push(alpha, &folder)?;
    let from_pool = resume(beta, &format!("{folder}/web"))?;
    let from_host = resume(gamma, "alpha:web")?;
    Ok(Life { first, later, from_pool, from_host })
}

fn push(host: &Daemon, folder: &str) -> Result<Pushed> {
    let begun = Instant::now();
    let report = host.json(&["push", "web", folder])?;
    Ok(Pushed { seconds: begun.elapsed().as_secs_f64(), megabytes: number(&report, "wire_bytes")? / 1e6 })
}

fn resume(host: &Daemon, from: &str) -> Result<Resumed> {
    let begun = Instant::now();
    host.run(&["resume", from])?;
    let runs = begun.elapsed().as_secs_f64();
    console(host, "web")?.wait_ready(PATIENCE)?;
    let answers = begun.elapsed().as_secs_f64();
    // Both run on the same processors: one is out of the way before the other begins.
    host.run(&["stop", "web", "--kill"])?;
    Ok(Resumed { runs, answers })
}
