//! The ssh transport: runs `ssh DESTINATION whimbrel dial-stdio`; wire frames use its input and output.
//!
//! There is no TLS inside: ssh has authenticated the peer, which has the rights of the trust entry with this
//! destination. ssh runs without a terminal and never prompts: where it would need a password it fails, and
//! the error contains its message.

use crate::{
    ConnectError, ConnectStep, Connection, Endpoint, PeerIdentity, connection,
    endpoint::connect_authenticated,
};
use std::{
    ffi::OsString,
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::FileTypeExt, net::UnixStream as StdUnixStream},
    },
    pin::Pin,
    process::Stdio,
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite},
    net::{UnixStream, unix::pipe},
    process::{Child, ChildStderr, Command},
    task::JoinHandle,
    time::timeout,
};

/// Bytes of ssh's standard error that are retained for the error.
const MAX_STDERR: usize = 4096;
/// Time for a failed ssh to exit and print its error.
const STDERR_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for ssh to exit after its connection has ended; longer than goodbyes may take.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Options for the stream: no terminal, no prompts, no forwarded ports or agents, no remote command from the
/// configuration, and a connect timeout below that of the hello, so that ssh can report the cause. Everything
/// else comes from the user's configuration.
const OPTIONS: [&str; 7] = [
    "-T",
    "-a",
    "-x",
    "-oBatchMode=yes",
    "-oClearAllForwardings=yes",
    "-oRemoteCommand=none",
    "-oConnectTimeout=8",
];

/// The ssh command line of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshCommand {
    /// The program, by default `ssh`.
    pub program: OsString,
    /// Options before the destination, like `-F FILE`.
    pub options: Vec<OsString>,
    /// `user@host` or a name from the user's ssh configuration.
    pub destination: String,
    /// The remote command, as the remote shell reads it.
    pub remote: String,
}

impl SshCommand {
    /// `whimbrel dial-stdio` at `destination`.
    pub fn new(destination: impl Into<String>) -> Self {
        let remote = "whimbrel dial-stdio".to_owned();
        Self { program: "ssh".into(), options: Vec::new(), destination: destination.into(), remote }
    }

    fn spawn(&self) -> Result<Child, ConnectError> {
        if self.destination.is_empty() || self.destination.starts_with('-') {
            return Err(ConnectError::Destination { destination: self.destination.clone() });
        }
        let mut command = Command::new(&self.program);
        command.args(OPTIONS).args(&self.options).arg("--").arg(&self.destination).arg(&self.remote);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command.spawn().map_err(|source| ConnectError::Io { step: ConnectStep::Dial, source })
    }
}

/// Starts ssh and exchanges hellos with the remote command. ssh ends with the connection.
pub async fn connect_ssh(ssh: &SshCommand, endpoint: &Endpoint) -> Result<Connection, ConnectError> {
    let peer = endpoint.dialled(PeerIdentity::Ssh(ssh.destination.clone()))?;
    let mut child = ssh.spawn()?;
    let piped = (child.stdout.take(), child.stdin.take(), child.stderr.take());
    let (Some(reader), Some(writer), Some(stderr)) = piped else {
        let source = io::Error::other("ssh was started without pipes");
        return Err(ConnectError::Io { step: ConnectStep::Dial, source });
    };
    let complaints = tokio::spawn(tail(stderr));
    match connect_authenticated(reader, writer, peer, endpoint).await {
        Ok(connection) => {
            let shared = connection.shared().clone();
            tokio::spawn(async move {
                connection::closed(&shared).await;
                // With closed pipes ssh exits by itself, unless its network is gone; then it is killed.
                if timeout(EXIT_TIMEOUT, child.wait()).await.is_err() {
                    let _ = child.kill().await;
                }
            });
            Ok(connection)
        }
        Err(error) => Err(explain_failure(child, complaints, ssh, error).await),
    }
}

/// The last bytes of ssh's standard error. It is read to its end, so that ssh never blocks on writing.
async fn tail(mut stderr: ChildStderr) -> String {
    let (mut kept, mut piece) = (Vec::new(), [0; 1024]);
    while let Ok(read @ 1..) = stderr.read(&mut piece).await {
        kept.extend_from_slice(&piece[..read]);
        kept.drain(..kept.len().saturating_sub(MAX_STDERR));
    }
    String::from_utf8_lossy(&kept).trim().to_owned()
}

/// Replaces the error with ssh's exit status and message, if ssh has exited.
async fn explain_failure(
    mut child: Child,
    complaints: JoinHandle<String>,
    ssh: &SshCommand,
    error: ConnectError,
) -> ConnectError {
    if !matches!(error, ConnectError::Io { .. }) {
        return error;
    }
    let Ok(Ok(status)) = timeout(STDERR_TIMEOUT, child.wait()).await else { return error };
    let stderr = timeout(STDERR_TIMEOUT, complaints).await.ok().and_then(Result::ok).unwrap_or_default();
    ConnectError::Ssh { destination: ssh.destination.clone(), status, stderr }
}

/// Byte stream from the process that started this one.
pub type StdioReader = Pin<Box<dyn AsyncRead + Send>>;
/// Byte stream to the process that started this one.
pub type StdioWriter = Pin<Box<dyn AsyncWrite + Send>>;

/// Standard input and output of this process as a stream. Must be called inside a runtime. The caller must
/// not print to standard output afterwards.
pub fn stdio() -> io::Result<(StdioReader, StdioWriter)> {
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    Ok((readable(input)?, writable(output)?))
}

/// sshd passes a socket and a shell a pipe, which are polled; other files are read on a thread.
fn readable(fd: OwnedFd) -> io::Result<StdioReader> {
    let file = File::from(fd);
    let kind = file.metadata()?.file_type();
    if kind.is_socket() {
        return Ok(Box::pin(socket(file)?));
    }
    if kind.is_fifo() {
        return Ok(Box::pin(pipe::Receiver::from_file(file)?));
    }
    Ok(Box::pin(tokio::io::stdin()))
}

fn writable(fd: OwnedFd) -> io::Result<StdioWriter> {
    let file = File::from(fd);
    let kind = file.metadata()?.file_type();
    if kind.is_socket() {
        return Ok(Box::pin(socket(file)?));
    }
    if kind.is_fifo() {
        return Ok(Box::pin(pipe::Sender::from_file(file)?));
    }
    Ok(Box::pin(tokio::io::stdout()))
}

fn socket(file: File) -> io::Result<UnixStream> {
    let socket = StdUnixStream::from(OwnedFd::from(file));
    socket.set_nonblocking(true)?;
    UnixStream::from_std(socket)
}
