//! `whimbrel completions`: prints a completion script. `whimbrel manuals`: writes the manual pages, for a
//! package.

use crate::{cli::Cli, error::CliError, output};
use clap::CommandFactory;
use clap_complete::Shell;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  whimbrel completions bash > /etc/bash_completion.d/whimbrel
  whimbrel completions fish > ~/.config/fish/completions/whimbrel.fish";

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Shell that the script is for
    shell: Shell,
}

impl Args {
    pub(crate) fn run(self) -> Result<(), CliError> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "whimbrel", &mut script);
        output::write(&script)
    }
}

/// Write the manual page of each verb to a directory
#[derive(Debug, clap::Args)]
#[command(hide = true)]
pub(crate) struct Manuals {
    dir: PathBuf,
}

impl Manuals {
    pub(crate) fn run(self) -> Result<(), CliError> {
        let written = clap_mangen::generate_to(Cli::command(), &self.dir);
        written.map_err(|source| CliError::Io { action: "write the manual pages", source })
    }
}
