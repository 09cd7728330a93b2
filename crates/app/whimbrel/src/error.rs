//! Errors of a command, and the exit code of each.

use crate::table::count;
use std::io;
use std::{error::Error, path::PathBuf};
use whimbrel_api::{ApiError, Damage, ErrorCode, OperationId};
use whimbrel_client::ClientError;
use whimbrel_pool::{client::PoolError, protocol::code};

#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// Failed call, or refusal of the daemon.
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Operation(ApiError),
    #[error("cancelled: {left}")]
    Cancelled {
        /// State that the cancelled operation left.
        left: String,
    },
    /// Ctrl-C, twice or before the daemon had answered.
    #[error("interrupted; the daemon may continue the operation")]
    Interrupted { operation: Option<OperationId> },
    /// Arguments that contradict each other or the settings file.
    #[error("{problem}")]
    Usage {
        problem: String,
        /// Advice about correct arguments.
        hint: String,
    },
    /// Settings file that is missing or wrong.
    #[error("cannot use the settings in {}", path.display())]
    Settings { path: PathBuf, source: Box<dyn Error + Send + Sync> },
    /// File of the user that cannot be read.
    #[error("cannot read {}", path.display())]
    File { path: PathBuf, source: io::Error },
    /// Input or output of this process that failed.
    #[error("cannot {action}")]
    Io {
        /// Action that failed, like `write the result`.
        action: &'static str,
        source: io::Error,
    },
    /// Damage found by `verify`, which has printed it as its result.
    #[error("the store is damaged in {}", count(damaged.len() as u64, "place"))]
    Damaged { damaged: Vec<Damage> },
    /// Repair that did not get everything, which it has printed as its result.
    #[error("{} still missing", count(*missing, "object"))]
    Missing { missing: u64 },
    /// Run of a schedule that failed, which has printed why.
    #[error("the run of {name} failed")]
    ScheduleFailed { name: whimbrel_core::MachineName },
    /// Evacuation that left machines, which it has printed as its result.
    #[error("{host} is not empty{}", left(*machines))]
    NotEmpty {
        host: String,
        /// Number of machines that did not move.
        machines: usize,
    },
    /// Program in a guest that ended with another exit code than 0, and has said why itself.
    #[error("the program in the guest ended with {code}")]
    GuestProgram { code: u8 },
    /// File that is not a usable dirty trace.
    #[error("cannot use the trace in {}", path.display())]
    Trace { path: PathBuf, source: Box<dyn Error + Send + Sync> },
    /// Examination of a data directory, which has printed them as its result.
    #[error("{} of the data directory cannot be used", count(*files, "file"))]
    DamagedFiles { files: u64 },
    /// Host whose own key is damaged.
    #[error("the key of {name} cannot be read there")]
    NoKey { name: whimbrel_core::HostName },
    /// Step that another program did not do, or did not say the end of.
    #[error("cannot {step}: {said}")]
    Step { step: String, said: String },
    #[error("{failed} of {checks} checks failed")]
    Unhealthy { failed: usize, checks: usize },
    /// Session that failed, on the client or on the server.
    #[error("the session failed")]
    Session(#[source] Box<dyn Error + Send + Sync>),
    /// Server that cannot be reached or refuses the session.
    #[error("cannot start the session")]
    NoSession(#[source] Box<dyn Error + Send + Sync>),
    /// Written data that the server does not have.
    #[error("some data was not written back: {left}")]
    NotWrittenBack {
        /// Amount of data, and the reason.
        left: String,
    },
    #[error("no session has the name {name:?}")]
    UnknownSession { name: String },
    #[error("the request to the pool failed")]
    Pool(#[source] PoolError),
    /// Member of a pool that could not start, or that had to stop.
    #[error("the member of the pool failed")]
    PoolMember(#[source] Box<dyn Error + Send + Sync>),
    /// Daemon that could not start, or that had to stop.
    #[error("the daemon ended")]
    Daemon(#[source] Box<dyn Error + Send + Sync>),
    /// Layer of a container image that cannot be unpacked.
    #[error(transparent)]
    Layer(#[from] whimbrel_container::ContainerError),
}

/// Exit codes, which are part of the interface and documented in `whimbrel --help`.
pub(crate) mod exit {
    pub(crate) const FAILED: u8 = 1;
    pub(crate) const USAGE: u8 = 2;
    pub(crate) const NOT_FOUND: u8 = 3;
    pub(crate) const CONFLICT: u8 = 4;
    pub(crate) const UNREACHABLE: u8 = 5;
    pub(crate) const DAMAGED: u8 = 6;
    pub(crate) const INTERRUPTED: u8 = 130;
}

fn left(machines: usize) -> String {
    if machines == 0 {
        String::new()
    } else {
        format!(": {} did not move", count(machines as u64, "machine"))
    }
}

fn exit_of(code: ErrorCode) -> u8 {
    match code {
        ErrorCode::Invalid => exit::USAGE,
        ErrorCode::NotFound => exit::NOT_FOUND,
        ErrorCode::NameTaken | ErrorCode::Busy => exit::CONFLICT,
        ErrorCode::Unreachable
        | ErrorCode::Untrusted
        | ErrorCode::Unauthenticated
        | ErrorCode::Forbidden
        | ErrorCode::RateLimited => exit::UNREACHABLE,
        ErrorCode::Damaged => exit::DAMAGED,
        ErrorCode::Cancelled => exit::INTERRUPTED,
        ErrorCode::NoSpace | ErrorCode::QemuFailed | ErrorCode::Unsupported | ErrorCode::Internal => {
            exit::FAILED
        }
    }
}

fn exit_of_pool(error: &PoolError) -> u8 {
    match (error, error.code()) {
        (PoolError::ManagerUnreachable { .. }, _) => exit::UNREACHABLE,
        (_, Some(code::NOT_FOUND)) => exit::NOT_FOUND,
        (_, Some(code::EXISTS | code::NOT_EMPTY | code::PINNED | code::INCOMPLETE)) => exit::CONFLICT,
        (_, Some(code::INVALID)) => exit::USAGE,
        (PoolError::Unreadable { .. }, _) | (_, Some(code::DAMAGED)) => exit::DAMAGED,
        _ => exit::FAILED,
    }
}

impl CliError {
    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Client(ClientError::Api(error)) | Self::Operation(error) => exit_of(error.code),
            Self::Client(ClientError::Protocol { .. } | ClientError::TooLarge { .. }) => exit::FAILED,
            Self::Client(_) => exit::UNREACHABLE,
            Self::Cancelled { .. } | Self::Interrupted { .. } => exit::INTERRUPTED,
            Self::Usage { .. } => exit::USAGE,
            Self::GuestProgram { code } => *code,
            Self::Settings { .. } => exit::USAGE,
            Self::Damaged { .. } | Self::DamagedFiles { .. } | Self::Missing { .. } => exit::DAMAGED,
            Self::Trace { .. } => exit::USAGE,
            Self::Io { .. }
            | Self::File { .. }
            | Self::NoKey { .. }
            | Self::Unhealthy { .. }
            | Self::Step { .. }
            | Self::NotEmpty { .. }
            | Self::ScheduleFailed { .. } => exit::FAILED,
            Self::NoSession(_) => exit::UNREACHABLE,
            Self::UnknownSession { .. } => exit::NOT_FOUND,
            Self::Session(_) | Self::NotWrittenBack { .. } => exit::FAILED,
            Self::Pool(error) => exit_of_pool(error),
            Self::PoolMember(_) => exit::FAILED,
            Self::Daemon(_) | Self::Layer(_) => exit::FAILED,
        }
    }

    /// Whether all was said already.
    pub(crate) fn is_told(&self) -> bool {
        matches!(self, Self::GuestProgram { .. })
    }

    /// Whether the reader of stdout has closed it, which is not an error.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Failure as `--json` prints it. A refusal of the daemon is printed as the daemon sent it.
    pub(crate) fn to_api(&self) -> ApiError {
        match self {
            Self::Client(ClientError::Api(error)) | Self::Operation(error) => error.clone(),
            other => ApiError { hint: self.hint(), ..ApiError::from_error(self.code(), other) },
        }
    }

    fn code(&self) -> ErrorCode {
        match self.exit_code() {
            exit::USAGE => ErrorCode::Invalid,
            exit::NOT_FOUND => ErrorCode::NotFound,
            exit::UNREACHABLE => ErrorCode::Unreachable,
            exit::DAMAGED => ErrorCode::Damaged,
            exit::INTERRUPTED => ErrorCode::Cancelled,
            _ => ErrorCode::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Client(error) => error.hint(),
            Self::Usage { hint, .. } => Some(hint.clone()),
            Self::Interrupted { operation: Some(_) } => {
                Some("`whimbrel ps` shows the machine".to_owned())
            }
            Self::Damaged { .. } => {
                Some("`whimbrel repair` fetches good copies from other hosts; capsules without damage can still be exported".to_owned())
            }
            Self::Missing { .. } => {
                Some("what was healed stays healed: run `whimbrel repair` again when a host or pool with a copy answers".to_owned())
            }
            Self::NotEmpty { .. } => {
                Some("machines that have moved stay there; run `whimbrel evacuate` again to continue".to_owned())
            }
            Self::Pool(PoolError::ManagerUnreachable { .. }) => {
                Some("check that this host is admitted: `whimbrel pool key` here, `whimbrel pool admit` on the manager".to_owned())
            }
            Self::NoKey { .. } => {
                Some("`whimbrel doctor --data` tells what is damaged and what to do".to_owned())
            }
            Self::Unhealthy { .. } => {
                Some("apply the fixes, then run `whimbrel doctor` again".to_owned())
            }
            Self::NoSession(_) => Some(
                "try `ssh HOST whimbrel serve /PATH --stdio`; over TLS, each side needs the key of the other".to_owned(),
            ),
            Self::NotWrittenBack { .. } => {
                Some("the data stays in the cache: mount the same target again when the server is reachable".to_owned())
            }
            Self::UnknownSession { .. } => Some("`whimbrel session ls` lists the sessions".to_owned()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_the_daemon_has_the_documented_exit_code() {
        let expected = [3, 4, 2, 4, 5, 5, 5, 5, 5, 6, 1, 1, 1, 130, 1];
        for (code, exit) in ErrorCode::ALL.into_iter().zip(expected) {
            assert_eq!(CliError::Operation(ApiError::new(code, "m")).exit_code(), exit, "{code}");
            assert_eq!(CliError::Client(ApiError::new(code, "m").into()).exit_code(), exit, "{code}");
        }
    }

    #[test]
    fn a_daemon_that_is_not_there_is_told_with_its_cause_and_the_next_command() {
        let source = io::Error::from(io::ErrorKind::NotFound);
        let error = CliError::Client(ClientError::NotRunning { socket: "/s".into(), source }).to_api();
        assert_eq!((error.code, error.causes.len()), (ErrorCode::Unreachable, 1));
        assert!(error.hint.unwrap().contains("whimbrel host"));
    }

    #[test]
    fn only_a_broken_pipe_is_quiet() {
        assert!(CliError::io("write the result")(io::ErrorKind::BrokenPipe.into()).is_broken_pipe());
        assert!(!CliError::io("write the result")(io::ErrorKind::StorageFull.into()).is_broken_pipe());
    }
}
