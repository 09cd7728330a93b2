//! `whimbrel import`.

use crate::{
    argument_types::{FormatArg, absolute},
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

/// Read a capsule or a disk from a file into the store
///
/// A disk becomes a capsule without memory, which boots when it is resumed.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// File to read
    #[arg(value_parser = absolute)]
    file: PathBuf,
    /// Tag for the new capsule
    name: RefName,
    /// What the file is; told from the ending of FILE (.raw, .img, .qcow2) unless given
    #[arg(long, value_enum)]
    format: Option<FormatArg>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let format = FormatArg::or_from_ending(self.format, &self.file).into();
        let request = ImportRequest { path: self.file, name: self.name, format };
        operation::perform(context, context.client.import(&request)).await
    }
}
