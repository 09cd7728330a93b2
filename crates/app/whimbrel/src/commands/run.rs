//! `whimbrel run`.

use crate::{
    argument_types::{DiskArg, GuestRequestArg, NicArg, absolute},
    context::Context,
    error::CliError,
    machine_text,
};
use clap::ValueEnum;
use std::path::PathBuf;
use whimbrel_api::RunRequest;
use whimbrel_core::{Accel, ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel run web --disk web.img --memory 1G --net br0
  whimbrel run db --disk root.img --disk data.img,size=100G --memory 4G --cpus 2
  whimbrel run tiny --memory 256M --kernel vmlinuz --initrd initrd.gz --append console=ttyS0";

/// Make a machine and start it
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name for the machine, not in use on this host
    name: MachineName,
    /// Raw image to begin from; it is read, never written (may be given several times)
    #[arg(long = "disk", value_name = "FILE[,size=SIZE]")]
    disks: Vec<DiskArg>,
    /// Guest memory
    #[arg(long, value_name = "SIZE")]
    memory: ByteSize,
    /// Virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    cpus: u32,
    /// Kernel to load directly instead of booting from the first disk
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    kernel: Option<PathBuf>,
    /// Initial RAM disk for that kernel
    #[arg(long, value_name = "FILE", value_parser = absolute, requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Command line for that kernel
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    append: Option<String>,
    /// Network port in a bridge of this host, or `none` for an unplugged one (may be given several times)
    #[arg(long = "net", value_name = "BRIDGE[,mac=ADDRESS]")]
    nics: Vec<NicArg>,
    /// What executes guest instructions; the host's choice unless given
    #[arg(long)]
    accel: Option<AccelArg>,
    /// What it may ask for from inside with `whimbrel-guest`; nothing unless given
    #[arg(long, value_name = "migrate=HOST|checkpoint", value_delimiter = ',')]
    self_service: Vec<GuestRequestArg>,
}

/// The two of them, with help.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum AccelArg {
    /// QEMU's own translator; works everywhere
    Tcg,
    /// Hardware virtualisation
    Kvm,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.run(&self.request()).await?;
        context.output.result(&machine, machine_text::sentence)
    }

    fn request(self) -> RunRequest {
        RunRequest {
            name: self.name,
            disks: self.disks.into_iter().map(|disk| disk.0).collect(),
            memory: self.memory,
            cpus: self.cpus,
            kernel: self.kernel,
            initrd: self.initrd,
            append: self.append,
            nics: self.nics.into_iter().map(|port| port.0).collect(),
            accel: self.accel.map(|accel| match accel {
                AccelArg::Tcg => Accel::Tcg,
                AccelArg::Kvm => Accel::Kvm,
            }),
            self_service: GuestRequestArg::all(self.self_service),
        }
    }
}
