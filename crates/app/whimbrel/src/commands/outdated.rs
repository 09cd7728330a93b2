//! `whimbrel rebase`.

use crate::{
    context::Context,
    error::CliError,
    table::{ago, table},
};
use whimbrel_api::{CapsuleRef, DiskRebase, OutdatedChild, OutdatedReport};
use whimbrel_core::RefName;

const EXAMPLES: &str = "\
Examples:
  whimbrel tag maintained golden && whimbrel rebase golden    golden has moved: who is left behind?
  whimbrel rebase golden --onto golden-3                      before it moves
  whimbrel rebase golden --json | jq '.standing[] | select(.disks[].conflicts > 0)'";

/// Report who still stands on an old version of a capsule
///
/// Lists the children of what CAPSULE named before, and the machines that run on them, with the pages of
/// their disks that they changed, that the update changed, and that both did. It changes nothing: a page is
/// too little to merge by. Pages that both changed to the same are no conflict; of a machine every page it
/// wrote counts.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag or machine that has moved, or the old capsule itself
    capsule: CapsuleRef,
    /// The new version; what CAPSULE names now unless given
    #[arg(long, value_name = "CAPSULE")]
    onto: Option<CapsuleRef>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let report = context.client.rebase(&self.capsule, self.onto.as_ref()).await?;
        context.output.result(&report, describe)
    }
}

fn describe(report: &OutdatedReport) -> String {
    let mut text = format!("new version  {}\n", report.onto.short());
    for version in &report.old {
        let when = match version.time_ms {
            0 => String::new(),
            time => format!(", named {} ago", ago(time)),
        };
        let gone = if version.here { "" } else { ", no longer in the store" };
        text += &format!("old version  {}{when}{gone}\n", version.capsule.short());
    }
    if report.old.is_empty() {
        return text + "there is no old version\n";
    }
    let rows = report.standing.iter().flat_map(rows);
    let header = ["LEFT BEHIND", "CAPSULE", "OLD VERSION", "DISK", "CHANGED", "UPDATED", "CONFLICTS"];
    text + "\n" + &table(header, rows, "nobody stands on an old version")
}

/// A row a disk, counts in pages; one with the reason where nothing can be told.
fn rows(standing: &OutdatedChild) -> Vec<[String; 7]> {
    let who = match &standing.machine {
        Some(machine) => format!("machine {machine}"),
        None => standing.names.iter().map(RefName::as_str).collect::<Vec<_>>().join(", "),
    };
    let row = |disk: &str, counts: [String; 3]| {
        let [changed, updated, conflicts] = counts;
        let (capsule, old) = (standing.capsule.short(), standing.old.short());
        [who.clone(), capsule, old, disk.to_owned(), changed, updated, conflicts]
    };
    if standing.disks.is_empty() {
        let why = standing.unknown.clone().unwrap_or_else(|| "no disk in common".to_owned());
        return vec![row("-", [why, String::new(), String::new()])];
    }
    let counts =
        |disk: &DiskRebase| [disk.changed, disk.updated, disk.conflicts].map(|count| count.to_string());
    standing.disks.iter().map(|disk| row(&disk.name, counts(disk))).collect()
}
