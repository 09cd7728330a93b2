//! QMP client: commands from any thread, answers matched by id, events to subscribers.
//!
//! One reader thread for each connection. Invariants: a waiting command always returns, by QEMU's answer, its
//! deadline or the end of the connection. After the end every command fails at once and every subscriber has
//! got [`MachineEvent::Disconnected`]. The reader never waits for a subscriber: one with [`BACKLOG`] unread
//! events is dropped, which it sees as a closed channel.
//!
//! A connection can be suspended ([`Qmp::suspend`]) and go on in another process, or in this one. Nobody
//! reads it meanwhile, so no byte of the stream is lost.

use super::{
    event::MachineEvent,
    line_reader::{LineBuffer, MAX_LINE},
    writer::Writer,
};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};
use whimbrel_core::lock;

/// Most events queued for a subscriber that does not read.
const BACKLOG: usize = 1024;
/// Bytes read at a time.
const READ_SIZE: usize = 64 << 10;
/// Default timeout of a command. `stop` drains the disks, which may be remote.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// Cause of a failed QMP command.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// QEMU returned an error.
    #[error("qemu refuses {command}: {words}")]
    Refused {
        /// Name of the command.
        command: String,
        /// Error class of QEMU: `GenericError`, …
        class: String,
        /// Error text of QEMU.
        words: String,
    },
    /// The answer did not arrive in time. The command may still take effect.
    #[error("qemu did not answer {command} within {after:?}")]
    TimedOut {
        /// Name of the command.
        command: String,
        /// Time waited for the answer.
        after: Duration,
    },
    /// QEMU died or quit before it answered.
    #[error("lost the connection to qemu during {command}")]
    Disconnected {
        /// Name of the command.
        command: String,
    },
    /// The socket could not be connected or written.
    #[error("cannot reach qemu's control socket")]
    Io(#[source] io::Error),
    /// The answer lacks required fields.
    #[error("qemu's answer to {command} is invalid")]
    Malformed {
        /// Name of the command.
        command: String,
    },
}

type Answer = Result<Value, (String, String)>;

#[derive(Default)]
struct Inbox {
    closed: bool,
    waiting: HashMap<u64, SyncSender<Answer>>,
    subscribers: Vec<SyncSender<MachineEvent>>,
}

/// Place in a QMP stream at which nobody reads it, in plain types: another process goes on there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QmpState {
    /// Received bytes that are no complete line yet.
    pub rest: Vec<u8>,
    /// Number of the next command, greater than that of any before.
    pub next_id: u64,
    /// Whether the virtual CPUs ran, by the events so far; none if QEMU has to be asked.
    pub running: Option<bool>,
}

impl QmpState {
    /// State of a connection that another process has used, nobody knows how far. What is left of a line is
    /// skipped, and an answer to a command of that process is never taken for one of this.
    pub fn unknown() -> Self {
        // More than a process sends in a millisecond, so later processes have greater numbers.
        const COMMANDS_PER_MS: u64 = 1 << 20;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let ms = now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000;
        Self { rest: Vec::new(), next_id: ms * COMMANDS_PER_MS, running: None }
    }
}

/// How reading ended without a failure.
enum Reading {
    Stopped,
    Ended,
}

#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    running: AtomicBool,
}

/// Command that was sent and not answered yet.
#[derive(Debug)]
pub(crate) struct PendingCommand {
    command: String,
    id: u64,
    /// In a mutex, because other threads may inspect the machine while one waits.
    answer: Mutex<Receiver<Answer>>,
}

/// Connection to a QMP socket. Dropping it closes the connection and does not affect QEMU.
pub struct Qmp {
    shared: Arc<Shared>,
    writer: Writer,
    next_id: AtomicU64,
    reader: Option<Reader>,
}

/// Thread that reads the connection.
struct Reader {
    thread: thread::JoinHandle<LineBuffer>,
    /// Eventfd that ends it.
    stop: OwnedFd,
}

impl Reader {
    fn start(stream: &UnixStream, shared: &Arc<Shared>, lines: LineBuffer) -> io::Result<Self> {
        let (stream, shared) = (stream.try_clone()?, Arc::clone(shared));
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let read = move || shared.read_all(&stream, stopped.as_fd(), lines);
        let thread = thread::Builder::new().name("qmp".into()).spawn(read)?;
        Ok(Self { thread, stop })
    }

    /// Ends the thread between two reads; returns what it received and did not use.
    fn end(self) -> LineBuffer {
        // Fails only after 2^64 calls.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        self.thread.join().unwrap_or_default()
    }
}

impl Qmp {
    /// Connects to the socket at `path` and negotiates.
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        Self::over(UnixStream::connect(path).map_err(QmpError::Io)?)
    }

    /// Negotiates over a stream whose other end speaks QMP.
    pub fn over(stream: UnixStream) -> Result<Self, QmpError> {
        let qmp = Self::reading(stream, LineBuffer::default(), 1, false)?;
        // QEMU greets first, but reads the negotiation without waiting. With `oob` it continues to read
        // during a command, otherwise it reads the next command only afterwards (docs/interop/qmp-spec,
        // "Out-of-band execution").
        match qmp.execute("qmp_capabilities", json!({"enable": ["oob"]})) {
            Err(QmpError::Refused { .. }) => qmp.execute("qmp_capabilities", json!({}))?,
            answer => answer?,
        };
        qmp.ask_running()?;
        Ok(qmp)
    }

    /// Asks QEMU whether the virtual CPUs run.
    pub(crate) fn ask_running(&self) -> Result<(), QmpError> {
        let status = self.execute("query-status", json!({}))?;
        if status.get("running").and_then(Value::as_bool) == Some(true) {
            self.shared.running.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Goes on with a connection at the place where another process suspended it.
    pub fn from_parts(stream: UnixStream, state: QmpState) -> Result<Self, QmpError> {
        let QmpState { rest, next_id, running } = state;
        if rest.len() >= MAX_LINE {
            return Err(QmpError::Io(io::ErrorKind::InvalidData.into()));
        }
        let qmp = Self::reading(stream, LineBuffer::new(rest), next_id, running == Some(true))?;
        if running.is_none() {
            qmp.ask_running()?;
        }
        Ok(qmp)
    }

    fn reading(stream: UnixStream, lines: LineBuffer, next_id: u64, running: bool) -> Result<Self, QmpError> {
        stream.set_write_timeout(Some(COMMAND_TIMEOUT)).map_err(QmpError::Io)?;
        let shared = Arc::new(Shared::default());
        // Before an event of the connection can change it.
        shared.running.store(running, Ordering::Release);
        let reader = Reader::start(&stream, &shared, lines).map_err(QmpError::Io)?;
        let (writer, next_id) = (Writer::new(stream), AtomicU64::new(next_id));
        Ok(Self { shared, writer, next_id, reader: Some(reader) })
    }

    /// Copy of the connection, for the process that goes on with it.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        self.writer.with_stream(|stream| stream.as_fd().try_clone_to_owned())
    }

    /// Stops reading, so that another process can, and returns where. Commands fail until [`Qmp::resume`];
    /// one that waits for its answer gets none. Dropped while suspended, this leaves the connection open.
    pub fn suspend(&mut self) -> QmpState {
        let rest = self.reader.take().map(|reader| reader.end().into_rest()).unwrap_or_default();
        self.shared.lock().waiting.clear();
        QmpState { rest, next_id: *self.next_id.get_mut(), running: Some(self.is_running()) }
    }

    /// Reads on after [`Qmp::suspend`] returned `state`, or [`QmpState::unknown`] if another process may have
    /// used the connection meanwhile.
    pub fn resume(&mut self, state: QmpState) -> Result<(), QmpError> {
        let next_id = self.next_id.get_mut();
        *next_id = state.next_id.max(*next_id);
        // Before an event of the connection can change it.
        self.shared.running.store(state.running == Some(true), Ordering::Release);
        let lines = LineBuffer::new(state.rest);
        let reader = self.writer.with_stream(|stream| Reader::start(stream, &self.shared, lines));
        let reader = reader.map_err(QmpError::Io)?;
        self.reader = Some(reader);
        if state.running.is_none() { self.ask_running() } else { Ok(()) }
    }

    /// Runs `command` and returns its answer, within 30 s.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, COMMAND_TIMEOUT)
    }

    /// Runs `command` and returns its answer, within `timeout`.
    pub(crate) fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        let [asked] = self.send_commands([(command, arguments)])?;
        self.answer_within(asked, timeout)
    }

    /// Sends several commands at once, without waiting for their answers. QEMU executes them in this order,
    /// even if one fails.
    pub(crate) fn send_commands<const N: usize>(
        &self,
        commands: [(&str, Value); N],
    ) -> Result<[PendingCommand; N], QmpError> {
        self.ask(commands, |lines| self.writer.send(lines))
    }

    /// Sends a command but for its end, which [`Qmp::finish_command`] must send at once. Others wait for it.
    pub(crate) fn begin_command(&self, command: (&str, Value)) -> Result<PendingCommand, QmpError> {
        let [asked] = self.ask([command], |line| self.writer.begin(line))?;
        Ok(asked)
    }

    /// Has QEMU carry out the command that was begun.
    pub(crate) fn finish_command(&self) -> Result<(), QmpError> {
        self.writer.finish().map_err(QmpError::Io)
    }

    fn ask<const N: usize>(
        &self,
        commands: [(&str, Value); N],
        send: impl FnOnce(&[u8]) -> io::Result<()>,
    ) -> Result<[PendingCommand; N], QmpError> {
        let mut lines = Vec::new();
        let mut inbox = self.shared.lock();
        let asked = commands.map(|(command, arguments)| {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            let (sender, answer) = sync_channel(1);
            inbox.waiting.insert(id, sender);
            // QEMU parses byte by byte, so empty arguments are left out.
            let mut line = json!({"execute": command, "id": id});
            if arguments.as_object().is_none_or(|arguments| !arguments.is_empty()) {
                line["arguments"] = arguments;
            }
            lines.extend(line.to_string().into_bytes());
            lines.push(b'\n');
            PendingCommand { command: command.to_owned(), id, answer: Mutex::new(answer) }
        });
        let closed = inbox.closed || self.reader.is_none();
        drop(inbox);
        let gone = || QmpError::Disconnected {
            command: asked.first().map_or_else(String::new, |one| one.command.clone()),
        };
        let sent = if closed { Err(gone()) } else { send(&lines).map_err(QmpError::Io) };
        let Err(error) = sent else { return Ok(asked) };
        let mut inbox = self.shared.lock();
        asked.iter().for_each(|one| drop(inbox.waiting.remove(&one.id)));
        let pipe = |kind| matches!(kind, io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset);
        Err(match error {
            QmpError::Io(error) if pipe(error.kind()) => gone(),
            error => error,
        })
    }

    /// The answer of a command, if it comes within `patience`.
    pub(crate) fn answer_soon(
        &self,
        asked: &PendingCommand,
        patience: Duration,
    ) -> Option<Result<Value, QmpError>> {
        let command = || asked.command.clone();
        match lock(&asked.answer).recv_timeout(patience) {
            Ok(Ok(value)) => Some(Ok(value)),
            Ok(Err((class, words))) => Some(Err(QmpError::Refused { command: command(), class, words })),
            Err(RecvTimeoutError::Disconnected) => Some(Err(QmpError::Disconnected { command: command() })),
            Err(RecvTimeoutError::Timeout) => None,
        }
    }

    /// Waits for the answer of a command, within 30 s.
    pub(crate) fn answer(&self, asked: PendingCommand) -> Result<Value, QmpError> {
        self.answer_within(asked, COMMAND_TIMEOUT)
    }

    fn answer_within(&self, asked: PendingCommand, timeout: Duration) -> Result<Value, QmpError> {
        self.answer_soon(&asked, timeout).unwrap_or_else(|| {
            self.shared.lock().waiting.remove(&asked.id);
            Err(QmpError::TimedOut { command: asked.command, after: timeout })
        })
    }

    /// Subscribes to all events. After [`MachineEvent::Disconnected`], or with 1,024 unread events, the
    /// channel closes.
    pub fn subscribe(&self) -> Receiver<MachineEvent> {
        let (sender, receiver) = sync_channel(BACKLOG);
        let mut inbox = self.shared.lock();
        if inbox.closed {
            // The channel is empty, so this cannot fail.
            let _ = sender.try_send(MachineEvent::Disconnected);
        } else {
            inbox.subscribers.push(sender);
        }
        receiver
    }

    /// Whether the virtual CPUs run, according to QEMU's events.
    pub fn is_running(&self) -> bool {
        self.shared.running.load(Ordering::Acquire)
    }

    /// Takes down that the virtual CPUs stand still, which something else has shown before QEMU's event came.
    pub(crate) fn note_stopped(&self) {
        self.shared.running.store(false, Ordering::Release);
    }

    /// Whether the connection is open.
    pub fn is_connected(&self) -> bool {
        !self.shared.lock().closed
    }

    /// Passes a descriptor to QEMU, which knows it by `name` until a command takes it.
    pub(crate) fn pass_descriptor(&self, name: &str, descriptor: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.send_descriptor(descriptor)?;
        self.execute("getfd", json!({"fdname": name})).map(drop)
    }

    /// Makes a descriptor the only one of a set that QEMU keeps until this connection ends; its number there.
    pub(crate) fn replace_descriptors(&self, set: u64, one: BorrowedFd<'_>) -> Result<u64, QmpError> {
        match self.execute("remove-fd", json!({"fdset-id": set})) {
            // There was no such set.
            Ok(_) | Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
        self.send_descriptor(one)?;
        let added = self.execute("add-fd", json!({"fdset-id": set}))?;
        added["fd"].as_u64().ok_or_else(|| QmpError::Io(io::ErrorKind::InvalidData.into()))
    }

    /// Sends a descriptor for the next command that takes one.
    fn send_descriptor(&self, descriptor: BorrowedFd<'_>) -> Result<(), QmpError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(&descriptor)));
        // QEMU keeps the descriptor that came last. White space is no part of a command.
        let send = |stream: &UnixStream| {
            Ok(sendmsg(stream, &[IoSlice::new(b" ")], &mut ancillary, SendFlags::NOSIGNAL)?)
        };
        self.writer.with_stream(send).map(drop).map_err(QmpError::Io)
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        if self.reader.is_none() {
            return;
        }
        // Ends the reader thread.
        self.writer.shut_down();
    }
}

whimbrel_core::opaque_debug!(Qmp);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // Nothing under the lock panics, and the map of waiting commands has no partial state.
        lock(&self.inbox)
    }

    /// Reads until the connection ends, or `stop` is readable; returns what was not used.
    fn read_all(&self, stream: &UnixStream, stop: BorrowedFd<'_>, mut lines: LineBuffer) -> LineBuffer {
        match self.read_lines(stream, stop, &mut lines) {
            Ok(Reading::Stopped) => return lines,
            Ok(Reading::Ended) => {}
            Err(error) => tracing::debug!(%error, "qmp connection lost"),
        }
        self.running.store(false, Ordering::Release);
        let mut inbox = self.lock();
        inbox.closed = true;
        inbox.waiting.clear();
        for subscriber in std::mem::take(&mut inbox.subscribers) {
            let _ = subscriber.try_send(MachineEvent::Disconnected);
        }
        lines
    }

    fn read_lines(
        &self,
        stream: &UnixStream,
        stop: BorrowedFd<'_>,
        lines: &mut LineBuffer,
    ) -> io::Result<Reading> {
        let mut buffer = vec![0; READ_SIZE];
        loop {
            while let Some(line) = lines.next_line()? {
                self.dispatch(&line);
            }
            let mut events = [PollFd::new(&stop, PollFlags::IN), PollFd::new(stream, PollFlags::IN)];
            match poll(&mut events, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            if !events[0].revents().is_empty() {
                return Ok(Reading::Stopped);
            }
            match rustix::net::recv(stream, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return lines.end().map(|()| Reading::Ended),
                Ok((_, count)) => lines.push(&buffer[..count]),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn dispatch(&self, line: &[u8]) {
        let Ok(message) = serde_json::from_slice::<Value>(line) else {
            tracing::warn!("qemu sent a line that is not JSON");
            return;
        };
        if let Some(event) = MachineEvent::from_message(&message) {
            return self.publish(event);
        }
        let Some(id) = message.get("id").and_then(Value::as_u64) else { return };
        let Some(waiting) = self.lock().waiting.remove(&id) else { return };
        let text = |error: &Value, key| error.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let answer = match message.get("error") {
            Some(error) => Err((text(error, "class"), text(error, "desc"))),
            None => Ok(message.get("return").cloned().unwrap_or(Value::Null)),
        };
        // A caller whose deadline passed has dropped its end.
        let _ = waiting.try_send(answer);
    }

    fn publish(&self, event: MachineEvent) {
        match event {
            MachineEvent::Stopped => self.running.store(false, Ordering::Release),
            MachineEvent::Resumed => self.running.store(true, Ordering::Release),
            _ => {}
        }
        self.lock().subscribers.retain(|subscriber| subscriber.try_send(event.clone()).is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};

    /// Scripted QEMU that answers the negotiation, then passes the connection to `then`.
    fn fake(then: impl FnOnce(BufReader<UnixStream>, UnixStream) + Send + 'static) -> Qmp {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            let mut reader = BufReader::new(theirs);
            writer.write_all(b"{\"QMP\": {}}\r\n").unwrap();
            for _ in 0..2 {
                let id = next_id(&mut reader);
                writeln!(writer, "{{\"return\": {{\"running\": true}}, \"id\": {id}}}").unwrap();
            }
            then(reader, writer);
        });
        Qmp::over(ours).unwrap()
    }

    fn next_id(reader: &mut impl BufRead) -> u64 {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap()["id"].as_u64().unwrap()
    }

    #[test]
    fn answers_find_their_callers_out_of_order_and_between_events() {
        let qmp = fake(|mut reader, mut writer| {
            let (first, second) = (next_id(&mut reader), next_id(&mut reader));
            writeln!(writer, "{{\"return\": {second}, \"id\": {second}}}").unwrap();
            writeln!(writer, "nonsense\n{{\"event\": \"STOP\"}}").unwrap();
            writeln!(writer, "{{\"return\": {first}, \"id\": {first}}}").unwrap();
            let _ = reader.read_to_end(&mut Vec::new());
        });
        let events = qmp.subscribe();
        let answers = thread::scope(|scope| {
            let calls = [(); 2].map(|()| scope.spawn(|| qmp.execute("x", json!({})).unwrap()));
            calls.map(|call| call.join().unwrap().as_u64().unwrap())
        });
        assert_ne!(answers[0], answers[1]);
        assert_eq!(events.recv().unwrap(), MachineEvent::Stopped);
        assert!(!qmp.is_running());
    }

    #[test]
    fn another_client_goes_on_in_the_middle_of_a_line_and_the_first_one_can_too() {
        let (tell, told) = std::sync::mpsc::channel::<()>();
        let mut qmp = fake(move |mut reader, mut writer| {
            write!(writer, "{{\"event\": \"ST").unwrap();
            tell.send(()).unwrap();
            let last = next_id(&mut reader);
            let id = last;
            writeln!(writer, "OP\"}}\n{{\"return\": {id}, \"id\": {id}}}").unwrap();
            let id = next_id(&mut reader);
            // The second client has sent one more command and died.
            let stale = last + 1;
            writeln!(writer, "left of a line\n{{\"return\": 0, \"id\": {stale}}}").unwrap();
            writeln!(writer, "{{\"return\": {{\"running\": true}}, \"id\": {id}}}").unwrap();
            let id = next_id(&mut reader);
            writeln!(writer, "{{\"return\": {id}, \"id\": {id}}}").unwrap();
            let _ = reader.read_to_end(&mut Vec::new());
        });
        told.recv().unwrap();
        let state = qmp.suspend();
        let gone = qmp.execute("x", json!({}));
        assert!(matches!(gone, Err(QmpError::Disconnected { .. })), "{gone:?}");
        let mut next = Qmp::from_parts(qmp.socket().unwrap().into(), state.clone()).unwrap();
        assert!(next.is_running());
        let answer = next.execute("x", json!({})).unwrap().as_u64();
        assert!(answer >= Some(state.next_id), "an answer to one client is never taken for the other's");
        assert!(!next.is_running(), "the event that came in two pieces was seen");
        next.suspend();
        drop(next);
        qmp.resume(QmpState::unknown()).unwrap();
        assert!(qmp.is_running(), "the other client had continued the machine");
        assert_ne!(qmp.execute("x", json!({})).unwrap(), json!(0), "the answer to another client");
    }

    #[test]
    fn a_silent_qemu_costs_the_timeout_and_a_dead_one_nothing() {
        let qmp = fake(|mut reader, writer| {
            next_id(&mut reader);
            next_id(&mut reader);
            drop((reader, writer));
        });
        let events = qmp.subscribe();
        let timed_out = qmp.execute_within("x", json!({}), Duration::from_millis(10));
        assert!(matches!(timed_out, Err(QmpError::TimedOut { .. })), "{timed_out:?}");
        for _ in 0..2 {
            let gone = qmp.execute("y", json!({}));
            assert!(matches!(gone, Err(QmpError::Disconnected { .. })), "{gone:?}");
        }
        assert_eq!(events.recv().unwrap(), MachineEvent::Disconnected);
        assert!(events.recv().is_err());
        assert_eq!(qmp.subscribe().recv().unwrap(), MachineEvent::Disconnected);
    }
}
