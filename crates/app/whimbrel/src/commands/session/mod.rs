//! `whimbrel session`: shows and changes sessions, through the control sockets of their processes.

mod conflicts;
mod hint;
pub(crate) mod mount;
mod pins;

use crate::{
    context::Context,
    error::CliError,
    metrics::session_page,
    output, session_dirs,
    table::{fields, milliseconds, table},
};
use clap::Subcommand;
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use whimbrel_core::ByteSize;
use whimbrel_session::client::{
    ControlRequest, ControlResponse, SessionStatus, WarmProgress, send_request, send_request_with_progress,
    sockets,
};
use whimbrel_wire::Identity;

/// Longest wait for a mount to go when its session has ended.
const UNMOUNT_TIME: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "\
Examples:
  whimbrel session ls
  whimbrel session show vms
  whimbrel session set vms write=back delay=never   send writes only on a flush or at the end
  whimbrel session set vms '*.log=none'             another write policy for some files
  whimbrel session flush vms                        write back all data now, durably
  whimbrel session invalidate vms                   request everything from the server again
  whimbrel session warm vms images                  fetch all files below a directory into the cache
  whimbrel session pin vms images/web.raw           fetch a file, and keep its content in the cache
  whimbrel session unpin vms images/web.raw         let it leave the cache again
  whimbrel session unmount vms                      write back all data and unmount
  whimbrel session unmount vms --keep-unsent        the same if the server cannot be reached
  whimbrel session conflicts vms                    list local versions that were put aside
  whimbrel session diff vms notes.txt               compare one with the server's version
  whimbrel session keep vms notes.txt both          resolve it: ours, theirs or both
  whimbrel session nbd vms web.raw /run/web.sock    serve a file as a block device over NBD
  whimbrel session hint /vms/web.raw                on the server: record which blocks are zero
  whimbrel session metrics                          figures of all sessions, for Prometheus
  whimbrel session key                              print the key for `whimbrel serve --allow`

Settings:
  write=POLICY      like `whimbrel mount --write`
  fresh=SECONDS     like --attr-timeout
  delay=SECONDS     like --write-back-delay
  patience=SECONDS  like --server-timeout
  whole=FILES       like --fetch-whole
  direct=FILES      files that bypass the kernel's page cache
  FILES=POLICY      like --rule; `FILES=default` removes the rule";

/// Show and change the sessions behind mounts
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Directory of control sockets
    #[arg(long, alias = "control", global = true, value_name = "DIR")]
    control_dir: Option<PathBuf>,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the sessions of this user
    Ls,
    /// Show hit ratio, unsent data, latency and events of a session
    Show {
        /// Name of the session
        name: String,
    },
    /// Change settings of a session while it is mounted
    Set {
        /// Name of the session
        name: String,
        /// Settings or file patterns, each with its value
        #[arg(required = true, value_name = "SETTING=VALUE")]
        settings: Vec<String>,
    },
    /// Write back all unsent data
    Flush {
        /// Name of the session
        name: String,
    },
    /// Drop cached names, attributes and unmodified data
    Invalidate {
        /// Name of the session
        name: String,
    },
    /// Fetch a file, or all files below a directory, into the cache
    ///
    /// What is there already is not requested again. Programs on the mount go first.
    Warm {
        /// Name of the session
        name: String,
        /// Path below the mounted directory; `.` for all of it
        path: String,
    },
    /// Fetch files, and keep their content in the cache
    ///
    /// The content stays until it is unpinned or changes on the server, across mounts of the same target.
    /// Pins may take three quarters of the cache. Files that come later are kept once they were read, or
    /// fetched by `warm`.
    Pin {
        /// Name of the session
        name: String,
        /// Path below the mounted directory; `.` for all of it
        path: String,
    },
    /// Let pinned content leave the cache when its room is needed
    Unpin {
        /// Name of the session
        name: String,
        /// Path that was pinned, or a directory above
        path: String,
    },
    /// Write back all unsent data and unmount
    #[command(alias = "end")]
    Unmount {
        /// Name of the session
        name: String,
        /// Unmount even if data cannot be sent; the next mount of the same target sends it
        #[arg(long, alias = "leave")]
        keep_unsent: bool,
    },
    /// List local versions put aside because somebody else changed the file
    Conflicts {
        /// Name of the session
        name: String,
    },
    /// Compare a local version that was put aside with the server's version
    Diff {
        /// Name of the session
        name: String,
        /// The copy, or the file if it has only one
        copy: String,
    },
    /// Resolve a conflict
    ///
    /// The copy that was put aside is removed when the chosen version is durable. For a disk of which only a
    /// part was ever on this host, `ours` and `both` are refused: there is no complete local version.
    Keep {
        /// Name of the session
        name: String,
        /// The copy, or the file if it has only one
        copy: String,
        /// Version that stays
        #[arg(value_enum)]
        version: conflicts::Choice,
        /// With `ours`: write only what was written here, over the server's version
        #[arg(long)]
        partial: bool,
    },
    /// Serve a file of a session as a block device over NBD
    ///
    /// The device uses the cache and the write policy of the session. Only this user may open the socket. The
    /// file is served until --stop or the end of the session.
    Nbd {
        /// Name of the session
        name: String,
        /// Path of the file below the mounted directory
        file: String,
        /// Unix socket to create
        #[arg(required_unless_present = "stop", value_name = "SOCKET")]
        at: Option<PathBuf>,
        /// Stop serving the file
        #[arg(long, alias = "end", conflicts_with = "at")]
        stop: bool,
    },
    /// Write a hint file for a file on the server
    ///
    /// The hint records which blocks are zero, and whether to fetch the file whole. Clients then do not
    /// request these blocks. Write the hint again when the file has changed.
    #[command(alias = "note")]
    Hint {
        /// File on this host that is served
        file: PathBuf,
        /// Fetch the file whole when it is opened, like the memory of a machine
        #[arg(long)]
        whole: bool,
        /// Fetch the file block by block, whatever its name is
        #[arg(long, conflicts_with = "whole")]
        blocks: bool,
    },
    /// Print the figures of all sessions in the text format of Prometheus
    Metrics,
    /// Print the key of this user for sessions
    Key {
        /// Directory of the key [default: ~/.config/whimbrel]
        #[arg(long, alias = "keys", value_name = "DIR")]
        keys_dir: Option<PathBuf>,
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
        if let Action::Key { keys_dir } = &self.action {
            let identity = Identity::load_or_create(&session_dirs::keys(keys_dir.as_deref()));
            let key = identity.map_err(|error| CliError::Session(error.into()))?.public_key().to_string();
            return context.output.result(&Key { key }, |key| format!("{}\n", key.key));
        }
        if let Action::Hint { file, whole, blocks } = &self.action {
            return hint::write(file, (*whole || *blocks).then_some(*whole), context);
        }
        let dir = session_dirs::control(self.control_dir.as_deref())?;
        let one = |name: &str, request: ControlRequest| send(&dir, name, &request);
        let response = match &self.action {
            Action::Ls => return list(&dir, context),
            Action::Metrics => {
                let all = living(&dir);
                let page = session_page(all.iter().map(|(name, all)| (name.as_str(), &all.status)));
                return output::write(page.as_bytes());
            }
            Action::Key { .. } | Action::Hint { .. } => return Ok(()),
            Action::Show { name } => one(name, ControlRequest::Show)?,
            Action::Flush { name } => one(name, ControlRequest::Flush)?,
            Action::Invalidate { name } => one(name, ControlRequest::Invalidate)?,
            Action::Unmount { name, keep_unsent } => {
                let response = one(name, ControlRequest::End { leave: *keep_unsent })?;
                wait_for_unmount(&response.mount);
                response
            }
            Action::Conflicts { name } => return conflicts::list(&one(name, ControlRequest::Show)?, context),
            Action::Diff { name, copy } => {
                return conflicts::compare(&one(name, ControlRequest::Show)?, name, copy, context);
            }
            Action::Keep { name, copy, version, partial } => {
                let session = one(name, ControlRequest::Show)?;
                return conflicts::resolve(&session, (name, copy), (*version, *partial), context);
            }
            Action::Warm { name, path } => {
                return pins::fetch(&dir, name, &ControlRequest::Warm { path: path.clone() }, context);
            }
            Action::Pin { name, path } => {
                return pins::fetch(&dir, name, &ControlRequest::Pin { path: path.clone() }, context);
            }
            Action::Unpin { name, path } => one(name, ControlRequest::Unpin { path: path.clone() })?,
            Action::Nbd { name, file, at, .. } => one(name, nbd(file, at.as_deref())?)?,
            Action::Set { name, settings } => set(name, settings, one)?,
        };
        context
            .output
            .result(&response, |response| self.action.outcome(response).unwrap_or_else(|| describe(response)))
    }
}

impl Action {
    /// What was done, where that says all; none for an action after which people look at the session.
    fn outcome(&self, response: &ControlResponse) -> Option<String> {
        let status = &response.status;
        Some(match self {
            Self::Flush { name } if status.dirty == 0 => format!("{name}: everything is written back\n"),
            Self::Flush { name } => {
                format!("{name}: written back; {} were written meanwhile\n", size(status.dirty))
            }
            Self::Invalidate { name } => {
                format!("{name}: names, attributes and unmodified data are dropped\n")
            }
            Self::Unmount { name, .. } if status.dirty == 0 && status.queued == 0 => {
                format!("{name}: written back and unmounted\n")
            }
            Self::Unmount { name, .. } => format!(
                "{name}: unmounted; {} and {} changes of names are not written back and stay in the cache: the next \
                 mount of the same target sends them\n",
                size(status.dirty),
                status.queued
            ),
            Self::Unpin { name, path } => format!("{name}: {path} may leave the cache\n"),
            _ => return None,
        })
    }
}

/// Waits until nothing is mounted there, for a while: a session answers before it ends, and until then the
/// directory cannot be removed or mounted on.
fn wait_for_unmount(mount: &Path) {
    let begun = Instant::now();
    // Fields of a line: docs of the kernel, filesystems/proc.rst, 3.5.
    let escaped = mount.display().to_string().replace(' ', "\\040");
    let is_there = |mounts: String| mounts.lines().any(|line| line.split(' ').nth(4) == Some(&*escaped));
    while begun.elapsed() < UNMOUNT_TIME && fs::read_to_string("/proc/self/mountinfo").is_ok_and(is_there) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn send(dir: &Path, name: &str, request: &ControlRequest) -> Result<ControlResponse, CliError> {
    send_with_progress(dir, name, request, &mut |_| {})
}

fn send_with_progress(
    dir: &Path,
    name: &str,
    request: &ControlRequest,
    show: &mut dyn FnMut(WarmProgress),
) -> Result<ControlResponse, CliError> {
    let path = dir.join(format!("{name}.sock"));
    if name.contains('/') || !path.exists() {
        return Err(CliError::UnknownSession { name: name.to_owned() });
    }
    let response = send_request_with_progress(&path, request, show);
    let response = response.map_err(|error| CliError::NoSession(error.into()))?;
    match &response.error {
        Some(error) if matches!(request, ControlRequest::Set { .. }) => {
            Err(CliError::Usage { problem: error.clone(), hint: "see `whimbrel session --help`".to_owned() })
        }
        Some(error) => match request {
            ControlRequest::Nbd { socket: Some(_), .. }
            | ControlRequest::Warm { .. }
            | ControlRequest::Pin { .. }
            | ControlRequest::Unpin { .. } => Err(CliError::Session(error.clone().into())),
            _ => Err(CliError::NotWrittenBack { left: error.clone() }),
        },
        None => Ok(response),
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
            problem: format!("{setting:?} is not a setting with a value"),
            hint: "write SETTING=VALUE, like write=back".to_owned(),
        })?;
        last = one(name, ControlRequest::Set { name: key.to_owned(), value: value.to_owned() })?;
    }
    Ok(last)
}

/// Makes the request to serve a file. The path is made absolute for the process of the session.
fn nbd(file: &str, at: Option<&Path>) -> Result<ControlRequest, CliError> {
    let socket = at.map(std::path::absolute).transpose();
    let socket = socket.map_err(CliError::io("find the directory of the socket"))?;
    Ok(ControlRequest::Nbd { file: file.to_owned(), socket })
}

/// Names and states of the sessions that answer.
fn living(dir: &Path) -> Vec<(String, ControlResponse)> {
    let named = |path: PathBuf| {
        // A session that does not answer has died; the next mount removes its socket.
        let response = send_request(&path, &ControlRequest::Show).ok()?;
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
            let server =
                if row.connected { row.server.clone() } else { format!("{} (not connected)", row.server) };
            let mount = row.mount.display().to_string();
            [row.name.clone(), mount, server, row.directory.clone(), size(row.dirty), ratio(row.hit_ratio)]
        });
        table(["NAME", "MOUNT", "SERVER", "DIRECTORY", "DIRTY", "HITS"], rows, "no mounted sessions")
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
    let mut text =
        fields(&[connection_fields(response), content_fields(status), setting_fields(status)].concat());
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

/// A line of a description: its label and its text.
type Field = (&'static str, String);

fn connection_fields(response: &ControlResponse) -> Vec<Field> {
    let status = &response.status;
    let link = match (status.connected, status.round_trip_ms) {
        (false, _) => "not connected".to_owned(),
        (true, None) => "connected".to_owned(),
        (true, Some(time)) => format!("connected, round trip {}", milliseconds(time)),
    };
    let (each, waited) = (milliseconds(status.call_ms), milliseconds(status.waited_ms));
    let calls = format!("{}, {each} each, connection lost {} times", status.calls, status.broken);
    let (times, names) = (status.waits, status.known);
    vec![
        ("mount", response.mount.display().to_string()),
        ("server", format!("{}:{} ({link})", status.server, status.directory)),
        ("calls", calls),
        ("waited", format!("{times} times for the server, {waited} in total; {names} names cached")),
    ]
}

fn content_fields(status: &SessionStatus) -> Vec<Field> {
    let spared = format!(
        "{} zero blocks by hints, {} in holes, {} blocks fetched in advance, {} pages found by digest; {} written pages that the server had",
        status.zero_blocks,
        size(status.holes),
        status.ahead_blocks,
        status.found_pages,
        status.spared_pages
    );
    let (used, capacity, hits) = (size(status.used), size(status.capacity), ratio(status.hit_ratio));
    let (dirty, files, names) = (size(status.dirty), status.dirty_files, status.queued);
    vec![
        ("not requested", spared),
        ("traffic", format!("{} sent, {} received", size(status.sent), size(status.received))),
        ("cache", format!("{used} of {capacity} used, hit ratio {hits}")),
        ("unsent", format!("{dirty} in {files} files, {names} changes of names")),
        ("damaged pages", format!("{} fetched again", status.damaged)),
        ("pinned", if status.pins.is_empty() { "nothing".to_owned() } else { status.pins.join(" ") }),
    ]
}

fn setting_fields(status: &SessionStatus) -> Vec<Field> {
    let settings = &status.settings;
    let seconds = |seconds: Option<u64>, none: &str| {
        seconds.map_or_else(|| none.to_owned(), |seconds| format!("{seconds} s"))
    };
    let rules: Vec<String> =
        settings.rules.iter().map(|rule| format!("{}={}", rule.files, rule.policy)).collect();
    vec![
        ("write", [vec![settings.policy.to_string()], rules].concat().join(" ")),
        ("fresh", seconds(settings.fresh, "the whole session")),
        ("delay", seconds(settings.delay, "never")),
        ("patience", format!("{} s", settings.patience)),
    ]
}
