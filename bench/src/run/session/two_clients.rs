//! `session.two.writers`, `session.alone.asks`: how soon one client sees what another has changed, and what a
//! client asks that nobody disturbs.

use super::{
    build,
    far::{Far, Near, ONE_WAY},
};
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Result, ensure};
use std::{
    fs::{self, File},
    time::{Duration, Instant},
};
use whimbrel_session::client::Policy;

/// After which a change counts as never seen.
const PATIENCE: Duration = Duration::from_secs(20);

/// Milliseconds until something is seen, of a change that was made just now.
fn until(seen: impl Fn() -> bool) -> Result<f64> {
    let began = Instant::now();
    while !seen() {
        ensure!(began.elapsed() < PATIENCE, "a change of one client is not seen by the other");
    }
    Ok(1e3 * began.elapsed().as_secs_f64())
}

/// A change of one client until the other sees it, counted from the return of the call that made it.
pub(crate) fn two_writers(context: &Context) -> Result<Vec<Row>> {
    let far = Far::new(100, |server| {
        fs::create_dir(server.join("dir"))?;
        Ok(fs::write(server.join("dir/file"), "at first")?)
    })?;
    let (one, other) = (far.mount("one", Policy::Through)?, far.mount_second("other", Policy::Through)?);
    let (mut content, mut names) = (Vec::new(), Vec::new());
    for round in 0..context.times(20, 20) {
        let (text, name) = (format!("round {round}"), format!("dir/name-{round}"));
        fs::read(other.path.join("dir/file"))?;
        ensure!(!other.path.join(&name).exists(), "{name} is there already");
        fs::write(one.path.join("dir/file"), &text)?;
        content
            .push(until(|| fs::read_to_string(other.path.join("dir/file")).is_ok_and(|seen| seen == text))?);
        File::create(one.path.join(&name))?;
        names.push(until(|| other.path.join(&name).exists())?);
    }
    other.end()?;
    one.end()?;
    let trip = Samples::new(vec![2e3 * ONE_WAY.as_secs_f64()]);
    let row = |what: &str, times| {
        let case = format!("{what}, 32 ms, 100 Mbit/s, idle");
        Row::new("session.two.writers", case, "ms", &Samples::new(times))
            .against("one round trip", &trip)
            .goal(Goal::PeerAtMost(1.2))
    };
    Ok(vec![row("a written file", content), row("a new name", names)])
}

/// Requests so far, except the one by which leases are kept.
fn asked(near: &Near) -> u64 {
    let requests = near.session.status().requests;
    requests.iter().filter(|(kind, _)| *kind != "watch").map(|(_, count)| count).sum()
}

/// A build on a warm cache, whose results wait here until it is done.
pub(crate) fn alone_asks(context: &Context) -> Result<Vec<Row>> {
    let far = Far::new(100, |server| build::source(server, context.quick))?;
    let near = far.mount("cache", Policy::Back)?;
    near.session.set("delay", "never").map_err(anyhow::Error::msg)?;
    build::make(&near.path)?;
    let mut requests = Vec::new();
    for _ in 0..context.times(3, 3) {
        build::clean(&near.path)?;
        near.flush()?;
        let before = asked(&near);
        build::make(&near.path)?;
        requests.push((asked(&near) - before) as f64);
    }
    near.end()?;
    let case = "C library, warm, 32 ms, 100 Mbit/s, without the renewals of leases and the write-back";
    let row = Row::new("session.alone.asks", case, "requests", &Samples::new(requests));
    Ok(vec![row.goal(Goal::AtMost(0.0))])
}
