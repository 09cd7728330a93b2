//! `whimbrel outdated`: lists what is based on an old version of a capsule.

use crate::{
    context::Context,
    error::CliError,
    table::{ago, table},
};
use whimbrel_api::{CapsuleRef, DiskRebase, OutdatedChild, OutdatedReport};
use whimbrel_core::RefName;

const EXAMPLES: &str = "\
Examples:
  whimbrel tag maintained golden && whimbrel outdated golden    after golden was updated
  whimbrel outdated golden --onto golden-3                      before it is updated
  whimbrel outdated golden --json | jq '.standing[] | select(.disks[].conflicts > 0)'";

/// List machines and capsules that are based on an old version of a capsule
///
/// For each disk: CHANGED counts the pages that the child changed, UPDATED those that the new version
/// changed, CONFLICTS those that both changed to different content. For a machine, every page that it wrote
/// counts as changed. The command itself changes nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag or machine that was updated, or the old capsule itself
    capsule: CapsuleRef,
    /// New version of CAPSULE [default: the one that it names now]
    #[arg(long, value_name = "VERSION")]
    onto: Option<CapsuleRef>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let report = context.client.outdated(&self.capsule, self.onto.as_ref()).await?;
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
    let header = ["OUTDATED", "CAPSULE", "OLD VERSION", "DISK", "CHANGED", "UPDATED", "CONFLICTS"];
    text + "\n" + &table(header, rows, "nothing is based on an old version")
}

/// Rows of one child: its disks with counts in pages, or the reason why there are none.
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
