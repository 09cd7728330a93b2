//! `whimbrel cache`: fills the hash cache and shows what it was good for.

use crate::{context::Context, error::CliError, operation, table::table};
use clap::Subcommand;
use std::path::PathBuf;
use whimbrel_api::{CacheAddRequest, CacheInfo};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel cache add /srv/images/debian.qcow2    transfers to this host skip the pages of this image
  whimbrel cache add --machine web               and those in the memory of web
  whimbrel cache stats
  whimbrel cache rm /srv/images/debian.qcow2

The cache stores no pages, only their places in files. The files may change or disappear at any time, \
because each page is checked when it is used.";

/// Index local files so that transfers can skip their pages
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Index the pages of a file or of a machine's memory
    Add {
        /// Disk image (raw or qcow2), or any other file of this host
        #[arg(required_unless_present = "machine")]
        path: Option<PathBuf>,
        /// Index the memory of this running machine
        #[arg(long, conflicts_with = "path")]
        machine: Option<MachineName>,
    },
    /// Remove the pages of a file from the cache
    #[command(alias = "forget")]
    Rm {
        /// File to remove
        path: PathBuf,
    },
    /// Show the indexed files and how often their pages were used
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
            Action::Rm { path } => (Some(path), None, true),
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
        "no files; add one with `whimbrel cache add PATH`",
    );
    let CacheInfo { table, slots, used, evictions, .. } = cache;
    format!("{used} of {slots} entries used in a table of {table}, {evictions} evicted\n{files}")
}
