//! `whimbrel session`: what runs behind mounts.

mod hint;
mod metrics;
pub(crate) mod mount;

use super::session::{hint::note, metrics::metrics};
use crate::{
    context::Context,
    error::CliError,
    output, session_dirs,
    table::{fields, milliseconds, table},
};
use clap::Subcommand;
use serde::Serialize;
use std::path::{Path, PathBuf};
use whimbrel_core::ByteSize;
use whimbrel_session::client::{ControlRequest, ControlResponse, ask, sockets};
use whimbrel_wire::Identity;

const EXAMPLES: &str = "\
Examples:
  whimbrel session ls
  whimbrel session show vms
  whimbrel session set vms write=back delay=never   writes go to the server only when told
  whimbrel session set vms '*.log=none'             another policy for some files; `=default` takes it away
  whimbrel session flush vms                        write everything back, durably, now
  whimbrel session invalidate vms                   ask the server again for everything
  whimbrel session end vms                          write back and unmount
  whimbrel session end vms --leave                  also if the server is gone: the rest stays in the cache
  whimbrel session nbd vms web.raw /run/web.sock    serve a file of it over NBD, for monitors that prefer a block device
  whimbrel session note /vms/web.raw                on the server: where it is zeros needs not be asked for
  whimbrel session metrics                          numbers of all sessions, as Prometheus reads them
  whimbrel session key                              the key that `whimbrel serve --allow` takes

Settings are write, fresh, delay, patience, whole, direct, and patterns of files.";

/// See and change the sessions behind mounts
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Folder of control sockets
    #[arg(long, global = true, value_name = "DIR")]
    control: Option<PathBuf>,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List them
    Ls,
    /// Show one: hits, what is not written back, latency, events
    Show {
        /// Its name
        name: String,
    },
    /// Change settings while it is mounted
    Set {
        /// Its name
        name: String,
        /// Settings or patterns of files, each with its value
        #[arg(required = true, value_name = "SETTING=VALUE")]
        settings: Vec<String>,
    },
    /// Write everything back
    Flush {
        /// Its name
        name: String,
    },
    /// Forget what is believed and clean
    Invalidate {
        /// Its name
        name: String,
    },
    /// Write everything back, unmount and end
    End {
        /// Its name
        name: String,
        /// End it also if not everything can be written back; the next mount of the same target does that
        /// first
        #[arg(long)]
        leave: bool,
    },
    /// Serve a file of it over NBD: with its cache and policy, to this user alone, until the session ends
    Nbd {
        /// Its name
        name: String,
        /// The file, below the directory that is mounted
        file: String,
        /// The unix socket to make
        #[arg(required_unless_present = "end", value_name = "SOCKET")]
        at: Option<PathBuf>,
        /// Serve it no longer
        #[arg(long, conflicts_with = "at")]
        end: bool,
    },
    /// On the server: note beside a file where it is zeros, and how it is best brought
    Note {
        /// The file
        file: PathBuf,
        /// It is best brought whole when it is opened, like memory of machines
        #[arg(long)]
        whole: bool,
        /// It is best brought block by block, whatever its name says
        #[arg(long, conflicts_with = "whole")]
        blocks: bool,
    },
    /// Print the numbers of all sessions in the text format of Prometheus
    Metrics,
    /// Print this user's key for sessions
    Key {
        /// Folder of keys, ~/.config/whimbrel unless given
        #[arg(long, value_name = "DIR")]
        keys: Option<PathBuf>,
    },
}

#[derive(Debug, Serialize)]
struct Listed {
    name: String,
    mount: PathBuf,
    server: String,
    directory: String,
    connected: bool,
    dirty: u64,
    hit_ratio: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Key {
    key: String,
}

impl Args {
    pub(crate) fn run(self, context: &Context) -> Result<(), CliError> {
        if let Action::Key { keys } = &self.action {
            let identity = Identity::load_or_create(&session_dirs::keys(keys.as_deref()));
            let key = identity.map_err(|error| CliError::Session(error.into()))?.public_key().to_string();
            return context.output.result(&Key { key }, |key| format!("{}\n", key.key));
        }
        if let Action::Note { file, whole, blocks } = &self.action {
            return note(file, (*whole || *blocks).then_some(*whole), context);
        }
        let dir = session_dirs::control(self.control.as_deref())?;
        let one = |name: &str, request: ControlRequest| -> Result<ControlResponse, CliError> {
            let path = dir.join(format!("{name}.sock"));
            if name.contains('/') || !path.exists() {
                return Err(CliError::UnknownSession { name: name.to_owned() });
            }
            let response = ask(&path, &request).map_err(|error| CliError::NoSession(error.into()))?;
            match &response.error {
                Some(error) if matches!(request, ControlRequest::Set { .. }) => Err(CliError::Usage {
                    problem: error.clone(),
                    hint: "see `whimbrel session --help`".to_owned(),
                }),
                Some(error) if matches!(request, ControlRequest::Nbd { socket: Some(_), .. }) => {
                    Err(CliError::Session(error.clone().into()))
                }
                Some(error) => Err(CliError::NotWrittenBack { left: error.clone() }),
                None => Ok(response),
            }
        };
        let response = match &self.action {
            Action::Ls => return list(&dir, context),
            Action::Metrics => return output::write(metrics(&living(&dir)).as_bytes()),
            Action::Key { .. } | Action::Note { .. } => return Ok(()),
            Action::Show { name } => one(name, ControlRequest::Show)?,
            Action::Flush { name } => one(name, ControlRequest::Flush)?,
            Action::Invalidate { name } => one(name, ControlRequest::Invalidate)?,
            Action::End { name, leave } => one(name, ControlRequest::End { leave: *leave })?,
            Action::Nbd { name, file, at, .. } => one(name, nbd(file, at.as_deref())?)?,
            Action::Set { name, settings } => set(name, settings, one)?,
        };
        context.output.result(&response, describe)
    }
}

fn set(
    name: &str,
    settings: &[String],
    one: impl Fn(&str, ControlRequest) -> Result<ControlResponse, CliError>,
) -> Result<ControlResponse, CliError> {
    let mut last = one(name, ControlRequest::Show)?;
    for setting in settings {
        let (key, value) = setting.rsplit_once('=').ok_or_else(|| CliError::Usage {
            problem: format!("{setting:?} sets nothing"),
            hint: "write SETTING=VALUE, like write=back".to_owned(),
        })?;
        last = one(name, ControlRequest::Set { name: key.to_owned(), value: value.to_owned() })?;
    }
    Ok(last)
}

/// The process of the session has another working directory than this one.
fn nbd(file: &str, at: Option<&Path>) -> Result<ControlRequest, CliError> {
    let socket = at.map(std::path::absolute).transpose();
    let socket = socket.map_err(CliError::io("find the place of the socket"))?;
    Ok(ControlRequest::Nbd { file: file.to_owned(), socket })
}

/// Sessions that answer, and their names.
fn living(dir: &Path) -> Vec<(String, ControlResponse)> {
    let named = |path: PathBuf| {
        // One that does not answer has died; its mount clears it away when it is made again.
        let response = ask(&path, &ControlRequest::Show).ok()?;
        Some((path.file_stem()?.to_string_lossy().into_owned(), response))
    };
    sockets(dir).into_iter().filter_map(named).collect()
}

fn list(dir: &Path, context: &Context) -> Result<(), CliError> {
    let listed: Vec<Listed> = living(dir)
        .into_iter()
        .map(|(name, response)| {
            let status = response.status;
            Listed {
                name,
                mount: response.mount,
                server: status.server,
                directory: status.directory,
                connected: status.connected,
                dirty: status.dirty,
                hit_ratio: status.hit_ratio,
            }
        })
        .collect();
    context.output.result(&listed, |listed| {
        let rows = listed.iter().map(|row| {
            let server = if row.connected { row.server.clone() } else { format!("{} (gone)", row.server) };
            let mount = row.mount.display().to_string();
            [row.name.clone(), mount, server, row.directory.clone(), size(row.dirty), ratio(row.hit_ratio)]
        });
        table(["NAME", "MOUNT", "SERVER", "DIRECTORY", "DIRTY", "HITS"], rows, "no session is mounted")
    })
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0))
}

fn describe(response: &ControlResponse) -> String {
    let status = &response.status;
    let settings = &status.settings;
    let seconds = |seconds: Option<u64>, none: &str| {
        seconds.map_or_else(|| none.to_owned(), |seconds| format!("{seconds} s"))
    };
    let rules: Vec<String> =
        settings.rules.iter().map(|rule| format!("{}={}", rule.files, rule.policy)).collect();
    let link = match (status.connected, status.round_trip_ms) {
        (false, _) => "gone".to_owned(),
        (true, None) => "connected".to_owned(),
        (true, Some(time)) => format!("connected, round trip {}", milliseconds(time)),
    };
    let mut text = fields(&[
        ("mount", response.mount.display().to_string()),
        ("server", format!("{}:{} ({link})", status.server, status.directory)),
        (
            "calls",
            format!(
                "{}, {} each, connection broke {} times",
                status.calls,
                milliseconds(status.call_ms),
                status.broken
            ),
        ),
        (
            "waited",
            format!(
                "{} times for the server, {} in all; {} names known",
                status.waits,
                milliseconds(status.waited_ms),
                status.known
            ),
        ),
        (
            "known before",
            format!(
                "{} blocks of zeros by notes, {} in holes, {} blocks that an earlier session read, {} pages by digest; {} that the server had of what was written",
                status.zero_blocks,
                size(status.holes),
                status.ahead_blocks,
                status.found_pages,
                status.spared_pages
            ),
        ),
        ("traffic", format!("{} sent, {} received", size(status.sent), size(status.received))),
        (
            "cache",
            format!(
                "{} of {} used, {} of reads hit",
                size(status.used),
                size(status.capacity),
                ratio(status.hit_ratio)
            ),
        ),
        (
            "not written back",
            format!(
                "{} in {} files, {} changes of names",
                size(status.dirty),
                status.dirty_files,
                status.queued
            ),
        ),
        ("damaged pages", format!("{} fetched again", status.damaged)),
        ("write", [vec![settings.policy.to_string()], rules].concat().join(" ")),
        ("fresh", seconds(settings.fresh, "the whole session")),
        ("delay", seconds(settings.delay, "never")),
        ("patience", format!("{} s", settings.patience)),
    ]);
    for export in &response.exports {
        let how = if export.read_only { ", read-only" } else { "" };
        text.push_str(&format!(
            "nbd: {} at {}, {}{how}, {} clients\n",
            export.file,
            export.socket.display(),
            size(export.size),
            export.clients
        ));
    }
    for event in status.events.iter().rev().take(20).rev() {
        text += &format!("event  {}\n", event.text);
    }
    text
}
