//! `checkpoint.*`: what it costs to keep a running Debian guest that compiles, from the second checkpoint on.
//!
//! The bytes are those by which the whole store grows: memory, disk, device state, trees. The peer has only
//! the two memory images, as they were at the two checkpoints, and makes a patch of them.

use super::{Context, patch};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, Hosts, Machine, number};
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};

const MEMORY: ByteSize = ByteSize(512 << 20);
/// Until the compiler is in full swing.
const WARM_UP: Duration = Duration::from_secs(20);
/// From the beginning of a checkpoint to the beginning of the next.
const APART: Duration = Duration::from_secs(10);
const NAME: &str = "builder";

/// What one checkpoint cost.
struct Taken {
    pause_ms: f64,
    total_ms: f64,
    waited_ms: f64,
    bytes: f64,
}

/// All rows: they come of the same checkpoints.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha"])?;
    let alpha = hosts.get("alpha")?;
    let options = GuestOptions { buffer_mib: 1, work: Work::Compile, ..GuestOptions::default() };
    Machine::debian(MEMORY, options)?.run(alpha, NAME)?;
    sleep(WARM_UP);
    let later = take_all(alpha, context.times(20, 4))?;
    alpha.discard(NAME)?;
    let patches = patches(alpha, hosts.disk(), later.len())?;

    let pause = Samples::of(&later, |taken| taken.pause_ms);
    let bytes = Samples::of(&later, |taken| taken.bytes / 1e6);
    Ok(vec![
        Row::new("checkpoint.pause", "p50", "ms", &pause).goal(Goal::AtMost(3.0)),
        Row::new("checkpoint.pause", "p99", "ms", &pause).percentile(99, &pause).goal(Goal::AtMost(8.0)),
        Row::new("checkpoint.time", "until durable", "ms", &Samples::of(&later, |taken| taken.total_ms))
            .goal(Goal::AtMost(1000.0)),
        Row::new(
            "checkpoint.time",
            "of the whole command",
            "ms",
            &Samples::of(&later, |taken| taken.waited_ms),
        ),
        Row::new("checkpoint.bytes", "ten seconds apart", "MB", &bytes)
            .against("zstd -3 --patch-from, memory only", &Samples::new(patches))
            .goal(Goal::PeerAtMost(1.2)),
    ])
}

/// A first checkpoint, which keeps everything, and then `count` more, which are measured.
fn take_all(host: &Daemon, count: usize) -> Result<Vec<Taken>> {
    let mut begun = Instant::now();
    take(host, 0)?;
    let mut later = Vec::new();
    for number in 1..=count {
        sleep((begun + APART).saturating_duration_since(Instant::now()));
        begun = Instant::now();
        later.push(take(host, number)?);
    }
    Ok(later)
}

fn take(host: &Daemon, version: usize) -> Result<Taken> {
    let (result, waited_ms) = host.timed(&["checkpoint", NAME, "--tag", &tag(version)])?;
    let (pause_ms, total_ms) = (number(&result, "pause_ms")?, number(&result, "total_ms")?);
    Ok(Taken { pause_ms, total_ms, waited_ms, bytes: number(&result, "bytes_added")? })
}

/// Megabytes of a patch from each memory image to the next one, `count` of them.
fn patches(host: &Daemon, folder: &Path, count: usize) -> Result<Vec<f64>> {
    let mut before = export(host, folder, 0)?;
    let mut patches = Vec::new();
    for version in 1..=count {
        let after = export(host, folder, version)?;
        patches.push(patch::bytes(&before, &after)? as f64 / 1e6);
        std::fs::remove_file(&before)?;
        before = after;
    }
    Ok(patches)
}

fn export(host: &Daemon, folder: &Path, version: usize) -> Result<PathBuf> {
    let path = folder.join(format!("{version}.mem"));
    let to = path.to_str().context("a path that is not UTF-8")?;
    host.run(&["export", &tag(version), to, "--format", "raw", "--image", "memory"])?;
    Ok(path)
}

fn tag(version: usize) -> String {
    format!("version-{version}")
}
