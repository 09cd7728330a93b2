//! `whimbrel set`: changes the settings of a machine on its host.

use crate::{
    argument_types::{AutostartArg, DurationArg, LabelArg, RestartArg},
    context::Context,
    error::CliError,
    machine_text,
    settings_args::autostart_of,
};
use clap::ArgGroup;
use whimbrel_api::SettingsRequest;
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel set web --autostart yes --restart on-failure
  whimbrel set db --autostart 1 --autostart-delay 30s     first of all; 30 s later the next ones
  whimbrel set web --autostart no --restart no
  whimbrel set web --label tier=front --unlabel owner --note 'moves to beta in May'

A machine that another host has, or may have, is never started by itself. Neither is a suspended one. Settings stay \
on this host when a machine moves.";

/// Change when a machine starts by itself, its labels and its note
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
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let removed = self.unlabels.into_iter().map(|key| (key, None));
        let set = self.labels.into_iter().map(|label| (label.0, Some(label.1)));
        let request = SettingsRequest {
            autostart: autostart_of(self.autostart, self.autostart_delay),
            restart: self.restart.map(|restart| restart.0),
            labels: removed.chain(set).collect(),
            note: self.note,
        };
        let machine = context.client.change_settings(&self.name, &request).await?;
        context.output.result(&machine, machine_text::settings)
    }
}
