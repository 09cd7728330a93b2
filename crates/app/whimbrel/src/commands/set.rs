//! `whimbrel set`: changes the settings of a machine on its host, and its hardware.

use crate::{
    argument_types::{AutostartArg, DurationArg, LabelArg, NicArg, RestartArg, absolute},
    context::Context,
    error::CliError,
    hardware_args::{BootOrderArg, DevicesArg, DiskSizeArg},
    machine_text,
    settings_args::autostart_of,
};
use clap::ArgGroup;
use std::path::PathBuf;
use whimbrel_api::{HardwareChange, SettingsRequest};
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel set web --autostart yes --restart on-failure
  whimbrel set db --autostart 1 --autostart-delay 30s     first of all; 30 s later the next ones
  whimbrel set web --autostart no --restart no
  whimbrel set web --label tier=front --unlabel owner --note 'moves to beta in May'
  whimbrel stop web && whimbrel set web --memory 4G --cpus 4 && whimbrel start web
  whimbrel set web --disk-size 40G                        the guest then makes its file system larger
  whimbrel set web --add-disk 50G --add-net lan1          also while the machine runs
  whimbrel set web --remove-disk 1                        the disk, with all that is on it
  whimbrel set desk --eject                               after the installation
  whimbrel set desk --cdrom rescue.iso --boot cdrom
  whimbrel set desk --eject --cdrom drivers.iso           another one, also while it runs

Hardware changes while the machine is stopped; the next start boots it with that. A machine that runs gets disks and \
network ports too, and loses the last that it got so, once its guest lets go of it. Its CD-ROM drives stay, and get \
other CD-ROMs. New disks are empty and come after those that it has. A running machine gives up memory by `whimbrel balloon`.

A machine that another host has, or may have, is never started by itself. Neither is a suspended one. Settings stay \
on this host when a machine moves.";

/// Change when a machine starts by itself, its labels, its note and its hardware
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, group = ArgGroup::new("change").required(true).multiple(true))]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Start the machine after its host has started; lower numbers start first
    #[arg(long, value_name = "yes|no|ORDER", group = "change")]
    autostart: Option<AutostartArg>,
    /// Time to wait after its start before the next machine starts
    #[arg(long, value_name = "DURATION", requires = "autostart")]
    autostart_delay: Option<DurationArg>,
    /// Restart the machine when its QEMU dies, or after any end but `whimbrel stop`; at most LIMIT times in a
    /// row, with growing delays
    #[arg(long, value_name = "no|on-failure|always[:LIMIT]", group = "change")]
    restart: Option<RestartArg>,
    /// Label to set (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE", group = "change")]
    labels: Vec<LabelArg>,
    /// Label to remove (repeatable)
    #[arg(long = "unlabel", value_name = "KEY", group = "change")]
    unlabels: Vec<String>,
    /// Remark about the machine; an empty one removes it
    #[arg(long, value_name = "TEXT", group = "change")]
    note: Option<String>,
    #[command(flatten)]
    hardware: HardwareArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Hardware")]
struct HardwareArgs {
    /// Size of the guest memory
    #[arg(long, value_name = "SIZE", group = "change")]
    memory: Option<ByteSize>,
    /// Number of virtual CPUs
    #[arg(long, value_name = "N", group = "change", value_parser = clap::value_parser!(u32).range(1..=256))]
    cpus: Option<u32>,
    /// CPU model, as of `whimbrel run`
    #[arg(long, value_name = "MODEL[,+FEATURE|,-FEATURE]", group = "change")]
    cpu: Option<String>,
    /// Give it a screen, a keyboard and a pointer, or take them away
    #[arg(long, value_name = "yes|no", group = "change", value_parser = clap::builder::BoolishValueParser::new())]
    display: Option<bool>,
    /// Kind of its disks and network ports, as of `whimbrel run`
    #[arg(long, value_name = "KIND", group = "change")]
    devices: Option<DevicesArg>,
    /// CD-ROM to put into a drive of the machine (repeatable)
    #[arg(long = "cdrom", value_name = "FILE", group = "change", value_parser = absolute)]
    cdroms: Vec<PathBuf>,
    /// Take all CD-ROMs out
    #[arg(long, group = "change")]
    eject: bool,
    /// Devices to try first at the boot: the disks, or the CD-ROMs
    #[arg(long, value_name = "DEVICES", group = "change")]
    boot: Option<BootOrderArg>,
    /// Size for a disk that becomes larger: the first one, or that of a number from 0 (repeatable)
    #[arg(long = "disk-size", value_name = "[DISK=]SIZE", group = "change")]
    disk_sizes: Vec<DiskSizeArg>,
    /// Empty disk of this size to add (repeatable)
    #[arg(long, value_name = "SIZE", group = "change")]
    add_disk: Vec<ByteSize>,
    /// Number of its last disk, from 0, to remove with all that is on it
    #[arg(long, value_name = "DISK", group = "change")]
    remove_disk: Option<u32>,
    /// Network port to add, in a network or bridge of this host (repeatable)
    #[arg(long, value_name = "BRIDGE[,mac=ADDRESS]", group = "change")]
    add_net: Vec<NicArg>,
    /// Hardware address of a network port to remove (repeatable)
    #[arg(long, value_name = "ADDRESS", group = "change")]
    remove_net: Vec<String>,
}

impl HardwareArgs {
    fn change(self) -> HardwareChange {
        HardwareChange {
            memory: self.memory,
            cpus: self.cpus,
            cpu: self.cpu,
            display: self.display,
            devices: self.devices.map(Into::into),
            disk_sizes: self.disk_sizes.into_iter().map(|disk| disk.0).collect(),
            eject: self.eject,
            add_cdroms: self.cdroms,
            boot_order: self.boot.map(Into::into),
            add_disks: self.add_disk,
            remove_disk: self.remove_disk,
            add_nics: self.add_net.into_iter().map(|port| port.0).collect(),
            remove_nics: self.remove_net,
        }
    }
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let removed = self.unlabels.into_iter().map(|key| (key, None));
        let set = self.labels.into_iter().map(|label| (label.0, Some(label.1)));
        let hardware = self.hardware.change();
        let is_hardware = !hardware.is_empty();
        let request = SettingsRequest {
            autostart: autostart_of(self.autostart, self.autostart_delay),
            restart: self.restart.map(|restart| restart.0),
            labels: removed.chain(set).collect(),
            note: self.note,
            hardware,
        };
        let machine = context.client.change_settings(&self.name, &request).await?;
        let text = if is_hardware { machine_text::page } else { machine_text::settings };
        context.output.result(&machine, text)
    }
}
