//! `whimbrel derive`: creates a machine that boots from the disks of a capsule.

use crate::{
    argument_types::{NicArg, PortArg},
    context::Context,
    error::CliError,
    first_boot::FirstBoot,
    machine_text,
    settings_args::SettingsArgs,
};
use whimbrel_api::{CapsuleRef, DeriveRequest};
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel import debian.qcow2 golden && whimbrel derive golden web
  whimbrel derive golden db --memory 4G --cpus 4 --net br0
  whimbrel derive golden db --ssh-key ~/.ssh/id_ed25519.pub --set address=10.1.2.5/24 --set gateway=10.1.2.1
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
    /// Size of the first disk, at least that of the parent's [default: that of the parent]
    #[arg(long, value_name = "SIZE")]
    disk_size: Option<ByteSize>,
    /// Port of this host that leads to a port of the machine (repeatable)
    #[arg(short, long, value_name = "[ADDRESS:]PORT:PORT[/udp]")]
    publish: Vec<PortArg>,
    /// Command line of the kernel, if the parent loads one directly
    #[arg(long, value_name = "TEXT")]
    append: Option<String>,
    #[command(flatten)]
    first_boot: FirstBoot,
    #[command(flatten)]
    settings: SettingsArgs,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let nics: Vec<_> = self.nics.into_iter().map(|port| port.0).collect();
        let request = DeriveRequest {
            memory: self.memory,
            cpus: self.cpus,
            cpu: self.cpu,
            nics: (!nics.is_empty()).then_some(nics),
            append: self.append,
            disk_size: self.disk_size,
            cloud_init: self.first_boot.cloud_init()?,
            publish: self.publish.into_iter().map(|port| port.0).collect(),
            settings: self.settings.settings(),
            ..DeriveRequest::new(self.capsule, self.name)
        };
        let machine = context.client.derive(&request).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
