//! `whimbrel run`: creates a machine and starts it.

use super::apply::Wanted;
use crate::{
    argument_types::{AccelArg, DiskArg, GuestRequestArg, NicArg, PortArg, absolute},
    context::Context,
    error::CliError,
    first_boot::FirstBoot,
    hardware_args::{BootOrderArg, DevicesArg, ProfileArg},
    machine_text,
    settings_args::SettingsArgs,
};
use std::path::PathBuf;
use whimbrel_api::{MachineInfo, RunRequest};
use whimbrel_core::{Accel, ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel run web --disk web.img --memory 1G --net br0
  whimbrel run db --disk root.img --disk data.img,size=100G --memory 4G --cpus 2
  whimbrel run web --disk web.img --memory 1G --net lan0 --publish 8080:80
  whimbrel run vm --disk debian-12.raw --memory 1G --net lan0 -p 2222:22 --ssh-key ~/.ssh/id_ed25519.pub
  whimbrel run web --disk web.img --memory 1G --autostart --restart on-failure --label tier=front
  whimbrel run tiny --memory 256M --kernel vmlinuz --initrd initrd.gz --append console=ttyS0
  whimbrel run fast --profile micro --memory 128M --kernel vmlinux --initrd initrd --append console=ttyS0
  whimbrel run desk --profile desktop --new-disk 40G --cdrom debian.iso --memory 4G --cpus 2 --net lan0
  whimbrel run old --profile foreign --disk old.raw --memory 1G --net lan0";

/// Create a machine and start it
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name for the machine, not in use on this host
    name: MachineName,
    /// Raw disk image to start from; it is read and never written (repeatable)
    #[arg(long = "disk", value_name = "FILE[,size=SIZE]")]
    disks: Vec<DiskArg>,
    /// Empty disk of this size, after those of --disk (repeatable)
    #[arg(long = "new-disk", value_name = "SIZE")]
    new_disks: Vec<ByteSize>,
    /// CD-ROM in a drive of the machine, like an installer's ISO file; it is read and never written
    /// (repeatable)
    #[arg(long = "cdrom", value_name = "FILE", value_parser = absolute)]
    cdroms: Vec<PathBuf>,
    /// Devices to try first at the boot: the disks, or the CD-ROMs
    #[arg(long, value_name = "DEVICES", default_value = "disk", requires = "cdroms")]
    boot: BootOrderArg,
    /// Size of the guest memory
    #[arg(long, value_name = "SIZE")]
    memory: ByteSize,
    /// Hardware: a PC with a BIOS, or with UEFI, a desktop (UEFI with Secure Boot, a TPM and a screen), a
    /// micro machine that starts a kernel at once, or a PC with a screen for systems that know no virtio
    #[arg(long, value_name = "PROFILE", default_value = "default")]
    profile: ProfileArg,
    /// Start only programs that are signed; needs UEFI [default: as the profile]
    #[arg(long, value_name = "yes|no", value_parser = clap::builder::BoolishValueParser::new())]
    secure_boot: Option<bool>,
    /// Kind of its disks and network ports: virtio is the fastest, emulated ones (SATA, e1000) every system
    /// knows [default: as the profile]
    #[arg(long, value_name = "KIND")]
    devices: Option<DevicesArg>,
    /// Give it a TPM 2.0; clones and copies of the machine have the same one
    #[arg(long)]
    tpm: bool,
    /// Give it a screen, a keyboard and a pointer: `whimbrel display NAME` and the web page show them
    #[arg(long)]
    display: bool,
    /// Number of virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    cpus: u32,
    /// CPU model: `x86-64-v2` or `x86-64-v3` to move between different processors and QEMU releases, `host`,
    /// `max`, `baseline` (what all trusted hosts have in common), or a name of QEMU [default: max]
    #[arg(long, value_name = "MODEL[,+FEATURE|,-FEATURE]")]
    cpu: Option<String>,
    /// Kernel to load directly, instead of booting from the first disk
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    kernel: Option<PathBuf>,
    /// Initial RAM disk of the kernel
    #[arg(long, value_name = "FILE", value_parser = absolute, requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Command line of the kernel
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    append: Option<String>,
    /// Network port in a network or bridge of this host, or `none` for an unplugged one (repeatable)
    #[arg(long = "net", value_name = "BRIDGE[,mac=ADDRESS]")]
    nics: Vec<NicArg>,
    /// Port of this host that leads to a port of the machine, which needs a port in a network (repeatable)
    #[arg(short, long, value_name = "[ADDRESS:]PORT:PORT[/udp]")]
    publish: Vec<PortArg>,
    #[command(flatten)]
    first_boot: FirstBoot,
    /// Executor of guest instructions [default: kvm if it works here, else tcg]
    #[arg(long)]
    accel: Option<AccelArg>,
    /// Operations that the guest may request through `whimbrel-guest` [default: none]
    #[arg(long, alias = "self-service", value_name = "migrate=HOST|checkpoint", value_delimiter = ',')]
    guest_requests: Vec<GuestRequestArg>,
    #[command(flatten)]
    settings: SettingsArgs,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        context.output.result(&self.create(context).await?, machine_text::sentence)
    }

    pub(crate) async fn create(self, context: &Context) -> Result<MachineInfo, CliError> {
        Ok(context.client.run(&self.request()?).await?)
    }

    pub(crate) fn wanted(&self) -> Wanted {
        let publish = self.publish.iter().map(|port| port.0).collect();
        Wanted { memory: self.memory, cpus: self.cpus, publish, settings: self.settings.settings() }
    }

    fn request(self) -> Result<RunRequest, CliError> {
        let cloud_init = self.first_boot.cloud_init()?;
        Ok(RunRequest {
            cloud_init,
            name: self.name,
            disks: self.disks.into_iter().map(|disk| disk.0).collect(),
            new_disks: self.new_disks,
            cdroms: self.cdroms,
            boot_order: self.boot.into(),
            memory: self.memory,
            profile: self.profile.into(),
            secure_boot: self.secure_boot,
            devices: self.devices.map(Into::into),
            tpm: self.tpm,
            display: self.display,
            cpus: self.cpus,
            cpu: self.cpu,
            kernel: self.kernel,
            initrd: self.initrd,
            append: self.append,
            nics: self.nics.into_iter().map(|port| port.0).collect(),
            publish: self.publish.into_iter().map(|port| port.0).collect(),
            accel: self.accel.map(Accel::from),
            self_service: GuestRequestArg::all(self.guest_requests),
            settings: self.settings.settings(),
        })
    }
}
