//! `migrate.wws.error`: how far `whimbrel wws` is off with the downtime it predicts, over guests that write in several ways and two links.
//!
//! Each guest moves twice. The first move tells what a prediction has to be told of this host and this guest: bytes that a page comes to,
//! and what a stop takes beside pages. Then the guest is sampled where it is, the downtime of its way back is predicted from the
//! trace, for as many rounds as it then takes, and compared with what the hosts say of it.

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
/// Most rounds that are predicted.
const ROUNDS_MAX: usize = 30;
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
    for (case, work) in WORKS {
        let errors = (0..context.times(5, 1)).map(|_| errors(&hosts, work));
        let errors: Vec<f64> = errors.collect::<Result<Vec<_>>>().context(case)?.concat();
        rows.push(row(case, &errors));
        all.extend(errors);
    }
    rows.push(row("all of these", &all).goal(Goal::AtMost(30.0)));
    Ok(rows)
}

fn row(case: &str, errors: &[f64]) -> Row {
    Row::new("migrate.wws.error", case, "%", &Samples::of(errors, |error| *error))
}

/// Of one guest over each of the links, in percent of the downtime that it had.
fn errors(hosts: &Hosts, work: Work) -> Result<Vec<f64>> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    let options = GuestOptions { address: None, buffer_mib: 8, work };
    Machine::small(MEMORY, options).run(alpha, "web")?;
    sleep(SETTLE);
    let errors = LINKS.iter().map(|link| error(alpha, beta, link)).collect();
    // It is back after each of them; a failure may have left it on either.
    let _ = alpha.discard("web").or_else(|_| beta.discard("web"));
    errors
}

fn error(alpha: &Daemon, beta: &Daemon, link: &str) -> Result<f64> {
    let there = alpha.json(&["migrate", "web", "beta", "--rate-max", link])?;
    let told = Told::by(&there)?;
    let (page_bytes, fixed) = (format!("{:.0}", told.page_bytes), format!("{:.0}ms", told.fixed_ms));
    let rounds = ROUNDS_MAX.to_string();
    let prediction = [
        "wws",
        "web",
        "--bandwidth",
        link,
        "--rounds",
        &rounds,
        "--page-bytes",
        &page_bytes,
        "--fixed",
        &fixed,
    ];
    let seen = beta.json(&prediction)?;
    let back = beta.json(&["migrate", "web", "alpha", "--rate-max", link])?;
    let real = number(&back, "downtime_ms")?;
    let taken = rounds_of(&back)?.len().saturating_sub(1).clamp(1, ROUNDS_MAX);
    let predicted = seen["predictions"][taken - 1]["downtime_ms"].as_f64().context("no prediction")?;
    Ok((predicted - real).abs() / real * 100.0)
}

/// What one move says of the next.
struct Told {
    page_bytes: f64,
    fixed_ms: f64,
}

impl Told {
    fn by(moved: &Value) -> Result<Self> {
        let rounds = rounds_of(moved)?;
        let sum = |field: &str| rounds.iter().filter_map(|round| round[field].as_f64()).sum::<f64>();
        let last = rounds.last().and_then(|round| round["ms"].as_f64()).context("no last round")?;
        let fixed_ms = (number(moved, "downtime_ms")? - last).max(1.0);
        Ok(Self { page_bytes: (sum("bytes") / sum("pages").max(1.0)).clamp(1.0, 8192.0), fixed_ms })
    }
}

fn rounds_of(moved: &Value) -> Result<&Vec<Value>> {
    moved["result"]["rounds"].as_array().context("no rounds")
}
