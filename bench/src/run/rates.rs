//! `migrate.rates`, `migrate.10g`: an idle guest and one that writes, over links from 128 Mbit/s to 10
//! Gbit/s, beside each of QEMU's own ways to move them.
//!
//! Total time, bytes and the downtime that a client sees. Of post-copy, time and bytes are up to when the
//! last page is there. A full run takes some three hours: 800 moves, each of a freshly booted guest. Of a
//! peer that does not come to its end in two minutes, three times in a row, there is no row.

use super::Context;
use super::migrate::{Moved, linked};
use super::muncher::MEMORY;
use super::{peers, precopy};
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{GUEST, Hosts};
use anyhow::{Context as _, Result};
use std::time::Duration;
use whimbrel_testkit::guest::{GuestOptions, Work};

/// Of the cables, in Mbit/s. The fastest is more than two processors fill.
const RATES: [u64; 5] = [128, 256, 512, 1000, 10_000];
const QUICK: [u64; 2] = [128, 10_000];
/// Both guests. The second writes half of what the slowest link carries, so that plain pre-copy could end
/// there too.
const GUESTS: [(&str, Work); 2] = [
    ("idle", Work::Idle),
    (
        "2k whole pages/s of 64 MiB",
        Work::Dirty { region_mib: 64, pages_per_second: 2000, bytes_per_page: 4096 },
    ),
];
/// Attempts at a move of a peer.
const ATTEMPTS: usize = 3;
const PEERS: [&str; 3] = ["QEMU pre-copy", "QEMU post-copy", "QEMU auto-converge"];

/// The row.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let rates: &[u64] = if context.quick { &QUICK } else { &RATES };
    let mut rows = Vec::new();
    for mbit in rates {
        let hosts = linked(*mbit)?;
        for (guest, work) in GUESTS {
            let case = format!("{mbit} Mbit/s, {guest}");
            eprintln!("    {case}");
            rows.extend(compare(&hosts, *mbit, (&case, work), context.times(20, 1)).context(case.clone())?);
        }
    }
    Ok(rows)
}

/// The writing guest over the fastest link: total time alone.
pub(crate) fn fast(context: &Context) -> Result<Vec<Row>> {
    const MBIT: u64 = 10_000;
    let (guest, work) = GUESTS[1];
    let measured = measure(&linked(MBIT)?, MBIT, (guest, work), context.times(10, 1))?;
    let total = |moved: &Moved| moved.total_ms;
    let row = |(peer, moves): (&str, &Option<Vec<Moved>>)| {
        let row = Row::new(
            "migrate.10g",
            format!("{guest}, total time"),
            "ms",
            &Samples::of(&measured.ours, total),
        );
        // A peer that does not come to its end is behind.
        match moves {
            Some(moves) => row.against(peer, &Samples::of(moves, total)).goal(Goal::PeerAtMost(1.0)),
            None => row,
        }
    };
    Ok(PEERS.into_iter().zip(&measured.theirs).map(row).collect())
}

/// Moves of ours and of each peer; none of a peer that has not come to its end.
struct Measured {
    ours: Vec<Moved>,
    theirs: [Option<Vec<Moved>>; 3],
}

/// One guest over one link, all of them in turn.
fn measure(hosts: &Hosts, mbit: u64, (case, work): (&str, Work), times: usize) -> Result<Measured> {
    let options = GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work };
    let plan = GuestPlan::small(MEMORY, options.clone());
    let ways: [&dyn Fn() -> Result<Moved>; 3] = [
        &|| precopy::moved(&hosts.lab, &plan, mbit),
        &|| precopy::moved_lazily(&hosts.lab, &plan, mbit, Duration::ZERO),
        &|| precopy::moved_converging(&hosts.lab, &plan, mbit, Duration::ZERO),
    ];
    let mut measured = Measured { ours: Vec::new(), theirs: PEERS.map(|_| Some(Vec::new())) };
    for _ in 0..times {
        measured.ours.push(peers::ours(hosts, options.clone(), &[]).context("whimbrel")?);
        for ((moves, way), peer) in measured.theirs.iter_mut().zip(ways).zip(PEERS) {
            let Some(done) = moves else { continue };
            match again(way, (case, peer)) {
                Some(moved) => done.push(moved),
                None => *moves = None,
            }
        }
    }
    Ok(measured)
}

/// A move of a peer. One that fails is done again: of some, the guest now and then does not answer
/// afterwards.
fn again(way: &dyn Fn() -> Result<Moved>, (case, peer): (&str, &str)) -> Option<Moved> {
    for _ in 0..ATTEMPTS {
        match way() {
            Ok(moved) => return Some(moved),
            Err(error) => eprintln!("    {case}: {peer} failed: {error:#}"),
        }
    }
    None
}

/// Rows of one guest over one link.
fn compare(hosts: &Hosts, mbit: u64, (case, work): (&str, Work), times: usize) -> Result<Vec<Row>> {
    let Measured { ours, theirs } = measure(hosts, mbit, (case, work), times)?;
    type Number = (&'static str, &'static str, fn(&Moved) -> f64);
    let numbers: [Number; 3] = [
        ("total time", "ms", |moved| moved.total_ms),
        ("on the wire", "MB", |moved| moved.bytes / 1e6),
        ("downtime, as a client sees it", "ms", |moved| moved.seen_ms),
    ];
    let row = |(what, unit, of): Number, peer: usize| {
        let row = Row::new("migrate.rates", format!("{case}, {what}"), unit, &Samples::of(&ours, of));
        Some(row.against(PEERS[peer], &Samples::of(theirs[peer].as_ref()?, of)))
    };
    Ok(numbers
        .into_iter()
        .flat_map(|number| (0..PEERS.len()).map(move |peer| (number, peer)))
        .filter_map(|(number, peer)| row(number, peer))
        .collect())
}
