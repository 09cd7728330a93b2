//! `vm.start`, `vm.checkpoint` and `vm.epoch`: what a host pays for processes that its machines have of their
//! own.
//!
//! Two hosts of the same build, in turn: `alpha` has such processes, `beta` has none.

use super::Context;
use super::protect::{Site, figure};
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{Daemon, Hosts, Machine, number};
use anyhow::Result;
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};

const SMALL: ByteSize = ByteSize(192 << 20);
/// Of a machine whose first checkpoint is timed; the guest fills most of it with what does not compress.
const LARGE: ByteSize = ByteSize(1 << 30);
const FILLED_MIB: u32 = 800;
/// Time of some 160 epochs of 50 ms, of one length whatever waits for them.
const WINDOW: Duration = Duration::from_secs(8);
const CALM: [&str; 4] = ["--lease", "5s", "--max-epoch-factor", "1"];
/// What a protected guest writes.
const WORK: Work = Work::Dirty { region_mib: 8, pages_per_second: 1000, bytes_per_page: 64 };
const PEER: &str = "a host without processes for machines";

fn hosts() -> Result<Hosts> {
    let mut hosts = Hosts::start(&["alpha", "beta"])?;
    let beta = hosts.get_mut("beta")?;
    beta.refuse_machine_processes();
    beta.restart()?;
    Ok(hosts)
}

/// `vm.start`.
pub(super) fn start(context: &Context) -> Result<Vec<Row>> {
    let hosts = hosts()?;
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    for host in [alpha, beta] {
        let options = GuestOptions { address: None, buffer_mib: 16, work: Work::Idle };
        Machine::small(SMALL, options).run(host, "web")?;
        resumed(host)?;
    }
    let (with, without) = in_turn(context.times(20, 5), || resumed(alpha), || resumed(beta))?;
    let added = with.iter().zip(&without).map(|(with, without)| with - without).collect();
    let row = |case: &str, samples| Row::new("vm.start", case, "ms", &Samples::new(samples));
    Ok(vec![
        row("what a warm resume takes longer", added).goal(Goal::AtMost(5.0)),
        row("a warm resume", with).against(PEER, &Samples::new(without)),
    ])
}

/// Milliseconds of a resume right after a suspend.
fn resumed(host: &Daemon) -> Result<f64> {
    host.run(&["suspend", "web"])?;
    number(&host.json(&["resume", "web"])?, "to_running_ms")
}

/// `vm.checkpoint`.
pub(super) fn checkpoint(context: &Context) -> Result<Vec<Row>> {
    let hosts = hosts()?;
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    let (with, without) = in_turn(context.times(5, 2), || first(alpha), || first(beta))?;
    let row = Row::new("vm.checkpoint", "first checkpoint of 1 GiB", "MB/s", &Samples::new(with));
    Ok(vec![row.against(PEER, &Samples::new(without)).goal(Goal::PeerAtLeast(0.95))])
}

/// Rate of the first checkpoint of a new machine.
fn first(host: &Daemon) -> Result<f64> {
    let options = GuestOptions { address: None, buffer_mib: FILLED_MIB, work: Work::Idle };
    Machine::small(LARGE, options).run(host, "large")?;
    let taken = host.json(&["checkpoint", "large"])?;
    let seconds = number(&taken, "total_ms")? / 1e3;
    host.discard("large")?;
    Ok(LARGE.0 as f64 / seconds / 1e6)
}

/// `vm.epoch`: pause and output of the same guest, protected by hosts with and without such processes.
pub(super) fn epoch(context: &Context) -> Result<Vec<Row>> {
    let (alpha, beta) = (Site::small(SMALL, WORK)?, Site::small_without_processes(SMALL, WORK)?);
    let (with, without) = in_turn(context.times(10, 2), || window(&alpha), || window(&beta))?;
    let row = |case: &str, number: usize| {
        let of = |seen: &[[f64; 2]]| Samples::new(seen.iter().map(|seen| seen[number]).collect());
        let row = Row::new("vm.epoch", format!("{case}, median of epochs of 50 ms"), "ms", &of(&with));
        row.against(PEER, &of(&without)).goal(Goal::PeerAtMost(1.05))
    };
    Ok(vec![row("pause", 0), row("output after the cut", 1)])
}

/// Median pause and median delay of output of a window.
fn window(site: &Site) -> Result<[f64; 2]> {
    site.protect(&CALM)?;
    sleep(WINDOW);
    let figures = site.figures()?;
    site.unprotect()?;
    Ok([figure(&figures, "pause_p50_ms")?, figure(&figures, "output_delay_p50_ms")?])
}
