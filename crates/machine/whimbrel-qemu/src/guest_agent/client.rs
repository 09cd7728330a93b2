//! Connection to qemu-ga: one command at a time, each with a limit for its answer in time and in bytes.
//!
//! The connection stays open while commands succeed. After a failure it is closed, since an answer may come
//! late; the next command opens another one and synchronises it.

use super::{
    AgentAnswer, AnswerDecoder, ExecStatus, FileChunk, GuestInterface, QemuGaError,
    answers::{self, encoded},
    message::{request, sync_request},
};
use serde_json::{Value, json};
use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use whimbrel_core::lock;

/// Longest answer to a command that has no data in it.
const ANSWER_MAX: usize = 1 << 20;
/// Longest answer with the output of a program: qemu-ga keeps 16 MiB of each of its two streams.
const OUTPUT_MAX: usize = 48 << 20;
/// Time for an answer to a command that does little.
const PATIENCE: Duration = Duration::from_secs(10);
const READ_SIZE: usize = 64 << 10;

/// The port of one machine. Copies use the same connection.
#[derive(Debug, Clone)]
pub struct QemuGa(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: PathBuf,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    busy: bool,
    /// Connection whose last command was answered.
    stream: Option<UnixStream>,
}

/// Right to send commands, until it is dropped. Nobody else sends one meanwhile.
#[derive(Debug)]
pub struct QemuGaSession<'a> {
    port: &'a Shared,
    stream: Option<UnixStream>,
}

impl QemuGa {
    /// The port behind a socket on which QEMU listens. Nothing is opened before the first command.
    pub fn new(socket: PathBuf) -> Self {
        Self(Arc::new(Shared { socket, state: Mutex::default(), freed: Condvar::new() }))
    }

    /// Waits for the port and for a sign of life, for at most `patience`.
    pub fn session(&self, patience: Duration) -> Result<QemuGaSession<'_>, QemuGaError> {
        let deadline = Instant::now() + patience;
        let stream = {
            let free = lock(&self.0.state);
            let mut state = self.wait_free(free, patience)?;
            state.busy = true;
            state.stream.take()
        };
        let mut session = QemuGaSession { port: &self.0, stream };
        if session.stream.is_none() {
            session.open(deadline, patience)?;
        }
        Ok(session)
    }

    fn wait_free<'a>(
        &self,
        state: MutexGuard<'a, State>,
        patience: Duration,
    ) -> Result<MutexGuard<'a, State>, QemuGaError> {
        let waited = self.0.freed.wait_timeout_while(state, patience, |state| state.busy);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() { Err(QemuGaError::Busy) } else { Ok(state) }
    }
}

impl Drop for QemuGaSession<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.port.state);
        (state.busy, state.stream) = (false, self.stream.take());
        drop(state);
        self.port.freed.notify_one();
    }
}

impl QemuGaSession<'_> {
    /// Opens a connection and has the guest answer on it.
    fn open(&mut self, deadline: Instant, patience: Duration) -> Result<(), QemuGaError> {
        let mut stream = UnixStream::connect(&self.port.socket).map_err(QemuGaError::Port)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // JSON has numbers up to 2^53.
        let id = since.as_nanos() as u64 & ((1 << 53) - 1);
        send(&mut stream, &sync_request(id), patience)?;
        let mut decoder = AnswerDecoder::default();
        loop {
            let line = read_line(&mut stream, &mut decoder, (deadline, patience), ANSWER_MAX)?;
            let line = line.ok_or(QemuGaError::Malformed { command: "guest-sync-delimited" })?;
            if AgentAnswer::parse(&line) == Some(AgentAnswer::Return(json!(id))) {
                self.stream = Some(stream);
                return Ok(());
            }
        }
    }

    /// Sends a command and waits for its answer.
    fn call(
        &mut self,
        command: &'static str,
        arguments: Value,
        (patience, limit): (Duration, usize),
    ) -> Result<Value, QemuGaError> {
        let deadline = Instant::now() + patience;
        // Back in its place only after an answer.
        let Some(mut stream) = self.stream.take() else {
            return Err(QemuGaError::Port(io::ErrorKind::NotConnected.into()));
        };
        send(&mut stream, &request(command, &arguments), patience)?;
        let mut decoder = AnswerDecoder::default();
        let line = read_line(&mut stream, &mut decoder, (deadline, patience), limit)?;
        let malformed = || QemuGaError::Malformed { command };
        let answer = line.as_deref().and_then(AgentAnswer::parse).ok_or_else(malformed)?;
        if decoder.is_empty() {
            self.stream = Some(stream);
        }
        answer.into_result(command)
    }

    fn short(&mut self, command: &'static str, arguments: Value) -> Result<Value, QemuGaError> {
        self.call(command, arguments, (PATIENCE, ANSWER_MAX))
    }

    fn number(&mut self, command: &'static str, arguments: Value) -> Result<i64, QemuGaError> {
        self.short(command, arguments)?.as_i64().ok_or(QemuGaError::Malformed { command })
    }

    /// Asks for a sign of life.
    pub fn ping(&mut self) -> Result<(), QemuGaError> {
        self.short("guest-ping", json!({})).map(drop)
    }

    /// Version of qemu-ga, for people.
    pub fn version(&mut self) -> Result<String, QemuGaError> {
        let info = self.short("guest-info", json!({}))?;
        Ok(super::message::printable(info["version"].as_str().unwrap_or_default(), 40))
    }

    /// Network interfaces of the guest.
    pub fn interfaces(&mut self) -> Result<Vec<GuestInterface>, QemuGaError> {
        self.short("guest-network-get-interfaces", json!({})).map(|answer| answers::interfaces(&answer))
    }

    /// Starts a program and returns its process id in the guest. `command` begins with its name.
    pub fn exec(&mut self, command: &[String], env: &[String], input: &[u8]) -> Result<i64, QemuGaError> {
        let (path, arguments) = command.split_first().map_or(("", &[][..]), |(path, rest)| (&**path, rest));
        let mut asked = json!({"path": path, "arg": arguments, "capture-output": true});
        if !env.is_empty() {
            asked["env"] = json!(env);
        }
        if !input.is_empty() {
            asked["input-data"] = json!(encoded(input));
        }
        let answer = self.short("guest-exec", asked)?;
        answer["pid"].as_i64().ok_or(QemuGaError::Malformed { command: "guest-exec" })
    }

    /// State of a program. Its output is there once it has ended, and is told once.
    pub fn exec_status(&mut self, pid: i64) -> Result<ExecStatus, QemuGaError> {
        let limits = (PATIENCE * 3, OUTPUT_MAX);
        answers::exec_status(&self.call("guest-exec-status", json!({"pid": pid}), limits)?)
    }

    /// Opens a file in a mode of `fopen(3)` and returns its handle.
    pub fn open_file(&mut self, path: &str, mode: &str) -> Result<i64, QemuGaError> {
        self.number("guest-file-open", json!({"path": path, "mode": mode}))
    }

    /// Goes to a place of an open file.
    pub fn seek_file(&mut self, handle: i64, offset: u64) -> Result<(), QemuGaError> {
        let place = json!({"handle": handle, "offset": offset, "whence": "set"});
        self.short("guest-file-seek", place).map(drop)
    }

    /// Reads at most `count` bytes of an open file.
    pub fn read_file(&mut self, handle: i64, count: usize) -> Result<FileChunk, QemuGaError> {
        // Base64 is a third longer.
        let limits = (PATIENCE, count * 2 + (64 << 10));
        let answer = self.call("guest-file-read", json!({"handle": handle, "count": count}), limits)?;
        answers::file_chunk(&answer, count)
    }

    /// Writes to an open file and returns how many bytes were written.
    pub fn write_file(&mut self, handle: i64, bytes: &[u8]) -> Result<usize, QemuGaError> {
        let command = "guest-file-write";
        let answer = self.short(command, json!({"handle": handle, "buf-b64": encoded(bytes)}))?;
        let count = answer["count"].as_u64().and_then(|count| usize::try_from(count).ok());
        count.filter(|count| *count <= bytes.len()).ok_or(QemuGaError::Malformed { command })
    }

    /// Closes a file. What was written is in the guest's cache.
    pub fn close_file(&mut self, handle: i64) -> Result<(), QemuGaError> {
        self.short("guest-file-flush", json!({"handle": handle}))?;
        self.short("guest-file-close", json!({"handle": handle})).map(drop)
    }

    /// Freezes all file systems of the guest, and returns how many.
    pub fn freeze(&mut self, patience: Duration) -> Result<u64, QemuGaError> {
        let command = "guest-fsfreeze-freeze";
        let count = self.call(command, json!({}), (patience, ANSWER_MAX))?;
        count.as_u64().ok_or(QemuGaError::Malformed { command })
    }

    /// Thaws all file systems that are frozen, and returns how many were.
    pub fn thaw(&mut self) -> Result<u64, QemuGaError> {
        let command = "guest-fsfreeze-thaw";
        self.short(command, json!({}))?.as_u64().ok_or(QemuGaError::Malformed { command })
    }

    /// Whether file systems are frozen.
    pub fn is_frozen(&mut self) -> Result<bool, QemuGaError> {
        Ok(self.short("guest-fsfreeze-status", json!({}))? == json!("frozen"))
    }

    /// Wall clock of the guest, in nanoseconds since 1970.
    pub fn time(&mut self) -> Result<i64, QemuGaError> {
        self.number("guest-get-time", json!({}))
    }

    /// Sets the wall clock of the guest. The clock is set even if this fails because the guest has no program
    /// that sets its hardware clock as well.
    pub fn set_time(&mut self, unix_ns: i64) -> Result<(), QemuGaError> {
        self.short("guest-set-time", json!({"time": unix_ns})).map(drop)
    }

    /// Has the guest shut down. Nothing is answered; an error is a refusal.
    pub fn shut_down(&mut self) -> Result<(), QemuGaError> {
        // qemu-ga answers only if it fails.
        match self.call("guest-shutdown", json!({}), (Duration::from_secs(2), ANSWER_MAX)) {
            Err(QemuGaError::Silent { .. }) | Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn send(stream: &mut UnixStream, bytes: &[u8], patience: Duration) -> Result<(), QemuGaError> {
    stream.set_write_timeout(Some(patience.max(Duration::from_millis(1)))).map_err(QemuGaError::Port)?;
    stream.write_all(bytes).map_err(|error| failed(error, patience))
}

/// Next line of the guest; none if it is longer than `limit`.
fn read_line(
    stream: &mut UnixStream,
    decoder: &mut AnswerDecoder,
    (deadline, patience): (Instant, Duration),
    limit: usize,
) -> Result<Option<Vec<u8>>, QemuGaError> {
    let mut piece = vec![0; READ_SIZE.min(limit)];
    loop {
        if let Some(line) = decoder.next_line() {
            return Ok(Some(line));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(QemuGaError::Silent { after: patience });
        }
        stream.set_read_timeout(Some(left)).map_err(QemuGaError::Port)?;
        let len = stream.read(&mut piece).map_err(|error| failed(error, patience))?;
        if len == 0 {
            return Err(QemuGaError::Port(io::ErrorKind::UnexpectedEof.into()));
        }
        if !decoder.push(&piece[..len], limit) {
            return Ok(None);
        }
    }
}

fn failed(error: io::Error, patience: Duration) -> QemuGaError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => QemuGaError::Silent { after: patience },
        _ => QemuGaError::Port(error),
    }
}
