//! `whimbrel checkpoint`: saves a machine as a capsule while it runs.

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
  whimbrel checkpoint web --disks-only --tag golden    without memory, to derive machines from
  whimbrel checkpoint web --disks-only --quiesce --tag nightly    file systems at rest
  whimbrel resume before-upgrade --name web2           run that state beside the machine";

/// Save the state of a running machine as a capsule
///
/// Memory and disks are copied while the machine runs. It is paused only for the last few pages.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Tag for the new capsule
    #[arg(long)]
    tag: Option<RefName>,
    /// Label for the new capsule (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE")]
    labels: Vec<LabelArg>,
    /// Save only configuration and disks, all disks as of one instant; the machine may be switched off
    #[arg(long)]
    disks_only: bool,
    /// Have qemu-ga in the guest write its caches and freeze its file systems for the pause, so that no
    /// journal has to be replayed
    #[arg(long, requires = "disks_only")]
    quiesce: bool,
    /// Shrink guest memory before the checkpoint and restore it afterwards: auto, off, or the size to shrink
    /// to
    #[arg(long, value_name = "auto|off|SIZE", default_value = "off", conflicts_with = "disks_only")]
    balloon: BalloonArg,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let labels = self.labels.into_iter().map(|LabelArg(key, value)| (key, value)).collect();
        let (balloon, disks_only, quiesce) = (self.balloon.0, self.disks_only, self.quiesce);
        let request = CheckpointRequest { tag: self.tag, labels, balloon, disks_only, quiesce };
        operation::perform(context, context.client.checkpoint(&self.name, &request)).await
    }
}
