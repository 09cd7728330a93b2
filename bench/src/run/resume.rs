//! `resume.*`: from a capsule in the local store to a running guest, its memory read when it is touched.
//!
//! Three moments count: the first guest instruction (as the daemon saw it), the return of the command, the
//! first answer of the guest. Cold: the daemon has just started and no QEMU waits. Warm: a QEMU started ahead
//! of time waits, as after every resume. The time must not depend on the size of the guest.

use super::Context;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, Hosts, Machine, console, number};
use anyhow::Result;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::GuestOptions;

/// Memory that the witness filled with noise: what the guest has in use.
const IN_USE_MIB: u32 = 64;
/// What a guest works on after it was resumed, and for how long when all of it is in memory.
const TOUCHED_MIB: u32 = 128;
const WORKED: Duration = Duration::from_secs(2);
const SMALL: ByteSize = ByteSize(512 << 20);
const LARGE: ByteSize = ByteSize(2 << 30);
const DISK: ByteSize = ByteSize(256 << 20);
/// Until the QEMU that a resume starts ahead waits, and the last machine is gone.
const SETTLE: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(30);

/// When things happened, in milliseconds since the command began.
struct Resumed {
    running: f64,
    returned: f64,
    answered: f64,
}

/// The two ways to find a QEMU.
struct Way {
    row: &'static str,
    goal_ms: f64,
}

const COLD: Way = Way { row: "resume.cold", goal_ms: 250.0 };
const WARM: Way = Way { row: "resume.warm", goal_ms: 60.0 };

/// All rows: cold and warm take turns on the same capsules.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let times = context.times(15, 4);
    let (small_cold, small_warm) = both(times, SMALL)?;
    let (large_cold, large_warm) = both(times, LARGE)?;
    let mut rows = COLD.rows(&small_cold, &large_cold);
    rows.extend(WARM.rows(&small_warm, &large_warm));
    Ok(rows)
}

/// The first two seconds of work of a guest that was resumed, against what the same work takes when
/// everything is in memory. The work is to read what it has in use, over and over.
pub(crate) fn touch(context: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha"])?;
    let alpha = hosts.get("alpha")?;
    let options = GuestOptions { buffer_mib: TOUCHED_MIB, ..GuestOptions::default() };
    Machine::small(SMALL, options).run(alpha, "origin")?;
    let rounds = {
        let (mut agent, begun) = (console(alpha, "origin")?, Instant::now());
        agent.wait_ready(PATIENCE)?;
        let mut rounds = 0;
        while begun.elapsed() < WORKED {
            agent.check()?;
            rounds += 1;
        }
        rounds
    };
    alpha.run(&["checkpoint", "origin", "--tag", "kept"])?;
    alpha.discard("origin")?;
    let (mut lazy, mut all) = (Vec::new(), Vec::new());
    for _ in 0..context.times(10, 2) {
        let begun = Instant::now();
        alpha.run(&["resume", "kept", "--name", "copy"])?;
        let mut agent = console(alpha, "copy")?;
        agent.wait_ready(PATIENCE)?;
        let mut work = || (0..rounds).try_for_each(|_| agent.check().map(drop));
        work()?;
        lazy.push(begun.elapsed().as_secs_f64() * 1e3);
        let begun = Instant::now();
        work()?;
        all.push(begun.elapsed().as_secs_f64() * 1e3);
        alpha.discard("copy")?;
        sleep(SETTLE);
    }
    let case = format!("{TOUCHED_MIB} of 512 MiB read {rounds} times, resume included");
    let row = Row::new("resume.touch", case, "ms", &Samples::new(lazy));
    Ok(vec![row.against("all in memory", &Samples::new(all)).goal(Goal::PeerAtMost(1.3))])
}

impl Way {
    fn rows(&self, small: &[Resumed], large: &[Resumed]) -> Vec<Row> {
        let mut rows = Vec::new();
        for (size, measured) in [("512 MiB", small), ("2 GiB", large)] {
            let row = |what: &str, when: fn(&Resumed) -> f64| {
                Row::new(self.row, format!("{size}, {what}"), "ms", &Samples::of(measured, when))
            };
            rows.push(row("first instruction", |it| it.running).goal(Goal::AtMost(self.goal_ms)));
            rows.push(row("command returns", |it| it.returned));
            rows.push(row("guest answers", |it| it.answered));
        }
        let [small, large] = [small, large].map(|measured| Samples::of(measured, |it| it.running));
        let beside = Row::new(self.row, "2 GiB beside 512 MiB", "ms", &large).against("512 MiB", &small);
        rows.push(beside.goal(Goal::PeerAtMost(1.3)));
        rows
    }
}

/// Cold and warm resumes of a guest of this size.
fn both(times: usize, memory: ByteSize) -> Result<(Vec<Resumed>, Vec<Resumed>)> {
    let mut hosts = Hosts::start(&["alpha"])?;
    let options = GuestOptions { buffer_mib: IN_USE_MIB, ..GuestOptions::default() };
    let machine = Machine::small(memory, options).with_blank_disk(hosts.disk(), DISK)?;
    let alpha = hosts.get("alpha")?;
    machine.run(alpha, "origin")?;
    alpha.run(&["checkpoint", "origin", "--tag", "kept"])?;
    alpha.discard("origin")?;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for _ in 0..times {
        hosts.get_mut("alpha")?.restart()?;
        sleep(SETTLE);
        cold.push(resume(hosts.get("alpha")?)?);
        sleep(SETTLE);
        warm.push(resume(hosts.get("alpha")?)?);
    }
    Ok((cold, warm))
}

fn resume(host: &Daemon) -> Result<Resumed> {
    let begun = Instant::now();
    let (result, returned) = host.timed(&["resume", "kept", "--name", "copy"])?;
    console(host, "copy")?.wait_ready(PATIENCE)?;
    let answered = begun.elapsed().as_secs_f64() * 1e3;
    host.discard("copy")?;
    Ok(Resumed { running: number(&result, "to_running_ms")?, returned, answered })
}
