//! Why a guest could not be made.

use std::{io, path::PathBuf, process::ExitStatus};

/// Why the files of a guest could not be made.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    File {
        /// `read`, `create`, …
        action: &'static str,
        /// What.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A program could not be started.
    #[error("cannot start {program}")]
    Start {
        /// Its name.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} ended with {status}: {errors}")]
    Program {
        /// Its name.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// The end of what it wrote to standard error.
        errors: String,
    },
    /// Something that must be there is not.
    #[error("there is no {what}")]
    Missing {
        /// What.
        what: String,
    },
}

impl GuestError {
    /// For `map_err`: an I/O error while doing `action` to `path`.
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }
}
