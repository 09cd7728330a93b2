//! `migrate.postgres` and `migrate.redis`: a database at work moves with its disk while clients outside check
//! their own history.
//!
//! PostgreSQL is asked by `pgbench` and by clients of ours that insert rows, redis (`appendfsync always`) by
//! clients that set keys sixteen at a time. What was acknowledged must be there on the other side, and every
//! connection must hold.

use super::Context;
use super::clients::Events;
use super::moved_server::{BEFORE, Migrate, Move, Moved, WARM, compare, rows};
use super::stores::{self, Histories, Kind, Pgbench};
use crate::harness::Row;
use crate::hosts::GUEST;
use anyhow::Result;
use std::thread::sleep;
use whimbrel_testkit::lab::Lab;

/// The rows of PostgreSQL.
pub(crate) fn postgres(context: &Context) -> Result<Vec<Row>> {
    run(context, "migrate.postgres", Kind::Postgres)
}

/// The rows of redis.
pub(crate) fn redis(context: &Context) -> Result<Vec<Row>> {
    run(context, "migrate.redis", Kind::Redis)
}

fn run(context: &Context, name: &'static str, store: Kind) -> Result<Vec<Row>> {
    let moves =
        compare(context, &|| stores::machine(GUEST), &|lab, migrate| under_load(lab, store, migrate))?;
    let lost = "acknowledged writes lost, and connections broken, in all moves";
    Ok(rows(name, &moves, ["answers lost while it moves", lost]))
}

/// Has a store moved while its clients are at work.
fn under_load(lab: &Lab, store: Kind, migrate: Migrate<'_>) -> Result<Moved> {
    let client = lab.host("client");
    // The guest before this one had the same address and another hardware address.
    client.ip("neigh flush all")?;
    let histories = Histories::start(client, &[store]);
    histories.check()?;
    // From here on every client has its connection; those that were refused while the server came up are not
    // counted.
    let broken_before = histories.broken();
    let pgbench = (store == Kind::Postgres).then(|| Pgbench::start(client)).transpose()?;
    sleep(WARM);
    histories.record(store);
    sleep(BEFORE);
    let moved = Move::of(lab, migrate)?;
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
    Ok(moved.seen(&Events(answers), lost))
}
