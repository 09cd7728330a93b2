//! `whimbrel import`: reads a capsule or a disk from a file.

use crate::{
    argument_types::{ImportFormatArg, absolute},
    context::Context,
    error::CliError,
    operation,
};
use std::path::PathBuf;
use whimbrel_api::ImportRequest;
use whimbrel_core::RefName;

const EXAMPLES: &str = "\
Examples:
  whimbrel import /backup/web.capsule web
  whimbrel import debian.qcow2 debian";

/// Read a capsule or a disk image from a file into the store
///
/// A disk image becomes a disk-only capsule, which boots when it is resumed. Images that name other files,
/// like a backing file, are refused.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// File to read
    #[arg(value_parser = absolute)]
    file: PathBuf,
    /// Tag for the new capsule
    name: RefName,
    /// Content of the file [default: disk if it ends in .raw, .img, .qcow2, .vmdk, .vhdx or .vhd, else
    /// capsule]
    #[arg(long, value_enum)]
    format: Option<ImportFormatArg>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let format = ImportFormatArg::or_from_ending(self.format, &self.file);
        let request = ImportRequest { path: self.file, name: self.name, format };
        operation::perform(context, context.client.import(&request)).await
    }
}
