//! Pins of a pool: `whimbrel pool pin`, `unpin` and `pins`. Policies do not delete a pinned version.

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

/// Pin a version, so that neither policies nor users delete it
#[derive(Debug, clap::Args)]
pub(super) struct Pin {
    #[arg(long, hide = true)]
    pub(super) release: bool,
    #[arg(long, hide = true, value_name = "HOST/MACHINE", requires = "release")]
    pub(super) holder: Option<String>,
    #[command(flatten)]
    pub(super) subject: Subject,
}

/// Remove a pin, so that policies apply to the version again
#[derive(Debug, clap::Args)]
pub(super) struct Unpin {
    /// Remove the pin of this holder; a machine that still reads the version loses the pages that it has not
    /// read
    #[arg(long, value_name = "HOST/MACHINE")]
    pub(super) holder: Option<String>,
    #[command(flatten)]
    pub(super) subject: Subject,
}

/// Version of a file in a pool.
#[derive(Debug, clap::Args)]
pub(super) struct Subject {
    /// Path of the file, like /blast/state
    path: String,
    /// Number of the version, as `whimbrel pool versions` lists it
    version: u32,
    #[command(flatten)]
    member: PoolArgs,
}

/// List pinned versions with their holders
#[derive(Debug, clap::Args)]
pub(super) struct Pins {
    #[command(flatten)]
    member: PoolArgs,
}

#[derive(Debug, Serialize)]
struct Pinned {
    path: String,
    version: u32,
    pinned: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<String>,
}

impl Subject {
    /// Pins the version, or removes the pin of `holder` or that of users.
    pub(super) fn pin(
        self,
        pinned: bool,
        holder: Option<String>,
        context: &Context,
        runtime: &Runtime,
    ) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let Self { path, version, .. } = self;
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
                (Some(holder), _) => format!("no longer pinned by {holder}"),
                (None, true) => "pinned".to_owned(),
                (None, false) => "no longer pinned".to_owned(),
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
    let list = table(["FILE", "VERSION", "SIZE", "BY", "FOR", "ENDS IN"], rows, "no pinned versions");
    match pins {
        [] => list,
        _ => {
            list + "`whimbrel pool unpin FILE VERSION` removes one, with `--holder HOST/MACHINE` that of a machine\n"
        }
    }
}
