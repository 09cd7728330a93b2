//! What `migrate.postgres`, `.redis` and `.mix` have in common: a server at work in a Debian guest moves with
//! its disk while clients outside are at it, beside QEMU's pre-copy with the disk mirrored over NBD.
//!
//! Downtime is the longest time in which nothing came to any client; the dip is what they got less of while
//! the machine moved, its downtime included. The disk's file is hidden from the target. Each move has a
//! freshly booted guest.

use super::Context;
use super::clients::Events;
use super::disk_time::{PeerWithDisk, hide};
use super::migrate::{linked, on_the_uplink};
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{Hosts, Machine};
use anyhow::{Context as _, Result};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_testkit::lab::Lab;

const MBIT: u64 = 1000;
const PEER: &str = "QEMU pre-copy, mirror over NBD";
const NAME: &str = "server";
/// Until both the server and its clients are at full speed; what they get is counted for [`BEFORE`].
pub(super) const WARM: Duration = Duration::from_secs(3);
pub(super) const BEFORE: Duration = Duration::from_secs(4);
/// A part of the time without an answer belongs to each side of the move.
const AFTER: Duration = Duration::from_secs(1);

/// Moves a guest; to be called once.
pub(super) type Migrate<'a> = &'a dyn Fn() -> Result<()>;

/// From when to when a guest moved, and how many bytes that took.
pub(super) struct Move {
    from: Instant,
    to: Instant,
    bytes: u64,
}

/// What a move cost the clients and the link.
pub(super) struct Moved {
    seen_ms: f64,
    total_ms: f64,
    bytes: f64,
    /// Percent of what they got before.
    dip: f64,
    /// What they lost for good.
    lost: f64,
}

impl Move {
    /// Moves a guest whose clients are at work.
    pub(super) fn of(lab: &Lab, migrate: Migrate<'_>) -> Result<Self> {
        let (before, from) = (on_the_uplink(lab)?, Instant::now());
        migrate()?;
        let (to, after) = (Instant::now(), on_the_uplink(lab)?);
        sleep(AFTER);
        Ok(Self { from, to, bytes: after - before })
    }

    /// What its clients saw.
    pub(super) fn seen(&self, came: &Events, lost: u64) -> Moved {
        let Self { from, to, bytes } = *self;
        let (rate, during) = (came.rate(from - BEFORE, from), came.rate(from, to));
        eprintln!("    {rate:.0} a second before, {during:.0} while it moved");
        Moved {
            seen_ms: came.silence(from, to + AFTER).as_secs_f64() * 1e3,
            total_ms: (to - from).as_secs_f64() * 1e3,
            bytes: bytes as f64,
            dip: 100.0 * (1.0 - during / rate),
            lost: lost as f64,
        }
    }
}

/// Moves of ours and of the peer in turn, each of a machine that `served` puts to work and moves.
pub(super) fn compare(
    context: &Context,
    machine: &dyn Fn() -> Result<Machine>,
    served: &dyn Fn(&Lab, Migrate<'_>) -> Result<Moved>,
) -> Result<[Vec<Moved>; 2]> {
    let hosts = linked(MBIT)?;
    let ours = || ours(&hosts, machine()?, served).context("whimbrel");
    let theirs = || theirs(&hosts, machine()?, served).context(PEER);
    in_turn(context.times(20, 1), ours, theirs).map(Into::into)
}

/// The rows: what was not served is called `dip`, what was lost in all moves together `lost`; none of that
/// may be.
pub(super) fn rows(name: &'static str, moves: &[Vec<Moved>; 2], [dip, lost]: [&str; 2]) -> Vec<Row> {
    let [ours, theirs] = moves;
    let row = |case: &str, unit, of: fn(&Moved) -> f64| {
        Row::new(name, case, unit, &Samples::of(ours, of)).against(PEER, &Samples::of(theirs, of))
    };
    let all = |moves: &[Moved]| Samples::new(vec![moves.iter().map(|moved| moved.lost).sum()]);
    vec![
        row("downtime, as clients see it", "ms", |moved| moved.seen_ms).goal(Goal::PeerAtMost(1.0)),
        row("total time", "ms", |moved| moved.total_ms).goal(Goal::PeerAtMost(1.0)),
        row("on the wire", "MB", |moved| moved.bytes / 1e6).goal(Goal::PeerAtMost(1.0)),
        row(dip, "%", |moved| moved.dip),
        Row::new(name, lost, "", &all(ours)).against(PEER, &all(theirs)).goal(Goal::AtMost(0.0)),
    ]
}

fn ours(
    hosts: &Hosts,
    machine: Machine,
    served: &dyn Fn(&Lab, Migrate<'_>) -> Result<Moved>,
) -> Result<Moved> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    machine.disks.iter().try_for_each(|disk| hide(beta, disk))?;
    machine.run(alpha, NAME)?;
    let moved = served(&hosts.lab, &|| {
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

fn theirs(
    hosts: &Hosts,
    machine: Machine,
    served: &dyn Fn(&Lab, Migrate<'_>) -> Result<Moved>,
) -> Result<Moved> {
    let Machine { memory, boot, options, disks } = machine;
    let (kernel, initrd) = boot.context("a guest that boots from its disk")?;
    let plan = || GuestPlan {
        kernel: kernel.clone(),
        initrd: initrd.clone(),
        ..GuestPlan::small(memory, options.clone())
    };
    let disk = disks.first().context("a guest without a disk")?;
    let pair = PeerWithDisk::start(hosts, plan, disk, MBIT)?;
    served(&hosts.lab, &|| pair.migrate())
}
