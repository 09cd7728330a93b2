//! `migrate.rate`, `migrate.cost.cpu`, `migrate.1t`: how fast memory moves over a link that is no limit, what
//! it costs, and whether the size of a disk costs anything by itself.
//!
//! The guest has its memory full of noise, so that nothing is gained by compression or by what the target
//! has. Both daemons share this machine's processors.

use super::Context;
use super::disk_time::{hide, make_disk};
use super::migrate::Cost;
use super::move_cost::Meter;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{Hosts, Machine, number};
use anyhow::{Context as _, Result};
use std::path::Path;
use whimbrel_core::{ByteSize, PAGE_SIZE};
use whimbrel_testkit::guest::GuestOptions;

const MEMORY: ByteSize = ByteSize(2 << 30);
const NOISE_MIB: u32 = 1536;
/// Sizes of a disk of which a GiB is used.
const DISKS: [(&str, u64); 2] = [("16 GiB", 16 << 30), ("1 TiB", 1 << 40)];
const USED: u64 = 1 << 30;
const NAME: &str = "big";

/// One move.
struct Moved {
    seconds: f64,
    bytes: f64,
    cpu: f64,
}

/// Rate and cost, of a fresh guest each time: one that comes back finds its pages where it was.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha", "beta"])?;
    let options = GuestOptions { buffer_mib: NOISE_MIB, ..GuestOptions::default() };
    let machine = Machine::small(MEMORY, options);
    let moves = (0..context.times(10, 2)).map(|_| moved(&hosts, &machine)).collect::<Result<Vec<_>>>()?;
    let case = format!("2 GiB, {NOISE_MIB} MiB of it noise, no limit");
    let rate = Samples::of(&moves, |moved| moved.bytes / 1e9 / moved.seconds);
    let cpu = Samples::of(&moves, |moved| moved.cpu / (moved.bytes / (1_u64 << 30) as f64));
    Ok(vec![
        Row::new("migrate.rate", case, "GB/s", &rate).goal(Goal::AtLeast(1.2)),
        Row::new("migrate.cost.cpu", "both daemons, a GiB of noise", "s", &cpu).goal(Goal::AtMost(2.0)),
    ])
}

/// A disk that is large and almost empty beside a small one.
pub(crate) fn large_disk(context: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha", "beta"])?;
    let made = DISKS.map(|(name, size)| {
        let image = hosts.disk().join(name);
        make_disk(&image, ByteSize(size), USED).map(|()| image)
    });
    let [small, large] = made;
    let (small, large) = (small?, large?);
    let with_disk = |image: &Path| {
        hide(hosts.get("beta")?, image)?;
        let mut machine = Machine::small(ByteSize(256 << 20), GuestOptions::default());
        machine.disks = vec![image.to_owned()];
        Ok(moved(&hosts, &machine)?.seconds)
    };
    let (ours, theirs) = in_turn(context.times(5, 1), || with_disk(&large), || with_disk(&small))?;
    let row = Row::new("migrate.1t", "1 TiB of which 1 GiB is used", "s", &Samples::new(ours));
    Ok(vec![row.against("16 GiB", &Samples::new(theirs)).goal(Goal::PeerAtMost(1.1))])
}

fn moved(hosts: &Hosts, machine: &Machine) -> Result<Moved> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    machine.run(alpha, NAME)?;
    let meter = Meter::start(&[alpha, beta])?;
    let result = alpha.json(&["migrate", NAME, "beta"])?;
    let Cost { cpu, .. } = meter.stop()?;
    beta.discard(NAME)?;
    let rounds = result["result"]["rounds"].as_array().context("no rounds")?;
    let pages: u64 = rounds.iter().filter_map(|round| round["pages"].as_u64()).sum();
    let bytes = (pages * PAGE_SIZE as u64) as f64;
    Ok(Moved { seconds: number(&result, "total_ms")? / 1e3, bytes, cpu })
}
