//! `whimbrel log`.

use crate::{
    capsules::{kind, names},
    context::Context,
    failure::Failure,
    graph::Graph,
    table::ago,
};
use whimbrel_api::{CapsuleInfo, CapsuleRef};

const EXAMPLES: &str = "\
Examples:
  whimbrel log web
  whimbrel log before-upgrade --graph";

/// Show a capsule and those it came from, newest first
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Machine (its newest capsule), tag or id
    capsule: CapsuleRef,
    /// Draw which capsule follows which
    #[arg(long)]
    graph: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Failure> {
        let history = context.client.log(&self.capsule).await?;
        context.output.result(history.as_slice(), |history| text(history, self.graph))
    }
}

fn text(history: &[CapsuleInfo], graph: bool) -> String {
    let mut lanes = graph.then(Graph::default);
    let line = |capsule: &CapsuleInfo| {
        let lanes = lanes.as_mut().map(|lanes| lanes.row(capsule.id, &capsule.parents).join("\n"));
        lanes.unwrap_or_default() + &one_line(capsule)
    };
    history.iter().map(line).collect()
}

fn one_line(capsule: &CapsuleInfo) -> String {
    let names = if capsule.names.is_empty() { String::new() } else { format!(" ({})", names(capsule)) };
    let labels: String = capsule.labels.iter().map(|(key, value)| format!(" {key}={value}")).collect();
    let (id, host) = (capsule.id.short(), &capsule.host);
    format!(
        "{id}{names} {} of {}, {} ago on {host}{labels}\n",
        kind(capsule),
        capsule.machine,
        ago(capsule.time_ms)
    )
}
