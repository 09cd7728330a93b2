//! `migrate.wws.error`: how far `whimbrel dirty-rate` is off with the downtime it predicts, over guests that
//! write in several ways and two links.
//!
//! `dirty-rate` takes what pages and stops cost from migrations that its host remembers, so the guests first
//! move to and fro a few times. Then each is sampled where it is, the downtime of its move back is predicted
//! from that, and compared with what the hosts say of it.

use super::Context;
use super::migrate::linked;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, Hosts, Machine, number};
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};

const MEMORY: ByteSize = ByteSize(256 << 20);
/// Of the cables.
const MBIT: u64 = 1000;
/// Limits that are set: rounds of one that is far below the cable's take as long as it says.
const LINKS: [&str; 2] = ["128Mbit", "512Mbit"];
const SETTLE: Duration = Duration::from_secs(3);
/// Moves to and fro before the first prediction, and before that of each guest.
const BEFORE: usize = 3;
const BEFORE_EACH: usize = 1;
const WORKS: [(&str, Work); 4] = [
    ("idle", Work::Idle),
    (
        "500 whole pages/s of 8 MiB",
        Work::Dirty { region_mib: 8, pages_per_second: 500, bytes_per_page: 4096 },
    ),
    (
        "2k whole pages/s of 64 MiB",
        Work::Dirty { region_mib: 64, pages_per_second: 2000, bytes_per_page: 4096 },
    ),
    ("8k pages/s of 32 MiB", Work::Dirty { region_mib: 32, pages_per_second: 8000, bytes_per_page: 4096 }),
];

/// A row for each guest, and one for all of them.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let (mut rows, mut all) = (Vec::new(), Vec::new());
    for (index, (case, work)) in WORKS.into_iter().enumerate() {
        let errors = errors(&hosts, (index, work), context.times(20, 1)).context(case)?;
        rows.push(row(case, &errors));
        all.extend(errors);
    }
    rows.push(row("all of these", &all).goal(Goal::AtMost(30.0)));
    Ok(rows)
}

fn row(case: &str, errors: &[f64]) -> Row {
    Row::new("migrate.wws.error", case, "%", &Samples::of(errors, |error| *error))
}

/// Of one guest over each of the links, so many times, in percent of the downtime that it had.
fn errors(hosts: &Hosts, (index, work): (usize, Work), times: usize) -> Result<Vec<f64>> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    // A name of its own: what pages come to is learned of a machine.
    let name = format!("guest{index}");
    let options = GuestOptions { address: None, buffer_mib: 8, work };
    Machine::small(MEMORY, options).run(alpha, &name)?;
    sleep(SETTLE);
    let before = if index == 0 { BEFORE } else { BEFORE_EACH };
    let errors = (0..before)
        .try_for_each(|turn| to_and_fro(alpha, beta, (&name, LINKS[turn % LINKS.len()])).map(drop))
        .and_then(|()| {
            let each = (0..times).flat_map(|_| LINKS.iter().map(|link| error(alpha, beta, (&name, *link))));
            each.collect()
        });
    // It is back after each of them; a failure may have left it on either.
    let _ = alpha.discard(&name).or_else(|_| beta.discard(&name));
    errors
}

/// A move there and back over a link.
fn to_and_fro(alpha: &Daemon, beta: &Daemon, (name, link): (&str, &str)) -> Result<Value> {
    alpha.json(&["migrate", name, "beta", "--rate-max", link])?;
    beta.json(&["migrate", name, "alpha", "--rate-max", link])
}

fn error(alpha: &Daemon, beta: &Daemon, (name, link): (&str, &str)) -> Result<f64> {
    alpha.json(&["migrate", name, "beta", "--rate-max", link])?;
    let seen = beta.json(&["dirty-rate", name, "--bandwidth", link])?;
    let back = beta.json(&["migrate", name, "alpha", "--rate-max", link])?;
    let real = number(&back, "downtime_ms")?;
    let predicted = seen["moves"][0]["downtime_ms"].as_f64().context("no prediction")?;
    Ok((predicted - real).abs() / real * 100.0)
}
