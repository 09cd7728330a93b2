//! `store.peers`: what it costs to keep a machine's memory and a later version of it, beside programs that
//! keep files.
//!
//! The same two images for all; each repetition begins with an empty repository.

use super::Context;
use super::images;
use super::keeper::{Keeper, Peer, PeerKind};
use super::ours::Ours;
use crate::harness::{Goal, Row, Samples, scratch};
use anyhow::{Context as _, Result, ensure};
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use tempfile::TempDir;

/// What one keeper did with the two images.
struct Outcome {
    first: Duration,
    later: Duration,
    back: Duration,
    first_bytes: u64,
    added_bytes: u64,
}

/// Both images, against every peer: bytes and time.
pub(crate) fn peers(context: &Context) -> Result<Vec<Row>> {
    let pair = images::pair(context)?;
    let scratch = scratch("store")?;
    let times = context.times(3, 1);
    let ours = outcomes(times, || Ok(Box::new(Ours::new(scratch.path())?)), &pair)?;
    let mut rows = Vec::new();
    for kind in PeerKind::ALL {
        let name = Peer::new(kind, scratch.path())?.name();
        let theirs = outcomes(times, || Ok(Box::new(Peer::new(kind, scratch.path())?)), &pair)?;
        rows.extend(compare(&ours, name, &theirs));
    }
    Ok(rows)
}

fn compare(ours: &[Outcome], name: &str, theirs: &[Outcome]) -> Vec<Row> {
    type Measure = fn(&Outcome) -> f64;
    // What is kept of the first image may be a tenth more than the smallest peer's; all else at most the
    // peer's.
    let cases: [(&str, &'static str, Measure, f64); 5] = [
        ("first image, kept", "MB", |outcome| outcome.first_bytes as f64 / 1e6, 1.1),
        ("later image, added", "MB", |outcome| outcome.added_bytes as f64 / 1e6, 1.0),
        ("first image, time", "s", |outcome| outcome.first.as_secs_f64(), 1.0),
        ("later image, time", "s", |outcome| outcome.later.as_secs_f64(), 1.0),
        ("later image, back", "s", |outcome| outcome.back.as_secs_f64(), 1.0),
    ];
    let samples =
        |outcomes: &[Outcome], measure: Measure| Samples::new(outcomes.iter().map(measure).collect());
    let row = |(case, unit, measure, times)| {
        let row = Row::new("store.peers", case, unit, &samples(ours, measure));
        row.against(name, &samples(theirs, measure)).goal(Goal::PeerAtMost(times))
    };
    cases.map(row).into()
}

fn outcomes(
    times: usize,
    mut make: impl FnMut() -> Result<Box<dyn Keeper>>,
    (first, later): &(PathBuf, PathBuf),
) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for _ in 0..times {
        let mut keeper = make()?;
        let empty = keeper.bytes()?;
        let first = keeper.save(first, "first")?;
        let after_first = keeper.bytes()?;
        let later_took = keeper.save(later, "later")?;
        let first_bytes = after_first - empty;
        let added_bytes = keeper.bytes()? - after_first;
        let back = back(&mut *keeper, later)?;
        outcomes.push(Outcome { first, later: later_took, back, first_bytes, added_bytes });
    }
    Ok(outcomes)
}

/// How long it takes to have `image`, kept as `later`, back. What came back is compared, outside the time.
fn back(keeper: &mut dyn Keeper, image: &Path) -> Result<Duration> {
    let place = TempDir::new_in(keeper.folder().parent().context("a repository lies in a folder")?)?;
    let to = place.path().join("back");
    let took = keeper.restore("later", &to)?;
    let same =
        Command::new("cmp").arg("--silent").arg(image).arg(&to).status().context("cannot start cmp")?;
    ensure!(same.success(), "{} gave back something else than it was given", keeper.name());
    Ok(took)
}
