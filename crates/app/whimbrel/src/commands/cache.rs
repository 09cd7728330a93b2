//! `whimbrel cache`.

use crate::{context::Context, error::CliError, operation, table::table};
use clap::Subcommand;
use std::path::PathBuf;
use whimbrel_api::{CacheAddRequest, CacheInfo};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel cache add /srv/images/debian.qcow2    pages of this image need not travel here any more
  whimbrel cache add --machine web               nor those that the memory of web has
  whimbrel cache stats
  whimbrel cache forget /srv/images/debian.qcow2

The cache keeps no pages, only where they lie. A file may change or go at any time: every page is checked
when it is used.";

/// Know pages that lie in files here, so that they need not travel
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

/// What to do with the cache.
#[derive(Debug, Subcommand)]
enum Action {
    /// Read a file once and remember where its pages lie
    Add {
        /// A disk image (raw or qcow2), or any other file of the host
        #[arg(required_unless_present = "machine")]
        path: Option<PathBuf>,
        /// The memory of a running machine instead
        #[arg(long, conflicts_with = "path")]
        machine: Option<MachineName>,
    },
    /// Forget a file
    Forget {
        /// The file
        path: PathBuf,
    },
    /// Show how full it is and what it was good for
    Stats,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let (path, machine, forget) = match self.action {
            Action::Stats => {
                let cache = context.client.cache().await?;
                return context.output.result(&cache, describe);
            }
            Action::Add { path, machine } => (path, machine, false),
            Action::Forget { path } => (Some(path), None, true),
        };
        // The daemon has another working directory.
        let path = path.map(|path| std::path::absolute(&path).unwrap_or(path));
        let request = CacheAddRequest { path, machine, forget };
        operation::perform(context, context.client.cache_add(&request)).await
    }
}

fn describe(cache: &CacheInfo) -> String {
    let rows = cache.sources.iter().map(|source| {
        [
            source.path.display().to_string(),
            source.kind.clone(),
            source.pages.to_string(),
            source.hits.to_string(),
            source.dropped.to_string(),
        ]
    });
    let files = table(
        ["FILE", "KIND", "PAGES", "USED", "CHANGED"],
        rows,
        "no file is known; add one with `whimbrel cache add PATH`",
    );
    let CacheInfo { table, slots, used, evictions, .. } = cache;
    format!("{used} of {slots} pages known in a table of {table}, {evictions} made room for others\n{files}")
}
