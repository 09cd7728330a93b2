//! `store.*`: what it costs to keep a machine's memory and to have it back, beside programs that keep files.
//!
//! The same two images for all; each repetition begins with an empty repository. Throughput is of the image's whole
//! length, zero pages included, because that is what a user has and waits for.

use super::Context;
use super::images;
use super::keeper::{Keeper, Peer, PeerKind};
use super::ours::Ours;
use crate::harness::{Goal, Row, Samples, alternate, scratch};
use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// What one keeper did with the two images.
struct Outcome {
    first: Duration,
    later: Duration,
    first_bytes: u64,
    added_bytes: u64,
}

/// Keep the first image in an empty repository.
pub(crate) fn ingest(context: &Context) -> Result<Vec<Row>> {
    let (first, _) = images::pair(context)?;
    let scratch = scratch("store")?;
    let ours = || save_once(&mut Ours::new(scratch.path())?, &first);
    let peer = || save_once(&mut Peer::new(PeerKind::Restic, scratch.path())?, &first);
    let (ours, theirs) = alternate(context.times(5, 2), ours, peer)?;
    let row = Row::new("store.ingest", "empty store", "MB/s", &ours).against("restic", &theirs);
    Ok(vec![row.goal(Goal::PeerAtLeast(1.0))])
}

/// Have the later image back.
pub(crate) fn restore(context: &Context) -> Result<Vec<Row>> {
    let (first, later) = images::pair(context)?;
    let scratch = scratch("store")?;
    let mut ours = Ours::new(scratch.path())?;
    let mut peer = Peer::new(PeerKind::Restic, scratch.path())?;
    for keeper in [&mut ours as &mut dyn Keeper, &mut peer] {
        keeper.save(&first, "first")?;
        keeper.save(&later, "later")?;
    }
    let times = context.times(5, 2);
    let (ours, theirs) = alternate(
        times,
        || restore_once(&mut ours, &later, scratch.path()),
        || restore_once(&mut peer, &later, scratch.path()),
    )?;
    let row = Row::new("store.restore", "later version", "MB/s", &ours).against("restic", &theirs);
    Ok(vec![row.goal(Goal::PeerAtLeast(1.0))])
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
    let cases: [(&str, &'static str, Measure); 4] = [
        ("first image, kept", "MB", |outcome| outcome.first_bytes as f64 / 1e6),
        ("later image, added", "MB", |outcome| outcome.added_bytes as f64 / 1e6),
        ("first image, time", "s", |outcome| outcome.first.as_secs_f64()),
        ("later image, time", "s", |outcome| outcome.later.as_secs_f64()),
    ];
    let samples =
        |outcomes: &[Outcome], measure: Measure| Samples::new(outcomes.iter().map(measure).collect());
    let row = |(case, unit, measure)| {
        let row = Row::new("store.peers", case, unit, &samples(ours, measure));
        row.against(name, &samples(theirs, measure)).goal(Goal::PeerAtMost(1.0))
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
        let later = keeper.save(later, "later")?;
        let first_bytes = after_first - empty;
        let added_bytes = keeper.bytes()? - after_first;
        outcomes.push(Outcome { first, later, first_bytes, added_bytes });
    }
    Ok(outcomes)
}

/// MB/s of keeping `image`.
fn save_once(keeper: &mut dyn Keeper, image: &Path) -> Result<f64> {
    let took = keeper.save(image, "first")?;
    Ok(std::fs::metadata(image)?.len() as f64 / 1e6 / took.as_secs_f64())
}

/// MB/s of having `image`, kept as `later`, back. What came back is compared, outside the time.
fn restore_once(keeper: &mut dyn Keeper, image: &Path, scratch: &Path) -> Result<f64> {
    let place = TempDir::new_in(scratch)?;
    let to = place.path().join("back");
    let took = keeper.restore("later", &to)?;
    let same =
        Command::new("cmp").arg("--silent").arg(image).arg(&to).status().context("cannot start cmp")?;
    ensure!(same.success(), "{} gave back something else than it was given", keeper.name());
    Ok(std::fs::metadata(image)?.len() as f64 / 1e6 / took.as_secs_f64())
}
