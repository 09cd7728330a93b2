//! Every way a command can fail, and the exit code that says so.

use crate::table::count;
use std::io;
use std::{error::Error, path::PathBuf};
use whimbrel_api::{ApiError, Damage, ErrorCode, OperationId};
use whimbrel_client::ClientError;
use whimbrel_pool::{client::PoolError, protocol::code};

/// Why a command did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// The call failed, or the daemon refused.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// An operation began and could not be completed.
    #[error(transparent)]
    Operation(ApiError),
    /// An operation was cancelled.
    #[error("cancelled: {left}")]
    Cancelled {
        /// What the daemon says is left.
        left: String,
    },
    /// The user pressed Ctrl-C twice, or before the daemon had answered.
    #[error("interrupted; the daemon may still be working on it")]
    Interrupted {
        /// The operation that may still go on.
        operation: Option<OperationId>,
    },
    /// The arguments contradict each other or the settings file.
    #[error("{problem}")]
    Usage {
        /// What is wrong.
        problem: String,
        /// What to write instead.
        hint: String,
    },
    /// The settings file cannot be used.
    #[error("cannot use the settings in {}", path.display())]
    Settings {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// Reading the terminal or writing a result failed.
    #[error("cannot {action}")]
    Io {
        /// `write the result`, `read the terminal`, …
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The store does not verify. What is damaged has been printed as the result.
    #[error("the store is damaged in {}", count(damaged.len() as u64, "place"))]
    Damaged {
        /// Where.
        damaged: Vec<Damage>,
    },
    /// Machines still run on a host that was to be emptied. Which ones has been printed as the result.
    #[error("{host} is not empty{}", left(*machines))]
    NotEmpty {
        /// The host.
        host: String,
        /// How many did not move.
        machines: usize,
    },
    /// The file is no trace that can be used.
    #[error("cannot use the trace in {}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// `doctor` found something that keeps Whimbrel from working.
    #[error("{failed} of {checks} checks failed")]
    Unhealthy {
        /// How many failed.
        failed: usize,
        /// How many were made.
        checks: usize,
    },
    /// A session could not be begun, served or asked.
    #[error("the session failed")]
    Session(#[source] Box<dyn Error + Send + Sync>),
    /// No server of sessions, or it lets nobody in.
    #[error("the session cannot be begun")]
    NoSession(#[source] Box<dyn Error + Send + Sync>),
    /// What was written is not all on the server.
    #[error("not everything was written back: {left}")]
    NotWrittenBack {
        /// What is left where.
        left: String,
    },
    /// No mount of that name.
    #[error("no session is called {name:?}")]
    UnknownSession {
        /// The name asked for.
        name: String,
    },
    /// A pool did not do what was asked.
    #[error("the pool did not do it")]
    Pool(#[source] PoolError),
    /// A member of a pool could not start, or had to stop.
    #[error("the member of the pool failed")]
    PoolMember(#[source] Box<dyn Error + Send + Sync>),
    /// The daemon could not start or had to stop.
    #[error("the host daemon ended")]
    Daemon(#[source] Box<dyn Error + Send + Sync>),
}

/// Exit codes. They are part of the interface and stand in `whimbrel --help`.
pub(crate) mod exit {
    pub(crate) const FAILED: u8 = 1;
    pub(crate) const USAGE: u8 = 2;
    pub(crate) const NOT_FOUND: u8 = 3;
    pub(crate) const CONFLICT: u8 = 4;
    pub(crate) const UNREACHABLE: u8 = 5;
    pub(crate) const DAMAGED: u8 = 6;
    pub(crate) const INTERRUPTED: u8 = 130;
}

/// How many machines are left, if it was they who did not move.
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
        ErrorCode::Unreachable | ErrorCode::Untrusted => exit::UNREACHABLE,
        ErrorCode::Damaged => exit::DAMAGED,
        ErrorCode::Cancelled => exit::INTERRUPTED,
        ErrorCode::NoSpace | ErrorCode::QemuFailed | ErrorCode::Unsupported | ErrorCode::Internal => {
            exit::FAILED
        }
    }
}

fn exit_of_pool(error: &PoolError) -> u8 {
    match (error, error.code()) {
        (PoolError::Away { .. }, _) => exit::UNREACHABLE,
        (_, Some(code::NOT_FOUND)) => exit::NOT_FOUND,
        (_, Some(code::EXISTS | code::NOT_EMPTY | code::PINNED)) => exit::CONFLICT,
        (_, Some(code::INVALID)) => exit::USAGE,
        (PoolError::Unreadable { .. }, _) | (_, Some(code::DAMAGED)) => exit::DAMAGED,
        _ => exit::FAILED,
    }
}

impl CliError {
    /// Writing to stdout or the terminal failed.
    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }

    /// The exit code of the process.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Client(ClientError::Api(error)) | Self::Operation(error) => exit_of(error.code),
            Self::Client(ClientError::Protocol { .. } | ClientError::TooLarge { .. }) => exit::FAILED,
            Self::Client(_) => exit::UNREACHABLE,
            Self::Cancelled { .. } | Self::Interrupted { .. } => exit::INTERRUPTED,
            Self::Usage { .. } => exit::USAGE,
            Self::Settings { .. } => exit::USAGE,
            Self::Damaged { .. } => exit::DAMAGED,
            Self::Trace { .. } => exit::USAGE,
            Self::Io { .. } | Self::Unhealthy { .. } | Self::NotEmpty { .. } => exit::FAILED,
            Self::NoSession(_) => exit::UNREACHABLE,
            Self::UnknownSession { .. } => exit::NOT_FOUND,
            Self::Session(_) | Self::NotWrittenBack { .. } => exit::FAILED,
            Self::Pool(error) => exit_of_pool(error),
            Self::PoolMember(_) => exit::FAILED,
            Self::Daemon(_) => exit::FAILED,
        }
    }

    /// Whether whoever read stdout has gone away, which is their right and no error.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The failure in the shape that `--json` prints: the daemon's own words if it was the daemon's refusal.
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
                Some("see what it does with `whimbrel ps`".to_owned())
            }
            Self::Damaged { .. } => {
                Some("capsules that verify can still be exported: `whimbrel export CAPSULE FILE`".to_owned())
            }
            Self::NotEmpty { .. } => {
                Some("what has moved stays moved: `whimbrel evacuate` again goes on".to_owned())
            }
            Self::Pool(PoolError::Away { .. }) => {
                Some("is it admitted? `whimbrel pool key` here, then `whimbrel pool admit` on the manager".to_owned())
            }
            Self::Unhealthy { .. } => {
                Some("do what stands under `fix`, then run `whimbrel doctor` again".to_owned())
            }
            Self::NoSession(_) => Some(
                "try what it runs: `ssh HOST whimbrel serve /PATH --stdio`; by TLS both sides need the other's key".to_owned(),
            ),
            Self::NotWrittenBack { .. } => {
                Some("it stays in the cache: mount the same directory again when the server is there".to_owned())
            }
            Self::UnknownSession { .. } => Some("`whimbrel session ls` lists them".to_owned()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_the_daemon_has_the_documented_exit_code() {
        let expected = [3, 4, 2, 4, 5, 5, 6, 1, 1, 1, 130, 1];
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
