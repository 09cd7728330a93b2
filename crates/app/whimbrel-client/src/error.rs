//! Errors of calls: no daemon, no permission, an error of the daemon, or an invalid reply.

use std::{error::Error, io, path::PathBuf};
use whimbrel_api::ApiError;
use whimbrel_wire::web_tls::WebTlsError;

/// Cause of a failed call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No process listens on the socket.
    #[error("no host daemon listens on {}", socket.display())]
    NotRunning {
        /// Path of the socket.
        socket: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The user may not connect to the socket.
    #[error("this user may not connect to the host daemon on {}", socket.display())]
    Permission {
        /// Path of the socket.
        socket: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The connection failed for another reason.
    #[error("cannot connect to {}", socket.display())]
    Connect {
        /// Path of the socket.
        socket: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The API of another computer cannot be reached, or its certificate is not the right one.
    #[error("cannot connect to {address}")]
    Remote {
        /// Address of the API.
        address: String,
        /// Cause reported by the kernel or by TLS.
        source: Box<WebTlsError>,
    },
    /// The daemon returned an error.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The connection failed, or the reply does not match the API.
    #[error("the host daemon's answer to {request} is invalid")]
    Protocol {
        /// Method and path of the call.
        request: String,
        /// Cause reported by the connection or the decoder.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The reply exceeds the limit.
    #[error("the host daemon's answer to {request} is longer than {limit} bytes")]
    TooLarge {
        /// Method and path of the call.
        request: String,
        /// Limit in bytes.
        limit: usize,
    },
    /// The event stream ended before the operation did.
    #[error("lost contact with the host daemon while operation {operation} was running")]
    Lost {
        /// Id of the operation.
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

    /// Advice for the user.
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
            Self::Remote { source, .. } => remote_hint(source),
            Self::Connect { .. } => None,
        }
    }
}

fn remote_hint(error: &WebTlsError) -> Option<String> {
    match error {
        WebTlsError::WrongCertificate { presented } => Some(format!(
            "if the daemon printed this fingerprint when it started, its certificate is new: --fingerprint {presented}"
        )),
        WebTlsError::Untrusted { .. } => Some(
            "name the fingerprint that the daemon prints when it starts with --fingerprint, or the authority \
             with the variable SSL_CERT_FILE"
                .to_owned(),
        ),
        _ => None,
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
