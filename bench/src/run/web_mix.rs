//! `migrate.mix`: a web server with pages that are made anew moves with its disk while many clients are at
//! it.
//!
//! Like the dynamic web workload of Clark et al. (NSDI 2005, section 6.3, figure 9), with packaged programs:
//! Apache, files of two sizes, a CGI program that keeps baskets. The clients wait for nothing between two
//! requests, so the guest has no time left.

use super::Context;
use super::clients::{Asked, Web, web_mix};
use super::moved_server::{BEFORE, Migrate, Move, Moved, compare, rows};
use super::protect::server_disk;
use crate::harness::Row;
use crate::hosts::{GUEST, Machine};
use anyhow::{Result, ensure};
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{DebianGuest, GuestOptions};
use whimbrel_testkit::lab::Lab;

const MEMORY: ByteSize = ByteSize(512 << 20);
const CLIENTS: u64 = 64;
/// Until the server takes connections.
const BOOTED: Duration = Duration::from_secs(120);
/// Until it has made processes enough for all clients, and the guest's code is translated.
const SETTLED: Duration = Duration::from_secs(15);

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let moves = compare(context, &machine, &served)?;
    let lost = "requests that failed, in all moves";
    Ok(rows("migrate.mix", &moves, ["bytes not served while it moves", lost]))
}

/// The guest. The kernel's command line has no other place for a word of the guest's than behind the last
/// option.
fn machine() -> Result<Machine> {
    let DebianGuest { kernel, initrd, .. } = DebianGuest::get()?;
    let address = Some(format!("{GUEST}/24 load=web"));
    let options = GuestOptions { address, buffer_mib: 1, ..GuestOptions::default() };
    Ok(Machine { memory: MEMORY, boot: Some((kernel, initrd)), options, disks: vec![server_disk()?] })
}

/// Moves the guest while it serves pages.
fn served(lab: &Lab, migrate: Migrate<'_>) -> Result<Moved> {
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
    sleep(SETTLED + BEFORE);
    let moved = Move::of(lab, migrate)?;
    let report = web.stop();
    Ok(moved.seen(&report.events, report.failed))
}
