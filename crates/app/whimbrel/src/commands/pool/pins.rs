//! Pins of a pool: `whimbrel pool pin`, `whimbrel pool pins`. What is pinned stays, whatever policies say.

use super::PoolArgs;
use crate::{
    context::Context,
    error::CliError,
    table::{span, table},
};
use serde::Serialize;
use std::time::Duration;
use tokio::runtime::Runtime;
use whimbrel_core::ByteSize;
use whimbrel_pool::protocol::PinInfo;

/// Have a version stay: policies leave it alone, and it cannot be removed
#[derive(Debug, clap::Args)]
pub(super) struct Pin {
    /// The file, like /blast/state
    path: String,
    /// The version, as `whimbrel pool versions` numbers it
    version: u32,
    /// Let it go again
    #[arg(long)]
    release: bool,
    /// Let go what this holder pins, as `whimbrel pool pins` names it: a machine that lives from the version
    /// loses what it has not read yet
    #[arg(long, value_name = "HOST/MACHINE", requires = "release")]
    holder: Option<String>,
    #[command(flatten)]
    member: PoolArgs,
}

/// List pinned versions: by whom, and until when unless that is said again
#[derive(Debug, clap::Args)]
pub(super) struct Pins {
    #[command(flatten)]
    member: PoolArgs,
}

/// What was pinned.
#[derive(Debug, Serialize)]
struct Pinned {
    path: String,
    version: u32,
    pinned: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<String>,
}

impl Pin {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let Self { path, version, holder, .. } = self;
        let pinned = !self.release;
        let done = pool.block(async {
            let node = pool.find(&path).await?.id;
            let Some(holder) = &holder else { return pool.pin(node, version, pinned).await };
            let versions = pool.versions(node).await?;
            let id = versions.iter().find(|one| one.number == version).map_or(0, |one| one.id);
            pool.release_pin(id, holder, true).await
        });
        done.map_err(CliError::Pool)?;
        context.output.result(&Pinned { path, version, pinned, holder }, |done| {
            let what = match (&done.holder, done.pinned) {
                (Some(holder), _) => format!("released for {holder}"),
                (None, true) => "pinned".to_owned(),
                (None, false) => "released".to_owned(),
            };
            format!("{} version {}: {what}\n", done.path, done.version)
        })
    }
}

impl Pins {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let pins = pool.block(pool.pins(false)).map_err(CliError::Pool)?;
        context.output.result(pins.as_slice(), for_people)
    }
}

fn for_people(pins: &[PinInfo]) -> String {
    let seconds = |seconds| span(Duration::from_secs(seconds));
    let rows = pins.iter().map(|pin| {
        let (by, since, left) = match &pin.held {
            Some(held) => (held.holder.clone(), seconds(held.since), seconds(held.left)),
            None => ("hand".to_owned(), "-".to_owned(), "-".to_owned()),
        };
        [pin.path.clone(), pin.version.to_string(), ByteSize(pin.size).to_string(), by, since, left]
    });
    let list = table(["FILE", "VERSION", "SIZE", "BY", "FOR", "ENDS IN"], rows, "nothing is pinned");
    match pins {
        [] => list,
        _ => {
            list + "`whimbrel pool pin FILE VERSION --release` lets one go, with `--holder HOST/MACHINE` that of a machine\n"
        }
    }
}
