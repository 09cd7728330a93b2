//! Charts of mounts: sessions and the checkpoint pool.

use super::super::chart::{Body, Group, Panel, Series};
use super::super::record::RecordedRow;
use super::{bars, beside_peers, names, panel, peers_and_legend};

/// The line of the charts of sessions, as cases have it.
const LINE: &str = ", 32 ms, 100 Mbit/s, ";
/// Number of the series that is nobody's mount.
const LOCAL: usize = 5;

/// Work on a mount beside a local disk, and beside mounts of other programs.
pub(super) fn session_peers(rows: &[&RecordedRow]) -> Vec<Panel> {
    let works = ["session.documents", "session.build", "session.io", "session.guest"];
    let groups: Vec<_> = works.into_iter().filter_map(|work| beside_disk(rows, work)).collect();
    let legend = ["mount, warm cache", "mount, cold cache", "mount without a cache"];
    let mut panels = panel(groups, &legend, "Beside a local disk", "time, s", false);
    panels.iter_mut().for_each(|panel| panel.legend.insert(0, (LOCAL, "local disk".into())));
    let rows: Vec<_> =
        rows.iter().filter(|row| row.row == "session.peers" && row.case.contains(LINE)).copied().collect();
    let (peers, legend) = peers_and_legend(&rows);
    let cases = names(rows.iter().map(|row| &*row.case));
    let groups = cases.into_iter().filter_map(|case| beside_peers(&rows, case, &peers));
    let groups = groups.map(|group| Group { name: group.name.replace(LINE, ", "), ..group }).collect();
    panels.extend(panel(groups, &legend, "Beside other programs", "time, s (logarithmic)", true));
    panels
}

/// One work: on a local disk, and on a mount with each state of the cache.
fn beside_disk(rows: &[&RecordedRow], name: &str) -> Option<Group> {
    let find = |cache: &str| {
        let mut of_work = rows.iter().filter(|row| row.row == name && !row.case.contains("over NBD"));
        of_work.find(|row| row.case.split_once(LINE).is_some_and(|(_, found)| found == cache)).copied()
    };
    let warm = find("warm")?;
    let values = ["warm", "cold", "no cache"].map(|cache| find(cache).map(|row| row.value));
    let local = warm.peer_value.map(|value| (LOCAL, value));
    let (work, _) = warm.case.split_once(LINE)?;
    let bars = local.into_iter().chain(bars(&values)).collect();
    Some(Group { name: work.to_owned(), bars, goal: None })
}

/// Rates by the width of the stripe, and a series of images beside other places.
pub(super) fn pool_rate(rows: &[&RecordedRow]) -> Vec<Panel> {
    let mut lines: Vec<(String, Series)> = Vec::new();
    for row in rows.iter().filter(|row| row.row == "stripes") {
        let Some((width, links)) = width_and_links(&row.case) else { continue };
        let at = lines.iter().position(|line| line.0 == links).unwrap_or_else(|| {
            lines.push((links, Series { number: lines.len(), points: Vec::new() }));
            lines.len() - 1
        });
        lines[at].1.add((width, row.value));
    }
    let mut panels = Vec::new();
    if !lines.is_empty() {
        let (names, series): (Vec<_>, Vec<_>) = lines.into_iter().unzip();
        panels.push(Panel {
            title: "Sliding window, until all is stored, one copy; links of each benefactor / of the client"
                .into(),
            legend: names.into_iter().enumerate().collect(),
            vertical: "rate, MB/s".into(),
            is_log: true,
            body: Body::Lines { horizontal: "benefactors in the stripe", series },
        });
    }
    panels.extend(beside_places(rows));
    panels
}

/// Width of the stripe, and the links as the legend has them.
fn width_and_links(case: &str) -> Option<(f64, String)> {
    let case = case.strip_prefix("sliding window, width ")?.strip_suffix(": ASB")?;
    let (width, links) = case.split_once(", ")?;
    let (benefactor, client) = links.split_once(" Mbit/s each, client ")?;
    Some((width.parse().ok()?, format!("{benefactor} / {client} Mbit/s")))
}

fn beside_places(rows: &[&RecordedRow]) -> Vec<Panel> {
    let rows: Vec<_> = rows.iter().filter(|row| row.row == "peers").collect();
    let group = |row: &&&RecordedRow| {
        let bars = bars(&[Some(row.value), row.peer_value]);
        Some(Group { name: row.peer.clone()?, bars, goal: None })
    };
    let title = rows.first().map(|row| format!("{}, written until durable", row.case)).unwrap_or_default();
    panel(rows.iter().filter_map(group).collect(), &["pool", "the other"], &title, "time, s", false)
}
