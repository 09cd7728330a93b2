//! Connections to peers over ssh, as the daemon's user. Failures are told apart by the exit code of ssh or of
//! the remote command, `whimbrel dial-stdio`.

use std::{io, time::Duration};
use whimbrel_wire::{ConnectError, ConnectStep, Connection, Endpoint, SshCommand, connect_ssh};

/// Exit code of ssh's own failures (ssh(1), EXIT STATUS).
const SSH_FAILED: i32 = 255;
/// Exit codes of the remote shell: not executable, not found (POSIX, Shell Command Language, 2.8.2).
const NO_COMMAND: [i32; 2] = [126, 127];
/// Exit code of `whimbrel` if its daemon does not answer, as its help documents it.
const NO_DAEMON: i32 = 5;
/// Time limit for the hello; ssh logs in before it, perhaps through other hosts, each of which may be slow.
const LOGIN: Duration = Duration::from_secs(30);

/// The reason why ssh does not lead to a daemon.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what its fields are")]
pub enum SshError {
    #[error("ssh cannot be started")]
    Start { source: io::Error },
    #[error("ssh cannot log in to {destination}")]
    Login { destination: String, source: ConnectError },
    #[error("whimbrel cannot be run on {destination}")]
    NoCommand { destination: String, source: ConnectError },
    #[error("no daemon runs on {destination}")]
    NoDaemon { destination: String, source: ConnectError },
    #[error("the output of ssh on {destination} is not that of a whimbrel daemon")]
    NotADaemon { destination: String, source: ConnectError },
}

impl SshError {
    fn new(destination: String, source: ConnectError) -> Self {
        match source {
            ConnectError::Io { step: ConnectStep::Dial, source } => Self::Start { source },
            ConnectError::Ssh { status, .. } => match status.code() {
                Some(SSH_FAILED) => Self::Login { destination, source },
                Some(code) if NO_COMMAND.contains(&code) => Self::NoCommand { destination, source },
                Some(NO_DAEMON) => Self::NoDaemon { destination, source },
                _ => Self::NotADaemon { destination, source },
            },
            ConnectError::Timeout { .. } | ConnectError::Destination { .. } => {
                Self::Login { destination, source }
            }
            _ => Self::NotADaemon { destination, source },
        }
    }

    /// The next step for the user.
    pub(crate) fn hint(&self) -> String {
        match self {
            Self::Start { .. } => "install an ssh client on this host".to_owned(),
            Self::Login { destination, .. } => format!(
                "`ssh -oBatchMode=yes {destination} true` must work without a question for the daemon's user"
            ),
            Self::NoCommand { destination, .. } => format!(
                "install whimbrel on {destination} in the PATH of ssh commands, such as /usr/local/bin"
            ),
            Self::NoDaemon { destination, .. } => {
                format!("start `whimbrel host` on {destination}, and log in as a user who may use its socket")
            }
            Self::NotADaemon { destination, .. } => format!(
                "check the output of `ssh {destination} whimbrel dial-stdio </dev/null`; login scripts must print nothing"
            ),
        }
    }
}

/// Connects to the daemon behind `destination`.
pub(super) async fn connect(destination: String, mut endpoint: Endpoint) -> Result<Connection, SshError> {
    endpoint.settings.handshake = LOGIN;
    let command = SshCommand::new(destination.clone());
    connect_ssh(&command, &endpoint).await.map_err(|source| SshError::new(destination, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::process::ExitStatusExt, process::ExitStatus};
    use whimbrel_wire::HelloError;

    fn ended(wait_status: i32) -> SshError {
        let (status, stderr) = (ExitStatus::from_raw(wait_status), "because".to_owned());
        SshError::new("beta".to_owned(), ConnectError::Ssh { destination: "beta".to_owned(), status, stderr })
    }

    #[test]
    fn what_did_not_get_there_is_never_taken_for_what_is_not_there() {
        assert!(matches!(ended(255 << 8), SshError::Login { .. }));
        assert!(matches!(ended(127 << 8), SshError::NoCommand { .. }));
        assert!(matches!(ended(126 << 8), SshError::NoCommand { .. }));
        assert!(matches!(ended(5 << 8), SshError::NoDaemon { .. }));
        for other in [0, 1 << 8, 9] {
            assert!(matches!(ended(other), SshError::NotADaemon { .. }), "{other}");
        }
    }

    #[test]
    fn a_login_script_that_prints_is_not_blamed_on_the_login() {
        let source = HelloError::NotWhimbrel { start: "Welcome".to_owned() };
        let error = SshError::new("beta".to_owned(), ConnectError::Hello { source });
        assert!(matches!(error, SshError::NotADaemon { .. }) && error.hint().contains("login scripts"));
    }
}
