//! `web.first`: the web page of a host with 200 machines, in a headless Chromium with an empty cache: what
//! the first load brings, and the time until the list can be used. Loopback.
//!
//! `web.live`: how late the rounds of a migration are on its chart, from the line of a round in the stream of
//! the operation on. The daemon sends that line when the round ends.

use super::Context;
use super::operate::{MACHINES, fill};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Hosts, Machine, WEB};
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::path::Path;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};

/// The page with its list of machines.
pub(super) fn first(context: &Context) -> Result<Vec<Row>> {
    let mut hosts = Hosts::start(&["alpha"])?;
    fill(&mut hosts)?;
    let times = context.times(20, 5).to_string();
    let loads = browse(&hosts, "first.mjs", &[&MACHINES.to_string(), &times])?;
    Ok(vec![
        Row::new("operate.web.first", "bytes", "KB", &samples(&loads, "bytes", 1e3)?)
            .goal(Goal::AtMost(300.0)),
        Row::new("operate.web.first", "interactive", "s", &samples(&loads, "ms", 1e3)?)
            .goal(Goal::AtMost(1.0)),
    ])
}

/// The chart of a migration.
pub(super) fn live(context: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha", "beta"])?;
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    let work = Work::Dirty { region_mib: 64, pages_per_second: 5000, bytes_per_page: 64 };
    Machine::small(ByteSize(256 << 20), GuestOptions { work, ..GuestOptions::default() })
        .run(alpha, "web")?;
    let mut rounds = Vec::new();
    while rounds.len() < context.times(50, 10) {
        rounds.extend(browse(&hosts, "live.mjs", &["web", "beta"])?);
        beta.run(&["migrate", "web", "alpha"])?;
    }
    let row = Row::new("operate.web.live", "a round", "ms", &samples(&rounds, "ms", 1.0)?);
    Ok(vec![row.goal(Goal::AtMost(300.0))])
}

/// Runs a script of `web/test` on alpha, with a token of its own; the objects that it printed.
fn browse(hosts: &Hosts, script: &str, more: &[&str]) -> Result<Vec<Value>> {
    let alpha = hosts.get("alpha")?;
    let listed = alpha.json(&["token", "ls"])?;
    let name = format!("bench-{}", listed.as_array().map_or(0, Vec::len));
    let token = alpha.run(&["token", "create", &name, "--role", "admin"])?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../web/test").join(script);
    let script = script.to_str().context("a path that is not UTF-8")?;
    let (url, folder) = (format!("http://{WEB}/"), hosts.disk().to_string_lossy().into_owned());
    let arguments = [&[script, &url, token.trim()], more, &[&folder]].concat();
    let text = hosts.lab.host("alpha").output("node", &arguments)?;
    serde_json::from_str(&text).context("the script prints something else")
}

/// A figure of each, in this unit.
fn samples(of: &[Value], field: &str, unit: f64) -> Result<Samples> {
    let values = of.iter().map(|one| one[field].as_f64().map(|value| value / unit));
    values.collect::<Option<Vec<f64>>>().map(Samples::new).context("a figure is missing")
}
