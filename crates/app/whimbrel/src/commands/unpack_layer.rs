//! `whimbrel unpack-layer`: applies a layer of a container image to the tree in the current folder. A daemon
//! runs it without rights, in a folder of its own.

use crate::error::CliError;
use std::{io::Write, path::Path};
use whimbrel_container::{LayerLimits, apply_layer};

/// Unpack a layer of a container image, from the standard input
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Length of the layer as it is read
    #[arg(long, value_name = "BYTES")]
    length: u64,
    /// Most bytes of all files
    #[arg(long, value_name = "BYTES")]
    bytes: u64,
    /// Digest of the layer before compression
    #[arg(long, value_name = "DIGEST")]
    diff_id: String,
}

impl Args {
    /// Unpacks the layer, and prints what the tree has then.
    pub(crate) fn run(self) -> Result<(), CliError> {
        let limits = LayerLimits { length: self.length, bytes: self.bytes, diff_id: self.diff_id };
        let applied = apply_layer(Path::new("."), std::io::stdin().lock(), &limits)?;
        let text = serde_json::to_string(&applied).unwrap_or_default();
        writeln!(std::io::stdout(), "{text}").map_err(CliError::io("print"))
    }
}
