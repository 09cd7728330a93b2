//! `whimbrel decompress-image`: decompresses a disk image into a file of the current folder. A daemon runs it
//! without rights, in a folder of its own.

use crate::error::CliError;
use std::path::PathBuf;

/// Decompress a disk image, from the standard input
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// New file for the image
    file: PathBuf,
}

impl Args {
    pub(crate) fn run(self) -> Result<(), CliError> {
        let written = whimbrel_container::decompress_disk(std::io::stdin().lock(), &self.file);
        written.map(drop).map_err(CliError::io("decompress the image"))
    }
}
