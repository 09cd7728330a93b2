//! `whimbrel promote`: detaches a capsule from its parents.

use crate::{context::Context, error::CliError, table::milliseconds};
use whimbrel_api::{CapsuleRef, PromoteReport, PromoteRequest};
use whimbrel_core::{ByteSize, CapsuleId, RefName};

const EXAMPLES: &str = "\
Examples:
  whimbrel promote golden                  the tag moves to the new capsule
  whimbrel promote web --tag web-alone     the old capsule keeps its names
  whimbrel promote 3fa95c81 --all-refs";

/// Detach a capsule from its parents
///
/// Creates a capsule with the same images and no parents, so that it can be passed on without its lineage. No
/// page is copied. A parent can be removed without this. The new capsule has another id; children of the old
/// capsule stay its children.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    capsule: CapsuleRef,
    /// Tag for the new capsule; no other name moves
    #[arg(long)]
    tag: Option<RefName>,
    /// Move every name of the old capsule to the new one
    #[arg(long)]
    all_refs: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let request = PromoteRequest { capsule: self.capsule, tag: self.tag, all_refs: self.all_refs };
        let report = context.client.promote(&request).await?;
        context.output.result(&report, describe)
    }
}

fn describe(report: &PromoteReport) -> String {
    let names: Vec<_> = report.refs.iter().map(RefName::as_str).collect();
    let parents: Vec<_> = report.parents.iter().map(CapsuleId::short).collect();
    if parents.is_empty() {
        return format!("{} has no parents ({})\n", report.capsule.short(), names.join(", "));
    }
    format!(
        "{} ({}) has no parents; {} had {}: {} of pages copied, {} written, took {}\n",
        report.capsule.short(),
        names.join(", "),
        report.was.short(),
        parents.join(", "),
        ByteSize(report.bytes_copied),
        ByteSize(report.bytes_added),
        milliseconds(report.ms),
    )
}
