//! `migrate.postcopy.faults`: a machine with four virtual CPUs that moves by post-copy, and writes to its
//! memory at random meanwhile: how many pages come a second, and how long a CPU waits for one.
//!
//! Two hosts with 1 Gbit/s and 1 ms there and back. Pages come because a CPU waits for them or because they
//! are near one that did, and otherwise in the background; all of them count, since one that has come is
//! waited for by nobody. Waits alone cannot be the goal: four CPUs that each wait a round trip for every page
//! are 4,000 a second.

use super::sites::{Sites, gigabit};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Machine, console, number};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{CheckResult, GuestOptions, Work};

const MEMORY: ByteSize = ByteSize(512 << 20);
const CPUS: u32 = 4;
/// What each CPU writes to, as fast as it can.
const REGION_MIB: u32 = 64;
const WARM_UP: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(120);
const NAME: &str = "writer";

/// One move.
struct Moved {
    /// Pages a second that arrived until none was missing.
    pages: f64,
    /// Waits a second, and the mean of them in milliseconds.
    waits: f64,
    wait_ms: f64,
}

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let sites = Sites::start()?;
    sites.set_link(gigabit());
    let moves = (0..context.times(10, 3)).map(|_| moved(&sites)).collect::<Result<Vec<_>>>()?;
    let row = |case: &str, unit, of: fn(&Moved) -> f64| {
        Row::new("migrate.postcopy.faults", case, unit, &Samples::of(&moves, of))
    };
    Ok(vec![
        row("pages that come while 4 vCPUs write at random, 1 Gbit/s, 1 ms", "faults/s", |it| it.pages)
            .goal(Goal::AtLeast(8000.0)),
        row("of them waited for", "waits/s", |it| it.waits),
        row("mean wait", "ms", |it| it.wait_ms),
    ])
}

fn moved(sites: &Sites) -> Result<Moved> {
    let (alpha, beta) = (sites.alpha(), sites.beta());
    let work = Work::Writers { count: CPUS, region_mib: REGION_MIB, pages_per_second: 0 };
    let options = GuestOptions { address: None, buffer_mib: 32, work };
    Machine::small(MEMORY, options).run_with(alpha, NAME, &["--cpus", &CPUS.to_string()])?;
    sleep(WARM_UP);
    let result = alpha.json(&["migrate", NAME, "beta", "--mode", "postcopy"])?;
    let mut guest = console(beta, NAME)?;
    guest.wait_ready(PATIENCE)?;
    let found = guest.check().context("the guest does not answer")?;
    ensure!(matches!(found.ram, CheckResult::Good(_)) && found.steady, "memory was lost: {found:?}");
    drop(guest);
    beta.discard(NAME)?;
    of_result(&result)
}

fn of_result(result: &Value) -> Result<Moved> {
    let fetch = &result["result"]["postcopy"];
    let field = |name: &str| fetch[name].as_f64().with_context(|| format!("no {name} in {result}"));
    // The whole move: the time before the fetch is a small part of it.
    let seconds = number(result, "total_ms")? / 1e3;
    let (faults, waited_ms) = (field("faults")?, field("waited_ms")?);
    Ok(Moved {
        pages: field("initial_missing_pages")? / seconds,
        waits: faults / seconds,
        wait_ms: waited_ms / faults.max(1.0),
    })
}
