//! `first.bytes`: a guest's first capsule comes to a host that has only the golden disk the guest was made
//! from.
//!
//! The peer is the guest's memory alone, pages of zeros left out, packed by `zstd -3`; ours is all that
//! crosses the link: memory, what the guest changed on its disk, and, told apart, the device state. The guest
//! boots from its own disk.

use super::sites::{NAME, Sites, check_whole};
use super::tools::{without_zeros, zstd_bytes};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::Machine;
use crate::run::Context;
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};
use whimbrel_testkit::lab::LinkConfig;

const MEMORY: ByteSize = ByteSize(512 << 20);
/// Until the compiler is in full swing.
const WARM_UP: Duration = Duration::from_secs(20);
const TAG: &str = "first";
const MB: f64 = 1e6;

/// What crossed the link: what describes the capsule, then all the rest.
struct Came {
    described: f64,
    rest: f64,
}

/// How the golden disk is known at beta.
const WAYS: [(&str, Prime); 3] = [
    ("golden disk in the hash cache", |disk, _, sites| sites.beta().run(&["cache", "add", disk]).map(drop)),
    ("golden disk imported", |disk, at, sites| {
        sites.beta().run(&["import", disk, &format!("golden-{at}")]).map(drop)
    }),
    ("nothing there", |_, _, _| Ok(())),
];

type Prime = fn(&str, usize, &Sites) -> Result<()>;

/// 10 Mbit/s, 20 ms there and back: an uplink at home, where bytes count.
fn link() -> LinkConfig {
    LinkConfig::new(10, Duration::from_millis(10))
}

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let mut sites = Sites::start()?;
    let options = GuestOptions { buffer_mib: 1, work: Work::Compile, ..GuestOptions::default() };
    let machine = Machine::installed(MEMORY, options, sites.disk())?;
    let text = |disk: &PathBuf| disk.to_str().map(str::to_owned).context("a path that is not UTF-8");
    let golden = machine.disks.iter().map(text).collect::<Result<Vec<_>>>()?;
    machine.run(sites.alpha(), NAME)?;
    sleep(WARM_UP);
    sites.alpha().run(&["checkpoint", NAME, "--tag", TAG])?;
    sites.alpha().discard(NAME)?;
    let peer = Samples::new(vec![packed_memory(&sites)? / MB]);
    let mut rows = Vec::new();
    // Without anything there it takes minutes.
    for (case, prime) in WAYS.into_iter().take(if context.quick { 2 } else { 3 }) {
        let mut came = Vec::new();
        for _ in 0..context.times(3, 1) {
            sites.fresh_beta()?;
            golden.iter().enumerate().try_for_each(|(at, disk)| prime(disk, at, &sites))?;
            sites.set_link(link());
            came.push(fetch(&sites)?);
        }
        rows.extend(rows_of(case, &came, &peer));
    }
    Ok(rows)
}

fn rows_of(case: &str, came: &[Came], peer: &Samples) -> [Row; 2] {
    let name = "zstd -3 of its non-zero memory";
    let row = |case: String, number: fn(&Came) -> f64| {
        Row::new("first.bytes", case, "MB", &Samples::of(came, number)).against(name, peer)
    };
    let all = row(case.to_owned(), |it| (it.described + it.rest) / MB);
    let all = if case == WAYS[2].0 { all } else { all.goal(Goal::PeerAtMost(0.6)) };
    [all, row(format!("{case}; of it device state"), |it| it.described / MB)]
}

fn fetch(sites: &Sites) -> Result<Came> {
    let from = format!("alpha:{TAG}");
    let (_, described) = sites.counting(|| sites.beta().json(&["pull", &from, "--lazy"]))?;
    let (pulled, rest) = sites.counting(|| sites.beta().json(&["pull", &from]))?;
    eprintln!("    {described} bytes describe it, then {rest}: {}", pulled["result"]);
    check_whole(&pulled, TAG)?;
    Ok(Came { described: described as f64, rest: rest as f64 })
}

fn packed_memory(sites: &Sites) -> Result<f64> {
    let image = sites.disk().join("memory");
    let to = image.to_str().context("a path that is not UTF-8")?;
    sites.alpha().run(&["export", TAG, to, "--format", "raw", "--image", "memory"])?;
    let pages = without_zeros(Path::new(to))?;
    let bytes = zstd_bytes(&pages)?;
    std::fs::remove_file(pages)?;
    std::fs::remove_file(image)?;
    Ok(bytes as f64)
}
