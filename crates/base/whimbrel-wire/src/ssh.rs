//! The user's own ssh as a carrier: `ssh DESTINATION whimbrel serve --stdio`, frames over its standard input
//! and output. No TLS inside: ssh has proved who is there, and the login says what they may do (everything).
//!
//! ssh runs without a terminal and never asks: what it cannot do without a password fails, with its own
//! words.

use crate::{
    ConnectError, ConnectStep, Connection, Endpoint, PeerIdentity, Rights, connection, endpoint::connect_io,
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

/// How much of what ssh complains is kept for the error.
const MAX_STDERR: usize = 4096;
/// How long a failed ssh may take to say why.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long an ssh whose connection has ended may take to end: more than goodbyes may.
const PARTING: Duration = Duration::from_secs(5);
/// The user's configuration holds for all the rest. These are about the stream: no terminal, no questions, no
/// forwarded ports or agents, no command of the configuration's own, and an end to trying before a hello is
/// given up, so that ssh can say why.
const OPTIONS: [&str; 7] = [
    "-T",
    "-a",
    "-x",
    "-oBatchMode=yes",
    "-oClearAllForwardings=yes",
    "-oRemoteCommand=none",
    "-oConnectTimeout=8",
];

/// How to run ssh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshCommand {
    /// The program, `ssh` unless told.
    pub program: OsString,
    /// Options before the destination, like `-F FILE`.
    pub options: Vec<OsString>,
    /// `user@host` or a name from the user's ssh configuration.
    pub destination: String,
    /// What to run there, as the remote shell reads it.
    pub remote: String,
}

impl SshCommand {
    /// `whimbrel serve --stdio` at `destination`.
    pub fn new(destination: impl Into<String>) -> Self {
        let remote = "whimbrel serve --stdio".to_owned();
        Self { program: "ssh".into(), options: Vec::new(), destination: destination.into(), remote }
    }

    fn spawn(&self) -> Result<Child, ConnectError> {
        if self.destination.is_empty() || self.destination.starts_with('-') {
            return Err(ConnectError::Destination { destination: self.destination.clone() });
        }
        let mut command = Command::new(&self.program);
        command.args(OPTIONS).args(&self.options).arg("--").arg(&self.destination).arg(&self.remote);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command.spawn().map_err(|source| ConnectError::Io { stage: ConnectStep::Dial, source })
    }
}

/// Starts ssh and says hello to what runs there. ssh ends with the connection.
pub async fn connect_ssh(ssh: &SshCommand, endpoint: &Endpoint) -> Result<Connection, ConnectError> {
    let mut child = ssh.spawn()?;
    let piped = (child.stdout.take(), child.stdin.take(), child.stderr.take());
    let (Some(reader), Some(writer), Some(stderr)) = piped else {
        let source = io::Error::other("ssh was started without pipes");
        return Err(ConnectError::Io { stage: ConnectStep::Dial, source });
    };
    let complaints = tokio::spawn(tail(stderr));
    let identity = PeerIdentity::Ssh(ssh.destination.clone());
    match connect_io(reader, writer, identity, Rights::all(), endpoint).await {
        Ok(connection) => {
            let shared = connection.shared().clone();
            tokio::spawn(async move {
                connection::closed(&shared).await;
                // Its pipes are closed, so it ends by itself, unless its network is gone: then it is killed.
                if timeout(PARTING, child.wait()).await.is_err() {
                    let _ = child.kill().await;
                }
            });
            Ok(connection)
        }
        Err(error) => Err(why(child, complaints, ssh, error).await),
    }
}

/// The last bytes of what ssh says; it is read to its end, so that ssh never waits for us.
async fn tail(mut stderr: ChildStderr) -> String {
    let (mut kept, mut piece) = (Vec::new(), [0; 1024]);
    while let Ok(read @ 1..) = stderr.read(&mut piece).await {
        kept.extend_from_slice(&piece[..read]);
        kept.drain(..kept.len().saturating_sub(MAX_STDERR));
    }
    String::from_utf8_lossy(&kept).trim().to_owned()
}

/// An ssh that ended tells more than the end of its pipe does.
async fn why(
    mut child: Child,
    complaints: JoinHandle<String>,
    ssh: &SshCommand,
    error: ConnectError,
) -> ConnectError {
    if !matches!(error, ConnectError::Io { .. }) {
        return error;
    }
    let Ok(Ok(status)) = timeout(LAST_WORDS, child.wait()).await else { return error };
    let stderr = timeout(LAST_WORDS, complaints).await.ok().and_then(Result::ok).unwrap_or_default();
    ConnectError::Ssh { destination: ssh.destination.clone(), status, stderr }
}

/// Bytes from whoever started this process.
pub type StdioReader = Pin<Box<dyn AsyncRead + Send>>;
/// Bytes to whoever started this process.
pub type StdioWriter = Pin<Box<dyn AsyncWrite + Send>>;

/// Standard input and output of this process as a stream. The caller must print nothing to standard output
/// from here on. Must be called inside a runtime.
pub fn stdio() -> io::Result<(StdioReader, StdioWriter)> {
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    Ok((readable(input)?, writable(output)?))
}

/// sshd gives a socket, a shell a pipe; both are watched without a thread. Anything else goes through one.
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
