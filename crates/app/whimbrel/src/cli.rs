//! The words of the command line. What each verb takes and does stands in its own file.

use crate::{commands::*, context::Context, error::CliError};
use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};

/// Where a daemon listens unless told otherwise.
pub(crate) const DEFAULT_SOCKET: &str = "/run/whimbrel/host.sock";

const AFTER_HELP: &str = "\
Getting started:
  whimbrel doctor                                        does this machine have what it takes?
  whimbrel host --name alpha --data /var/lib/whimbrel &  start the daemon
  whimbrel run web --disk web.img --memory 1G            start a machine
  whimbrel checkpoint web --tag before-upgrade           keep its state
  whimbrel resume before-upgrade --name web2             have that state run again

Exit codes:
  0  done
  1  it failed
  2  wrong arguments or settings
  3  no such machine, capsule, host or operation
  4  the name is taken, or the thing is busy
  5  a host or the daemon is unreachable, or not trusted
  6  stored data is damaged
  130  interrupted or cancelled";

/// Run, keep, move and protect whole machines on unmodified QEMU
#[derive(Debug, Parser)]
#[command(name = "whimbrel", version, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    /// Socket of the host daemon, /run/whimbrel/host.sock unless given
    #[arg(long, global = true, env = "WHIMBREL_SOCKET", hide_env_values = true)]
    #[arg(value_name = "PATH", help_heading = "Global options")]
    pub(crate) socket: Option<PathBuf>,
    /// Print the result as JSON on stdout, an error as JSON on stderr
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
    /// Show no progress and no remarks
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,
    /// Log more on stderr; twice for everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Global options")]
    pub(crate) verbose: u8,
    /// The verb.
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// The socket that was given, or the usual one.
    pub(crate) fn socket(&self) -> &Path {
        self.socket.as_deref().unwrap_or(Path::new(DEFAULT_SOCKET))
    }
}

/// All verbs: those that call the daemon, and those that do not need one.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[command(flatten)]
    Call(Call),
    Host(host::Args),
    Doctor(doctor::Args),
    Mount(Box<mount::Args>),
    Pool(pool::Args),
    Session(session::Args),
    Completions(completions::Args),
}

impl Command {
    /// Whether this process is to be the daemon.
    pub(crate) fn is_daemon(&self) -> bool {
        match self {
            Self::Host(_) => true,
            Self::Pool(args) => args.is_daemon(),
            _ => false,
        }
    }
}

/// Verbs that call the daemon.
#[derive(Debug, Subcommand)]
pub(crate) enum Call {
    Run(run::Args),
    Ps(ps::Args),
    Top(top::Args),
    Console(console::Args),
    Start(start::Args),
    Stop(stop::Args),
    Forget(delete::Args),
    Pause(pause::Args),
    Unpause(unpause::Args),
    Balloon(balloon::Args),
    Checkpoint(checkpoint::Args),
    Suspend(suspend::Args),
    Resume(resume::Args),
    Clone(clone::Args),
    Derive(derive::Args),
    Migrate(migrate::Args),
    Protect(protect::Args),
    Unprotect(unprotect::Args),
    Failover(failover::Args),
    Report(migrations::Args),
    Evacuate(evacuate::Args),
    Wws(dirty_rate::Args),
    Push(push::Args),
    Pull(pull::Args),
    Ls(ls::Args),
    Log(log::Args),
    Show(show::Args),
    Diff(diff::Args),
    Tag(tag::Args),
    Promote(promote::Args),
    Rebase(outdated::Args),
    Rm(untag::Args),
    Cache(cache::Args),
    Gc(gc::Args),
    Verify(verify::Args),
    Export(export::Args),
    Import(import::Args),
    Trust(trust::Args),
    Key(key::Args),
    Serve(serve::Args),
}

impl Call {
    /// Does it.
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        match self {
            Self::Run(args) => args.run(context).await,
            Self::Ps(args) => args.run(context).await,
            Self::Top(args) => args.run(context).await,
            Self::Console(args) => args.run(context).await,
            Self::Start(args) => args.run(context).await,
            Self::Stop(args) => args.run(context).await,
            Self::Forget(args) => args.run(context).await,
            Self::Pause(args) => args.run(context).await,
            Self::Unpause(args) => args.run(context).await,
            Self::Balloon(args) => args.run(context).await,
            Self::Checkpoint(args) => args.run(context).await,
            Self::Suspend(args) => args.run(context).await,
            Self::Resume(args) => args.run(context).await,
            Self::Clone(args) => args.run(context).await,
            Self::Derive(args) => args.run(context).await,
            Self::Migrate(args) => args.run(context).await,
            Self::Protect(args) => args.run(context).await,
            Self::Unprotect(args) => args.run(context).await,
            Self::Failover(args) => args.run(context).await,
            Self::Report(args) => args.run(context).await,
            Self::Evacuate(args) => args.run(context).await,
            Self::Wws(args) => args.run(context).await,
            Self::Push(args) => args.run(context).await,
            Self::Pull(args) => args.run(context).await,
            Self::Ls(args) => args.run(context).await,
            Self::Log(args) => args.run(context).await,
            Self::Show(args) => args.run(context).await,
            Self::Diff(args) => args.run(context).await,
            Self::Tag(args) => args.run(context).await,
            Self::Promote(args) => args.run(context).await,
            Self::Rebase(args) => args.run(context).await,
            Self::Rm(args) => args.run(context).await,
            Self::Cache(args) => args.run(context).await,
            Self::Gc(args) => args.run(context).await,
            Self::Verify(args) => args.run(context).await,
            Self::Export(args) => args.run(context).await,
            Self::Import(args) => args.run(context).await,
            Self::Trust(args) => args.run(context).await,
            Self::Key(args) => args.run(context).await,
            Self::Serve(args) => args.run(context).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_verb_teaches_by_example() {
        for verb in Cli::command().get_subcommands() {
            let name = verb.get_name();
            assert!(verb.get_about().is_some(), "{name} has no description");
            let examples = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(examples.contains(&format!("whimbrel {name}")), "{name} has no example");
        }
    }
}
