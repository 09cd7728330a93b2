//! `clone.*`: clones of a guest that runs, eight or a hundred, and what one of them holds in memory when it
//! idles.
//!
//! Memory of a clone: of its QEMU what is not on a tmpfs (shared pages of program and libraries divided by
//! those who map them), plus what its files on the tmpfs occupy (the guest pages it touched), plus its
//! part of what the daemon grew by.

use super::Context;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, Hosts, Machine, Resident, allocated, console};
use anyhow::{Result, anyhow};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};

/// Clones at once, of a guest of this much memory of which the test agent fills a part.
#[derive(Clone, Copy)]
struct Plan {
    count: usize,
    memory: ByteSize,
    buffer_mib: u32,
    work: Work,
}

const EIGHT: Plan = Plan { count: 8, memory: ByteSize(512 << 20), buffer_mib: 64, work: Work::Idle };
/// A hundred test guests that wake twenty times a second are more than two processors under the translator.
const HUNDRED: Plan = Plan { count: 100, memory: ByteSize(128 << 20), buffer_mib: 8, work: Work::Resting };
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

impl Batch {
    /// Bytes of a clone beyond what all of them share.
    fn whole(&self) -> f64 {
        self.qemu + self.pages + self.daemon
    }
}

/// Eight: the clones that were timed are weighed.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let batches = batches(EIGHT, context.times(5, 2))?;
    let part = |case: &str, part: fn(&Batch) -> f64| {
        Row::new("clone.memory", case, "MB", &Samples::of(&batches, |batch| part(batch) / 1e6))
    };
    Ok(vec![
        Row::new("clone.time", "8 until all answer", "s", &Samples::of(&batches, |batch| batch.seconds))
            .goal(Goal::AtMost(3.0)),
        part("QEMU without tmpfs, tmpfs, daemon's growth / 8", Batch::whole).goal(Goal::AtMost(40.0)),
        part("of it QEMU without tmpfs", |batch| batch.qemu),
        part("of it guest pages on tmpfs", |batch| batch.pages),
        part("of it daemon's growth / 8", |batch| batch.daemon),
    ])
}

/// A hundred.
pub(crate) fn hundred(context: &Context) -> Result<Vec<Row>> {
    let batches = batches(HUNDRED, context.times(5, 1))?;
    let seconds = Samples::of(&batches, |batch| batch.seconds);
    let memory = Samples::of(&batches, |batch| batch.whole() / 1e6);
    Ok(vec![
        Row::new("clone.hundred", "time until all answer", "s", &seconds).goal(Goal::AtMost(2.0)),
        Row::new("clone.hundred", "memory of each beyond the template", "MB", &memory)
            .goal(Goal::AtMost(12.0)),
    ])
}

fn batches(plan: Plan, times: usize) -> Result<Vec<Batch>> {
    let hosts = Hosts::start(&["alpha"])?;
    let alpha = hosts.get("alpha")?;
    let options = GuestOptions { buffer_mib: plan.buffer_mib, work: plan.work, ..GuestOptions::default() };
    Machine::small(plan.memory, options).with_blank_disk(hosts.disk(), DISK)?.run(alpha, "origin")?;
    alpha.run(&["checkpoint", "origin", "--tag", "kept"])?;
    (0..times).map(|_| batch(alpha, plan.count)).collect()
}

fn batch(host: &Daemon, count: usize) -> Result<Batch> {
    let before = (Resident::of_daemon(host)?, allocated(host.run_dir())?);
    let begun = Instant::now();
    host.run(&["clone", "kept", "--count", &count.to_string(), "--prefix", "twin"])?;
    wait_all(host, count)?;
    let seconds = begun.elapsed().as_secs_f64();
    sleep(IDLE);
    let each = |bytes: u64| bytes as f64 / count as f64;
    let batch = Batch {
        seconds,
        qemu: each(Resident::of_machines(host, "twin-")?.0),
        pages: each(allocated(host.run_dir())?.saturating_sub(before.1)),
        daemon: each(Resident::of_daemon(host)?.0.saturating_sub(before.0.0)),
    };
    names(count).try_for_each(|name| host.discard(&name))?;
    Ok(batch)
}

/// Waits until every clone has answered.
fn wait_all(host: &Daemon, count: usize) -> Result<()> {
    thread::scope(|scope| {
        let answer = |name: String| Ok(console(host, &name)?.wait_ready(PATIENCE)?);
        let waiting: Vec<_> = names(count).map(|name| scope.spawn(move || answer(name))).collect();
        let panicked = |_| Err(anyhow!("a thread that waited for a clone panicked"));
        waiting.into_iter().try_for_each(|one| one.join().unwrap_or_else(panicked))
    })
}

fn names(count: usize) -> impl Iterator<Item = String> {
    (1..=count).map(|number| format!("twin-{number}"))
}
