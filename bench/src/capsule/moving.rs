//! `moving.*`: active capsules move by suspend and resume (the paper's 5.2 and figure 6).
//!
//! Workloads: a compiler, a web server with a client, a simulation in memory. What is there before: nothing,
//! or the golden disk in the hash cache. Ballooned or not. Migration is until the guest answers at the other
//! host, execution until all of it is there while it works on. Without hashing and demand paging all of its
//! memory would travel first: that is computed from its memory packed by `zstd -3`.

use super::awaited::arrive;
use super::desk;
use super::sites::{DSL, NAME, Sites, gigabit, lan};
use super::tools::{without_zeros, zstd_bytes};
use crate::harness::{Row, Samples};
use crate::hosts::{GUEST, Machine};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{DebianGuest, GuestOptions};
use whimbrel_testkit::lab::LinkConfig;

const INIT: &str = include_str!("moving-init.sh");
const LOADS: [&str; 3] = ["compile", "web", "simulation"];
const MEMORY: ByteSize = ByteSize(256 << 20);
const WARM_UP: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(1800);
const MB: f64 = 1e6;

/// The time and the bytes of a move, until the guest answered and until all of it was there.
struct Moved {
    answered: (f64, u64),
    whole: Option<(f64, u64)>,
}

/// The rows, one a bar of the paper's figure. A quick run takes the LAN only.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for load in LOADS.into_iter().take(context.times(3, 2)) {
        let mut sites = Sites::start()?;
        let golden = desk::disk(INIT)?;
        start(&sites, load, &golden)?;
        let alone = packed_memory(&sites)?;
        let mut lines = vec![("100 Mbit/s", lan())];
        if !context.quick {
            lines.push(("384 kbit/s", DSL));
        }
        for (line, config) in lines {
            for (tag, balloon) in [("active", ""), ("squeezed", ", ballooned")] {
                for primed in [false, true] {
                    fresh(&mut sites, &golden, primed)?;
                    let moved = bring(&sites, tag, config, line == "100 Mbit/s")?;
                    let hash = if primed { "primed" } else { "empty cache" };
                    rows.extend(rows_of(&format!("{load}, {line}, {hash}{balloon}"), &moved, alone, config));
                }
            }
        }
    }
    Ok(rows)
}

fn rows_of(case: &str, moved: &Moved, alone: u64, line: LinkConfig) -> Vec<Row> {
    let one = |number: f64| Samples::new(vec![number]);
    let (seconds, bytes) = moved.answered;
    eprintln!("    {case}: {seconds:.1} s, {bytes} bytes; then {:?}; packed memory {alone}", moved.whole);
    let on_line = alone as f64 * 8.0 / line.bits_per_second as f64;
    let peer = "zstd -3 of its memory first (computed from bytes)";
    let row = |name, case: String, unit, number| Row::new(name, case, unit, &one(number));
    let mut rows = vec![
        row("moving.time", format!("{case}: migration"), "s", seconds).against(peer, &one(on_line)),
        row("moving.bytes", format!("{case}: migration"), "MB", bytes as f64 / MB)
            .against(peer, &one(alone as f64 / MB)),
    ];
    if let Some((seconds, bytes)) = moved.whole {
        rows.push(row("moving.time", format!("{case}: all there"), "s", seconds));
        rows.push(row("moving.bytes", format!("{case}: all there"), "MB", bytes as f64 / MB));
    }
    rows
}

/// At alpha: the guest at work, kept as it is and ballooned.
fn start(sites: &Sites, load: &str, golden: &Path) -> Result<()> {
    let DebianGuest { kernel, initrd, .. } = DebianGuest::get()?;
    // The kernel's command line has no other place for a word of our own than behind the last option.
    let address = Some(format!("{GUEST}/24 load={load}"));
    let options = GuestOptions { address, buffer_mib: 1, ..GuestOptions::default() };
    let disks = vec![golden.to_owned()];
    let machine = Machine { memory: MEMORY, boot: Some((kernel, initrd)), options, disks };
    machine.run(sites.alpha(), NAME)?;
    // The kernel alone, for the other host to have before.
    sites.alpha().run(&["checkpoint", NAME, "--disks-only", "--tag", "boot"])?;
    sleep(WARM_UP);
    sites.alpha().run(&["checkpoint", NAME, "--tag", "active"])?;
    sites.alpha().run(&["checkpoint", NAME, "--tag", "squeezed", "--balloon", "auto"])?;
    sites.alpha().discard(NAME)
}

/// A beta that has kernel and initial RAM disk, and knows the golden disk if it is to be primed.
fn fresh(sites: &mut Sites, golden: &Path, primed: bool) -> Result<()> {
    sites.set_link(gigabit());
    sites.fresh_beta()?;
    sites.beta().run(&["pull", "alpha:boot", "--lazy"])?;
    if primed {
        sites.beta().run(&["cache", "add", golden.to_str().context("a path that is not UTF-8")?])?;
    }
    Ok(())
}

fn bring(sites: &Sites, tag: &str, line: LinkConfig, to_the_end: bool) -> Result<Moved> {
    sites.set_link(line);
    let (begun, before) = (Instant::now(), sites.link_bytes());
    let from = format!("alpha:{tag}");
    let mut words = vec!["resume", &from, "--name", "copy"];
    if to_the_end {
        words.extend(["--fetch-rest"]);
    }
    let arrival = arrive(sites, &[&words], PATIENCE)?;
    let so_far = || (begun.elapsed().as_secs_f64(), sites.link_bytes() - before);
    let whole = if to_the_end { Some(wait_whole(sites).map(|()| so_far())?) } else { None };
    sites.beta().discard("copy")?;
    Ok(Moved { answered: (arrival.answered, arrival.bytes), whole })
}

/// Waits until nothing of the machine is elsewhere.
fn wait_whole(sites: &Sites) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let machines = sites.beta().json(&["ps"])?;
        if machines[0]["state"]["kind"] == "running" {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "it does not become whole: {machines}");
        sleep(Duration::from_millis(50));
    }
}

fn packed_memory(sites: &Sites) -> Result<u64> {
    let image = sites.disk().join("memory");
    let to = image.to_str().context("a path that is not UTF-8")?;
    sites.alpha().run(&["export", "active", to, "--format", "raw", "--image", "memory"])?;
    let pages = without_zeros(&image)?;
    let bytes = zstd_bytes(&pages)?;
    std::fs::remove_file(pages)?;
    std::fs::remove_file(image)?;
    Ok(bytes)
}
