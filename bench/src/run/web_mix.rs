//! `migrate.mix`: a web server with pages that are made anew moves with its disk while many clients are at it, beside QEMU's pre-copy with the
//! disk mirrored over NBD.
//!
//! Like the dynamic web workload of Clark et al. (NSDI 2005, section 6.3, figure 9), with packaged programs: Apache, files of two
//! sizes, a CGI program that keeps baskets. The clients wait for nothing between two requests, so the guest has no time left.
//! Downtime is the longest time in which none of them got a byte. The disk's file is hidden from the target. Each move has a freshly booted guest.

use super::Context;
use super::clients::{Asked, Web, web_mix};
use super::disk_time::{PeerWithDisk, hide};
use super::migrate::{linked, on_the_uplink};
use super::protect::server_disk;
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{GUEST, Hosts, Machine};
use anyhow::{Context as _, Result, ensure};
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{DebianGuest, GuestOptions};
use whimbrel_testkit::lab::Lab;

const MBIT: u64 = 1000;
const PEER: &str = "QEMU pre-copy, mirror over NBD";
const NAME: &str = "shop";
const MEMORY: ByteSize = ByteSize(512 << 20);
const CLIENTS: u64 = 64;
/// Until the server takes connections.
const BOOTED: Duration = Duration::from_secs(120);
/// Until it is at full speed; what clients get is counted for [`BEFORE`].
const WARM: Duration = Duration::from_secs(3);
const BEFORE: Duration = Duration::from_secs(4);
/// A part of the time without a byte belongs to each side of the move.
const AFTER: Duration = Duration::from_secs(1);

/// What a move cost the clients and the link.
struct Moved {
    seen_ms: f64,
    total_ms: f64,
    bytes: f64,
    /// Percent of what they got before.
    dip: f64,
    failed: f64,
}

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let ours = || ours(&hosts).context("whimbrel");
    let theirs = || theirs(&hosts).context(PEER);
    let (ours, theirs) = in_turn(context.times(20, 1), ours, theirs)?;
    let row = |case: &str, unit, of: fn(&Moved) -> f64| {
        let row = Row::new("migrate.mix", case, unit, &Samples::of(&ours, of));
        row.against(PEER, &Samples::of(&theirs, of))
    };
    Ok(vec![
        row("downtime, as clients see it", "ms", |moved| moved.seen_ms).goal(Goal::PeerAtMost(1.0)),
        row("total time", "ms", |moved| moved.total_ms).goal(Goal::PeerAtMost(1.0)),
        row("on the wire", "MB", |moved| moved.bytes / 1e6).goal(Goal::PeerAtMost(1.0)),
        row("bytes not served while it moves", "%", |moved| moved.dip),
        row("requests that failed in a move", "", |moved| moved.failed),
    ])
}

fn ours(hosts: &Hosts) -> Result<Moved> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    let (disk, DebianGuest { kernel, initrd, .. }) = (server_disk()?, DebianGuest::get()?);
    hide(beta, &disk)?;
    let machine =
        Machine { memory: MEMORY, boot: Some((kernel, initrd)), options: options(), disks: vec![disk] };
    machine.run(alpha, NAME)?;
    let moved = served(&hosts.lab, || {
        let said = alpha.json(&["migrate", NAME, "beta"])?;
        eprintln!("    {}", said["result"]);
        Ok(())
    });
    let moved = moved.inspect_err(|_| {
        // Nobody knows on which host the failure left it; what went wrong is told, not what clearing up did.
        let _ = alpha.discard(NAME).or_else(|_| beta.discard(NAME));
    })?;
    beta.discard(NAME)?;
    Ok(moved)
}

fn theirs(hosts: &Hosts) -> Result<Moved> {
    let DebianGuest { kernel, initrd, .. } = DebianGuest::get()?;
    let plan = || GuestPlan {
        kernel: kernel.clone(),
        initrd: initrd.clone(),
        ..GuestPlan::small(MEMORY, options())
    };
    let pair = PeerWithDisk::start(hosts, plan, &server_disk()?, MBIT)?;
    served(&hosts.lab, || pair.migrate())
}

/// The kernel's command line has no other place for a word of the guest's than behind the last option.
fn options() -> GuestOptions {
    let address = Some(format!("{GUEST}/24 load=web"));
    GuestOptions { address, buffer_mib: 1, ..GuestOptions::default() }
}

/// Moves the guest while it serves pages.
fn served(lab: &Lab, migrate: impl FnOnce() -> Result<()>) -> Result<Moved> {
    let (client, server) = (lab.host("client"), SocketAddr::new(GUEST.parse()?, 80));
    // The guest before this one had the same address and another hardware address.
    client.ip("neigh flush all")?;
    let deadline = Instant::now() + BOOTED;
    while let Err(error) = client.connect(server, Duration::from_secs(2)) {
        ensure!(Instant::now() < deadline, "Apache takes no connections: {error}");
        sleep(Duration::from_millis(50));
    }
    let web = Web::start(client, server, (CLIENTS, Duration::ZERO), Asked { path: web_mix, more_than: 0 })?;
    web.wait_fetched(CLIENTS, BOOTED)?;
    sleep(WARM + BEFORE);
    let (before, from) = (on_the_uplink(lab)?, Instant::now());
    migrate()?;
    let (to, after) = (Instant::now(), on_the_uplink(lab)?);
    sleep(AFTER);
    let report = web.stop();
    let (rate, during) = (report.events.rate(from - BEFORE, from), report.events.rate(from, to));
    eprintln!("    {:.0} KB a second before, {:.0} while it moved", rate / 1e3, during / 1e3);
    Ok(Moved {
        seen_ms: report.events.silence(from, to + AFTER).as_secs_f64() * 1e3,
        total_ms: (to - from).as_secs_f64() * 1e3,
        bytes: (after - before) as f64,
        dip: 100.0 * (1.0 - during / rate),
        failed: report.failed as f64,
    })
}
