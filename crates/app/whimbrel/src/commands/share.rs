//! `whimbrel share`: writes a capsule to an encrypted file, for somebody who has the key.

use crate::{argument_types::absolute, context::Context, error::CliError, operation};
use serde::Serialize;
use std::path::PathBuf;
use whimbrel_api::{CapsuleRef, ExportFormat, ExportRequest, OperationResult, OperationState};
use whimbrel_client::ClientError;
use whimbrel_core::{ByteSize, FileKey};

const EXAMPLES: &str = "\
Examples:
  whimbrel checkpoint web && whimbrel share web     web as it is now, in web.whimbrel
  whimbrel share before-upgrade /tmp/web.whimbrel
  whimbrel open web.whimbrel                        run it elsewhere; asks for the key";

/// Write a capsule to an encrypted file, for somebody else
///
/// The file has memory, disks and settings of the machine, and needs nothing else. The command prints its
/// key, which is stored nowhere: send it by another way than the file. Whoever has both has the machine, with
/// every secret in its memory.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    capsule: CapsuleRef,
    /// File to create; it must not exist [default: CAPSULE.whimbrel]
    #[arg(value_parser = absolute)]
    file: Option<PathBuf>,
}

/// File that was shared, and its key.
#[derive(Debug, Serialize)]
struct Shared {
    path: PathBuf,
    bytes: ByteSize,
    key: FileKey,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let default = || absolute(&format!("{}.whimbrel", self.capsule));
        let path = self.file.clone().map_or_else(default, Ok);
        let path = path.map_err(CliError::io("find the current folder"))?;
        let key = FileKey(rand::random());
        let request = ExportRequest {
            capsule: self.capsule,
            path: path.clone(),
            format: ExportFormat::Capsule,
            image: None,
            key: Some(key.clone()),
        };
        let ended = operation::complete(context, context.client.export(&request)).await?;
        let OperationState::Succeeded { result: OperationResult::Export { bytes, .. } } = ended.state else {
            return Err(ClientError::Lost { operation: ended.id }.into());
        };
        context.output.result(&Shared { path, bytes, key }, describe)
    }
}

fn describe(shared: &Shared) -> String {
    let (path, name) = (shared.path.display(), shared.path.file_name().unwrap_or_default().display());
    format!(
        "{path} has it, encrypted ({}). Its key is stored nowhere; send it by another way than the file:\n\n  \
         whimbrel open {name} {}\n",
        shared.bytes, shared.key
    )
}
