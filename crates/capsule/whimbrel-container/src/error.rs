//! Errors of container images that cannot become machines.

use std::{io, path::PathBuf};

/// A container image cannot be used, or what a machine of it needs is not on this host.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what its fields are")]
pub enum ContainerError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{part} of the image is missing")]
    Missing { part: String },
    #[error("{part} of the image cannot be read: {reason}")]
    Invalid { part: String, reason: String },
    #[error("the image has nothing for {wanted}; it has {found}")]
    Platform { wanted: &'static str, found: String },
    #[error("there are {} images in it: {}", names.len(), names.join(", "))]
    Several { names: Vec<String> },
    #[error("a layer cannot be unpacked")]
    Unpack { source: io::Error },
    #[error("{path:?} in a layer {reason}")]
    Entry { path: String, reason: &'static str },
    #[error("the checksum of a layer is {found}, and the image says {expected}")]
    Checksum { expected: String, found: String },
    #[error("its files need more than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("it has more than {limit} files")]
    TooMany { limit: usize },
    #[error("no kernel in /boot has its modules in /lib/modules")]
    NoKernel,
    #[error("{} does not run by itself: it needs libraries", path.display())]
    NotStatic { path: PathBuf },
}

impl ContainerError {
    pub(crate) fn invalid(part: impl Into<String>, reason: impl ToString) -> Self {
        Self::Invalid { part: part.into(), reason: reason.to_string() }
    }

    pub(crate) fn read(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Read { path, source }
    }
}
