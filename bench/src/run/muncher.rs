//! `migrate.muncher.*`: the diabolical case of Clark et al. (NSDI 2005, section 6.5). A process writes 256
//! MiB of a guest of 512 as fast as it goes, faster than a Gbit/s carries away; the paper's machine stood
//! still for 3.5 s.
//!
//! With the program for guests inside the process is held; without it the virtual CPUs are throttled, as
//! QEMU's `auto-converge` does.

use super::Context;
use super::migrate::{Moved, linked, watch};
use super::precopy;
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{GUEST, Hosts, Machine, number};
use anyhow::{Context as _, Result};
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};

pub(super) const MEMORY: ByteSize = ByteSize(512 << 20);
pub(super) const MBIT: u64 = 1000;
/// Until the muncher has filled its region and goes round in it.
pub(super) const SETTLE: Duration = Duration::from_secs(12);
const PEER: &str = "QEMU auto-converge";

/// Both rows, with the program inside and without.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let times = context.times(20, 2);
    let many = |helper| (0..times).map(|_| ours(&hosts, options(helper), &[])).collect::<Result<Vec<_>>>();
    let (with, without) = (many(true)?, many(false)?);
    let plan = GuestPlan::small(MEMORY, options(false));
    let peer = || precopy::moved_converging(&hosts.lab, &plan, MBIT, SETTLE);
    let theirs = (0..context.times(20, 1)).map(|_| peer()).collect::<Result<Vec<_>>>().context(PEER)?;
    let (seen, total) = (|moved: &Moved| moved.seen_ms, |moved: &Moved| moved.total_ms);
    let row = |name: &'static str, case: &str, moves: &[Moved], of: fn(&Moved) -> f64| {
        Row::new(name, case, "ms", &Samples::of(moves, of)).against(PEER, &Samples::of(&theirs, of))
    };
    let (inside, alone) = ("256 of 512 MiB flat out, program inside", "256 of 512 MiB flat out, throttled");
    Ok(vec![
        row("migrate.muncher.downtime", inside, &with, seen).goal(Goal::AtMost(200.0)),
        row("migrate.muncher.downtime", alone, &without, seen),
        row("migrate.muncher.time", inside, &with, total),
        row("migrate.muncher.time", alone, &without, total),
    ])
}

pub(super) fn options(helper: bool) -> GuestOptions {
    // Whole pages. The paper's program writes one word of each, which travels as a difference of a few bytes:
    // we get ahead of that.
    let work = Work::MemoryWriter { region_mib: 256, bytes_per_page: 4096, helper };
    GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work }
}

/// One move, `more` said to it.
pub(super) fn ours(hosts: &Hosts, options: GuestOptions, more: &[&str]) -> Result<Moved> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    Machine::small(MEMORY, options).run(alpha, "web")?;
    sleep(SETTLE);
    let watched = watch(&hosts.lab, || {
        let result = alpha.json(&[&["migrate", "web", "beta"], more].concat())?;
        number(&result, "downtime_ms")
    });
    let watched = watched.inspect_err(|_| {
        // Nobody knows on which host the failure left it; what went wrong is told, not what clearing up did.
        let _ = alpha.discard("web").or_else(|_| beta.discard("web"));
    })?;
    beta.discard("web")?;
    Ok(watched)
}
