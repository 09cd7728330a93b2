//! Guest agent: the connection to the agent inside a guest, for its hello, commands with their reports, and
//! guest requests.
//!
//! A thread keeps the connection, reads it, and reconnects when it ends. The agent is *present* from its
//! answer to the hello of this connection until the connection ends or another start of the agent sends
//! something. Until then nothing but the hello is sent: commands that wait in the port of a guest that does
//! not read would be executed much later.

use super::RunningError;
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use whimbrel_core::{HostName, MachineName};
use whimbrel_guest_protocol::{
    Command, FEATURE_CLOCK, GuestRequest, Report, RequestOutcome, VERSION, frame::Decoder,
};

/// Interval between attempts to reconnect.
const RECONNECT: Duration = Duration::from_millis(200);
/// Time limit for a write to a guest that does not read.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// Ids of hellos: on a new connection, and in answer to an unrequested report, which has id 0.
const HELLO_ID: u32 = 1;
const HELLO_AGAIN_ID: u32 = 2;
/// Times of repeated announcements, like those of the host: a switch may not be listening at the first.
const ANNOUNCE_AFTER: [Duration; 3] =
    [Duration::ZERO, Duration::from_millis(200), Duration::from_millis(1000)];

/// Times that a guest is told the time, until its report comes at once.
const SETTINGS_MAX: u32 = 5;
/// A report that takes longer was on its way for long, and so was the time.
const PROMPT: Duration = Duration::from_millis(20);

/// How a machine came to run here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrivalKind {
    /// With a migration: the guest is asked to announce itself as soon as its agent is present, and its clock
    /// is set forward.
    ByMigration,
    /// Started or resumed here: its clock is set forward.
    Started,
    /// Left running by an earlier daemon.
    Adopted,
}

/// The reason why a guest agent did not execute a command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    /// There is no agent, or it ended.
    #[error("no guest agent answers")]
    Absent,
    /// The agent takes too long.
    #[error("the guest agent does not answer within {after:?}")]
    Timeout {
        /// Time that it had.
        after: Duration,
    },
    /// The agent does not do it.
    #[error("the guest agent refuses: {reason}")]
    Refused {
        /// Words of the agent.
        reason: String,
    },
    /// The report does not fit the command.
    #[error("the report of the guest agent does not fit the command")]
    UnexpectedReport,
}

/// Service that carries out what guests request.
pub trait GuestRequests: Send + Sync {
    /// Handles request `id` of a guest, without delay: its thread also reads the reports of the guest.
    fn handle(&self, guest: AgentCommands, id: u32, request: GuestRequest);
}

/// Right to make a request, which a guest has once. Dropping it returns the right.
pub struct RequestSlot(AgentCommands);

impl Drop for RequestSlot {
    fn drop(&mut self) {
        self.0.0.is_requesting.store(false, Ordering::Release);
    }
}

/// Connection to the agent inside a guest.
pub struct GuestAgent {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

struct Shared {
    /// Set while a request of the guest is carried out; there is one at a time.
    is_requesting: AtomicBool,
    socket: PathBuf,
    hello: Command,
    machine: MachineName,
    requests: Arc<dyn GuestRequests>,
    arrived: ArrivalKind,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    stream: Option<UnixStream>,
    /// Session of the agent that is present.
    session: Option<u32>,
    next: u32,
    /// Ids of commands that wait for their reports.
    waiting: BTreeSet<u32>,
    answers: BTreeMap<u32, Report>,
    /// Whether the guest was told of its arrival.
    arrived: bool,
    /// Features of the agent.
    features: u32,
}

impl GuestAgent {
    /// Keeps a connection to the port at `socket` until it is dropped.
    pub fn open(
        (host, machine): (&HostName, &MachineName),
        pages: u64,
        socket: PathBuf,
        arrived: ArrivalKind,
        requests: Arc<dyn GuestRequests>,
    ) -> io::Result<Self> {
        let hello = Command::Hello { host: host.to_string(), machine: machine.to_string(), pages };
        let machine = machine.clone();
        let (state, changed) = (Mutex::default(), Condvar::new());
        let is_requesting = AtomicBool::new(false);
        let shared =
            Arc::new(Shared { is_requesting, socket, hello, machine, requests, arrived, state, changed });
        Self::over(shared)
    }

    fn over(shared: Arc<Shared>) -> io::Result<Self> {
        let theirs = shared.clone();
        let reader = thread::Builder::new().name("guest-port".into()).spawn(move || theirs.read_reports())?;
        Ok(Self { shared, reader: Some(reader) })
    }

    /// Closes the connection, so that another process can open one.
    pub(crate) fn suspend(&mut self) {
        self.close();
    }

    /// Opens a connection again, as to a guest that was adopted.
    pub(crate) fn resume(&mut self) -> Result<(), RunningError> {
        if self.reader.is_none() {
            let before = &self.shared;
            let shared = Shared {
                is_requesting: AtomicBool::new(false),
                socket: before.socket.clone(),
                hello: before.hello.clone(),
                machine: before.machine.clone(),
                requests: before.requests.clone(),
                arrived: ArrivalKind::Adopted,
                state: Mutex::default(),
                changed: Condvar::new(),
            };
            let path = shared.socket.clone();
            *self = Self::over(Arc::new(shared))
                .map_err(|source| RunningError::io("connect to", &path, source))?;
        }
        Ok(())
    }

    /// Whether a request of the guest is being carried out.
    pub(crate) fn is_requesting(&self) -> bool {
        self.shared.is_requesting.load(Ordering::Acquire)
    }

    /// A handle for commands, which may outlive the connection.
    pub fn commands(&self) -> AgentCommands {
        AgentCommands(self.shared.clone())
    }
}

impl GuestAgent {
    fn close(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        if let Some(stream) = &state.stream {
            // An error means that it is closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(state);
        self.shared.changed.notify_all();
        if let Some(reader) = self.reader.take() {
            // The thread has reported a panic itself.
            let _ = reader.join();
        }
    }
}

impl Drop for GuestAgent {
    fn drop(&mut self) {
        self.close();
    }
}

/// Commands to the agent of one guest.
#[derive(Clone)]
pub struct AgentCommands(Arc<Shared>);

impl AgentCommands {
    /// Whether an agent has answered on the present connection.
    pub fn is_present(&self) -> bool {
        self.0.lock().session.is_some()
    }

    /// Whether the agent sets the guest's clock.
    pub(super) fn sets_clock(&self) -> bool {
        let state = self.0.lock();
        state.session.is_some() && state.features & FEATURE_CLOCK != 0
    }

    /// Sends a command and waits for its report.
    pub fn ask(&self, order: &Command, patience: Duration) -> Result<Report, AgentError> {
        let (id, session) = {
            let mut state = self.0.lock();
            let session = state.session.ok_or(AgentError::Absent)?;
            state.next = state.next.wrapping_add(1).max(HELLO_AGAIN_ID + 1);
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

    /// Has the guest set its wall clock forward after a pause, without waiting for it.
    pub fn catch_up(&self) {
        let orders = self.clone();
        spawn("guest-clock", move || set_clock(&orders));
    }

    /// Sends a command whose report nobody waits for. Nothing is sent if the agent is not present.
    pub fn send(&self, order: &Command) {
        self.send_with_id(order, 0);
    }

    /// Takes the right of the guest to make a request; none while another one is carried out.
    pub fn begin_request(&self) -> Option<RequestSlot> {
        let taken = self.0.is_requesting.swap(true, Ordering::AcqRel);
        (!taken).then(|| RequestSlot(self.clone()))
    }

    /// Tells the guest what became of request `id`.
    pub fn send_result(&self, id: u32, outcome: RequestOutcome) {
        self.send_with_id(&Command::RequestResult(outcome), id);
    }

    fn send_with_id(&self, order: &Command, id: u32) {
        let session = self.0.lock().session;
        if let Some(Err(error)) = session.map(|session| self.0.send(order, session, id)) {
            tracing::debug!(machine = %self.0.machine, %error, "could not send a command to a guest");
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic under the lock leaves an inconsistent state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, order: &Command, session: u32, id: u32) -> io::Result<()> {
        // Outside the lock: a guest that does not read must not delay readers of the state.
        let stream = self.lock().stream.as_ref().map(UnixStream::try_clone);
        let mut stream = stream.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()))?;
        let sent = stream.write_all(&order.to_frame(session, id).encode());
        if sent.is_err() {
            // Part of a frame may have been sent: a new connection is needed.
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
                return Err(AgentError::Timeout { after: patience });
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Connects, reads until the connection ends, and starts again.
    fn read_reports(self: &Arc<Self>) {
        while let Some(mut stream) = self.connected() {
            let mut decoder = Decoder::default();
            let mut piece = [0; 4 << 10];
            while let Ok(len @ 1..) = stream.read(&mut piece) {
                decoder.push(&piece[..len]);
                while let Some(frame) = decoder.next_frame() {
                    match Report::from_frame(&frame) {
                        Ok(word) => self.handle(word, frame.session, frame.id),
                        Err(error) => tracing::debug!(machine = %self.machine, %error, "bad report"),
                    }
                }
                if let Some(theirs) = decoder.other_version() {
                    tracing::warn!(machine = %self.machine, ours = VERSION, theirs, "the guest agent speaks another version");
                }
            }
            let mut state = self.lock();
            (state.stream, state.session) = (None, None);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// A new connection over which the hello was sent; none when the port is closed.
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
        stream.write_all(&self.hello.to_frame(0, HELLO_ID).encode())?;
        Ok((stream.try_clone()?, stream))
    }

    fn handle(self: &Arc<Self>, word: Report, session: u32, id: u32) {
        let mut state = self.lock();
        match word {
            Report::Ready { features, .. } => {
                state.features = features;
                self.handle_ready(&mut state, session, id);
            }
            _ if state.session != Some(session) => {}
            Report::Request(ask) => {
                drop(state);
                self.requests.handle(AgentCommands(self.clone()), id, ask);
            }
            word if state.waiting.contains(&id) => {
                state.answers.insert(id, word);
            }
            _ => {}
        }
        self.changed.notify_all();
    }

    fn handle_ready(self: &Arc<Self>, state: &mut State, session: u32, id: u32) {
        if state.session == Some(session) {
            return;
        }
        tracing::info!(machine = %self.machine, id, "the guest agent is present");
        state.session = Some(session);
        if id == 0 {
            // The report was unrequested or sent before it read our hello; this hello is read for certain.
            let theirs = self.clone();
            spawn("guest-hello", move || drop(theirs.send(&theirs.hello, 0, HELLO_AGAIN_ID)));
        }
        if std::mem::replace(&mut state.arrived, true) || self.arrived == ArrivalKind::Adopted {
            return;
        }
        let orders = AgentCommands(self.clone());
        if self.arrived == ArrivalKind::ByMigration {
            let orders = orders.clone();
            spawn("guest-announce", move || announce(&orders));
        }
        spawn("guest-clock", move || set_clock(&orders));
    }
}

/// Has the guest set its wall clock forward, if its agent can do that. A report that took long tells that the
/// time was old when it was set, so the guest is told once more.
fn set_clock(orders: &AgentCommands) {
    let machine = &orders.0.machine;
    if !orders.sets_clock() {
        return;
    }
    for _ in 0..SETTINGS_MAX {
        let (since, begun) = (SystemTime::now().duration_since(UNIX_EPOCH), Instant::now());
        let unix_ms = since.map_or(0, |since| since.as_millis() as u64);
        match orders.ask(&Command::SetClock { unix_ms }, Duration::from_secs(2)) {
            Ok(Report::ClockSet { forward_ms: 0 }) => {}
            Ok(Report::ClockSet { forward_ms }) => {
                tracing::info!(%machine, forward_ms, "the guest has set its clock forward");
            }
            Ok(_) => {}
            Err(error) => return tracing::debug!(%machine, %error, "the guest does not set its clock"),
        }
        if begun.elapsed() <= PROMPT {
            return;
        }
    }
}

/// Has the guest announce itself to the network a few times.
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
        tracing::error!(%error, "could not start a thread for a guest agent");
    }
}
