//! `stall.other`: how long a guest that runs lazily waits for a page at most, while one of the three hosts
//! that have its capsule is dark.
//!
//! It reads all of its memory meanwhile. The cable of one holder after the other is pulled, without a word to
//! anybody.

use super::stops::StopWatch;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Hosts, Machine, console};
use crate::run::Context;
use anyhow::{Result, anyhow};
use std::thread::{sleep, spawn};
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::GuestOptions;

const MEMORY: ByteSize = ByteSize(384 << 20);
/// What the guest reads.
const BUFFER_MIB: u32 = 192;
/// Of the host that it runs on: pages arrive for some seconds.
const MBIT: u64 = 400;
const HOLDERS: [&str; 3] = ["alpha", "beta", "gamma"];
const PATIENCE: Duration = Duration::from_secs(120);
/// From the resume until the cable is pulled.
const BEFORE: Duration = Duration::from_millis(700);

/// The row.
pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let mut hosts = Hosts::start(&["alpha", "beta", "gamma", "delta"])?;
    let alpha = hosts.get("alpha")?;
    let options = GuestOptions { buffer_mib: BUFFER_MIB, ..GuestOptions::default() };
    Machine::small(MEMORY, options).run(alpha, "origin")?;
    alpha.run(&["checkpoint", "origin", "--tag", "kept"])?;
    alpha.discard("origin")?;
    for holder in &HOLDERS[1..] {
        alpha.run(&["push", "kept", holder])?;
    }
    hosts.lab.limit("delta", MBIT)?;
    let mut longest = Vec::new();
    for time in 0..context.times(6, 3) {
        let dark = HOLDERS[time % HOLDERS.len()];
        let stopped = once(&hosts, dark)?;
        eprintln!("    {dark} is dark: the longest wait is {stopped:.0} ms");
        longest.push(stopped);
        // Its host is to have none of the pages again.
        renew(&mut hosts)?;
    }
    let case = format!("{BUFFER_MIB} MiB read by a guest at {MBIT} Mbit/s, one of three holders dark");
    let longest = Samples::new(longest);
    let row = Row::new("stall.other", case, "ms", &longest).percentile(100, &longest);
    Ok(vec![row.goal(Goal::AtMost(300.0))])
}

/// Gives delta an empty store, and with it another key.
fn renew(hosts: &mut Hosts) -> Result<()> {
    HOLDERS.iter().try_for_each(|name| hosts.get(name)?.run(&["trust", "rm", "delta"]).map(drop))?;
    hosts.get_mut("delta")?.renew()?;
    let delta = hosts.get("delta")?;
    for name in HOLDERS {
        let holder = hosts.get(name)?;
        holder.run(&["trust", "add", "delta", &delta.key()?, delta.address()])?;
        delta.run(&["trust", "add", name, &holder.key()?, holder.address()])?;
    }
    Ok(())
}

/// The longest wait of a guest that reads all of its memory.
fn once(hosts: &Hosts, dark: &str) -> Result<f64> {
    let delta = hosts.get("delta")?;
    delta.run(&["resume", "alpha:kept", "--name", "copy"])?;
    let mut agent = console(delta, "copy")?;
    let reads = spawn(move || -> Result<()> {
        agent.wait_ready(PATIENCE)?;
        Ok(agent.check().map(drop)?)
    });
    let watch = StopWatch::start(delta, "copy")?;
    sleep(BEFORE);
    hosts.lab.unplug(dark)?;
    let read = reads.join().map_err(|_| anyhow!("a thread that waited for a guest panicked"))?;
    let longest = watch.end();
    hosts.lab.replug(dark)?;
    read?;
    longest
}
