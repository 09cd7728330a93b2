//! `whimbrel log`.

use crate::{
    capsule_text::{kind, names},
    capsule_tree,
    context::Context,
    error::CliError,
    table::{ago, table},
};
use whimbrel_api::{CapsuleInfo, CapsuleRef, GraphNode, RefVersion};
use whimbrel_core::CapsuleId;

const EXAMPLES: &str = "\
Examples:
  whimbrel log web
  whimbrel log --graph              every capsule, as a tree
  whimbrel log golden --graph       what golden came from, and what came from it
  whimbrel log golden --refs        what the name stood for before";

/// Show a capsule and those it came from, newest first
///
/// As a tree, oldest first: a full circle is an active capsule, an empty one has disks only; what it adds to
/// its parents (before compression); and after an arrow the machines that stand on it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Machine (its newest capsule), tag or id
    #[arg(required_unless_present = "graph")]
    capsule: Option<CapsuleRef>,
    /// Draw the tree: its ancestors and descendants, or all capsules
    #[arg(long)]
    graph: bool,
    /// Show what the name stood for before, newest first
    #[arg(long, requires = "capsule", conflicts_with = "graph")]
    refs: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        if self.graph {
            let nodes = context.client.graph(self.capsule.as_ref()).await?;
            return context.output.result(nodes.as_slice(), picture);
        }
        // Without --graph there is one: clap requires it.
        let Some(capsule) = self.capsule else { return Ok(()) };
        match capsule {
            CapsuleRef::Name(name) if self.refs => {
                let versions = context.client.ref_history(&name).await?;
                context.output.result(versions.as_slice(), past)
            }
            capsule => {
                let history = context.client.log(&capsule).await?;
                context.output.result(history.as_slice(), |all| all.iter().map(one_line).collect())
            }
        }
    }
}

fn one_line(capsule: &CapsuleInfo) -> String {
    beside(capsule) + "\n"
}

fn beside(capsule: &CapsuleInfo) -> String {
    let names = if capsule.names.is_empty() { String::new() } else { format!(" ({})", names(capsule)) };
    let labels: String = capsule.labels.iter().map(|(key, value)| format!(" {key}={value}")).collect();
    let (id, host) = (capsule.id.short(), &capsule.host);
    format!(
        "{id}{names} {} of {}, {} ago on {host}{labels}",
        kind(capsule),
        capsule.machine,
        ago(capsule.time_ms)
    )
}

fn picture(nodes: &[GraphNode]) -> String {
    if nodes.is_empty() {
        return "no capsules; take one with `whimbrel checkpoint NAME`\n".to_owned();
    }
    capsule_tree::draw(nodes, |node| {
        let adds = node.adds.map_or_else(|| ", partly elsewhere".to_owned(), |adds| format!(", adds {adds}"));
        let off = |live: bool| if live { "" } else { " (off)" };
        let machines: Vec<_> = node.machines.iter().map(|m| format!("{}{}", m.name, off(m.live))).collect();
        let arrow = if machines.is_empty() { String::new() } else { format!(" ← {}", machines.join(", ")) };
        beside(&node.capsule) + &adds + &arrow
    })
}

fn past(versions: &[RefVersion]) -> String {
    let rows = versions.iter().map(|version| {
        let when = match version.time_ms {
            0 => "-".to_owned(),
            time => format!("{} ago", ago(time)),
        };
        let before = version.previous.as_ref().map_or_else(|| "-".to_owned(), CapsuleId::short);
        let here = if version.here { "yes" } else { "no" };
        [version.capsule.short(), before, when, here.to_owned()]
    });
    table(["CAPSULE", "BEFORE", "SINCE", "IN STORE"], rows, "nothing is known of it")
}
