//! Mounting a session: `[USER@]HOST:/PATH` by the user's ssh, `HOST:PORT:/PATH` with a key by TLS.
//!
//! The command returns when the mount answers; another process of it carries the mount until it is unmounted,
//! told to end, or killed. What it cannot write back stays in the cache for the next mount of the same
//! directory.

use crate::{context::Context, error::CliError, session_dirs};
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

/// How often the carrier of a mount looks whether somebody has unmounted it.
const LOOK: Duration = Duration::from_millis(200);

/// A server's directory and how it is used.
#[derive(Debug, clap::Args)]
pub(crate) struct MountSession {
    /// Where the cache lies; one of its own for each target unless given
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Bytes the cache may hold, like 500M or 8G; with 0 nothing is kept on this host's disk
    #[arg(long, value_name = "SIZE", default_value = "8G")]
    capacity: ByteSize,
    /// Bytes of a block of the cache, 4K to 256K
    #[arg(long, value_name = "SIZE", default_value = "64K")]
    block: ByteSize,
    /// When writes reach the server: none, through (before close returns) or back (later)
    #[arg(long, value_name = "POLICY", default_value = "through")]
    write: Policy,
    /// Another policy for some files, like '*.log=back'; may be given several times
    #[arg(long, value_name = "FILES=POLICY")]
    rule: Vec<String>,
    /// Seconds for which names and attributes are believed, or `session`
    #[arg(long, value_name = "SECONDS", default_value = "30")]
    fresh: String,
    /// Seconds after which writes are written back, or `never`
    #[arg(long, value_name = "SECONDS", default_value = "5")]
    delay: String,
    /// Seconds that calls wait for a server that is gone before they fail
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    patience: u64,
    /// A file of this host, like a golden image: what it has as well is not sent over a slow link; may be
    /// given several times
    #[arg(long, value_name = "FILE")]
    known: Vec<PathBuf>,
    /// A directory (root's, mode 1733) in which users of this host share what the server lets each of them
    /// read
    #[arg(long, value_name = "DIR")]
    shared: Option<PathBuf>,
    /// Files that are fetched whole when they are opened, like memory of machines: '*.vmss,*.mem'
    #[arg(long, value_name = "FILES")]
    whole: Option<String>,
    /// By TLS: the server's key, as `whimbrel serve` prints it
    #[arg(long, value_name = "KEY")]
    key: Option<PublicKey>,
    /// Folder of the own key, ~/.config/whimbrel unless given
    #[arg(long, value_name = "DIR")]
    pub(crate) keys: Option<PathBuf>,
    /// An option for ssh, like 'Port=2222'; may be given several times
    #[arg(long, value_name = "OPTION")]
    ssh_option: Vec<String>,
    /// What whimbrel is called on the server
    #[arg(long, value_name = "PROGRAM", default_value = "whimbrel")]
    remote: String,
    /// Owners are numbers, the same on both sides; otherwise what the server's user owns is yours
    #[arg(long, conflicts_with = "id")]
    same_ids: bool,
    /// Who else is who: `user:THERE=HERE` or `group:THERE=HERE`, by numbers; may be given several times
    #[arg(long, value_name = "PAIR")]
    id: Vec<IdPair>,
    /// Let other users of this host use the mount, as modes and owners say
    #[arg(long)]
    pub(crate) others: bool,
    /// What `whimbrel session` calls it; the name of the directory unless given
    #[arg(long)]
    name: Option<String>,
    /// Folder of control sockets
    #[arg(long, value_name = "DIR")]
    control: Option<PathBuf>,
    /// Do not return before it is unmounted
    #[arg(long)]
    foreground: bool,
    /// The one who mounts waits for a line on stdout
    #[arg(long, hide = true)]
    announce: bool,
}

/// What is printed when a session is mounted.
#[derive(Debug, Serialize, serde::Deserialize)]
struct MountedSession {
    name: String,
    target: String,
    mount: PathBuf,
    cache: PathBuf,
    control: PathBuf,
}

/// Where a session's server is.
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

/// Host and directory of a target.
fn split(target: &str) -> Option<(&str, &str)> {
    let at = target.find(":/")?;
    let (host, path) = (&target[..at], &target[at + 1..]);
    (!host.is_empty()).then_some((host, path))
}

/// One word for a shell, whatever is in it.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn usage(problem: String, hint: &str) -> CliError {
    CliError::Usage { problem, hint: hint.to_owned() }
}

impl MountSession {
    fn settings(&self) -> Result<MountSettings, CliError> {
        let mut settings =
            MountSettings { policy: self.write, patience: self.patience, ..MountSettings::default() };
        let mut set = |name: &str, value: &str| {
            settings.set(name, value).map_err(|problem| usage(problem, "see `whimbrel mount --help`"))
        };
        set("fresh", &self.fresh)?;
        set("delay", &self.delay)?;
        if let Some(whole) = &self.whole {
            set("whole", whole)?;
        }
        for rule in &self.rule {
            let (files, policy) = rule.rsplit_once('=').ok_or_else(|| {
                usage(format!("{rule:?} is no rule"), "write FILES=POLICY, like '*.log=back'")
            })?;
            set(files, policy)?;
        }
        Ok(settings)
    }

    fn carrier(&self, host: &str, path: &str) -> Result<Carrier, CliError> {
        let way = match self.key {
            Some(key) => {
                let dir = session_dirs::keys(self.keys.as_deref());
                let identity =
                    Identity::load_or_create(&dir).map_err(|error| CliError::Session(Box::new(error)))?;
                Way::Tls { address: host.to_owned(), key, identity }
            }
            None => {
                let mut ssh = SshCommand::new(host);
                ssh.remote = format!("{} serve {} --stdio", self.remote, quoted(path));
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
            return Err(usage(format!("{target:?} names no directory of a server"), hint));
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
            return Err(usage(format!("{name:?} is no name for a session"), "give another one with --name"));
        }
        let control = session_dirs::control(self.control.as_deref())?.join(format!("{name}.sock"));
        let cache = session_dirs::cache(self.cache.as_deref(), target);
        Ok(MountedSession { name, target: target.to_owned(), mount, cache, control })
    }

    /// Carries the mount until its end.
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
        options.capacity = self.capacity.0;
        options.block = self.block.0;
        options.settings = self.settings()?;
        options.known.clone_from(&self.known);
        options.shared.clone_from(&self.shared);
        options.owners = match self.same_ids {
            true => IdMap::Same,
            false => IdMap::mine(self.id.clone())
                .map_err(|error| usage(error.to_string(), "pair everybody once on each side"))?,
        };
        let carrier = Arc::new(self.carrier(host, path)?);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(CliError::io("start the runtime"))?;
        let session = runtime.block_on(Session::start(carrier, options)).map_err(no_session)?;
        let mut kernel = MountOptions::new(target, "whimbrel");
        kernel.others = self.others;
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
        self.announced(&names, context)?;
        while end.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) && !mounted.is_gone() {}
        // First, so that what its clients wrote is written back.
        control.end_exports();
        let flushed = session.end();
        // Who has files open there finds them gone; what they wrote is in the cache.
        let unmounted = mounted.unmount();
        drop((unmounted, mounted, control));
        let status = session.status();
        runtime.shutdown_background();
        flushed.map_err(|errno| CliError::NotWrittenBack {
            left: format!("{errno}; {} bytes and {} changes of names are left", status.dirty, status.queued),
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
        let mut line = serde_json::to_vec(names)
            .map_err(|error| CliError::io("say that it is mounted")(error.into()))?;
        line.push(b'\n');
        let mut stdout = std::io::stdout();
        stdout
            .write_all(&line)
            .and_then(|()| stdout.flush())
            .map_err(CliError::io("say that it is mounted"))?;
        // From here on nobody listens: who waited goes on.
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

/// TERM, INT and HUP end the session; USR1 writes back, USR2 forgets what is clean.
async fn signals(session: Session, ended: mpsc::Sender<()>) {
    let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
    for kind in kinds {
        let ended = ended.clone();
        if let Ok(mut stream) = signal(kind) {
            tokio::spawn(async move {
                while stream.recv().await.is_some() {
                    // The other side goes when the session has ended.
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

/// Starts this command again in a session of its own and waits until it says that the mount answers.
fn in_background() -> Result<MountedSession, CliError> {
    let program = std::env::current_exe().map_err(CliError::io("find this program"))?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--announce");
    // No signal of this terminal is meant for it.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(CliError::io("start the process of the mount"))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout)
            .read_line(&mut line)
            .map_err(CliError::io("hear from the process of the mount"))?;
    }
    if let Ok(mounted) = serde_json::from_str(&line) {
        return Ok(mounted);
    }
    let status = child.wait().map_err(CliError::io("wait for the process of the mount"))?;
    std::process::exit(code(status));
}

/// It has said on stderr what went wrong; its exit code says the rest.
fn code(status: ExitStatus) -> i32 {
    status.code().filter(|code| *code != 0).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_split_where_the_path_begins() {
        assert_eq!(split("ada@state:/vms"), Some(("ada@state", "/vms")));
        assert_eq!(split("10.0.0.1:7788:/vms/a:/b"), Some(("10.0.0.1:7788", "/vms/a:/b")));
        assert_eq!(split("state:vms"), None);
        assert_eq!(split(":/vms"), None);
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
