//! Members that go for good, and labels: `whimbrel pool expel`, `forget` and `label`.

use super::PoolArgs;
use crate::{
    argument_types::DurationArg,
    context::Context,
    error::CliError,
    table::{count, span},
};
use serde::Serialize;
use std::time::Duration;
use tokio::runtime::Runtime;
use whimbrel_pool::protocol::{MemberLabels, RemovedMember};

/// Take all rights from a member for good, and replace its copies
///
/// The key of the member is never admitted again.
#[derive(Debug, clap::Args)]
pub(super) struct Expel {
    /// Name of the member, as it was admitted
    member_name: String,
    /// Expel it also if it has the only copy of chunks, which are lost then
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    member: PoolArgs,
}

/// Forget a benefactor that is dead, and replace its copies
///
/// The key of the benefactor stays admitted.
#[derive(Debug, clap::Args)]
pub(super) struct Forget {
    /// Name of the benefactor, as in `whimbrel pool status`
    benefactor: String,
    /// Forget it also if it has the only copy of chunks, which are lost unless it returns
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    member: PoolArgs,
}

/// Say where a benefactor is, and how long it may be away
///
/// Copies of a chunk are kept on different hosts, racks and sites.
#[derive(Debug, clap::Args)]
#[command(after_help = LABEL_EXAMPLES)]
pub(super) struct Label {
    /// Name of the benefactor, as in `whimbrel pool status`
    benefactor: String,
    /// Site, such as a building
    #[arg(long, default_value = "", hide_default_value = true)]
    site: String,
    /// Rack, or what else fails as one, in the site
    #[arg(long, default_value = "", hide_default_value = true)]
    rack: String,
    /// Host, for several benefactors on one
    #[arg(long = "on-host", value_name = "HOST", default_value = "", hide_default_value = true)]
    host: String,
    /// Expect it to be silent for up to this long, such as every night: its chunks are not copied again
    #[arg(long, value_name = "DURATION")]
    away: Option<DurationArg>,
    #[command(flatten)]
    member: PoolArgs,
}

const LABEL_EXAMPLES: &str = "\
Examples:
  whimbrel pool label b1 --site north --rack 3 --manager MANAGER
  whimbrel pool label desk7 --site north --away 16h --manager MANAGER    switched off at night
  whimbrel pool label b1 --manager MANAGER                               no labels any more";

#[derive(Debug, Serialize)]
struct Removed {
    member: String,
    #[serde(flatten)]
    removed: RemovedMember,
}

fn removed(
    member: String,
    removed: RemovedMember,
    verb: &'static str,
    context: &Context,
) -> Result<(), CliError> {
    context.output.result(&Removed { member, removed }, |gone| {
        let copies = match gone.removed.copies {
            0 => "it had no copies".to_owned(),
            copies => format!("copies of {} are made again", count(copies, "chunk")),
        };
        let lost = match gone.removed.lost {
            0 => String::new(),
            lost => format!("; {} had no other copy", count(lost, "chunk")),
        };
        format!("{}: {verb}; {copies}{lost}\n", gone.member)
    })
}

impl Expel {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let done = pool.block(pool.expel(&self.member_name, self.force)).map_err(CliError::Pool)?;
        removed(self.member_name, done, "expelled", context)
    }
}

impl Forget {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let done = pool.block(pool.forget(&self.benefactor, self.force)).map_err(CliError::Pool)?;
        removed(self.benefactor, done, "forgotten", context)
    }
}

#[derive(Debug, Serialize)]
struct Labelled {
    benefactor: String,
    #[serde(flatten)]
    labels: MemberLabels,
}

/// Labels for people.
pub(super) fn labels_text(labels: &MemberLabels) -> String {
    let places = [("site", &labels.site), ("rack", &labels.rack), ("host", &labels.host)];
    let places = places.into_iter().filter(|(_, name)| !name.is_empty());
    let places = places.map(|(level, name)| format!("{level} {name}"));
    let away = (labels.away > 0).then(|| format!("away for {}", span(Duration::from_secs(labels.away))));
    places.chain(away).collect::<Vec<_>>().join(", ")
}

impl Label {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let away = self.away.map_or(0, |away| away.0.as_secs());
        let labels = MemberLabels { site: self.site, rack: self.rack, host: self.host, away };
        pool.block(pool.label(&self.benefactor, labels.clone())).map_err(CliError::Pool)?;
        context.output.result(&Labelled { benefactor: self.benefactor, labels }, |done| {
            match labels_text(&done.labels) {
                text if text.is_empty() => format!("{}: no labels\n", done.benefactor),
                text => format!("{}: {text}\n", done.benefactor),
            }
        })
    }
}
