//! `whimbrel derive`: creates a machine that boots from the disks of a capsule.

use crate::{
    argument_types::NicArg, context::Context, error::CliError, machine_text, settings_args::SettingsArgs,
};
use whimbrel_api::{CapsuleRef, DeriveRequest};
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel import debian.qcow2 golden && whimbrel derive golden web
  whimbrel derive golden db --memory 4G --cpus 4 --net br0
  whimbrel checkpoint web --tag web-1       a child of golden
  whimbrel log golden --graph               both capsules, and what each adds";

/// Create a machine that boots from the disks of a capsule
///
/// The new machine boots and shares all unchanged disk pages with CAPSULE. Its own capsules become children
/// of CAPSULE. The memory of CAPSULE is not used; `resume` and `clone` continue a machine with its memory.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Parent: tag, machine (its newest capsule) or id
    capsule: CapsuleRef,
    /// Name for the machine, not in use on this host
    name: MachineName,
    /// Size of the guest memory [default: that of the parent]
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Number of virtual CPUs [default: that of the parent]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    cpus: Option<u32>,
    /// CPU model, as of `whimbrel run` [default: that of the parent]
    #[arg(long, value_name = "MODEL[,+FEATURE|,-FEATURE]")]
    cpu: Option<String>,
    /// Network port in a bridge of this host, or `none` for an unplugged one (repeatable) [default: the ports
    /// of the parent with new hardware addresses]
    #[arg(long = "net", value_name = "BRIDGE[,mac=ADDRESS]")]
    nics: Vec<NicArg>,
    /// Command line of the kernel, if the parent loads one directly
    #[arg(long, value_name = "TEXT")]
    append: Option<String>,
    #[command(flatten)]
    settings: SettingsArgs,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let nics: Vec<_> = self.nics.into_iter().map(|port| port.0).collect();
        let request = DeriveRequest {
            capsule: self.capsule,
            name: self.name,
            memory: self.memory,
            cpus: self.cpus,
            cpu: self.cpu,
            profile: None,
            secure_boot: None,
            tpm: false,
            display: false,
            nics: (!nics.is_empty()).then_some(nics),
            append: self.append,
            disk_size: None,
            cloud_init: None,
            publish: Vec::new(),
            settings: self.settings.settings(),
        };
        let machine = context.client.derive(&request).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
