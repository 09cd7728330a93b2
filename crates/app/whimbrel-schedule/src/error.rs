//! Errors of schedules, and of what they ask of their host.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};
use whimbrel_core::MachineName;

/// Failure of something that a schedule asked of its host.
pub type HostFailure = Box<dyn Error + Send + Sync>;

/// Failure of a request about a schedule.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what its fields are")]
pub enum ScheduleError {
    #[error("there is no schedule {name}")]
    Unknown { name: MachineName },
    #[error("{reason}")]
    Invalid { reason: String },
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Host(#[from] HostFailure),
}

impl ScheduleError {
    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::Invalid { reason: reason.into() }
    }

    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
