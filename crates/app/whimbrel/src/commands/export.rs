//! `whimbrel export`: writes a capsule or an image to a file.

use crate::{
    argument_types::{FormatArg, absolute},
    context::Context,
    error::CliError,
    operation,
};
use std::path::PathBuf;
use whimbrel_api::{CapsuleRef, ExportRequest};

const EXAMPLES: &str = "\
Examples:
  whimbrel export before-upgrade /backup/web.capsule
  whimbrel export web disk.qcow2
  whimbrel export web memory.raw --image memory";

/// Write a capsule or one of its images to a file
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    capsule: CapsuleRef,
    /// File to create; it must not exist
    #[arg(value_parser = absolute)]
    file: PathBuf,
    /// Content of the file [default: from its ending .raw, .img or .qcow2, else capsule]
    #[arg(long, value_enum)]
    format: Option<FormatArg>,
    /// Image to write, for raw and qcow2 [default: the first disk]
    #[arg(long, value_name = "NAME")]
    image: Option<String>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let format = FormatArg::or_from_ending(self.format, &self.file);
        if self.image.is_some() && format == FormatArg::Capsule {
            return Err(CliError::Usage {
                problem: "a capsule is exported with all of its images".to_owned(),
                hint: "add --format raw or --format qcow2, or leave --image out".to_owned(),
            });
        }
        let request = ExportRequest {
            capsule: self.capsule,
            path: self.file,
            format: format.into(),
            image: self.image,
            key: None,
        };
        operation::perform(context, context.client.export(&request)).await
    }
}
