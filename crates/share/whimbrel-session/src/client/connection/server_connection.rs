//! Connection to the server: one at a time, restored when it breaks, and calls that survive its loss.
//!
//! A call waits for a connection until the server timeout of the session; then it fails as `Gone`. A call
//! whose connection broke before the answer is sent again. Reads can be repeated, and changes are designed so
//! that the server (or the caller, which is told of the repetition) recognises one that was already made.

use super::transfer_rate::TransferRate;
use crate::proto::{
    Attr, ClientId, FIRST_WITH_CONDITIONS, FIRST_WITH_NODES, Keyed, Op, OpCall, OpDone, Open, OpenCall,
    Opened, SPOKEN, SessionKey, code, errno, request_name,
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::watch,
    time::{sleep, timeout},
};
use whimbrel_core::lock;
use whimbrel_fuse::Errno;
use whimbrel_wire::{BoxFuture, Call, CallError, ConnectError, Connection, Refusal, Reply, Request, range};

/// Opens connections to the server.
pub trait Connector: Send + Sync + 'static {
    /// Opens another connection.
    fn connect(&self) -> BoxFuture<'_, Result<Connection, ConnectError>>;
    /// Name of the server, for people.
    fn destination(&self) -> String;
}

/// Settings of a server connection.
#[derive(Debug, Clone)]
pub struct ConnectionSettings {
    /// Path of the directory on the server.
    pub directory: Vec<u8>,
    /// Id of this client at the server.
    pub client: ClientId,
    /// How long a call waits for an unreachable server.
    pub server_timeout: Duration,
    /// Round trip from which on content is compressed.
    pub slow: Duration,
}

/// First and longest pause between attempts to connect.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3));

/// Number of request kinds that are counted apart; sessions have fewer, and their range begins at a multiple
/// of it.
const KINDS: usize = 32;

/// Reasons why a call failed.
#[derive(Debug, Clone)]
pub(in crate::client) enum CallFailure {
    /// The server was unreachable until the timeout.
    Unreachable,
    /// The server refused the call.
    Refused(Refusal),
    InvalidReply,
    /// The file changed before the answer arrived.
    Outdated,
}

impl CallFailure {
    pub(in crate::client) fn errno(&self) -> Errno {
        match self {
            Self::Unreachable | Self::InvalidReply | Self::Outdated => Errno::EIO,
            Self::Refused(refusal) => match refusal.code {
                code::STALE | code::CONFLICT => Errno::ESTALE,
                _ => errno(refusal).map_or(Errno::EIO, Errno::from_number),
            },
        }
    }

    /// Whether the server's system returned one of these error numbers.
    pub(in crate::client) fn is_errno(&self, numbers: &[i32]) -> bool {
        matches!(self, Self::Refused(refusal) if errno(refusal).is_some_and(|number| numbers.contains(&number)))
    }

    pub(in crate::client) fn is(&self, wanted: whimbrel_wire::Code) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.code == wanted)
    }
}

impl std::fmt::Display for CallFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unreachable => f.write_str("the server cannot be reached"),
            Self::Refused(refusal) => f.write_str(&refusal.text),
            Self::InvalidReply => f.write_str("the server's answer is invalid"),
            Self::Outdated => f.write_str("the file changed before the answer arrived"),
        }
    }
}

#[derive(Clone)]
pub(super) struct OpenSession {
    connection: Connection,
    key: SessionKey,
    /// Version that the server answers.
    pub(super) protocol: u16,
}

/// What the server tells beside its reply when a session is opened.
struct Told {
    /// Boot of the server and mount of its file system; empty if it is an older one that does not tell.
    incarnation: Bytes,
    /// Whether new files may have any owner, and devices may be created.
    sets_owners: bool,
    /// Largest size of a file; none if it is not known.
    size_max: Option<u64>,
}

impl Told {
    fn parse(payload: &Bytes) -> Self {
        const INCARNATION: usize = 16;
        let size = payload.get(INCARNATION + 1..).and_then(|rest| rest.first_chunk());
        Self {
            incarnation: payload.slice(..payload.len().min(INCARNATION)),
            sets_owners: payload.get(INCARNATION) == Some(&1),
            size_max: size.map(|size| u64::from_le_bytes(*size)),
        }
    }
}

impl OpenSession {
    /// The change in a form that the server knows: an older one checks no conditions.
    fn understood(&self, op: &Op) -> Op {
        let op = if self.protocol < FIRST_WITH_NODES { op.clone().without_nodes() } else { op.clone() };
        if self.protocol < FIRST_WITH_CONDITIONS { op.plain() } else { op }
    }
}

/// A session on a connection, reopened on a new one whenever that breaks.
pub(in crate::client) struct ServerConnection {
    runtime: Handle,
    up: watch::Sender<Option<OpenSession>>,
    server_timeout: RwLock<Duration>,
    abandoned: watch::Sender<bool>,
    calls: AtomicU64,
    waited: AtomicU64,
    breaks: AtomicU64,
    restarts: AtomicU64,
    /// Number of server sessions so far, and the moment before the current one was asked for.
    opened: AtomicU64,
    asked_at: Mutex<Instant>,
    /// What the last server told.
    told: Mutex<Told>,
    /// Requests by kind, indexed by the low bits of its number.
    kinds: [AtomicU64; KINDS],
    /// Number of waits for an answer, and their total in microseconds.
    waits: [AtomicU64; 2],
    waiters: AtomicU64,
    rate: Mutex<TransferRate>,
    slow: Duration,
}

/// Marks a program as waiting for the server, until it is dropped.
pub(in crate::client) struct WaitGuard<'a> {
    link: &'a ServerConnection,
    began: Instant,
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        self.link.waiters.fetch_sub(1, Ordering::Relaxed);
        let [waits, micros] = &self.link.waits;
        waits.fetch_add(1, Ordering::Relaxed);
        micros.fetch_add(self.began.elapsed().as_micros() as u64, Ordering::Relaxed);
    }
}

pub(in crate::client) struct FirstConnection {
    pub(in crate::client) link: Arc<ServerConnection>,
    pub(in crate::client) root: Attr,
    pub(in crate::client) read_only: bool,
    pub(in crate::client) uid: u32,
    pub(in crate::client) gid: u32,
}

/// Opens a session by the newest version that the server answers.
async fn open(
    connector: &dyn Connector,
    settings: &ConnectionSettings,
) -> Result<(OpenSession, Opened, Told), crate::client::SessionError> {
    use crate::client::SessionError as E;
    let connection = connector
        .connect()
        .await
        .map_err(|source| E::Connect { to: connector.destination(), source: Box::new(source) })?;
    let mut protocol = SPOKEN.newest;
    loop {
        let wanted = Open { protocol, directory: settings.directory.clone() };
        let client = Bytes::copy_from_slice(settings.client.as_bytes());
        match connection.request::<OpenCall>(&wanted, client).await {
            Ok((opened, payload)) => {
                let session = OpenSession { connection, key: opened.key, protocol };
                return Ok((session, opened, Told::parse(&payload)));
            }
            Err(CallError::Refused { source })
                if source.code == code::VERSION && protocol > SPOKEN.oldest =>
            {
                protocol -= 1;
            }
            Err(source) => return Err(E::Open { to: connector.destination(), source }),
        }
    }
}

impl ServerConnection {
    /// Connects; from then on the connection is restored whenever it breaks, until it is dropped.
    pub(in crate::client) async fn start(
        connector: Arc<dyn Connector>,
        settings: ConnectionSettings,
    ) -> Result<FirstConnection, crate::client::SessionError> {
        let asked_at = Instant::now();
        let (up, opened, told) = open(&*connector, &settings).await?;
        let link = Arc::new(Self {
            runtime: Handle::current(),
            told: Mutex::new(told),
            up: watch::Sender::new(Some(up)),
            server_timeout: RwLock::new(settings.server_timeout),
            abandoned: watch::Sender::new(false),
            calls: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            breaks: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
            opened: AtomicU64::new(1),
            asked_at: Mutex::new(asked_at),
            kinds: Default::default(),
            waits: Default::default(),
            waiters: AtomicU64::new(0),
            rate: Mutex::default(),
            slow: settings.slow,
        });
        let weak = Arc::downgrade(&link);
        tokio::spawn(async move {
            while let Some(link) = weak.upgrade() {
                let up = link.up.borrow().clone();
                drop(link);
                if let Some(up) = up {
                    up.connection.closed().await;
                }
                let Some(link) = weak.upgrade() else { return };
                link.up.send_replace(None);
                link.breaks.fetch_add(1, Ordering::Relaxed);
                drop(link);
                let mut pause = PAUSE.0;
                loop {
                    let asked_at = Instant::now();
                    match open(&*connector, &settings).await {
                        Ok((up, _, now)) => {
                            let Some(link) = weak.upgrade() else { return };
                            let mut told = lock(&link.told);
                            // An older server does not tell, so it counts as another one each time.
                            if now.incarnation.is_empty() || now.incarnation != told.incarnation {
                                link.restarts.fetch_add(1, Ordering::Release);
                            }
                            *told = now;
                            drop(told);
                            // Before its answers: none of them is leased in the session before.
                            *lock(&link.asked_at) = asked_at;
                            link.opened.fetch_add(1, Ordering::AcqRel);
                            tracing::info!(to = connector.destination(), "reconnected to the server");
                            link.up.send_replace(Some(up));
                            break;
                        }
                        Err(error) => tracing::debug!(%error, "cannot reconnect to the server yet"),
                    }
                    if weak.strong_count() == 0 {
                        return;
                    }
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSE.1);
                }
            }
        });
        let Opened { root, read_only, uid, gid, .. } = opened;
        Ok(FirstConnection { link, root, read_only, uid, gid })
    }

    pub(in crate::client) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// The change in a form that the server knows.
    pub(in crate::client) fn understood(&self, op: &Op) -> Op {
        self.up.borrow().as_ref().map_or_else(|| op.clone(), |up| up.understood(op))
    }

    /// Whether the server knows files of every type, owners of new files and extended attributes; while there
    /// is no connection, it counts as one that does.
    pub(in crate::client) fn knows_nodes(&self) -> bool {
        self.up.borrow().as_ref().is_none_or(|up| up.protocol >= FIRST_WITH_NODES)
    }

    /// Whether new files may have any owner.
    pub(in crate::client) fn sets_owners(&self) -> bool {
        lock(&self.told).sets_owners
    }

    /// Largest size that the server's file system lets a file have, as far as it is known.
    pub(in crate::client) fn size_max(&self) -> u64 {
        lock(&self.told).size_max.unwrap_or(u64::MAX).min(i64::MAX as u64)
    }

    pub(in crate::client) fn is_up(&self) -> bool {
        self.up.borrow().is_some()
    }

    pub(in crate::client) fn set_server_timeout(&self, patience: Duration) {
        *self.server_timeout.write().unwrap_or_else(std::sync::PoisonError::into_inner) = patience;
    }

    /// Makes all calls stop waiting for the server.
    pub(in crate::client) fn abandon(&self) {
        self.abandoned.send_replace(true);
    }

    fn server_timeout(&self) -> Duration {
        *self.server_timeout.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Times the connection broke; calls; mean microseconds of a call.
    pub(in crate::client) fn counters(&self) -> (u64, u64, u64) {
        let calls = self.calls.load(Ordering::Relaxed);
        let mean = self.waited.load(Ordering::Relaxed).checked_div(calls).unwrap_or(0);
        (self.breaks.load(Ordering::Relaxed), calls, mean)
    }

    /// Number of the current server session, or of the last one.
    pub(in crate::client) fn session_number(&self) -> u64 {
        self.opened.load(Ordering::Acquire)
    }

    /// The moment before the current server session was asked for.
    pub(in crate::client) fn session_asked_at(&self) -> Instant {
        *lock(&self.asked_at)
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Option<OpenSession>> {
        self.up.subscribe()
    }

    pub(super) fn current_session(&self) -> Option<OpenSession> {
        self.up.borrow().clone()
    }

    pub(super) fn count(&self, kind: u16) {
        self.kinds[usize::from(kind) % KINDS].fetch_add(1, Ordering::Relaxed);
    }

    /// Requests so far, by name.
    pub(in crate::client) fn requests(&self) -> BTreeMap<String, u64> {
        let named = |kind: u16| {
            let sent = self.kinds[usize::from(kind) % KINDS].load(Ordering::Relaxed);
            Some((request_name(kind)?.to_owned(), sent))
        };
        (range::SESSION..range::SESSION + KINDS as u16).filter_map(named).collect()
    }

    /// Marks a program as waiting, until the guard is dropped.
    pub(in crate::client) fn waiting(&self) -> WaitGuard<'_> {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        WaitGuard { link: self, began: Instant::now() }
    }

    pub(in crate::client) fn has_waiters(&self) -> bool {
        self.waiters() > 0
    }

    /// Number of programs that wait.
    pub(in crate::client) fn waiters(&self) -> u64 {
        self.waiters.load(Ordering::Relaxed)
    }

    /// Number of waits of programs, and their total.
    pub(in crate::client) fn waits(&self) -> (u64, Duration) {
        let [waits, micros] = &self.waits;
        (waits.load(Ordering::Relaxed), Duration::from_micros(micros.load(Ordering::Relaxed)))
    }

    /// Number of times that the server may have lost what it had not synced. If it is the same before a
    /// change is sent and after it was synced, the change is durable.
    pub(in crate::client) fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Acquire)
    }

    /// Whether the connection broke before, so that requests of an earlier one may still be carried out.
    pub(in crate::client) fn has_broken(&self) -> bool {
        self.breaks.load(Ordering::Relaxed) > 0
    }

    pub(in crate::client) fn round_trip(&self) -> Option<Duration> {
        self.up.borrow().as_ref().and_then(|up| up.connection.round_trip())
    }

    /// Bytes sent and received on the current connection.
    pub(in crate::client) fn traffic(&self) -> (u64, u64) {
        let traffic = self.up.borrow().as_ref().map(|up| up.connection.traffic());
        traffic.map_or((0, 0), |traffic| (traffic.sent, traffic.received))
    }

    /// Compression level for content on this link; none on a fast one.
    pub(in crate::client) fn compression_level(&self) -> Option<i8> {
        let slow = self.slow.is_zero() || self.round_trip().is_some_and(|time| time >= self.slow);
        slow.then_some(2)
    }

    async fn current(&self, deadline: Instant) -> Result<OpenSession, CallFailure> {
        let (mut watch, mut over) = (self.up.subscribe(), self.abandoned.subscribe());
        let left = deadline.saturating_duration_since(Instant::now());
        let found = tokio::select! {
            found = timeout(left, watch.wait_for(Option::is_some)) => found,
            _ = over.wait_for(|over| *over) => return Err(CallFailure::Unreachable),
        };
        let found = found.map_err(|_| CallFailure::Unreachable)?.map_err(|_| CallFailure::Unreachable)?;
        found.clone().ok_or(CallFailure::Unreachable)
    }

    /// Sends a call. The flag says whether it was repeated, so that a change may have been made before.
    pub(in crate::client) async fn send<C, B>(
        &self,
        body: B,
        payload: Bytes,
        stream: Option<u16>,
    ) -> (Result<(C::Reply, Bytes), CallFailure>, bool)
    where
        B: Clone,
        C: Call<Header = Keyed<B>>,
    {
        let deadline = Instant::now() + self.server_timeout();
        let mut again = false;
        loop {
            let up = match self.current(deadline).await {
                Ok(up) => up,
                Err(fail) => return (Err(fail), again),
            };
            let began = Instant::now();
            self.count(C::KIND);
            let asked = send_once::<C, B>(&up, body.clone(), payload.clone(), stream).await;
            self.calls.fetch_add(1, Ordering::Relaxed);
            self.waited.fetch_add(began.elapsed().as_micros() as u64, Ordering::Relaxed);
            match asked {
                Ok(answer) => return (Ok(answer), again),
                Err(CallError::Closed { .. }) => {
                    again = true;
                    self.drop_connection(&up);
                }
                // The server was restarted or forgot the session: the supervisor opens a new one.
                Err(CallError::Refused { source }) if source.code == code::KEY => {
                    up.connection.close();
                    self.drop_connection(&up);
                }
                Err(CallError::Refused { source }) => return (Err(CallFailure::Refused(source)), again),
                Err(_) => return (Err(CallFailure::InvalidReply), again),
            }
        }
    }

    /// Rate in bytes per second at which content arrives, once some has.
    pub(in crate::client) fn rate(&self) -> Option<f64> {
        lock(&self.rate).per_second()
    }

    /// Like [`ServerConnection::send`], for content; measures the rate.
    pub(in crate::client) async fn send_for_content<C, B>(
        &self,
        body: B,
    ) -> Result<(C::Reply, Bytes), CallFailure>
    where
        B: Clone,
        C: Call<Header = Keyed<B>>,
    {
        lock(&self.rate).request_sent(Instant::now());
        let answer = self.send::<C, B>(body, Bytes::new(), None).await.0;
        let bytes = answer.as_ref().map_or(0, |(_, payload)| payload.len() as u64);
        let round_trip = self.round_trip().unwrap_or_default();
        lock(&self.rate).reply_received(Instant::now(), bytes, round_trip);
        answer
    }

    /// Sends changes on one ordered stream, all of them before the first answer is awaited. Changes whose
    /// connection broke before their answer have none.
    pub(in crate::client) async fn send_in_order(
        &self,
        ops: &[&Op],
    ) -> Vec<Option<Result<(OpDone, Bytes), CallFailure>>> {
        let up = match self.current(Instant::now() + self.server_timeout()).await {
            Ok(up) => up,
            Err(fail) => return ops.iter().map(|_| Some(Err(fail.clone()))).collect(),
        };
        let mut pending = Vec::with_capacity(ops.len());
        for op in ops {
            let body = up.understood(op);
            self.count(OpCall::KIND);
            let request = Request::of::<OpCall>(&Keyed { key: up.key, body }, Bytes::new());
            let started = match request {
                Ok(request) => up.connection.start(request.ordered(0)).await,
                Err(error) => Err(error),
            };
            pending.push(started);
        }
        let mut answers = Vec::with_capacity(ops.len());
        for started in pending {
            let reply = match started {
                Ok(pending) => pending.await,
                Err(error) => Err(error),
            };
            self.calls.fetch_add(1, Ordering::Relaxed);
            let decoded = reply.and_then(|reply| Ok((reply.decode::<OpCall>()?, reply.payload)));
            answers.push(match decoded {
                Ok(done) => Some(Ok(done)),
                Err(CallError::Closed { .. }) => {
                    self.drop_connection(&up);
                    None
                }
                Err(CallError::Refused { source }) if source.code == code::KEY => {
                    up.connection.close();
                    self.drop_connection(&up);
                    None
                }
                Err(CallError::Refused { source }) => Some(Err(CallFailure::Refused(source))),
                Err(_) => Some(Err(CallFailure::InvalidReply)),
            });
        }
        answers
    }

    fn drop_connection(&self, up: &OpenSession) {
        self.up.send_if_modified(|current| {
            let same = current.as_ref().is_some_and(|current| current.key.matches(&up.key));
            if same {
                *current = None;
            }
            same
        });
    }

    /// Like [`ServerConnection::send`], for threads that block.
    pub(in crate::client) fn call<C, B>(&self, body: B) -> Result<(C::Reply, Bytes), CallFailure>
    where
        B: Clone,
        C: Call<Header = Keyed<B>>,
    {
        let _waits = self.waiting();
        self.runtime.block_on(self.send::<C, B>(body, Bytes::new(), None)).0
    }
}

pub(super) async fn send_once<C, B>(
    up: &OpenSession,
    body: B,
    payload: Bytes,
    stream: Option<u16>,
) -> Result<(C::Reply, Bytes), CallError>
where
    C: Call<Header = Keyed<B>>,
{
    let mut request = Request::of::<C>(&Keyed { key: up.key, body }, payload)?;
    if let Some(stream) = stream {
        request = request.ordered(stream);
    }
    let reply: Reply = up.connection.call(request).await?;
    Ok((reply.decode::<C>()?, reply.payload))
}
