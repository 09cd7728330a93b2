//! `session.clone.images`: different golden machines, each cloned once on a host that has none of them
//! (WAN-S2 and WAN-S3 of figure 6).
//!
//! Each was booted by itself from the same distribution, with some noise in its memory that no other has.
//! What they have in common, a later clone finds on its host by its content: that is not kept from it.

use super::clones::{Campus, LAN, MACHINE, WAN};
use super::far::ONE_WAY;
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Result, ensure};
use whimbrel_testkit::lab::LinkConfig;

/// One after the other over the line, and once more by way of a host on the LAN that has them from before.
pub(crate) fn images(context: &Context) -> Result<Vec<Row>> {
    let count = if context.quick { 2 } else { 8 };
    let mut campus = Campus::start()?;
    for number in 1..=count {
        let tag = format!("golden-{number}");
        campus.register(&tag, &[&format!("image={number}")])?;
        campus.daemons[1].run(&["pull", &format!("alpha:{tag}")])?;
    }
    campus.line.change(LinkConfig::new(WAN, ONE_WAY));
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
