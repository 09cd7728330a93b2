//! `whimbrel log`: shows the lineage of a capsule, or the history of a tag.

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
  whimbrel log golden --graph       ancestors and descendants of golden
  whimbrel log golden --refs        earlier capsules of the tag golden";

/// Show a capsule and its ancestors, newest first
///
/// With --graph: ● is a capsule with memory, ○ a disk-only capsule. Each line shows what it adds to its
/// parents and, after an arrow, the machines based on it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Machine (its newest capsule), tag or id
    #[arg(required_unless_present = "graph")]
    capsule: Option<CapsuleRef>,
    /// Draw a tree of its ancestors and descendants, or of all capsules
    #[arg(long)]
    graph: bool,
    /// Show the earlier capsules of a tag or machine, newest first
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

/// A capsule in one line, without its end.
pub(crate) fn beside(capsule: &CapsuleInfo) -> String {
    let names = if capsule.names.is_empty() { String::new() } else { format!(" ({})", names(capsule)) };
    let labels: String = capsule.labels.iter().map(|(key, value)| format!(" {key}={value}")).collect();
    let (id, host) = (capsule.id.short(), &capsule.host);
    let (machine, ago) = (&capsule.machine, ago(capsule.time_ms));
    format!("{id}{names} of {machine}, {}, {ago} ago on {host}{labels}", kind(capsule))
}

fn picture(nodes: &[GraphNode]) -> String {
    if nodes.is_empty() {
        return "no capsules; take one with `whimbrel checkpoint NAME`\n".to_owned();
    }
    capsule_tree::draw(nodes, |node| {
        let adds = node.adds.map_or_else(|| ", partial".to_owned(), |adds| format!(", adds {adds}"));
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
    table(["CAPSULE", "BEFORE", "SINCE", "IN STORE"], rows, "no history of this name is stored")
}
