//! `session.clone.images`, `session.clone.hosts`: different golden machines, each cloned once on a host that
//! has none of them (WAN-S2 and WAN-S3 of figure 6), or on as many hosts at once (WAN-P).
//!
//! Each was booted by itself from the same distribution, with some noise in its memory that no other has.
//! What they have in common, a later clone finds on its host by its content: that is not kept from it.

use super::clones::{Campus, LAN, MACHINE, WAN, clone_on};
use super::far::ONE_WAY;
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Result, anyhow, ensure};
use std::thread;
use whimbrel_testkit::lab::LinkConfig;

/// So many golden machines at alpha, which beta has too, and then the line as slow as it is.
fn golden(campus: &Campus, count: usize) -> Result<()> {
    for number in 1..=count {
        let tag = format!("golden-{number}");
        campus.register(&tag, &[&format!("image={number}")])?;
        campus.daemons[1].run(&["pull", &format!("alpha:{tag}")])?;
    }
    campus.line.change(LinkConfig::new(WAN, ONE_WAY));
    Ok(())
}

/// Each of as many hosts clones another machine of the host on the LAN, all at the same time.
pub(crate) fn hosts(context: &Context) -> Result<Vec<Row>> {
    let names = ["one", "two", "three", "four", "five", "six", "seven", "eight"];
    let names = if context.quick { &names[..2] } else { &names[..] };
    let mut campus = Campus::with(names)?;
    golden(&campus, names.len())?;
    let mut longest = Vec::new();
    for _ in 0..context.times(3, 1) {
        (2..2 + names.len()).try_for_each(|at| campus.fresh(at))?;
        let hosts = &campus.daemons[2..];
        let seconds = thread::scope(|scope| {
            let clone = |(at, host)| clone_on(host, &format!("image={}", at + 1), &["--from", "beta"], 1);
            let all: Vec<_> = hosts.iter().enumerate().map(|one| scope.spawn(move || clone(one))).collect();
            let panicked = |_| Err(anyhow!("a thread that cloned panicked"));
            all.into_iter().map(|one| one.join().unwrap_or_else(panicked)).collect::<Result<Vec<_>>>()
        })?;
        longest.push(seconds.into_iter().fold(0.0, f64::max));
    }
    let count = names.len();
    let case =
        format!("the slowest of {count} hosts at once, {count} machines of {MACHINE}, LAN of {LAN} Mbit/s");
    let row = Row::new("session.clone.hosts", case, "s", &Samples::new(longest));
    Ok(vec![row.goal(Goal::AtMost(2.0))])
}

/// One after the other over the line, and once more by way of a host on the LAN that has them from before.
pub(crate) fn images(context: &Context) -> Result<Vec<Row>> {
    let count = if context.quick { 2 } else { 8 };
    let mut campus = Campus::start()?;
    golden(&campus, count)?;
    let mut each = |host: &str| -> Result<Vec<f64>> {
        campus.fresh_gamma()?;
        (1..=count).map(|number| campus.clone(&format!("image={number}"), &["--from", host], 1)).collect()
    };
    let wide = each("alpha")?;
    let near = each("beta")?;
    ensure!(wide.len() == count && near.len() == count, "not all were cloned");
    let line = format!("{} ms, {WAN} Mbit/s", 2 * ONE_WAY.as_millis());
    let rows = |name, place: &str, seconds: Vec<f64>, goal| {
        let total = Samples::new(vec![seconds.iter().sum()]);
        let case = |what: &str| format!("{count} different machines of {MACHINE}, {place}, {what}");
        [
            Row::new(name, case("each"), "s", &Samples::new(seconds)).goal(Goal::AtMost(goal)),
            Row::new(name, case("all, one after the other"), "s", &total),
        ]
    };
    let lan = format!("of a host on a LAN of {LAN} Mbit/s");
    Ok([rows("session.clone.images", &line, wide, 40.0), rows("session.clone.images.lan", &lan, near, 5.0)]
        .concat())
}
