//! `whimbrel events`: what happens on the host, one line each.

use crate::{context::Context, error::CliError, output};
use whimbrel_api::{EventKind, HostEvent};
use whimbrel_core::Utc;

const EXAMPLES: &str = "\
Examples:
  whimbrel events                    what the daemon still knows, then what happens
  whimbrel events --past
  whimbrel events --json | jq -c 'select(.kind == \"takeover\")'
  whimbrel events --since 1795639262123 --json      go on after an event, by its number";

/// Print what happens to machines and operations, as it happens
///
/// The daemon retains the last 1000 events, until it restarts.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Number of the last event that is known already
    #[arg(long, value_name = "NUMBER")]
    since: Option<u64>,
    /// End after the events of the past
    #[arg(long)]
    past: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let mut events = context.client.host_events(self.since, !self.past).await?;
        while let Some(event) = events.next().await? {
            if context.output.json {
                context.output.line(&event)?;
            } else {
                output::write(line(&event).as_bytes())?;
            }
        }
        Ok(())
    }
}

fn line(event: &HostEvent) -> String {
    let what = match event.kind {
        EventKind::Machine => String::new(),
        EventKind::MachineRemoved => "deleted".to_owned(),
        EventKind::Settings => "settings changed".to_owned(),
        EventKind::Takeover => "taken over ".to_owned(),
        EventKind::Schedule => "schedule ".to_owned(),
        EventKind::SelfStart => "by itself: ".to_owned(),
        EventKind::OperationStarted { operation } => format!("{operation} started"),
        EventKind::OperationEnded { operation } => format!("{operation} "),
        EventKind::Missed => String::new(),
    };
    let subject = if event.subject.is_empty() { "-" } else { &event.subject };
    format!("{}  {subject}  {what}{}\n", Utc::from_ms(event.time_ms), event.text)
}
