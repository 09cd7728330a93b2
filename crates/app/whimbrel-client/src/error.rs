//! Why a call failed: no daemon, no right to talk to it, its own refusal, or an answer that makes no sense.

use std::{error::Error, io, path::PathBuf};
use whimbrel_api::ApiError;

/// A call that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody listens on the socket.
    #[error("no host daemon listens on {}", socket.display())]
    NotRunning {
        /// The socket's path.
        socket: PathBuf,
        /// What connecting said.
        #[source]
        source: io::Error,
    },
    /// The socket is there and not for this user.
    #[error("this user may not talk to the host daemon on {}", socket.display())]
    Permission {
        /// The socket's path.
        socket: PathBuf,
        /// What connecting said.
        #[source]
        source: io::Error,
    },
    /// Connecting failed in another way.
    #[error("cannot connect to {}", socket.display())]
    Connect {
        /// The socket's path.
        socket: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The daemon answered that it cannot.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The connection broke, or what came over it is not what the API says.
    #[error("the host daemon's answer to {request} makes no sense")]
    Protocol {
        /// Method and path of the call.
        request: String,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The answer is longer than anything the API would say.
    #[error("the host daemon's answer to {request} is longer than {limit} bytes")]
    TooLarge {
        /// Method and path of the call.
        request: String,
        /// The bound.
        limit: usize,
    },
    /// The stream of an operation ended before the operation did.
    #[error("the host daemon went away while operation {operation} was running")]
    Lost {
        /// Its number.
        operation: whimbrel_api::OperationId,
    },
}

impl ClientError {
    pub(crate) fn protocol(request: &str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Protocol { request: request.to_owned(), source: source.into() }
    }

    pub(crate) fn connecting(socket: PathBuf, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Self::NotRunning { socket, source },
            io::ErrorKind::PermissionDenied => Self::Permission { socket, source },
            _ => Self::Connect { socket, source },
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NotRunning { .. } => Some(
                "start one with `whimbrel host --name NAME --data DIR`, or name its socket with --socket"
                    .to_owned(),
            ),
            Self::Permission { .. } => Some("run as root, as the daemon does".to_owned()),
            Self::Api(error) => error.hint.clone(),
            Self::Protocol { .. } | Self::TooLarge { .. } => {
                Some("check that daemon and command are of one version: `whimbrel doctor`".to_owned())
            }
            Self::Lost { .. } => Some("see what is left with `whimbrel ps` and the daemon's log".to_owned()),
            Self::Connect { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_of_somebody_else_is_told_from_an_absent_one() {
        let denied = ClientError::connecting("/s".into(), io::ErrorKind::PermissionDenied.into());
        assert!(matches!(denied, ClientError::Permission { .. }));
        assert!(denied.hint().is_some_and(|hint| hint.contains("root")));
        let absent = ClientError::connecting("/s".into(), io::ErrorKind::NotFound.into());
        assert!(matches!(absent, ClientError::NotRunning { .. }));
    }
}
