//! `whimbrel open`: runs the machine of a file that `whimbrel share` wrote.

use crate::{argument_types::absolute, context::Context, error::CliError, operation};
use std::{
    io::{self, BufRead, Write},
    path::PathBuf,
};
use whimbrel_api::{
    CapsuleRef, ImportFormat, ImportRequest, OperationResult, OperationState, ResumeMode, ResumeRequest,
};
use whimbrel_client::ClientError;
use whimbrel_core::{FileKey, MachineName, RefName};

const EXAMPLES: &str = "\
Examples:
  whimbrel open web.whimbrel                  asks for the key
  whimbrel open web.whimbrel --name web2 < key-file
  whimbrel resume opened.1f2e3d4c             again, if the machine could not run at first";

/// Run the machine of a file that `whimbrel share` wrote
///
/// The capsule in the file becomes one of this host, and the machine continues from there. If it cannot run,
/// because its network is missing for example, the capsule stays, with a tag that the command prints.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// File to open
    #[arg(value_parser = absolute)]
    file: PathBuf,
    /// Key that `share` printed; other users of this computer may see it here [default: read from standard
    /// input]
    key: Option<FileKey>,
    /// Name for the machine [default: the name that it had]
    #[arg(long)]
    name: Option<MachineName>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let key = match self.key {
            Some(key) => key,
            None => read_key()?,
        };
        let tag = format!("opened.{:08x}", rand::random::<u32>());
        let tag: RefName = tag.parse().map_err(|error| usage(format!("{error}")))?;
        let request = ImportRequest {
            path: self.file,
            name: tag.clone(),
            format: ImportFormat::Capsule,
            key: Some(key),
        };
        let imported = operation::complete(context, context.client.import(&request)).await?;
        let OperationState::Succeeded { result: OperationResult::Import { .. } } = imported.state else {
            return Err(ClientError::Lost { operation: imported.id }.into());
        };
        let request = ResumeRequest {
            capsule: CapsuleRef::Name(tag.clone()),
            host: None,
            pool: None,
            reclaim: false,
            name: self.name,
            mode: ResumeMode::Lazy,
            then_full: false,
            network: None,
        };
        let ran = operation::perform(context, context.client.resume(&request)).await;
        match &ran {
            // The machine keeps what it needs, and runs, whatever becomes of the tag.
            Ok(()) => {
                if let Err(error) = context.client.remove(&tag).await {
                    let text =
                        format!("note: the tag {tag} stays, `whimbrel untag {tag}` removes it: {error}");
                    context.output.remark(&text);
                }
            }
            Err(_) => context.output.remark(&format!("note: the capsule is here, see `whimbrel show {tag}`")),
        }
        ran
    }
}

fn read_key() -> Result<FileKey, CliError> {
    let mut line = String::new();
    let asked = write!(io::stderr(), "Key: ").and_then(|()| io::stderr().flush());
    asked.and_then(|()| io::stdin().lock().read_line(&mut line)).map_err(CliError::io("read the key"))?;
    line.parse().map_err(|error| usage(format!("{error}")))
}

fn usage(problem: String) -> CliError {
    CliError::Usage {
        problem,
        hint: "`whimbrel share` prints the key of a file when it writes it".to_owned(),
    }
}
