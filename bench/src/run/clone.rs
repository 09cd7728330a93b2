//! `clone.*`: eight clones of a guest that runs, and what one of them holds in memory when it idles.
//!
//! Memory of a clone: of its QEMU what is not on a tmpfs (shared pages of program and libraries divided by
//! those who map them), plus what its files on the tmpfs occupy (the guest pages it touched), plus an eighth
//! of what the daemon grew by.

use super::Context;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, Hosts, Machine, Resident, allocated, console};
use anyhow::{Result, anyhow};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::GuestOptions;

const COUNT: usize = 8;
const MEMORY: ByteSize = ByteSize(512 << 20);
const DISK: ByteSize = ByteSize(256 << 20);
/// How long clones idle before their memory is looked at.
const IDLE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(60);

/// One batch of clones.
struct Batch {
    seconds: f64,
    /// Bytes a clone: its QEMU, its guest pages, its part of the daemon.
    qemu: f64,
    pages: f64,
    daemon: f64,
}

/// Both rows: the clones that were timed are weighed.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha"])?;
    let alpha = hosts.get("alpha")?;
    let options = GuestOptions { buffer_mib: 64, ..GuestOptions::default() };
    Machine::small(MEMORY, options).with_blank_disk(hosts.disk(), DISK)?.run(alpha, "origin")?;
    alpha.run(&["checkpoint", "origin", "--tag", "kept"])?;
    let batches = (0..context.times(5, 2)).map(|_| batch(alpha)).collect::<Result<Vec<_>>>()?;
    let part = |case: &str, part: fn(&Batch) -> f64| {
        Row::new("clone.memory", case, "MB", &Samples::of(&batches, |batch| part(batch) / 1e6))
    };
    Ok(vec![
        Row::new("clone.time", "8 until all answer", "s", &Samples::of(&batches, |batch| batch.seconds))
            .goal(Goal::AtMost(3.0)),
        part("QEMU without tmpfs, tmpfs, daemon's growth / 8", |b| b.qemu + b.pages + b.daemon)
            .goal(Goal::AtMost(40.0)),
        part("of it QEMU without tmpfs", |batch| batch.qemu),
        part("of it guest pages on tmpfs", |batch| batch.pages),
        part("of it daemon's growth / 8", |batch| batch.daemon),
    ])
}

fn batch(host: &Daemon) -> Result<Batch> {
    let before = (Resident::of_daemon(host)?, allocated(host.run_dir())?);
    let begun = Instant::now();
    host.run(&["clone", "kept", "--count", &COUNT.to_string(), "--prefix", "twin"])?;
    wait_all(host)?;
    let seconds = begun.elapsed().as_secs_f64();
    sleep(IDLE);
    let each = |bytes: u64| bytes as f64 / COUNT as f64;
    let batch = Batch {
        seconds,
        qemu: each(Resident::of_machines(host, "twin-")?.0),
        pages: each(allocated(host.run_dir())?.saturating_sub(before.1)),
        daemon: each(Resident::of_daemon(host)?.0.saturating_sub(before.0.0)),
    };
    names().try_for_each(|name| host.discard(&name))?;
    Ok(batch)
}

/// Waits until every clone has answered.
fn wait_all(host: &Daemon) -> Result<()> {
    thread::scope(|scope| {
        let answer = |name: String| Ok(console(host, &name)?.wait_ready(PATIENCE)?);
        let waiting: Vec<_> = names().map(|name| scope.spawn(move || answer(name))).collect();
        let panicked = |_| Err(anyhow!("a thread that waited for a clone panicked"));
        waiting.into_iter().try_for_each(|one| one.join().unwrap_or_else(panicked))
    })
}

fn names() -> impl Iterator<Item = String> {
    (1..=COUNT).map(|number| format!("twin-{number}"))
}
