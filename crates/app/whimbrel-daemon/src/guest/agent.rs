//! The connection to the program inside a guest: hello, orders with their answers, wishes.
//!
//! A thread keeps the connection, reads it, and connects again when it ends. A guest is *here* from its
//! answer to the hello of this connection until the connection ends or another start of the program speaks.
//! Until it is here nothing but the hello is sent: what waits in the port of a guest that does not listen
//! would be obeyed much later.

use super::requests;
use crate::daemon::Daemon;
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use whimbrel_core::MachineName;
use whimbrel_guest_protocol::{Command, Report, RequestOutcome, frame::Decoder};

/// How soon a lost connection is tried again.
const RECONNECT: Duration = Duration::from_millis(200);
/// How long the guest may refuse to read.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// The ids of the hello of a new connection, and of one that answers an unasked word, which has id 0.
const FIRST: u32 = 1;
const AGAIN: u32 = 2;
/// Repeats of an announcement, like those of the host: a switch may not be listening yet at the first.
const ANNOUNCE_AFTER: [Duration; 3] =
    [Duration::ZERO, Duration::from_millis(200), Duration::from_millis(1000)];

/// How the machine of a port came here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArrivalKind {
    /// From another host: its guest is asked to announce itself as soon as it speaks.
    ByMigration,
    /// In any other way.
    Otherwise,
}

/// Why a guest did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AgentError {
    /// No program inside answers.
    #[error("no program inside the guest answers")]
    Absent,
    /// It takes too long.
    #[error("the program inside the guest does not answer within {after:?}")]
    Silent {
        /// How long was waited.
        after: Duration,
    },
    /// It refuses, in its words.
    #[error("the program inside the guest refuses: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// It answered something else.
    #[error("the program inside the guest answers something else than it was asked")]
    Strange,
}

/// The port of one machine.
pub(crate) struct GuestAgent {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

pub(super) struct Shared {
    socket: PathBuf,
    hello: Command,
    machine: MachineName,
    host: Weak<Daemon>,
    arrived: ArrivalKind,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    stream: Option<UnixStream>,
    /// The session of the program that is here.
    session: Option<u32>,
    next: u32,
    /// Orders that wait for their answers.
    waiting: BTreeSet<u32>,
    answers: BTreeMap<u32, Report>,
    /// Whether the guest was asked to announce itself after it arrived.
    announced: bool,
}

impl GuestAgent {
    /// Keeps a connection to the port at `socket`, until it is dropped.
    pub(crate) fn open(
        host: &Daemon,
        machine: &MachineName,
        pages: u64,
        socket: PathBuf,
        arrived: ArrivalKind,
    ) -> io::Result<Self> {
        let hello = Command::Hello { host: host.name.to_string(), machine: machine.to_string(), pages };
        let (machine, host) = (machine.clone(), host.me.clone());
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { socket, hello, machine, host, arrived, state, changed });
        let theirs = shared.clone();
        let reader = thread::Builder::new().name("guest-port".into()).spawn(move || theirs.read_reports())?;
        Ok(Self { shared, reader: Some(reader) })
    }

    /// Something to order with, that may outlive the port.
    pub(crate) fn orders(&self) -> AgentCommands {
        AgentCommands(self.shared.clone())
    }
}

impl Drop for GuestAgent {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        if let Some(stream) = &state.stream {
            // Fails if it is closed already, which is what is wanted.
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(state);
        self.shared.changed.notify_all();
        if let Some(reader) = self.reader.take() {
            // A panic in it was reported by its own thread.
            let _ = reader.join();
        }
    }
}

/// Orders to a guest.
#[derive(Clone)]
pub(crate) struct AgentCommands(pub(super) Arc<Shared>);

impl AgentCommands {
    /// Whether a program inside is here.
    pub(crate) fn is_heard(&self) -> bool {
        self.0.lock().session.is_some()
    }

    /// Orders and waits for the answer.
    pub(crate) fn ask(&self, order: &Command, patience: Duration) -> Result<Report, AgentError> {
        let (id, session) = {
            let mut state = self.0.lock();
            let session = state.session.ok_or(AgentError::Absent)?;
            state.next = state.next.wrapping_add(1).max(AGAIN + 1);
            let id = state.next;
            state.waiting.insert(id);
            (id, session)
        };
        let answer = match self.0.send(order, session, id) {
            Ok(()) => self.0.wait_answer(id, session, patience),
            Err(_) => Err(AgentError::Absent),
        };
        let mut state = self.0.lock();
        state.waiting.remove(&id);
        state.answers.remove(&id);
        match answer? {
            Report::Failed { reason } => Err(AgentError::Refused { reason }),
            word => Ok(word),
        }
    }

    /// Orders something that is not answered, or whose answer nobody waits for. A guest that is not here
    /// hears nothing.
    pub(crate) fn send(&self, order: &Command) {
        self.tell_as(order, 0);
    }

    /// What became of the guest's wish of this id.
    pub(super) fn send_result(&self, id: u32, outcome: RequestOutcome) {
        self.tell_as(&Command::RequestResult(outcome), id);
    }

    fn tell_as(&self, order: &Command, id: u32) {
        let session = self.0.lock().session;
        if let Some(Err(error)) = session.map(|session| self.0.send(order, session, id)) {
            tracing::debug!(machine = %self.0.machine, %error, "a guest does not hear");
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock leaves the state half made.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, order: &Command, session: u32, id: u32) -> io::Result<()> {
        // Outside the lock: a guest that does not read must not hold up those who only look.
        let stream = self.lock().stream.as_ref().map(UnixStream::try_clone);
        let mut stream = stream.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()))?;
        let sent = stream.write_all(&order.to_frame(session, id).encode());
        if sent.is_err() {
            // Half a frame may have gone: the connection begins anew.
            let _ = stream.shutdown(Shutdown::Both);
        }
        sent
    }

    fn wait_answer(&self, id: u32, session: u32, patience: Duration) -> Result<Report, AgentError> {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            if let Some(word) = state.answers.remove(&id) {
                return Ok(word);
            }
            if state.closed || state.session != Some(session) {
                return Err(AgentError::Absent);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(AgentError::Silent { after: patience });
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Connects, reads until the connection ends, and again.
    fn read_reports(self: &Arc<Self>) {
        while let Some(mut stream) = self.connected() {
            let mut decoder = Decoder::default();
            let mut piece = [0; 4 << 10];
            while let Ok(len @ 1..) = stream.read(&mut piece) {
                decoder.push(&piece[..len]);
                while let Some(frame) = decoder.next_frame() {
                    match Report::of(&frame) {
                        Ok(word) => self.handle(word, frame.session, frame.id),
                        Err(error) => tracing::debug!(machine = %self.machine, %error, "a guest says"),
                    }
                }
                if let Some(version) = decoder.other_version() {
                    tracing::warn!(machine = %self.machine, version, "the program inside speaks another version");
                }
            }
            let mut state = self.lock();
            (state.stream, state.session) = (None, None);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// A new connection, over which hello was said. None when the port is closed.
    fn connected(&self) -> Option<UnixStream> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            drop(state);
            let opened = self.connect();
            state = self.lock();
            if let Ok((reading, writing)) = opened
                && !state.closed
            {
                state.stream = Some(writing);
                return Some(reading);
            }
            state = self.changed.wait_timeout(state, RECONNECT).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn connect(&self) -> io::Result<(UnixStream, UnixStream)> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        stream.write_all(&self.hello.to_frame(0, FIRST).encode())?;
        Ok((stream.try_clone()?, stream))
    }

    fn handle(self: &Arc<Self>, word: Report, session: u32, id: u32) {
        let mut state = self.lock();
        match word {
            Report::Ready { .. } => self.is_here(&mut state, session, id),
            _ if state.session != Some(session) => {}
            Report::Ask(ask) => {
                drop(state);
                requests::consider(&self.host, &self.machine, AgentCommands(self.clone()), id, ask);
            }
            word if state.waiting.contains(&id) => {
                state.answers.insert(id, word);
            }
            _ => {}
        }
        self.changed.notify_all();
    }

    fn is_here(self: &Arc<Self>, state: &mut State, session: u32, id: u32) {
        if state.session == Some(session) {
            return;
        }
        tracing::info!(machine = %self.machine, id, "the program inside the guest is here");
        state.session = Some(session);
        if id == 0 {
            // Said unasked, or before our hello was read: this one is heard by all means.
            let theirs = self.clone();
            spawn("guest-hello", move || drop(theirs.send(&theirs.hello, 0, AGAIN)));
        }
        if self.arrived == ArrivalKind::ByMigration && !state.announced {
            state.announced = true;
            let orders = AgentCommands(self.clone());
            spawn("guest-announce", move || announce(&orders));
        }
    }
}

/// Has the guest tell the network where it is now, a few times.
fn announce(orders: &AgentCommands) {
    let begun = Instant::now();
    for after in ANNOUNCE_AFTER {
        thread::sleep(after.saturating_sub(begun.elapsed()));
        match orders.ask(&Command::Announce, Duration::from_secs(2)) {
            Ok(Report::Announced { frames }) => {
                tracing::info!(machine = %orders.0.machine, frames, "the guest has announced itself");
            }
            Ok(_) | Err(AgentError::Absent) => return,
            Err(error) => {
                tracing::debug!(machine = %orders.0.machine, %error, "the guest does not announce itself")
            }
        }
    }
}

pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name(name.to_owned()).spawn(work) {
        tracing::error!(%error, "no thread to talk to a guest");
    }
}
