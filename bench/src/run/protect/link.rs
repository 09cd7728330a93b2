//! `link.*`: epochs over a link of 1 Gbit/s and of 100 Mbit/s to the standby's host: what they come to, how
//! late output leaves, and how long they get.
//!
//! The link is a token bucket at both ends of the cable of the standby's host; clients of the guest have
//! another way.

use super::pause::{LEASE, WARM_UP, clients};
use super::site::{Site, figure};
use crate::harness::{Row, Samples};
use crate::run::Context;
use anyhow::Result;
use std::thread::sleep;
use std::time::Duration;

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let window = Duration::from_secs(context.times(60, 15) as u64);
    let mut rows = Vec::new();
    for load in ["web", "redis", "compile"] {
        let site = Site::at_work(load)?;
        let _clients = clients(&site, load);
        sleep(WARM_UP);
        for mbit in [1000, 100] {
            site.hosts.lab.limit("beta", mbit)?;
            let [mut bytes, mut delay, mut length] = [vec![], vec![], vec![]];
            for _ in 0..context.times(5, 1) {
                site.protect(&LEASE)?;
                let before = site.figures()?;
                sleep(window);
                let after = site.figures()?;
                site.unprotect()?;
                eprintln!("    {load}, {mbit} Mbit/s: {after}");
                let epochs = figure(&after, "epochs")? - figure(&before, "epochs")?;
                let sent = figure(&after, "sent_bytes")? - figure(&before, "sent_bytes")?;
                bytes.push(sent / epochs.max(1.0) / 1e3);
                delay.push(figure(&after, "output_delay_p50_ms")?);
                length.push(figure(&after, "epoch_ms")?);
            }
            let case = format!("{load}, {mbit} Mbit/s, an epoch");
            rows.push(Row::new("link.bytes", case.clone(), "kB", &Samples::new(bytes)));
            rows.push(Row::new("link.delay", format!("{case}, output late"), "ms", &Samples::new(delay)));
            rows.push(Row::new(
                "link.epoch",
                format!("{case}, from cut to cut"),
                "ms",
                &Samples::new(length),
            ));
        }
    }
    Ok(rows)
}
