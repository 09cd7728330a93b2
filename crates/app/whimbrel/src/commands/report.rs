//! `whimbrel report`: what somebody needs who helps, in one file.

use crate::{commands::migrations, context::Context, error::CliError, report::Report};
use serde::Serialize;
use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use whimbrel_core::ByteSize;

const EXAMPLES: &str = "\
Examples:
  whimbrel report bundle                          whimbrel-report.tar.gz in this directory
  whimbrel report bundle /tmp/for-bob.tar.gz
  whimbrel report bundle --log /var/log/whimbrel.log    where no journal has the daemon's log";

const BUNDLE: &str = "\
In it are versions, the checks of `doctor`, machines, capsules, operations, past migrations,
schedules, networks, events, metrics, records and the daemon's log. Keys, tokens, passwords, labels,
notes, kernel command lines and user data are taken out, addresses become numbers. Names of hosts
and machines and paths stay. Console logs and disks are never in it. Look through it before you
send it: `tar -xzf FILE`.";

/// Gather what is needed to help, for a person to send
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    /// Old form of `whimbrel migrations ID|NAME`
    #[arg(hide = true)]
    migration: Option<String>,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Write versions, checks, records, figures and logs to one file
    #[command(after_help = BUNDLE)]
    Bundle(Bundle),
}

#[derive(Debug, clap::Args)]
struct Bundle {
    /// File to write, which must be new
    #[arg(value_name = "FILE", default_value = "whimbrel-report.tar.gz")]
    file: PathBuf,
    /// File with the log of a daemon that is no unit of systemd; repeat the option for more
    #[arg(long, value_name = "FILE")]
    log: Vec<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Written {
    file: PathBuf,
    bytes: u64,
    parts: Vec<String>,
    missing: Vec<String>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let Some(Action::Bundle(Bundle { file, log })) = self.action else {
            return migrations::Args { migration: self.migration }.run(context).await;
        };
        if file.exists() {
            return Err(CliError::Usage {
                problem: format!("{} is there already", file.display()),
                hint: "name another file".to_owned(),
            });
        }
        let report = Report::gather(context, &log).await;
        let bytes = pack(&report, &file).map_err(CliError::io("write the report"))?;
        let (parts, missing) = (report.parts.into_keys().collect(), report.missing);
        context.output.result(&Written { file, bytes, parts, missing }, text)
    }
}

/// Writes the parts into one file, which only its owner may read. Its length.
fn pack(report: &Report, file: &Path) -> io::Result<u64> {
    let folder = Folder::create()?;
    let top = folder.0.join("whimbrel-report");
    for (name, bytes) in &report.parts {
        let path = top.join(name);
        fs::create_dir_all(path.parent().unwrap_or(&top))?;
        fs::write(path, bytes)?;
    }
    let mut partial = file.as_os_str().to_owned();
    partial.push(".partial");
    let packed = fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--sort=name", "--owner=0", "--group=0", "--file=-", "--directory"]);
    tar.arg(&folder.0).arg("whimbrel-report").stdin(Stdio::null()).stdout(packed.try_clone()?);
    if !tar.status()?.success() {
        fs::remove_file(&partial)?;
        return Err(io::Error::other("tar failed"));
    }
    (&packed).flush()?;
    packed.sync_all()?;
    fs::rename(&partial, file)?;
    Ok(packed.metadata()?.len())
}

/// Folder of this process alone, which is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn create() -> io::Result<Self> {
        let name = format!("whimbrel-report-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        // A folder of this name that somebody else made is not trusted with the content: creating fails.
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, folder = %self.0.display(), "cannot remove a temporary folder");
        }
    }
}

fn text(written: &Written) -> String {
    let Written { file, bytes, parts, missing } = written;
    let missing: String = missing.iter().map(|reason| format!("not in it: {reason}\n")).collect();
    let (file, size) = (file.display(), ByteSize(*bytes));
    format!("{missing}{file}: {size}, {} files; look through it before you send it\n", parts.len())
}
