//! Errors of building the files of a guest.

use std::{io, path::PathBuf, process::ExitStatus};

/// Cause of a guest that could not be built.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The operating system returned an error.
    #[error("cannot {action} {}", path.display())]
    File {
        /// Verb of the operation: `read`, `create`, …
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("cannot start {program}")]
    Start {
        /// Name of the program.
        program: String,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} ended with {status}: {errors}")]
    Program {
        /// Name of the program.
        program: String,
        /// Exit status of the program.
        status: ExitStatus,
        /// End of its standard error.
        errors: String,
    },
    /// The modules of a kernel could not be read.
    #[error("cannot read the modules of a kernel")]
    Modules(#[from] whimbrel_container::ContainerError),
    /// Something required does not exist.
    #[error("there is no {what}")]
    Missing {
        /// Missing file, package or setting.
        what: String,
    },
}

impl GuestError {
    /// Makes an I/O error of `action` on `path`, for `map_err`.
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }
}
