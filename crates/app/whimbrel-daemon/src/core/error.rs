//! Errors of the daemon: each has a stable code, a chain of causes and a hint for the user.

use crate::{image::FetchError, peers::ssh::SshError};
use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};
use whimbrel_api::{ApiError, ErrorCode};
use whimbrel_capture::CaptureError;
use whimbrel_container::ContainerError;
use whimbrel_core::{ByteSize, CapsuleId, HostName, MachineName, causes, error_chain, is_shortage};
use whimbrel_migrate::{MigrateError, compatibility::Incompatibility, link::LinkError};
use whimbrel_pool::client::PoolError;
use whimbrel_protect::PrimaryError;
use whimbrel_qemu::{ImageError, ImageFormat, LaunchError, QemuGaError};
use whimbrel_schedule::ScheduleError;
use whimbrel_store::StoreError;
use whimbrel_vm::{PassError, RunningError};
use whimbrel_wire::{private_dir::PrivateDirError, web_tls::WebTlsError};

type Cause = Box<dyn Error + Send + Sync>;

/// Failure of a request or an operation.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what its fields are")]
pub enum DaemonError {
    #[error("there is no {what} {name}")]
    NotFound { what: &'static str, name: String },
    #[error("the name {name} is taken")]
    NameTaken { name: MachineName },
    #[error("{} is not an earlier state of {name}", capsule.short())]
    NotItsPast { name: MachineName, capsule: CapsuleId },
    #[error("{from} is called {to} now, but not everything of it has the new name")]
    HalfRenamed { from: MachineName, to: MachineName, source: Box<DaemonError> },
    #[error("the record of {name} cannot be read: {reason}")]
    UnreadableRecord { name: MachineName, reason: String },
    #[error("{} cannot be read: {reason}", path.display())]
    UnreadableFile { path: PathBuf, reason: String },
    #[error("whether the machine was handed over to {to} cannot be read from {}", path.display())]
    CommitMark { path: PathBuf, to: HostName, source: io::Error },
    #[error("{name} is busy with {with}")]
    Busy { name: MachineName, with: String },
    #[error("{name} is {state}; it must be {needed}")]
    State { name: MachineName, state: &'static str, needed: &'static str },
    #[error("{reason}")]
    Invalid { reason: String },
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "the machine needs {needed} of memory; {host} has {spare} that are not promised to its other machines"
    )]
    NoRoom { host: HostName, needed: ByteSize, spare: ByteSize },
    #[error("{} is not on a tmpfs, which guest memory needs", path.display())]
    NotTmpfs { path: PathBuf },
    #[error("the directory is not private to the daemon")]
    NotPrivate { source: PrivateDirError },
    #[error("the API cannot be served over TLS")]
    Certificate { source: WebTlsError },
    #[error("another daemon already uses {}", path.display())]
    AlreadyServed { path: PathBuf },
    #[error("QEMU failed: cannot {action}")]
    Qemu { action: &'static str, source: Cause },
    #[error("a machine did not pass between the daemon and its own process")]
    Pass { source: PassError },
    #[error("cannot access the memory of QEMU")]
    Memory { source: Cause },
    #[error("the disk {disk} failed")]
    Disk { disk: String, source: Cause },
    #[error("{} cannot be read as a disk image", path.display())]
    Image { path: PathBuf, source: ImageError },
    #[error("{} cannot become a machine", path.display())]
    Container { path: PathBuf, source: ContainerError },
    #[error("{} is an image in the format {format}, which cannot be the disk of a machine", path.display())]
    NotRaw { path: PathBuf, format: ImageFormat },
    #[error("cannot fetch {location}")]
    ImageSource { location: String, source: FetchError },
    #[error("the network port {port} failed")]
    Port { port: String, source: Cause },
    #[error("the network {name} cannot be set up")]
    Network { name: String, source: whimbrel_net::managed::ProgramError },
    #[error("the store failed: cannot {action}")]
    Store { action: &'static str, code: ErrorCode, source: Cause },
    #[error("the master key from {place} cannot be used")]
    MasterKey { place: String, source: Cause },
    #[error("cannot capture the state of the machine")]
    Capture { source: CaptureError },
    #[error("{name} was not migrated to {host} and still runs here")]
    Migrate { name: MachineName, host: HostName, source: Box<MigrateError> },
    #[error("the protection failed")]
    Protect { source: Cause },
    #[error("{name} has no witness, so only a user can confirm that its primary is dead")]
    NoWitness { name: MachineName },
    #[error("{name} is not taken over: its primary {host} answers")]
    PrimaryAnswers { name: MachineName, host: HostName },
    #[error("{name} was taken over by its standby {host}")]
    TakenOver { name: MachineName, host: HostName },
    #[error("{name} was handed over to {host}, which has not confirmed that it runs there")]
    Unconfirmed { name: MachineName, host: HostName },
    #[error("{name} is protected by {standby}: {why}")]
    Protected { name: MachineName, standby: HostName, why: &'static str },
    #[error(
        "{name} was not migrated: its QEMU on {host} ended before it was started there; it is here again"
    )]
    GivenBack { name: MachineName, host: HostName },
    #[error("{name} is between two hosts: {known}")]
    Unresolved { name: MachineName, known: String },
    #[error("cannot decide the handover")]
    Resolve { source: Cause },
    #[error("{name} was migrated to {target}, which failed or could not fetch its pages; it runs on {third}")]
    RunsOnBackupHost { name: MachineName, target: HostName, third: HostName },
    #[error("some disk pages of {name} are still on {from}")]
    MissingPages { name: MachineName, from: HostName },
    #[error("cannot reach host {host}")]
    Unreachable { host: HostName, source: Cause },
    #[error("cannot reach host {host} over ssh")]
    Ssh { host: HostName, source: Box<SshError> },
    #[error("cannot fetch from or send to host {host}")]
    Transfer { host: HostName, source: Cause },
    #[error("cannot read from or write to {pool}")]
    Pool { pool: String, source: Cause },
    #[error("cannot read from or write to {place}")]
    Bucket { place: String, source: Cause },
    #[error("the hash cache failed")]
    HashCache { source: Cause },
    #[error("{name} was handed off to {to}, which may resume it")]
    HandedOff { name: MachineName, to: HostName },
    #[error("host {host} is not trusted here")]
    Untrusted { host: HostName },
    #[error("host {host} and this one do not trust each other")]
    NotTrustedThere { host: HostName, source: Cause },
    #[error("{host} has an earlier version of Whimbrel, which cannot run machines with {what}")]
    OlderHost { host: HostName, what: &'static str },
    #[error("{name} has no port for qemu-ga")]
    NoAgentPort { name: MachineName },
    #[error("the guest of {name} did not do it")]
    Agent { name: MachineName, source: QemuGaError },
    #[error("the program still runs in {name} after {seconds} s, as process {pid}")]
    StillExecutes { name: MachineName, pid: i64, seconds: u64 },
    #[error("the guest did not shut down within {seconds} s")]
    StillRunning { seconds: u64 },
    #[error("the identity of this host failed")]
    Identity { source: Cause },
    #[error("this host is being evacuated already")]
    Evacuating,
    #[error("{host} was not evacuated")]
    NotEvacuated { host: HostName, source: Box<ApiError> },
    #[error("lost contact with {host}; the evacuation may still be running there")]
    LostContact { host: HostName, source: Cause },
    #[error("cancelled: {left}")]
    Cancelled { left: String },
    #[error("cannot start a thread")]
    Thread { source: io::Error },
    #[error("a bug in the daemon stopped the operation")]
    Panicked,
}

impl From<RunningError> for DaemonError {
    fn from(error: RunningError) -> Self {
        match error {
            RunningError::Io { action, path, source } => Self::Io { action, path, source },
            RunningError::Qemu { action, source } => Self::Qemu { action, source },
            RunningError::Memory { source } => Self::Memory { source },
            RunningError::Disk { disk, source } => Self::Disk { disk, source },
            RunningError::Port { port, source } => Self::Port { port, source },
            RunningError::Store { action, source } => crate::core::refs::store_error(action)(source),
            RunningError::Capture { source } => Self::Capture { source },
            RunningError::StillRunning { seconds } => Self::StillRunning { seconds },
        }
    }
}

impl From<ScheduleError> for DaemonError {
    fn from(error: ScheduleError) -> Self {
        match error {
            ScheduleError::Unknown { name } => Self::NotFound { what: "schedule", name: name.to_string() },
            ScheduleError::Invalid { reason } => Self::Invalid { reason },
            ScheduleError::Io { action, path, source } => Self::Io { action, path, source },
            ScheduleError::Host(failure) => match failure.downcast::<Self>() {
                Ok(own) => *own,
                Err(other) => Self::invalid(error_chain(&*other)),
            },
        }
    }
}

impl DaemonError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::Invalid { reason: reason.into() }
    }

    pub(crate) fn machine_not_found(name: &MachineName) -> Self {
        Self::NotFound { what: "machine", name: name.to_string() }
    }

    /// The stable code for callers that branch on it.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::NotFound { .. } => ErrorCode::NotFound,
            Self::NameTaken { .. } => ErrorCode::NameTaken,
            Self::UnreadableRecord { .. } | Self::UnreadableFile { .. } | Self::CommitMark { .. } => {
                ErrorCode::Damaged
            }
            Self::Busy { .. }
            | Self::State { .. }
            | Self::AlreadyServed { .. }
            | Self::StillExecutes { .. }
            | Self::Agent { source: QemuGaError::Busy, .. }
            | Self::StillRunning { .. } => ErrorCode::Busy,
            Self::Invalid { .. } | Self::NotItsPast { .. } => ErrorCode::Invalid,
            Self::Agent { source: QemuGaError::Silent { .. } | QemuGaError::Port(_), .. } => {
                ErrorCode::Unreachable
            }
            Self::Agent { source: QemuGaError::Refused { .. }, .. } => ErrorCode::Invalid,
            Self::Agent { .. } => ErrorCode::Internal,
            Self::NoAgentPort { .. } => ErrorCode::Unsupported,
            Self::NotTmpfs { .. } | Self::Network { .. } | Self::OlderHost { .. } => ErrorCode::Unsupported,
            Self::Certificate { source } => chain_code(source),
            Self::NotPrivate { source: PrivateDirError::Io { source, .. } } => io_code(source),
            Self::NotPrivate { .. } => ErrorCode::Unsupported,
            Self::NoRoom { .. } => ErrorCode::NoSpace,
            Self::Qemu { source, .. } if is_unfit(&**source) => ErrorCode::Invalid,
            Self::Qemu { .. } | Self::Memory { .. } | Self::Pass { .. } => ErrorCode::QemuFailed,
            Self::Image { source: ImageError::Read(source), .. } => io_code(source),
            Self::Image { source: ImageError::Start(_) | ImageError::TimedOut { .. }, .. } => {
                ErrorCode::QemuFailed
            }
            Self::ImageSource { source, .. } => source_code(source),
            Self::Container { source, .. } => container_code(source),
            Self::Image { .. } | Self::NotRaw { .. } => ErrorCode::Invalid,
            Self::Store { code, .. } => *code,
            Self::MasterKey { .. } => ErrorCode::Invalid,
            Self::Io { source, .. } => io_code(source),
            Self::Disk { source, .. } | Self::Port { source, .. } | Self::Identity { source } => {
                chain_code(&**source)
            }
            Self::Capture { source: CaptureError::Cancelled } | Self::Cancelled { .. } => {
                ErrorCode::Cancelled
            }
            Self::Capture { source } => chain_code(source),
            Self::Migrate { source, .. } => migrate_code(source),
            Self::Transfer { .. } => ErrorCode::Unreachable,
            Self::Pool { source, .. } => pool_code(&**source),
            Self::Bucket { .. } => ErrorCode::Unreachable,
            Self::HashCache { source } => chain_code(&**source),
            Self::HandedOff { .. } | Self::MissingPages { .. } | Self::Evacuating => ErrorCode::Busy,
            Self::NotEvacuated { source, .. } => source.code,
            Self::HalfRenamed { source, .. } => source.code(),
            Self::Unconfirmed { .. }
            | Self::RunsOnBackupHost { .. }
            | Self::GivenBack { .. }
            | Self::Unreachable { .. }
            | Self::LostContact { .. }
            | Self::Ssh { .. } => ErrorCode::Unreachable,
            Self::Untrusted { .. } | Self::NotTrustedThere { .. } => ErrorCode::Untrusted,
            Self::Protect { source } => protect_code(&**source),
            Self::NoWitness { .. }
            | Self::PrimaryAnswers { .. }
            | Self::TakenOver { .. }
            | Self::Protected { .. }
            | Self::Unresolved { .. }
            | Self::Resolve { .. } => ErrorCode::Busy,
            Self::Thread { .. } | Self::Panicked => ErrorCode::Internal,
        }
    }

    /// What to do about a file or directory of the user.
    fn file_hint(&self) -> Option<String> {
        Some(match self {
            Self::NotTmpfs { .. } => {
                "name a directory on a tmpfs with --run-dir, like /dev/shm/whimbrel".into()
            }
            Self::NotPrivate { source: PrivateDirError::Foreign { .. } | PrivateDirError::Shared { .. } } => {
                "only this user and root may be able to change any part of the path: mend its owner and mode after \
                 looking at what is there, or name other directories with --data and --run-dir"
                    .into()
            }
            Self::NotRaw { path, .. } => format!(
                "`whimbrel import {} NAME` makes a capsule of it, which `whimbrel resume NAME` boots",
                path.display()
            ),
            Self::NotItsPast { name, capsule } => format!(
                "`whimbrel log {name}` lists its states; `whimbrel resume {} --name NAME` runs this one beside it",
                capsule.short()
            ),
            Self::Image { path, source: ImageError::Unsupported { format: format @ ("gzip" | "xz" | "zstd" | "bzip2") } } => {
                format!("unpack it first: `{format} -d {}`", path.display())
            }
            Self::Container { source: ContainerError::NoKernel, .. } => {
                "install a kernel for machines, such as Debian's linux-image-cloud-amd64, or name one in the daemon's settings: `kernel` of [containers]".to_owned()
            }
            Self::Container { source: ContainerError::NotStatic { .. }, .. } => {
                "install busybox-static".to_owned()
            }
            Self::Container { source: ContainerError::Read { path, .. }, .. } if path.ends_with("busybox") => {
                "install busybox-static".to_owned()
            }
            Self::Container { path, source: ContainerError::Several { .. } } => format!(
                "copy the one that you want: `skopeo copy oci-archive:{}:NAME oci-archive:ONE.tar:NAME`",
                path.display()
            ),
            Self::Image { path, source: ImageError::Unsupported { format: "tar" } } => format!(
                "a container image has `oci-layout` or `manifest.json`, an appliance an OVF file first: `tar -tf {}` lists it",
                path.display()
            ),
            Self::Image { path, source: ImageError::NeedsFile { .. } | ImageError::Unsupported { .. } } => format!(
                "make one file of it where you trust all of them: `qemu-img convert -O qcow2 {} NEW.qcow2`",
                path.display()
            ),
            _ => return None,
        })
    }

    /// What to do about a damaged file of the daemon.
    fn damage_hint(&self) -> Option<String> {
        Some(match self {
            Self::UnreadableRecord { name, .. } => format!(
                "`whimbrel doctor --data` tells what is damaged: restore it and restart the daemon, or delete what is left of the machine with `whimbrel delete --unreadable {name}`"
            ),
            Self::UnreadableFile { .. } | Self::CommitMark { .. } => {
                "`whimbrel doctor --data` tells what it is and what to do; nothing of it was changed".into()
            }
            _ => return None,
        })
    }

    /// What to do about a guest in which a program or qemu-ga does not do what it should.
    fn guest_hint(&self) -> Option<String> {
        Some(match self {
            Self::NoAgentPort { name } => format!(
                "it was made before there was one: `whimbrel stop {name}`, then `whimbrel start {name}` gives it one"
            ),
            Self::Agent { name, source: QemuGaError::Silent { .. } } => no_agent(name),
            Self::Capture { source } if is_silent_agent(source) => no_agent("NAME"),
            Self::StillExecutes { name, pid, .. } => {
                format!("wait longer with --timeout, or end it: `whimbrel exec {name} -- kill {pid}`")
            }
            _ => return None,
        })
    }

    /// The hint of a family of errors, if this is one of a family.
    fn own_hint(&self) -> Option<String> {
        let families = [Self::file_hint, Self::damage_hint, Self::guest_hint, Self::protection_hint];
        families.into_iter().find_map(|hint| hint(self))
    }

    fn protection_hint(&self) -> Option<String> {
        Some(match self {
            Self::Protect { source }
                if let Some(PrimaryError::Incompatible(misfit)) = source.downcast_ref() =>
            {
                misfit.hint()
            }
            Self::NoWitness { name } | Self::PrimaryAnswers { name, .. } => format!(
                "make sure that its primary is off or disconnected, then `whimbrel failover {name} --primary-is-dead`; `--force` overrides a host that answers"
            ),
            Self::TakenOver { name, host } => {
                format!("see `whimbrel ps` on {host}; `whimbrel delete {name}` deletes the copy here")
            }
            Self::Protected { name, .. } => {
                format!(
                    "`whimbrel failover {name}` moves it to its standby; for anything else `whimbrel unprotect {name}` first"
                )
            }
            Self::RunsOnBackupHost { name, third, .. } => {
                format!("{name} has left this host: see `whimbrel ps` on {third}")
            }
            _ => return None,
        })
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            _ if let Some(hint) = self.own_hint() => hint,
            Self::NotFound { what: "machine", .. } => "`whimbrel ps` lists the machines of this host".into(),
            Self::NotFound { what: "capsule", .. } => "`whimbrel ls` lists the capsules of this host".into(),
            Self::NotFound { what: "host", .. } => "`whimbrel trust ls` lists the hosts known here".into(),
            Self::NotFound { what: "network", .. } => "`whimbrel network ls` lists the networks of this host".into(),
            Self::NotFound { what: "image", .. } => {
                "`whimbrel image ls --available` lists the images that can be pulled".into()
            }
            Self::ImageSource { source, .. } if source.is_distrust() => {
                "nothing was stored: try again later, and tell who runs the source if it stays so".into()
            }
            Self::NameTaken { name } => {
                format!("choose another name, or end the machine with `whimbrel stop {name}`")
            }
            Self::Busy { name, .. } => format!("`whimbrel ps` shows when {name} is free again"),
            Self::Unresolved { name, .. } => format!(
                "make sure that the other host does not run it, then `whimbrel resolve {name} --run-here`; or `--discard` this copy"
            ),
            Self::Migrate { source, .. } if matches!(**source, MigrateError::OverBudget { .. }) => {
                "allow more with --downtime-max or --time-max".into()
            }
            Self::State { name, state, needed } => return state_hint(name, state, needed),
            Self::NoRoom { .. } => {
                "`whimbrel ps` lists the machines here: suspend, stop or migrate one, or give the new one less memory".into()
            }
            Self::Untrusted { host } | Self::Unreachable { host, .. } => {
                format!("`whimbrel trust add {host} KEY ADDRESS`; `whimbrel key` prints the key on {host}")
            }
            Self::Pool { .. } if self.code() == ErrorCode::Unreachable => {
                "the pool must know this host: `whimbrel key` prints the key, `whimbrel pool admit` on its manager admits it".into()
            }
            Self::Bucket { .. } => {
                "the daemon's environment has the credentials: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, and `AWS_ENDPOINT` if it is not Amazon's".into()
            }
            Self::HalfRenamed { from, .. } => {
                format!("mend the cause and restart the daemon, which does the rest; until then nothing can be called {from}")
            }
            Self::Ssh { source, .. } => source.hint(),
            Self::NotEvacuated { source, .. } => return source.hint.clone(),
            Self::LostContact { host, .. } => {
                format!("run `whimbrel evacuate {host}` again to continue")
            }
            Self::NotTrustedThere { host, .. } => {
                format!(
                    "add this host on {host} too: `whimbrel trust add`, with the key that `whimbrel key` prints here"
                )
            }
            Self::HandedOff { name, to } => format!(
                "resume it there, or bring it back with `whimbrel resume {to}:{name}`; if {to} is lost for good, `--reclaim`"
            ),
            Self::Migrate { source, .. } if let MigrateError::Incompatible(misfit) = &**source => misfit.hint(),
            Self::MissingPages { name, .. } => format!("`whimbrel start {name}` starts it and fetches the rest"),
            Self::Thread { .. } => "the system or the daemon's limits allow no more threads or memory; try again with fewer operations at once".into(),
            Self::OlderHost { host, .. } => format!("update Whimbrel on {host}; until then machines can only move from there to here"),
            Self::StillRunning { .. } => "`whimbrel stop --kill` stops it at once".into(),
            Self::Unconfirmed { host, .. } => {
                format!("the daemon keeps asking; see `whimbrel ps` on {host}")
            }
            _ if is_shortage(self) => {
                "the daemon lacks memory or open files: `LimitNOFILE=` of its service and `ulimit -n` limit these".into()
            }
            _ => return self.storage_hint().map(str::to_owned),
        })
    }

    fn storage_hint(&self) -> Option<&'static str> {
        match (self, self.code()) {
            (Self::Store { source, .. }, _) if let Some(hint) = crate::core::refs::key_hint(&**source) => {
                Some(hint)
            }
            (Self::Store { source, .. }, _) if is_latched(&**source) => Some(
                "the disk of the store failed (see the daemon's log): repair it, then `whimbrel gc` uses the store again",
            ),
            (_, ErrorCode::NoSpace) => Some("free space, or run `whimbrel gc`"),
            (_, ErrorCode::Damaged) => Some(
                "`whimbrel verify` lists all damage, and `whimbrel repair` heals it from other hosts or a pool",
            ),
            _ => None,
        }
    }

    /// State that a cancelled operation left behind.
    pub(crate) fn state_left(&self) -> String {
        match self {
            Self::Cancelled { left } => left.clone(),
            _ => "nothing was changed".to_owned(),
        }
    }

    pub(crate) fn to_api(&self) -> ApiError {
        let mut api = ApiError::from_error(self.code(), self);
        if let Self::NotEvacuated { source, .. } = self {
            api.causes.extend(source.causes.iter().cloned());
        }
        api.causes.dedup();
        api.hint = self.hint();
        api
    }
}

/// Way out of a state in which a machine cannot do what was asked.
fn state_hint(name: &MachineName, state: &str, needed: &str) -> Option<String> {
    let lost = format!("if that host is lost for good, `whimbrel resolve {name}`");
    Some(match (state, needed) {
        ("stopped" | "crashed", "running") => format!("`whimbrel start {name}` runs it again"),
        ("running", "stopped or suspended") => format!(
            "`whimbrel suspend {name}` saves it as it is, `whimbrel resume` continues it under its new name; or `whimbrel stop {name}`"
        ),
        ("suspended", _) => format!("`whimbrel resume {name}` continues it"),
        ("handed over", _) => format!("it belongs to the target host: see `whimbrel ps` there; {lost}"),
        ("arriving", _) => format!("it runs as soon as the source commits the handover; {lost}"),
        ("running", _) => format!("`whimbrel stop {name}` stops it"),
        (_, "protected") => format!("`whimbrel protect {name} HOST` creates a standby"),
        _ => return None,
    })
}

/// What to do about a guest in which nothing answers.
fn no_agent(name: impl std::fmt::Display) -> String {
    format!(
        "the guest needs the program qemu-ga, in most distributions the package qemu-guest-agent; `whimbrel console {name}` shows whether the guest is up"
    )
}

/// Whether a capture failed because the guest has no qemu-ga.
fn is_silent_agent(error: &(dyn Error + 'static)) -> bool {
    causes(error)
        .filter_map(|error| error.downcast_ref::<QemuGaError>())
        .any(|error| matches!(error, QemuGaError::Silent { .. }))
}

/// Whether a store refuses to write because an earlier write failed.
fn is_latched(error: &(dyn Error + 'static)) -> bool {
    causes(error)
        .filter_map(|error| error.downcast_ref::<StoreError>())
        .any(|error| matches!(error, StoreError::Latched { .. }))
}

fn io_code(error: &io::Error) -> ErrorCode {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            ErrorCode::NoSpace
        }
        io::ErrorKind::NotFound => ErrorCode::NotFound,
        io::ErrorKind::PermissionDenied => ErrorCode::Unsupported,
        _ => ErrorCode::Internal,
    }
}

pub(crate) fn chain_code(error: &(dyn Error + 'static)) -> ErrorCode {
    causes(error).find_map(|error| error.downcast_ref::<io::Error>()).map_or(ErrorCode::Internal, io_code)
}

/// Whether QEMU was not started, because what was asked for cannot be a machine.
fn is_unfit(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|error| matches!(error.downcast_ref(), Some(LaunchError::Spec(_))))
}

fn container_code(error: &ContainerError) -> ErrorCode {
    match error {
        ContainerError::Read { source, .. } => io_code(source),
        ContainerError::NoKernel | ContainerError::NotStatic { .. } => ErrorCode::Unsupported,
        _ => ErrorCode::Invalid,
    }
}

fn source_code(error: &FetchError) -> ErrorCode {
    match error {
        _ if error.is_absent() => ErrorCode::NotFound,
        _ if error.is_distrust() => ErrorCode::Untrusted,
        FetchError::Address { .. } | FetchError::TooLong { .. } | FetchError::List { .. } => {
            ErrorCode::Invalid
        }
        FetchError::File { source, .. } => io_code(source),
        _ => ErrorCode::Unreachable,
    }
}

fn pool_code(error: &(dyn Error + 'static)) -> ErrorCode {
    let mut chain = causes(error);
    match chain.find_map(|error| error.downcast_ref::<PoolError>()) {
        Some(error) if error.is_full() => ErrorCode::NoSpace,
        Some(PoolError::WrongSecret { .. }) => ErrorCode::Untrusted,
        Some(PoolError::Unreadable { .. }) => ErrorCode::Damaged,
        Some(_) => ErrorCode::Unreachable,
        None => ErrorCode::Invalid,
    }
}

fn protect_code(error: &(dyn Error + 'static)) -> ErrorCode {
    match error.downcast_ref::<PrimaryError>() {
        Some(PrimaryError::Start(LinkError::Refused { .. })) => ErrorCode::Busy,
        Some(PrimaryError::Incompatible(Incompatibility::Name { .. })) => ErrorCode::NameTaken,
        Some(PrimaryError::Incompatible(Incompatibility::Memory { .. } | Incompatibility::Disk { .. })) => {
            ErrorCode::NoSpace
        }
        Some(PrimaryError::Incompatible(_)) => ErrorCode::Unsupported,
        Some(PrimaryError::Link(_) | PrimaryError::Start(_) | PrimaryError::Seeding(_)) => {
            ErrorCode::Unreachable
        }
        _ => chain_code(error),
    }
}

fn migrate_code(error: &MigrateError) -> ErrorCode {
    match error {
        MigrateError::Capture(CaptureError::Cancelled) => ErrorCode::Cancelled,
        MigrateError::Offer(LinkError::Refused { .. }) => ErrorCode::Busy,
        MigrateError::Incompatible(Incompatibility::Name { .. }) => ErrorCode::NameTaken,
        MigrateError::Incompatible(Incompatibility::Memory { .. } | Incompatibility::Disk { .. }) => {
            ErrorCode::NoSpace
        }
        MigrateError::Incompatible(_) => ErrorCode::Unsupported,
        MigrateError::Load(LinkError::Refused { .. }) => ErrorCode::QemuFailed,
        MigrateError::Record(source) => chain_code(&**source),
        MigrateError::BootFile { .. } | MigrateError::Answer(_) => ErrorCode::Internal,
        _ => ErrorCode::Unreachable,
    }
}
