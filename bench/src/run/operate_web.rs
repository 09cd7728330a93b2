//! `web.first`: the web page of a host with 200 machines, in a headless Chromium with an empty cache: what
//! the first load brings, and the time until the list can be used. Loopback; machines are switched off.

use super::{Context, Experiment};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Hosts, Machine, WEB};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::Path;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::GuestOptions;

const MACHINES: usize = 200;

pub(super) const EXPERIMENTS: &[Experiment] = &[Experiment {
    rows: &["operate.web.first"],
    about: "load the web page of a host with 200 machines",
    run: first,
}];

fn first(context: &Context) -> Result<Vec<Row>> {
    let mut hosts = Hosts::start(&["alpha"])?;
    fill(&mut hosts)?;
    let alpha = hosts.get("alpha")?;
    let token = alpha.run(&["token", "create", "bench", "--role", "admin"])?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../web/test/first.mjs");
    let script = script.to_str().context("a path that is not UTF-8")?;
    let (url, times) = (format!("http://{WEB}/"), context.times(20, 5).to_string());
    let (machines, folder) = (MACHINES.to_string(), hosts.disk().to_string_lossy().into_owned());
    let arguments = [script, &url, token.trim(), &machines, &times, &folder];
    let text = hosts.lab.host("alpha").output("node", &arguments)?;
    let loads: Vec<Value> = serde_json::from_str(&text).context("the script prints something else")?;
    let samples = |field: &str, unit: f64| {
        let values = loads.iter().map(|load| load[field].as_f64().map(|value| value / unit));
        values.collect::<Option<Vec<f64>>>().map(Samples::new).context("a load without its figures")
    };
    Ok(vec![
        Row::new("operate.web.first", "bytes", "KB", &samples("bytes", 1e3)?).goal(Goal::AtMost(300.0)),
        Row::new("operate.web.first", "interactive", "s", &samples("ms", 1e3)?).goal(Goal::AtMost(1.0)),
    ])
}

/// Gives the host its machines: one that was run and stopped, and copies of its record.
fn fill(hosts: &mut Hosts) -> Result<()> {
    let alpha = hosts.get("alpha")?;
    Machine::small(ByteSize(96 << 20), GuestOptions::default()).run(alpha, "web")?;
    alpha.run(&["stop", "web", "--kill"])?;
    let folder = hosts.disk().join("alpha/machines");
    let record = fs::read_to_string(folder.join("web/machine.json"))?;
    let alpha = hosts.get_mut("alpha")?;
    alpha.end_daemon()?;
    for number in 2..=MACHINES {
        let (copy, name) = (folder.join(format!("web-{number}")), format!("\"web-{number}\""));
        fs::create_dir(&copy)?;
        fs::write(copy.join("machine.json"), record.replace("\"web\"", &name))?;
    }
    alpha.begin()?;
    let machines = alpha.json(&["ps"])?.as_array().map_or(0, Vec::len);
    ensure!(machines == MACHINES, "the host has {machines} machines");
    Ok(())
}
