//! `whimbrel checkpoint`.

use crate::{
    argument_types::{BalloonArg, LabelArg},
    context::Context,
    error::CliError,
    operation,
};
use whimbrel_api::CheckpointRequest;
use whimbrel_core::{MachineName, RefName};

const EXAMPLES: &str = "\
Examples:
  whimbrel checkpoint web
  whimbrel checkpoint web --tag before-upgrade --label ticket=4711
  whimbrel checkpoint web --disks-only --tag golden    without memory: what others derive from
  whimbrel resume before-upgrade --name web2    have that state run beside the machine";

/// Keep the state of a machine as a capsule; the machine runs on
///
/// Copies while the machine runs and stops it only for the last few pages.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
    /// Tag for the new capsule
    #[arg(long)]
    tag: Option<RefName>,
    /// Something to write on it (may be given several times)
    #[arg(long = "label", value_name = "KEY=VALUE")]
    labels: Vec<LabelArg>,
    /// Keep its disks and configuration only, all as of one instant; works for a machine that is switched off
    /// too
    #[arg(long)]
    disks_only: bool,
    /// Take memory from the guest before and give it back after: auto, off or what to leave it
    #[arg(long, value_name = "auto|off|SIZE", default_value = "off", conflicts_with = "disks_only")]
    balloon: BalloonArg,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let labels = self.labels.into_iter().map(|LabelArg(key, value)| (key, value)).collect();
        let (balloon, disks_only) = (self.balloon.0, self.disks_only);
        let request = CheckpointRequest { tag: self.tag, labels, balloon, disks_only };
        operation::perform(context, context.client.checkpoint(&self.name, &request)).await
    }
}
