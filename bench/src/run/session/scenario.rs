//! Where the same work is done, as in table 1 and figures 3 to 5 of the paper: on a local disk, and on a
//! mount over a LAN and over a WAN, without a cache, with an empty one, and with one that has seen the work
//! before.
//!
//! One list of places for all kinds of work. Every run begins without what an earlier one made, and what
//! comes about on the server is compared with what came about on the local disk. Without a cache writes go
//! through; with one they go back afterwards, in a time of its own that the paper adds to the total.

use super::far::{Far, LAN_100, LAN_1000, Line, Near, WAN_30, WAN_100, seconds};
use crate::harness::{Goal, Row, Samples, scratch};
use anyhow::{Context as _, Result};
use std::{fmt, path::Path};
use whimbrel_session::client::Policy;

/// What a mount has of what is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cache {
    Absent,
    Cold,
    Warm,
}

/// Lines, and what is mounted over each, in this order.
pub(super) type Places = &'static [(Line, &'static [Cache])];

const EVERYWHERE: Places = &[
    (LAN_100, &[Cache::Absent]),
    (LAN_1000, &[Cache::Absent]),
    (WAN_30, &[Cache::Absent, Cache::Cold, Cache::Warm]),
    (WAN_100, &[Cache::Absent, Cache::Cold, Cache::Warm]),
];

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "no cache",
            Self::Cold => "cold",
            Self::Warm => "warm",
        })
    }
}

/// Seconds of a run, and of its parts.
pub(super) struct Ran {
    pub(super) total: f64,
    pub(super) parts: Vec<f64>,
}

impl Ran {
    /// A run that tells the times of its parts.
    pub(super) fn of(work: impl FnOnce() -> Result<Vec<f64>>) -> Result<Self> {
        let mut parts = Vec::new();
        let total = seconds(|| {
            parts = work()?;
            Ok(())
        })?;
        Ok(Self { total, parts })
    }
}

/// A program's work in a directory.
pub(super) trait Work {
    /// Name of its rows.
    const ROW: &'static str;
    /// What of it has times of its own.
    const PARTS: &'static [&'static str];
    /// Whether it is told how often a program waited for the server.
    const WAITS: bool = false;
    /// Name of the row that has only how a warm cache over a WAN compares with a local disk.
    const WARM: Option<&'static str> = None;
    /// Where it is done.
    const PLACES: Places = EVERYWHERE;

    /// It in a few words.
    fn what(&self) -> String;
    /// Makes what it begins with.
    fn fill(&self, dir: &Path) -> Result<()>;
    /// Does it in a directory.
    fn run(&self, dir: &Path) -> Result<Ran>;
    /// Does it on a mount.
    fn run_on(&self, near: &Near) -> Result<Ran> {
        self.run(&near.path)
    }
    /// Takes away what it made.
    fn clean(&self, dir: &Path) -> Result<()>;
    /// Fails unless both directories have the same results.
    fn compare(&self, local: &Path, served: &Path) -> Result<()>;
    /// What it must reach.
    fn goal(&self, line: Line, cache: Cache) -> Option<Goal>;
}

/// What was measured at one place.
#[derive(Default)]
struct Times {
    total: Vec<f64>,
    parts: Vec<Vec<f64>>,
    back: Vec<f64>,
    waits: Vec<f64>,
}

impl Times {
    fn take(&mut self, ran: Ran) {
        self.total.push(ran.total);
        self.parts.resize_with(ran.parts.len(), Vec::new);
        self.parts.iter_mut().zip(ran.parts).for_each(|(all, part)| all.push(part));
    }
}

fn mount(far: &Far, line: Line, cache: Cache, round: usize) -> Result<Near> {
    match cache {
        Cache::Absent => far.mount_without_cache(),
        Cache::Cold | Cache::Warm => far.mount(&format!("cache-{}-{round}", line.mbit), Policy::Back),
    }
}

/// What was measured everywhere: on the local disk, and at each place.
struct All {
    local: Times,
    places: Vec<Vec<Times>>,
}

/// The work once at each place, each time after the same on the local disk.
fn round<W: Work>(work: &W, far: &Far, plain: &Path, all: &mut All, number: usize) -> Result<()> {
    for ((line, caches), times) in W::PLACES.iter().zip(&mut all.places) {
        far.change(*line);
        work.clean(plain)?;
        all.local.take(work.run(plain).context("on the local disk")?);
        for (cache, times) in caches.iter().zip(times) {
            let near = mount(far, *line, *cache, number)?;
            let place = || format!("{line}, {cache}");
            times.take(work.run_on(&near).with_context(place)?);
            times.waits.push(near.session.status().waits as f64);
            times.back.push(seconds(|| near.flush())?);
            near.end()?;
            work.compare(plain, &far.served()).with_context(place)?;
            work.clean(&far.served())?;
        }
    }
    Ok(())
}

/// Rows of every place.
pub(super) fn rows<W: Work>(work: &W, times: usize) -> Result<Vec<Row>> {
    let far = Far::new(WAN_100.mbit, |server| work.fill(server))?;
    let plain = scratch("session-local")?;
    work.fill(plain.path())?;
    // Once, so that programs and inputs are in memory for everybody.
    work.run(plain.path())?;
    let places = W::PLACES.iter().map(|(_, caches)| caches.iter().map(|_| Times::default()).collect());
    let mut all = All { local: Times::default(), places: places.collect() };
    for number in 0..times {
        round(work, &far, plain.path(), &mut all, number)?;
        eprintln!("    round {} of {times}", number + 1);
    }
    let local = Local {
        total: Samples::new(all.local.total),
        parts: all.local.parts.into_iter().map(Samples::new).collect(),
    };
    let mut rows = Vec::new();
    for ((line, caches), times) in W::PLACES.iter().zip(all.places) {
        for (cache, times) in caches.iter().zip(times) {
            rows.extend(rows_of(work, &local, (*line, *cache), times));
        }
    }
    Ok(rows)
}

/// The local disk.
struct Local {
    total: Samples,
    parts: Vec<Samples>,
}

fn rows_of<W: Work>(work: &W, local: &Local, (line, cache): (Line, Cache), times: Times) -> Vec<Row> {
    let case = |more: &str| format!("{}, {line}, {cache}{more}", work.what());
    let row = |more: &str, unit, values| Row::new(W::ROW, case(more), unit, &Samples::new(values));
    let warm = W::WARM.filter(|_| cache == Cache::Warm && line.is_wan()).map(|name| {
        Row::new(name, line.to_string(), "s", &Samples::new(times.total.clone()))
            .against("local disk", &local.total)
    });
    let total = row("", "s", times.total).against("local disk", &local.total);
    let mut rows: Vec<Row> = [Some(total), warm]
        .into_iter()
        .flatten()
        .map(|row| match work.goal(line, cache) {
            Some(goal) => row.goal(goal),
            None => row,
        })
        .collect();
    let parts = W::PARTS.iter().zip(times.parts).zip(&local.parts);
    rows.extend(
        parts
            .map(|((name, times), local)| row(&format!(", {name}"), "s", times).against("local disk", local)),
    );
    if cache != Cache::Absent {
        rows.push(row(", then written back", "s", times.back));
    }
    if W::WAITS {
        rows.push(row(", a program waits for the server", "times", times.waits));
    }
    rows
}
