//! The charts of the page: which rows each one shows.
//!
//! A chart chooses rows by name and case. If none of a chart's rows are recorded it is left out, and the page
//! says so; single values that are missing are gaps.

mod machines;
mod mounts;

use super::chart::{Body, Chart, Group, Panel};
use super::record::{Entry, RecordedRow};
use anyhow::{Context as _, Result};
use std::collections::BTreeSet;

/// One chart of the page.
pub(super) enum Drawn {
    Picture {
        /// File name without its ending.
        name: &'static str,
        title: &'static str,
        /// A sentence that names rows, repetitions and records.
        sources: String,
        svg: String,
    },
    /// A chart whose rows no record has.
    Missing { title: &'static str, rows: &'static [&'static str] },
}

/// A chart before its rows are known.
struct Plan {
    name: &'static str,
    title: &'static str,
    /// Names of the rows that it takes values from.
    rows: &'static [&'static str],
    /// What a reader of the chart has to know beside its legend.
    remark: &'static str,
    panels: fn(&[&RecordedRow]) -> Vec<Panel>,
}

const PLANS: &[Plan] = &[
    Plan {
        name: "downtime-by-link",
        title: "Client downtime of a migration, by link",
        rows: &["migrate.rates"],
        remark: "A missing point: the peer's migration did not end, or its guest did not answer afterwards.",
        panels: machines::downtime_by_link,
    },
    Plan {
        name: "bytes-sent",
        title: "Bytes sent by a migration",
        rows: &[
            "migrate.bytes",
            "migrate.bytes.primed",
            "migrate.disk.bytes",
            "migrate.redis",
            "migrate.postgres",
            "migrate.mix",
        ],
        remark: "Both ways, counted at the source's uplink.",
        panels: machines::bytes_sent,
    },
    Plan {
        name: "checkpoint-peers",
        title: "Two versions of a memory image, saved and restored",
        rows: &["store.peers"],
        remark: "The images are memory of one guest that compiles, ten seconds apart.",
        panels: machines::checkpoint_peers,
    },
    Plan {
        name: "slowdown-by-epoch",
        title: "Slowdown of a protected machine, by epoch",
        rows: &["slowdown.compile", "slowdown.web", "slowdown.ep"],
        remark: "A negative value: more was done under protection than without.",
        panels: machines::slowdown_by_epoch,
    },
    Plan {
        name: "session-peers",
        title: "Sessions over 32 ms and 100 Mbit/s",
        rows: &["session.documents", "session.build", "session.io", "session.guest", "session.peers"],
        remark: "The lower panel is logarithmic.",
        panels: mounts::session_peers,
    },
    Plan {
        name: "pool-rate",
        title: "Writes to the checkpoint pool",
        rows: &["stripes", "peers"],
        remark: "The pool was measured anew beside each of the others.",
        panels: mounts::pool_rate,
    },
];

/// Every chart, in the order of the page.
pub(super) fn draw(entries: &[Entry<'_>]) -> Result<Vec<Drawn>> {
    PLANS.iter().map(|plan| draw_one(plan, entries)).collect()
}

fn draw_one(plan: &Plan, entries: &[Entry<'_>]) -> Result<Drawn> {
    let used: Vec<_> = entries.iter().filter(|entry| plan.rows.contains(&&*entry.row.row)).collect();
    let rows: Vec<_> = used.iter().map(|entry| entry.row).collect();
    let panels = (plan.panels)(&rows);
    if panels.is_empty() {
        return Ok(Drawn::Missing { title: plan.title, rows: plan.rows });
    }
    let svg = Chart { title: plan.title, panels }.svg().with_context(|| format!("chart {}", plan.name))?;
    Ok(Drawn::Picture { name: plan.name, title: plan.title, sources: sources(plan, &used), svg })
}

/// Rows, repetitions and kind of the records behind a chart.
fn sources(plan: &Plan, used: &[&Entry<'_>]) -> String {
    let names = plan.rows.iter().filter(|name| used.iter().any(|entry| entry.row.row == **name));
    let rows = names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let counts: BTreeSet<_> = used.iter().map(|entry| entry.row.n).collect();
    let n = match (counts.first(), counts.last()) {
        (Some(least), Some(most)) if least != most => format!("{least} to {most}"),
        (least, _) => least.copied().unwrap_or(0).to_string(),
    };
    let quick: BTreeSet<_> = used.iter().map(|entry| entry.record.quick).collect();
    let kind = match (quick.contains(&true), quick.contains(&false)) {
        (true, false) => ", `quick`",
        (true, true) => ", partly `quick`",
        _ => "",
    };
    format!("Medians of {rows}; n = {n}{kind}. {}", plan.remark)
}

/// A panel of bars, or none without groups.
fn panel(groups: Vec<Group>, legend: &[&str], title: &str, vertical: &str, is_log: bool) -> Vec<Panel> {
    if groups.is_empty() {
        return Vec::new();
    }
    let legend = numbered(legend);
    vec![Panel { title: title.into(), legend, vertical: vertical.into(), is_log, body: Body::Bars(groups) }]
}

/// A legend in the order of the colours.
fn numbered(names: &[&str]) -> Vec<(usize, String)> {
    names.iter().map(|name| (*name).to_owned()).enumerate().collect()
}

/// One group a case: our value and, in the order of `peers`, theirs.
fn beside_peers(rows: &[&RecordedRow], case: &str, peers: &[&str]) -> Option<Group> {
    let of_case: Vec<_> = rows.iter().filter(|row| row.case == case).collect();
    let theirs = |peer: &&str| of_case.iter().find(|row| row.peer.as_deref() == Some(peer))?.peer_value;
    let values: Vec<_> = [Some(of_case.first()?.value)].into_iter().chain(peers.iter().map(theirs)).collect();
    Some(Group { name: case.to_owned(), bars: bars(&values), goal: None })
}

/// All peers of some rows, and the legend that has them after Whimbrel.
fn peers_and_legend<'a>(rows: &[&'a RecordedRow]) -> (Vec<&'a str>, Vec<&'a str>) {
    let peers = names(rows.iter().filter_map(|row| row.peer.as_deref()));
    let legend = ["Whimbrel"].into_iter().chain(peers.iter().copied()).collect();
    (peers, legend)
}

/// Numbered values; those that are missing leave no bar.
fn bars(values: &[Option<f64>]) -> Vec<(usize, f64)> {
    values.iter().enumerate().filter_map(|(series, value)| Some((series, (*value)?))).collect()
}

/// Names in the order in which they come first.
fn names<'a>(all: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names = Vec::new();
    for name in all {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::super::record::Records;
    use super::super::record::tests::{record, row};
    use super::*;

    fn titles(rows: &[RecordedRow], name: &str) -> Option<String> {
        let records = Records::new(vec![record("x", true, rows)]);
        let drawn = draw(&records.entries()).unwrap().into_iter();
        drawn
            .filter_map(|one| match one {
                Drawn::Picture { name: this, svg, .. } if this == name => Some(svg),
                _ => None,
            })
            .next()
    }

    #[test]
    fn a_chart_without_its_rows_is_left_out() {
        let records = Records::new(vec![record("x", true, &[row("scan.idle", "", 1.0, None)])]);
        let drawn = draw(&records.entries()).unwrap();
        assert!(drawn.iter().all(|one| matches!(one, Drawn::Missing { .. })));
    }

    #[test]
    fn a_peer_that_did_not_end_leaves_a_gap() {
        let case = |link: u32| format!("{link} Mbit/s, idle, downtime, as a client sees it");
        let measured = |link, peer, theirs| row("migrate.rates", &case(link), 50.0, Some((peer, theirs)));
        let rows = [
            measured(100, "QEMU pre-copy", 90.0),
            measured(200, "QEMU post-copy", 900.0),
            measured(400, "QEMU pre-copy", 80.0),
        ];
        let svg = titles(&rows, "downtime-by-link").unwrap();
        assert!(svg.contains("Guest: idle") && svg.contains("link, Mbit/s"));
        let points = |colour: &str| {
            let lines = svg.lines().filter(|line| line.starts_with("<polyline") && line.contains(colour));
            lines.map(|line| line.matches(',').count()).max().unwrap_or(0)
        };
        assert_eq!((points("#2F81F7"), points("#D9822B")), (3, 1), "points in a line: ours, precopy");
    }

    #[test]
    fn programs_that_cannot_do_a_work_have_no_bar_in_it() {
        let rows = [
            row("session.peers", "2 document runs, 32 ms, 100 Mbit/s, cold", 0.7, Some(("sshfs", 18.0))),
            row("session.peers", "16 MiB read, 32 ms, 100 Mbit/s, cold", 1.5, Some(("sshfs", 3.0))),
            row("session.peers", "16 MiB read, 32 ms, 100 Mbit/s, cold", 1.5, Some(("NFSv4", 2.5))),
            row("session.peers", "16 MiB read, 32 ms, 30 Mbit/s, cold", 4.5, Some(("NFSv4", 77.7))),
        ];
        let svg = titles(&rows, "session-peers").unwrap();
        assert!(svg.contains("2 document runs, cold") && svg.contains("2.50") && !svg.contains("77.7"));
    }
}
