//! `migrate.postgres` and `migrate.redis`: a database at work moves with its disk while clients outside check their own history, beside QEMU's
//! pre-copy with the disk mirrored over NBD.
//!
//! PostgreSQL is asked by `pgbench` and by clients of ours that insert rows, redis (`appendfsync always`) by clients that set keys
//! sixteen at a time. What was acknowledged must be there on the other side, and every connection must hold. Downtime is the longest time in
//! which no client got an answer; the dip is what they got less of while the machine moved, its downtime included. The disk's file is hidden
//! from the target. Each move has a freshly booted guest.

use super::Context;
use super::clients::Events;
use super::disk_time::{PeerWithDisk, hide};
use super::migrate::{linked, on_the_uplink};
use super::stores::{self, Histories, Kind, Pgbench};
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{GUEST, Hosts};
use anyhow::{Context as _, Result};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_testkit::guest::DebianGuest;
use whimbrel_testkit::lab::Lab;

const MBIT: u64 = 1000;
const PEER: &str = "QEMU pre-copy, mirror over NBD";
const NAME: &str = "store";
/// Until both the server and its clients are at full speed; what they get is counted for [`BEFORE`].
const WARM: Duration = Duration::from_secs(3);
const BEFORE: Duration = Duration::from_secs(4);
/// A part of the time without an answer belongs to each side of the move.
const AFTER: Duration = Duration::from_secs(1);

/// What a move cost the clients and the link.
struct Moved {
    seen_ms: f64,
    total_ms: f64,
    bytes: f64,
    /// Percent of what they got before.
    dip: f64,
    /// Acknowledged writes that were not there, and connections that broke.
    lost: f64,
}

/// The rows of PostgreSQL.
pub(crate) fn postgres(context: &Context) -> Result<Vec<Row>> {
    run(context, Kind::Postgres)
}

/// The rows of redis.
pub(crate) fn redis(context: &Context) -> Result<Vec<Row>> {
    run(context, Kind::Redis)
}

fn run(context: &Context, store: Kind) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let ours = || ours(&hosts, store).context("whimbrel");
    let theirs = || theirs(&hosts, store).context(PEER);
    let (ours, theirs) = in_turn(context.times(20, 1), ours, theirs)?;
    let name = match store {
        Kind::Postgres => "migrate.postgres",
        Kind::Redis => "migrate.redis",
    };
    let row = |case: &str, unit, of: fn(&Moved) -> f64| {
        Row::new(name, case, unit, &Samples::of(&ours, of)).against(PEER, &Samples::of(&theirs, of))
    };
    // Lost in all moves together: none of them may lose anything.
    let lost = |moves: &[Moved]| Samples::new(vec![moves.iter().map(|moved| moved.lost).sum()]);
    let none = "acknowledged writes lost, and connections broken, in all moves";
    Ok(vec![
        row("downtime, as clients see it", "ms", |moved| moved.seen_ms).goal(Goal::PeerAtMost(1.0)),
        row("total time", "ms", |moved| moved.total_ms).goal(Goal::PeerAtMost(1.0)),
        row("on the wire", "MB", |moved| moved.bytes / 1e6).goal(Goal::PeerAtMost(1.0)),
        row("answers lost while it moves", "%", |moved| moved.dip),
        Row::new(name, none, "", &lost(&ours)).against(PEER, &lost(&theirs)).goal(Goal::AtMost(0.0)),
    ])
}

fn ours(hosts: &Hosts, store: Kind) -> Result<Moved> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    hide(beta, &stores::disk()?)?;
    stores::machine(GUEST)?.run(alpha, NAME)?;
    let moved = under_load(&hosts.lab, store, || {
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

fn theirs(hosts: &Hosts, store: Kind) -> Result<Moved> {
    let DebianGuest { kernel, initrd, .. } = DebianGuest::get()?;
    let plan = || GuestPlan {
        kernel: kernel.clone(),
        initrd: initrd.clone(),
        ..GuestPlan::small(stores::MEMORY, stores::options(GUEST))
    };
    let pair = PeerWithDisk::start(hosts, plan, &stores::disk()?, MBIT)?;
    under_load(&hosts.lab, store, || pair.migrate())
}

/// Has a store moved while its clients are at work.
fn under_load(lab: &Lab, store: Kind, migrate: impl FnOnce() -> Result<()>) -> Result<Moved> {
    let client = lab.host("client");
    // The guest before this one had the same address and another hardware address.
    client.ip("neigh flush all")?;
    let histories = Histories::start(client, &[store]);
    histories.check()?;
    // From here on every client has its connection; those that were refused while the server came up are not counted.
    let broken_before = histories.broken();
    let pgbench = (store == Kind::Postgres).then(|| Pgbench::start(client)).transpose()?;
    sleep(WARM);
    histories.record(store);
    sleep(BEFORE);
    let (before, from) = (on_the_uplink(lab)?, Instant::now());
    migrate()?;
    let (to, after) = (Instant::now(), on_the_uplink(lab)?);
    sleep(AFTER);
    let answers = histories.recorded(store);
    histories.check()?;
    let mut lost = histories.sums().lost.iter().sum::<u64>() + histories.broken() - broken_before;
    let answers = match pgbench.map(Pgbench::stop).transpose()? {
        Some(transactions) => {
            lost += transactions.lost + u64::from(transactions.broke);
            transactions.committed.into_iter().map(|at| (at, 1)).collect()
        }
        None => answers,
    };
    let answers = Events(answers);
    let (rate, during) = (answers.rate(from - BEFORE, from), answers.rate(from, to));
    eprintln!("    {rate:.0} answers a second before, {during:.0} while it moved");
    Ok(Moved {
        seen_ms: answers.silence(from, to + AFTER).as_secs_f64() * 1e3,
        total_ms: (to - from).as_secs_f64() * 1e3,
        bytes: (after - before) as f64,
        dip: 100.0 * (1.0 - during / rate),
        lost: lost as f64,
    })
}
