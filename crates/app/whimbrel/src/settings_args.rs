//! Options of a machine's settings on its host, for verbs that create a machine and for `set`.

use crate::argument_types::{AutostartArg, DurationArg, LabelArg, RestartArg};
use whimbrel_api::{Autostart, MachineSettings};

/// Settings of a new machine.
#[derive(Debug, clap::Args)]
pub(crate) struct SettingsArgs {
    /// Start the machine after its host has started; lower numbers start first [default: no]
    #[arg(long, value_name = "ORDER", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    autostart: Option<u32>,
    /// Time to wait after its start before the next machine starts
    #[arg(long, value_name = "DURATION", requires = "autostart")]
    autostart_delay: Option<DurationArg>,
    /// Restart the machine when its QEMU dies, or after any end but `whimbrel stop`; at most LIMIT times in a
    /// row [default: no]
    #[arg(long, value_name = "no|on-failure|always[:LIMIT]")]
    restart: Option<RestartArg>,
    /// Label for the machine (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE")]
    labels: Vec<LabelArg>,
    /// Remark about the machine
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
}

impl SettingsArgs {
    pub(crate) fn settings(&self) -> MachineSettings {
        let autostart = self.autostart.map(AutostartArg::On);
        MachineSettings {
            autostart: autostart_of(autostart, self.autostart_delay).unwrap_or_default(),
            restart: self.restart.as_ref().map(|restart| restart.0).unwrap_or_default(),
            labels: self.labels.iter().map(|label| (label.0.clone(), label.1.clone())).collect(),
            note: self.note.clone().unwrap_or_default(),
        }
    }
}

/// The setting of both options together.
pub(crate) fn autostart_of(autostart: Option<AutostartArg>, delay: Option<DurationArg>) -> Option<Autostart> {
    // One that is too long is refused by the daemon.
    let delay_s = delay.map_or(0, |delay| u32::try_from(delay.0.as_secs()).unwrap_or(u32::MAX));
    autostart.map(|autostart| match autostart {
        AutostartArg::Off => Autostart::Off,
        AutostartArg::On(order) => Autostart::On { order, delay_s },
    })
}
