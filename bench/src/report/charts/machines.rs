//! Charts of machines: migrations, checkpoints, protection.

use super::super::chart::{Body, Group, Panel, Series};
use super::super::record::RecordedRow;
use super::{bars, beside_peers, numbered, panel, peers_and_legend};

/// Names of the peers in the records and in the legend.
const LINKED: [(&str, &str); 3] = [
    ("QEMU pre-copy", "QEMU precopy"),
    ("QEMU post-copy", "QEMU postcopy"),
    ("QEMU auto-converge", "QEMU auto-converge"),
];

/// A panel for each guest, a line for each way to migrate.
pub(super) fn downtime_by_link(rows: &[&RecordedRow]) -> Vec<Panel> {
    let mut panels: Vec<(&str, Vec<Series>)> = Vec::new();
    for row in rows {
        let Some((guest, link)) = guest_and_link(&row.case) else { continue };
        let at = panels.iter().position(|panel| panel.0 == guest).unwrap_or_else(|| {
            let lines = (0..=LINKED.len()).map(|number| Series { number, points: Vec::new() }).collect();
            panels.push((guest, lines));
            panels.len() - 1
        });
        let lines = &mut panels[at].1;
        lines[0].add((link, row.value));
        let peer = LINKED.iter().position(|(name, _)| row.peer.as_deref() == Some(name));
        if let (Some(peer), Some(theirs)) = (peer, row.peer_value) {
            lines[peer + 1].add((link, theirs));
        }
    }
    panels.into_iter().map(|(guest, lines)| downtime_panel(guest, lines)).collect()
}

fn downtime_panel(guest: &str, mut series: Vec<Series>) -> Panel {
    mark_gaps(&mut series);
    let [precopy, postcopy, converge] = LINKED.map(|(_, name)| name);
    Panel {
        title: format!("Guest: {guest}"),
        legend: numbered(&["Whimbrel", precopy, postcopy, converge]),
        vertical: "client downtime, ms".into(),
        is_log: true,
        body: Body::Lines { horizontal: "link, Mbit/s", series },
    }
}

fn guest_and_link(case: &str) -> Option<(&str, f64)> {
    let (link, guest) = case.strip_suffix(", downtime, as a client sees it")?.split_once(" Mbit/s, ")?;
    Some((guest, link.parse().ok()?))
}

/// Breaks each line where it lacks a point that another one has.
fn mark_gaps(series: &mut [Series]) {
    let mut places: Vec<f64> = series.iter().flat_map(|one| one.points.iter().map(|point| point.0)).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    for one in series {
        let missing = places.iter().filter(|place| one.points.iter().all(|point| point.0 != **place));
        let missing: Vec<_> = missing.map(|place| (*place, f64::NAN)).collect();
        one.points.extend(missing);
    }
}

/// Pairs of bars: ours and the peer's.
pub(super) fn bytes_sent(rows: &[&RecordedRow]) -> Vec<Panel> {
    const WIRE: &str = "on the wire";
    let cases = [
        ("migrate.bytes", "idle", "idle guest"),
        ("migrate.bytes.primed", "", "idle guest, target has an older capsule"),
        ("migrate.bytes", "64 MiB", "64 MiB written at 20k pages/s"),
        ("migrate.disk.bytes", "", "disk of 2 GiB, written to"),
        ("migrate.redis", WIRE, "redis with disk"),
        ("migrate.postgres", WIRE, "PostgreSQL with disk"),
        ("migrate.mix", WIRE, "web server with disk"),
    ];
    let group = |(name, case, title): (&str, &str, &str)| {
        let row = rows.iter().find(|row| row.row == name && row.case.starts_with(case))?;
        Some(Group { name: title.into(), bars: bars(&[Some(row.value), row.peer_value]), goal: None })
    };
    let legend = ["Whimbrel", "QEMU precopy, with NBD mirror where there is a disk"];
    panel(cases.into_iter().filter_map(group).collect(), &legend, "1 Gbit/s", "bytes sent, MB", false)
}

/// Bytes kept and time of the store beside programs for backup.
pub(super) fn checkpoint_peers(rows: &[&RecordedRow]) -> Vec<Panel> {
    let (peers, legend) = peers_and_legend(rows);
    let groups = |cases: &[&str]| cases.iter().filter_map(|case| beside_peers(rows, case, &peers)).collect();
    let sizes = groups(&["first image, kept", "later image, added"]);
    let times = groups(&["first image, time", "later image, time", "later image, back"]);
    let mut panels = panel(sizes, &legend, "Size", "bytes kept, MB", false);
    panels.extend(panel(times, &legend, "Time", "time, s", false));
    panels
}

/// A group for each load, a bar for each way to cut epochs.
pub(super) fn slowdown_by_epoch(rows: &[&RecordedRow]) -> Vec<Panel> {
    const WAYS: [&str; 2] =
        ["epochs of 50 ms, standby ", "epochs of 50 ms, up to 200 while nothing waits, standby "];
    let group = |load: &str| {
        let row = |way: &str| {
            let is_whole =
                |row: &&&RecordedRow| row.case.starts_with(way) && row.case.ends_with(" of a processor");
            rows.iter().filter(|row| row.row.strip_prefix("slowdown.") == Some(load)).find(is_whole).copied()
        };
        let found = WAYS.map(row);
        let goal = found.iter().flatten().find_map(|row| limit(row.goal.as_deref()?));
        let values = found.map(|row| row.map(|row| row.value));
        values.iter().any(Option::is_some).then(|| Group { name: load.into(), bars: bars(&values), goal })
    };
    let groups = ["compile", "web", "ep"].into_iter().filter_map(group).collect();
    let legend = ["epochs of 50 ms", "epochs of 50 ms, up to 200 ms while no output waits (default)"];
    panel(groups, &legend, "Against the same machine without protection", "work lost, %", false)
}

/// The number of a goal such as `<= 8 %`.
fn limit(goal: &str) -> Option<f64> {
    goal.strip_prefix("<= ")?.split(' ').next()?.parse().ok()
}
