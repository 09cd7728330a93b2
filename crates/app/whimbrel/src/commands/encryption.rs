//! `whimbrel encryption`: how the store is encrypted, sealing what is plain, another master key.

use crate::{argument_types::absolute, context::Context, error::CliError, operation};
use clap::Subcommand;
use std::path::PathBuf;
use whimbrel_api::{KeyChangeRequest, StoreEncryption};
use whimbrel_core::ByteSize;

const EXAMPLES: &str = "\
Examples:
  (umask 077; openssl rand -hex 32 > /etc/whimbrel/master.key)
  whimbrel host --encrypt --key-file /etc/whimbrel/master.key
  whimbrel encryption status
  whimbrel encryption seal                                       encrypt what the store had before
  whimbrel encryption rotate --key-file /etc/whimbrel/new.key    then start the daemon with it

Without the master key nobody can read the store again. Keep a copy of it where the disk is not.";

/// Manage the encryption of the store
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show the keys of the store and how much is not encrypted
    Status,
    /// Encrypt what was stored before the daemon was started with --encrypt
    ///
    /// Reads and writes the content of the store in parts, and frees the old parts. Machines run on, and a
    /// cancel or a crash leaves a complete store, some of it encrypted.
    Seal,
    /// Change the master key; nothing is written again but the key of the store
    ///
    /// From then on only the new key opens the store. The daemon that runs needs it when it starts next.
    Rotate {
        /// File of the host with the new key, 64 hexadecimal digits
        #[arg(long, value_name = "FILE", value_parser = absolute)]
        key_file: PathBuf,
    },
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        match self.action {
            Action::Status => context.output.result(&context.client.encryption().await?, describe),
            Action::Seal => operation::perform(context, context.client.seal()).await,
            Action::Rotate { key_file } => {
                let changed = context.client.change_master_key(&KeyChangeRequest { key_file }).await?;
                context.output.result(&changed, |changed| {
                    let key = changed.master_key.as_deref().unwrap_or("none");
                    format!("the master key is {key} now: start the daemon with it next time\n")
                })
            }
        }
    }
}

fn describe(encryption: &StoreEncryption) -> String {
    let StoreEncryption { master_key, data_key, plain } = encryption;
    let (Some(master), Some(data)) = (master_key, data_key) else {
        return "the store is not encrypted; `whimbrel host --encrypt` encrypts it\n".to_owned();
    };
    let rest = match plain {
        ByteSize(0) => "everything in the store is encrypted".to_owned(),
        plain => format!("{plain} from before are not encrypted; `whimbrel encryption seal` encrypts them"),
    };
    format!("master key {master}\ndata key   {data}\n{rest}\n")
}
