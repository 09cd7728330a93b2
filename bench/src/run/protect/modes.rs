//! `modes.ping`, `modes.pause`: whole pages as in Remus, epochs as they are usually, and inputs that are
//! played again as in LLM, side by side.

use super::clients::pings;
use super::pause::{CALM, WARM_UP, clients};
use super::site::{Site, figure};
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::Result;
use std::thread::sleep;
use std::time::Duration;

/// Each mode with the time between cuts that is usual for it.
const MODES: [(&str, &[&str]); 3] = [
    ("remus, 50 ms", &["--mode", "remus"]),
    ("epoch, 50 ms", &["--mode", "epoch"]),
    ("replay, 1 s", &["--mode", "replay"]),
];

/// What a client waits for an answer of an idle guest.
pub(crate) fn ping(context: &Context) -> Result<Vec<Row>> {
    let site = Site::at_work("idle")?;
    sleep(WARM_UP);
    let count = context.times(1000, 100) as u64;
    let alone = Samples::new(pings(site.client(), count)?);
    let mut rows = Vec::new();
    for (mode, more) in MODES {
        site.protect(&[&CALM, more].concat())?;
        let trips = Samples::new(pings(site.client(), count)?);
        site.unprotect()?;
        let row =
            Row::new("modes.ping", format!("idle, {mode}"), "ms", &trips).against("unprotected", &alone);
        rows.push(if mode.starts_with("replay") { row.goal(Goal::AtMost(6.0)) } else { row });
    }
    Ok(rows)
}

/// How long a cut stops the machine, and how late output leaves.
pub(crate) fn pauses(context: &Context) -> Result<Vec<Row>> {
    let window = Duration::from_secs(context.times(60, 15) as u64);
    let mut rows = Vec::new();
    for load in ["web", "ep"] {
        let site = Site::at_work(load)?;
        let _clients = clients(&site, load);
        sleep(WARM_UP);
        for (mode, more) in MODES {
            let (mut pause, mut delay) = (vec![], vec![]);
            for _ in 0..context.times(5, 1) {
                site.protect(&[&CALM, more].concat())?;
                sleep(window);
                let figures = site.figures()?;
                site.unprotect()?;
                eprintln!("    {load}, {mode}: {figures}");
                pause.push(figure(&figures, "pause_p50_ms")?);
                delay.push(figure(&figures, "output_delay_p50_ms")?);
            }
            let case = format!("{load}, {mode}, output {:.1} ms late", Samples::new(delay).median());
            rows.push(Row::new("modes.pause", case, "ms", &Samples::new(pause)));
        }
    }
    Ok(rows)
}
