//! `migrate.peers.*`: QEMU's other ways to move a guest, each beside the way of ours that does the same.
//!
//! `auto-converge` differs from plain pre-copy only for guests that write faster than the link takes it; an
//! idle one shows what it costs to have it on. Post-copy stands beside `--mode lazy`: time is up to when the
//! last page is there.

use super::Context;
use super::migrate::{Moved, linked, watch};
use super::muncher::{self, MBIT, MEMORY, SETTLE};
use super::precopy;
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{GUEST, Hosts, Machine, number};
use anyhow::{Context as _, Result};
use std::time::Duration;
use whimbrel_testkit::guest::{GuestOptions, Work};

const CONVERGE: &str = "QEMU auto-converge";
const POSTCOPY: &str = "QEMU post-copy";
const LAZY: &[&str] = &["--mode", "postcopy"];

/// An idle guest beside both, and one that writes half of its memory flat out beside post-copy.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let idle = || GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work: Work::Idle };
    let plan = GuestPlan::small(MEMORY, idle());
    let times = context.times(20, 2);
    let plain = || ours(&hosts, idle(), &[]).context("whimbrel, idle");
    let converge = || precopy::moved_converging(&hosts.lab, &plan, MBIT, Duration::ZERO).context(CONVERGE);
    let mut rows = compare("idle", CONVERGE, &in_turn(times, plain, converge)?).to_vec();
    let lazy = || ours(&hosts, idle(), LAZY).context("whimbrel, idle, lazy");
    let postcopy = || precopy::moved_lazily(&hosts.lab, &plan, MBIT, Duration::ZERO).context(POSTCOPY);
    rows.extend(compare("idle, lazy", POSTCOPY, &in_turn(times, lazy, postcopy)?));
    let plan = GuestPlan::small(MEMORY, muncher::options(false));
    let lazy = || muncher::ours(&hosts, muncher::options(false), LAZY).context("whimbrel, muncher, lazy");
    let postcopy = || precopy::moved_lazily(&hosts.lab, &plan, MBIT, SETTLE).context(POSTCOPY);
    rows.extend(compare("256 of 512 MiB flat out, lazy", POSTCOPY, &in_turn(times, lazy, postcopy)?));
    rows.sort_by_key(|row| row.row);
    Ok(rows)
}

fn compare(case: &str, peer: &str, (ours, theirs): &(Vec<Moved>, Vec<Moved>)) -> [Row; 2] {
    let row = |name: &'static str, of: fn(&Moved) -> f64| {
        Row::new(name, case, "ms", &Samples::of(ours, of)).against(peer, &Samples::of(theirs, of))
    };
    [
        row("migrate.peers.downtime", |moved| moved.seen_ms).goal(Goal::PeerAtMost(1.0)),
        row("migrate.peers.time", |moved| moved.total_ms),
    ]
}

/// One move of ours, `more` said to it.
pub(super) fn ours(hosts: &Hosts, options: GuestOptions, more: &[&str]) -> Result<Moved> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    Machine::small(MEMORY, options).run(alpha, "web")?;
    let moved = watch(&hosts.lab, || {
        number(&alpha.json(&[&["migrate", "web", "beta"], more].concat())?, "downtime_ms")
    });
    let moved = moved.inspect_err(|_| {
        // Nobody knows on which host the failure left it; what went wrong is told, not what clearing up did.
        let _ = alpha.discard("web").or_else(|_| beta.discard("web"));
    })?;
    beta.discard("web")?;
    Ok(moved)
}
