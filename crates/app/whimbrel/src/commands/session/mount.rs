//! Mount of a session: `[USER@]HOST:/PATH` over the user's ssh, or `HOST:PORT:/PATH` with a key over TLS.
//!
//! The command returns when the mount answers. A process in the background runs the session until it is
//! unmounted or ended. Data that cannot be written back stays in the cache for the next mount of the target.

use crate::{
    argument_types::absolute,
    context::Context,
    error::CliError,
    metrics::{MetricsListener, client_page},
    session_dirs,
};
use serde::Serialize;
use std::{
    ffi::OsString,
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::{Arc, mpsc},
    time::Duration,
};
use tokio::signal::unix::{SignalKind, signal};
use whimbrel_core::{ByteSize, HostName};
use whimbrel_fuse::{MountOptions, Mounted};
use whimbrel_session::client::{
    Connector, Control, FuseOperations, IdMap, IdPair, MountSettings, Policy, Session, SessionError,
    SessionOptions,
};
use whimbrel_wire::{
    BoxFuture, ConnectError, Connection, Endpoint, Identity, PublicKey, SshCommand, connect_ssh, connect_tls,
};

/// Interval at which the process of a mount checks whether it was unmounted.
const LOOK: Duration = Duration::from_millis(200);

/// Options for a directory of a server.
#[derive(Debug, clap::Args)]
pub(crate) struct MountSession {
    /// Directory of the cache [default: one for each target, below ~/.local/state/whimbrel]
    #[arg(long, alias = "cache", value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Size of the cache, like 500M or 8G; with 0 no data of the server is stored on this host's disk
    #[arg(long, alias = "capacity", value_name = "SIZE", default_value = "8G")]
    cache_size: ByteSize,
    /// File with 64 hexadecimal digits: the key with which the cache is encrypted, from its first use on
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    cache_key_file: Option<PathBuf>,
    /// Size of a cache block, 4K to 256K
    #[arg(long, value_name = "SIZE", default_value = "64K")]
    block: ByteSize,
    /// Write policy: none (read-only), through (sent before close returns) or back (sent later)
    #[arg(long, value_name = "POLICY", default_value = "through")]
    write: Policy,
    /// Write policy for some files, like '*.log=back' (repeatable)
    #[arg(long, value_name = "FILES=POLICY")]
    rule: Vec<String>,
    /// Seconds for which names and attributes are cached, or `session`
    #[arg(long, alias = "fresh", value_name = "SECONDS", default_value = "30")]
    attr_timeout: String,
    /// Seconds until written data is sent, or `never`, with --write back
    #[arg(long, alias = "delay", value_name = "SECONDS", default_value = "5")]
    write_back_delay: String,
    /// Seconds that calls wait for an unreachable server before they fail
    #[arg(long, alias = "patience", value_name = "SECONDS", default_value = "60")]
    server_timeout: u64,
    /// Local file, such as a disk image, whose pages need not be fetched (repeatable)
    #[arg(long, alias = "known", value_name = "FILE")]
    reference: Vec<PathBuf>,
    /// Directory, owned by root with mode 1733, in which users of this host share cached data
    #[arg(long, alias = "shared", value_name = "DIR")]
    shared_cache: Option<PathBuf>,
    /// Files to fetch whole when they are opened [default: *.vmss,*.mem,*.memory]
    #[arg(long, alias = "whole", value_name = "FILES")]
    fetch_whole: Option<String>,
    /// Connect over TLS to the server with this key, as `whimbrel serve` prints it
    #[arg(long, value_name = "KEY")]
    key: Option<PublicKey>,
    /// Directory of the own key [default: ~/.config/whimbrel]
    #[arg(long, alias = "keys", value_name = "DIR")]
    pub(crate) keys_dir: Option<PathBuf>,
    /// Option for ssh, like 'Port=2222' (repeatable)
    #[arg(long, value_name = "OPTION")]
    ssh_option: Vec<String>,
    /// Name of the program `whimbrel` on the server
    #[arg(long, alias = "remote", value_name = "PROGRAM", default_value = "whimbrel")]
    remote_program: String,
    /// Keep numeric user and group ids; by default, files of the server's user appear as yours
    #[arg(long, alias = "same-ids", conflicts_with = "map_id")]
    numeric_ids: bool,
    /// Pair of numeric ids, user:SERVER=LOCAL or group:SERVER=LOCAL (repeatable)
    #[arg(long, alias = "id", value_name = "PAIR")]
    map_id: Vec<IdPair>,
    /// Let other users of this host use the mount, as far as modes and owners permit
    #[arg(long, alias = "others")]
    pub(crate) allow_other: bool,
    /// Support extended attributes and POSIX access lists; each question about them goes to the server
    #[arg(long)]
    xattrs: bool,
    /// Let locks apply among the programs of this mount only; otherwise each one is a request to the server
    #[arg(long)]
    local_locks: bool,
    /// Allow device nodes of the mount to be opened
    #[arg(long)]
    dev: bool,
    /// Let programs on the mount run as their owner or group if their mode says so
    #[arg(long)]
    suid: bool,
    /// Name of the session for `whimbrel session` [default: the name of the directory]
    #[arg(long)]
    name: Option<String>,
    /// Directory of control sockets
    #[arg(long, alias = "control", value_name = "DIR")]
    control_dir: Option<PathBuf>,
    #[command(flatten)]
    metrics: MetricsListener,
    /// Return only after the directory was unmounted
    #[arg(long)]
    foreground: bool,
    /// Report the mount on stdout to the process that started this one.
    #[arg(long, hide = true)]
    announce: bool,
}

/// Result of a mount.
#[derive(Debug, Serialize, serde::Deserialize)]
struct MountedSession {
    name: String,
    target: String,
    mount: PathBuf,
    cache: PathBuf,
    control: PathBuf,
}

/// Connection to the server.
enum Way {
    Ssh(SshCommand),
    Tls { address: String, key: PublicKey, identity: Identity },
}

struct Carrier {
    way: Way,
    endpoint: Endpoint,
}

impl Connector for Carrier {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, ConnectError>> {
        Box::pin(async move {
            match &self.way {
                Way::Ssh(ssh) => connect_ssh(ssh, &self.endpoint).await,
                Way::Tls { address, key, identity } => {
                    connect_tls(address, *key, identity, &self.endpoint).await
                }
            }
        })
    }

    fn destination(&self) -> String {
        match &self.way {
            Way::Ssh(ssh) => ssh.destination.clone(),
            Way::Tls { address, .. } => address.clone(),
        }
    }
}

fn split(target: &str) -> Option<(&str, &str)> {
    let at = target.find(":/")?;
    let (host, path) = (&target[..at], &target[at + 1..]);
    (!host.is_empty()).then_some((host, path))
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn usage(problem: String, hint: &str) -> CliError {
    CliError::Usage { problem, hint: hint.to_owned() }
}

impl MountSession {
    fn settings(&self) -> Result<MountSettings, CliError> {
        let mut settings =
            MountSettings { policy: self.write, patience: self.server_timeout, ..MountSettings::default() };
        let mut set = |name: &str, value: &str| {
            settings.set(name, value).map_err(|problem| usage(problem, "see `whimbrel mount --help`"))
        };
        set("fresh", &self.attr_timeout)?;
        set("delay", &self.write_back_delay)?;
        if let Some(whole) = &self.fetch_whole {
            set("whole", whole)?;
        }
        for rule in &self.rule {
            let (files, policy) = rule.rsplit_once('=').ok_or_else(|| {
                usage(format!("{rule:?} is not a rule"), "write FILES=POLICY, like '*.log=back'")
            })?;
            set(files, policy)?;
        }
        Ok(settings)
    }

    fn carrier(&self, host: &str, path: &str) -> Result<Carrier, CliError> {
        let way = match self.key {
            Some(key) => {
                let dir = session_dirs::keys(self.keys_dir.as_deref());
                let identity =
                    Identity::load_or_create(&dir).map_err(|error| CliError::Session(Box::new(error)))?;
                Way::Tls { address: host.to_owned(), key, identity }
            }
            None => {
                let mut ssh = SshCommand::new(host);
                ssh.remote = format!("{} serve {} --stdio", self.remote_program, quoted(path));
                ssh.options =
                    self.ssh_option.iter().map(|option| OsString::from(format!("-o{option}"))).collect();
                Way::Ssh(ssh)
            }
        };
        let name = "mount".parse::<HostName>().map_err(|error| CliError::Session(Box::new(error)))?;
        Ok(Carrier { way, endpoint: Endpoint::new(name, ()) })
    }

    /// Mounts `target` on `dir`.
    pub(crate) fn run(self, target: &str, dir: &Path, context: &Context) -> Result<(), CliError> {
        let Some((host, path)) = split(target) else {
            let hint = "write [USER@]HOST:/PATH, or HOST:PORT:/PATH with --key";
            return Err(usage(format!("{target:?} is not a directory of a server"), hint));
        };
        if self.foreground || self.announce {
            return self.carry(target, host, path, dir, context);
        }
        self.settings()?;
        let mounted = in_background()?;
        context.output.result(&mounted, |mounted| {
            format!("{} is mounted on {}\n", mounted.target, mounted.mount.display())
        })
    }

    fn names(&self, target: &str, dir: &Path) -> Result<MountedSession, CliError> {
        let mount = dir.canonicalize().map_err(CliError::io("find the directory to mount on"))?;
        let last =
            mount.file_name().map_or_else(|| "root".to_owned(), |name| name.to_string_lossy().into_owned());
        let name = self.name.clone().unwrap_or(last);
        if name.is_empty() || name.contains(['/', '\0']) || name.starts_with('.') {
            return Err(usage(
                format!("{name:?} cannot be the name of a session"),
                "set another one with --name",
            ));
        }
        let control = session_dirs::control(self.control_dir.as_deref())?.join(format!("{name}.sock"));
        let cache = session_dirs::cache(self.cache_dir.as_deref(), target);
        Ok(MountedSession { name, target: target.to_owned(), mount, cache, control })
    }

    /// Runs the session until its end.
    fn carry(
        &self,
        target: &str,
        host: &str,
        path: &str,
        dir: &Path,
        context: &Context,
    ) -> Result<(), CliError> {
        whimbrel_fuse::clear_stale(dir).map_err(CliError::io("use the directory to mount on"))?;
        let names = self.names(target, dir)?;
        let mut options = SessionOptions::new(path.as_bytes(), names.cache.clone());
        options.cache_key.clone_from(&self.cache_key_file);
        options.capacity = self.cache_size.0;
        options.block = self.block.0;
        options.xattrs = self.xattrs;
        options.settings = self.settings()?;
        options.references.clone_from(&self.reference);
        options.shared_cache.clone_from(&self.shared_cache);
        options.id_map = match self.numeric_ids {
            true => IdMap::Same,
            false => IdMap::with_pairs(self.map_id.clone())
                .map_err(|error| usage(error.to_string(), "pair each id once on each side"))?,
        };
        let carrier = Arc::new(self.carrier(host, path)?);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(CliError::io("start the runtime"))?;
        let session = runtime.block_on(Session::start(carrier, options)).map_err(no_session)?;
        let mut kernel = MountOptions::new(target, "whimbrel");
        kernel.allow_others = self.allow_other;
        (kernel.devices, kernel.set_user_id) = (self.dev, self.suid);
        kernel.access_lists = self.xattrs && self.allow_other;
        kernel.locks = !self.local_locks && session.has_locks();
        kernel.read_only = session.is_read_only();
        let mut mounted = Mounted::new(FuseOperations::new(&session), dir, &kernel)
            .map_err(|error| CliError::Session(error.into()))?;
        if let Some(notifier) = mounted.notifier() {
            session.mounted(notifier);
        }
        let (ended, end) = mpsc::channel();
        let control = Control::start(&names.control, session.clone(), names.mount.clone(), ended.clone());
        let control = control.map_err(|error| CliError::Session(error.into()))?;
        runtime.spawn(signals(session.clone(), ended));
        let (name, figures) = (names.name.clone(), session.clone());
        let page = move || {
            let (name, session) = (name.clone(), figures.clone());
            let page = tokio::task::spawn_blocking(move || client_page(&name, &session.status()));
            async { page.await.unwrap_or_default() }
        };
        runtime.block_on(self.metrics.start(page))?;
        self.announced(&names, context)?;
        while end.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) && !mounted.is_gone() {}
        // The exports end first, so that data of their clients is written back.
        control.end_exports();
        let flushed = session.end();
        // Programs lose their open files; the data that they wrote is in the cache.
        let unmounted = mounted.unmount();
        drop((unmounted, mounted, control));
        let status = session.status();
        runtime.shutdown_background();
        flushed.map_err(|errno| CliError::NotWrittenBack {
            left: format!(
                "{errno}; {} bytes and {} changes of names are unsent",
                status.dirty, status.queued
            ),
        })
    }

    fn announced(&self, names: &MountedSession, context: &Context) -> Result<(), CliError> {
        if !self.announce {
            let text = format!("{} is mounted on {}", names.target, names.mount.display());
            context.output.remark(&text);
            return Ok(());
        }
        let log = fs::OpenOptions::new().append(true).create(true).open(names.cache.join("log"));
        let log = log.map_err(CliError::io("open the log of the session"))?;
        let mut line =
            serde_json::to_vec(names).map_err(|error| CliError::io("report the mount")(error.into()))?;
        line.push(b'\n');
        let mut stdout = std::io::stdout();
        stdout.write_all(&line).and_then(|()| stdout.flush()).map_err(CliError::io("report the mount"))?;
        // The process that waited reads no further.
        let moved = rustix::stdio::dup2_stdout(&log).and_then(|()| rustix::stdio::dup2_stderr(&log));
        moved.map_err(|error| CliError::io("write to the log of the session")(error.into()))
    }
}

fn no_session(error: SessionError) -> CliError {
    match error {
        SessionError::Connect { .. } | SessionError::Open { .. } => CliError::NoSession(error.into()),
        other => CliError::Session(other.into()),
    }
}

/// Handles signals: TERM, INT and HUP end the session, USR1 writes back, USR2 drops unmodified data.
async fn signals(session: Session, ended: mpsc::Sender<()>) {
    let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
    for kind in kinds {
        let ended = ended.clone();
        if let Ok(mut stream) = signal(kind) {
            tokio::spawn(async move {
                while stream.recv().await.is_some() {
                    // The receiver is gone once the session has ended.
                    let _ = ended.send(());
                }
            });
        }
    }
    type Work = fn(&Session);
    let works: [(SignalKind, Work); 2] = [
        (SignalKind::user_defined1(), |session| _ = session.flush()),
        (SignalKind::user_defined2(), |session| _ = session.invalidate()),
    ];
    for (kind, work) in works {
        let session = session.clone();
        if let Ok(mut stream) = signal(kind) {
            tokio::spawn(async move {
                while stream.recv().await.is_some() {
                    let session = session.clone();
                    tokio::task::spawn_blocking(move || work(&session));
                }
            });
        }
    }
}

/// Starts this command again as a process in the background, and waits until that reports the mount.
fn in_background() -> Result<MountedSession, CliError> {
    let program = std::env::current_exe().map_err(CliError::io("find this program"))?;
    let mut command = Command::new(program);
    command.args(with_announce(std::env::args_os().skip(1)));
    // Signals of this terminal are not for that process.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(CliError::io("start the process of the mount"))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout)
            .read_line(&mut line)
            .map_err(CliError::io("read from the process of the mount"))?;
    }
    if let Ok(mounted) = serde_json::from_str(&line) {
        return Ok(mounted);
    }
    let status = child.wait().map_err(CliError::io("wait for the process of the mount"))?;
    std::process::exit(code(status));
}

/// The arguments of this command with one option more, before the `--` after which there are no options.
fn with_announce(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    let end = arguments.iter().position(|argument| argument == "--").unwrap_or(arguments.len());
    arguments.insert(end, "--announce".into());
    arguments
}

/// Exit code of a mount that failed. The process has printed the error.
fn code(status: ExitStatus) -> i32 {
    status.code().filter(|code| *code != 0).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_in_the_background_gets_its_option_before_the_end_of_options() {
        let with = |line: &str| {
            let arguments = with_announce(line.split(' ').map(OsString::from));
            arguments.join(std::ffi::OsStr::new(" ")).into_string().unwrap()
        };
        assert_eq!(with("mount a:/b /c"), "mount a:/b /c --announce");
        assert_eq!(with("mount --xattrs -- a:/b -c"), "mount --xattrs --announce -- a:/b -c");
        assert_eq!(with("mount -- a:/b --"), "mount --announce -- a:/b --");
    }

    #[test]
    fn targets_are_split_where_the_path_begins() {
        assert_eq!(split("ada@state:/vms"), Some(("ada@state", "/vms")));
        assert_eq!(split("10.0.0.1:7788:/vms/a:/b"), Some(("10.0.0.1:7788", "/vms/a:/b")));
        assert_eq!(split("state:vms"), None);
        assert_eq!(split(":/vms"), None);
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
