//! The dispatcher of incoming requests: checks rights, orders requests, runs handlers, sends answers.
//!
//! Unordered requests run at once, up to a number of handlers; requests of one stream run one after the
//! other. A request's bytes count against the peer's credit until its answer was sent. No new handler starts
//! while a window of answers waits for the peer's credit. Handlers are dropped when the connection ends: work
//! that must finish belongs in a task of its own.

use crate::{
    Answer, Connection, Protocol, ProtocolMismatch, ProtocolVersions, PublicKey, Refusal, Request, Role,
    call::Code,
    connection::{HeldCredit, Link, Shared},
    endpoint::Grants,
    frame::{Flags, WireFrame},
    hello::versions_of,
};
use bytes::Bytes;
use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
};
use tokio::{
    sync::{Notify, Semaphore},
    task::JoinSet,
};
use whimbrel_core::{HostName, lock};

/// A boxed, sendable future.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// How the peer was authenticated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerIdentity {
    /// The peer proved that it has the secret of this key.
    Key(PublicKey),
    /// The user's ssh authenticated this destination.
    Ssh(String),
    /// The process that started this one and holds its standard input and output.
    Stdio,
}

/// Peer at the other end of a connection.
#[derive(Clone)]
pub struct Peer {
    /// How the peer was authenticated.
    pub identity: PeerIdentity,
    /// The name in the trust list; without a trust list, the name in the peer's hello.
    pub name: HostName,
    /// The kind of program that the peer is.
    pub role: Role,
    /// Protocol version that both sides use.
    pub version: u16,
    /// Bytes of bulk that may be in flight in each direction.
    pub window: u32,
    pub(crate) grants: Grants,
    pub(crate) mismatches: Vec<ProtocolMismatch>,
    /// Protocols that the peer's hello lists.
    pub(crate) protocols: Vec<ProtocolVersions>,
    pub(crate) link: Weak<Link>,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({} by {:?})", self.name, self.identity)
    }
}

/// Handler of incoming requests.
pub trait Service: Send + Sync + 'static {
    /// Answers one request. The payload's credit is returned to the peer after the answer was sent, so a
    /// service slows its peer down by not answering. Must not block the thread.
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer>;

    /// Whether the peer may send requests of `kind` now, asked for each of them before it is handled. A
    /// service whose requests need more than the right of their range judges them itself.
    fn admits(&self, peer: &Peer, kind: u16) -> bool {
        peer.grants.allow(&peer.identity, kind)
    }

    /// Called for a new connection before any of its requests is handled. The handle can call the peer, and
    /// keeps the connection open while it exists. Must not block.
    fn connected(&self, _connection: Connection) {}
}

/// Refuses every request, for sides that only call.
impl Service for () {
    fn handle<'a>(&'a self, _peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async move { Err(Refusal::unknown_kind(request.kind)) })
    }
}

/// A request and the id that its answer must carry.
struct Job {
    id: u64,
    request: Request,
    held: HeldCredit,
}

type Streams = HashMap<u16, VecDeque<Job>>;

/// State that all handlers of a connection share.
struct HandlerContext {
    service: Arc<dyn Service>,
    peer: Arc<Peer>,
    shared: Arc<Shared>,
    handler_permits: Semaphore,
    /// Requests of streams that have a task; the task ends when its queue is empty.
    streams: Mutex<Streams>,
    /// Bytes of answers that wait for credit.
    backlog: AtomicU64,
    backlog_shrunk: Notify,
}

/// Starts handlers; dropping the dispatcher drops them all.
pub(crate) struct Dispatcher {
    context: Arc<HandlerContext>,
    tasks: JoinSet<()>,
}

impl Dispatcher {
    pub(crate) fn new(
        service: Arc<dyn Service>,
        peer: Arc<Peer>,
        shared: Arc<Shared>,
        max_handlers: usize,
    ) -> Self {
        let desk = HandlerContext {
            service,
            peer,
            shared,
            handler_permits: Semaphore::new(max_handlers),
            streams: Mutex::default(),
            backlog: AtomicU64::new(0),
            backlog_shrunk: Notify::new(),
        };
        Self { context: Arc::new(desk), tasks: JoinSet::new() }
    }

    /// Queues or starts a request.
    pub(crate) fn request(&mut self, frame: WireFrame, held: HeldCredit) {
        while self.tasks.try_join_next().is_some() {}
        let ordered = frame.head.flags == Flags::ORDERED;
        let (id, stream) = (frame.head.request, frame.head.stream);
        let request = Request::new(frame.head.kind, frame.header, frame.payload);
        let desk = self.context.clone();
        if !ordered {
            let job = Job { id, request, held };
            self.tasks.spawn(async move {
                // The semaphore is never closed.
                let _slot = desk.handler_permits.acquire().await;
                desk.answer(job).await;
            });
            return;
        }
        let job = Job { id, request: request.ordered(stream), held };
        match lock(&self.context.streams).entry(stream) {
            Entry::Occupied(mut queue) => queue.get_mut().push_back(job),
            Entry::Vacant(place) => {
                place.insert(VecDeque::from([job]));
                self.tasks.spawn(async move { desk.drain(stream).await });
            }
        }
    }
}

impl HandlerContext {
    /// The next request of `stream`. If there is none, the stream is removed and its task ends.
    fn next(&self, stream: u16) -> Option<Job> {
        let mut streams = lock(&self.streams);
        let job = streams.get_mut(&stream)?.pop_front();
        if job.is_none() {
            streams.remove(&stream);
        }
        job
    }

    async fn drain(&self, stream: u16) {
        while let Some(job) = self.next(stream) {
            self.answer(job).await;
        }
    }

    async fn answer(&self, job: Job) {
        let Job { id, request, held } = job;
        self.wait_for_backlog().await;
        let kind = request.kind;
        let answer = self.call_service(request).await;
        let frame = answer_frame(kind, id, answer);
        let bytes = u64::from(frame.head.frame_len());
        self.backlog.fetch_add(bytes, Ordering::AcqRel);
        // An answer is lost if the connection has ended.
        let _sent = self.shared.send_frame(frame).await;
        self.backlog.fetch_sub(bytes, Ordering::AcqRel);
        self.backlog_shrunk.notify_waiters();
        drop(held);
    }

    async fn wait_for_backlog(&self) {
        loop {
            let less = self.backlog_shrunk.notified();
            if self.backlog.load(Ordering::Acquire) < u64::from(self.peer.window) {
                return;
            }
            less.await;
        }
    }

    async fn call_service(&self, request: Request) -> Answer {
        let kind = request.kind;
        if !self.service.admits(&self.peer, kind) {
            return Err(Refusal::new(
                Code::FORBIDDEN,
                format!("requests of kind {kind:#06x} are not allowed"),
            ));
        }
        if let Some(refusal) = self.peer.refusal_by_version(kind) {
            return Err(refusal);
        }
        // A panic fails only its request: the caller gets a refusal and the connection stays open.
        let mut handled = pin!(async { self.service.handle(&self.peer, request).await });
        std::future::poll_fn(|context| {
            let polled = catch_unwind(AssertUnwindSafe(|| handled.as_mut().poll(context)));
            polled.unwrap_or_else(|_| {
                tracing::error!(peer = %self.peer.name, kind, "a handler panicked");
                Poll::Ready(Err(Refusal::new(Code::INTERNAL, "the handler failed")))
            })
        })
        .await
    }
}

fn answer_frame(kind: u16, request: u64, answer: Answer) -> WireFrame {
    let frame = |flags, header, payload| WireFrame::new(flags, kind, 0, request, header, payload);
    let refusal = match answer {
        Ok(reply) => match frame(Flags::REPLY, reply.header, reply.payload) {
            Ok(frame) => return frame,
            Err(error) => Refusal::new(Code::TOO_LONG, error.to_string()),
        },
        Err(refusal) => refusal,
    };
    let header = refusal.to_header();
    // At most 1,000 characters of four bytes, far below the limit of a header.
    frame(Flags::REFUSAL, header, Bytes::new()).expect("a refusal is short")
}

impl Peer {
    /// The refusal of a request whose protocol has no common version.
    pub(crate) fn refusal_by_version(&self, kind: u16) -> Option<Refusal> {
        let found = self.mismatches.iter().find(|one| (one.kinds.0..=one.kinds.1).contains(&kind))?;
        Some(Refusal::new(Code::VERSION, found.to_string()))
    }

    /// The version of a protocol that both sides use; none if they have none in common.
    pub fn version_of(&self, protocol: &Protocol) -> Option<u16> {
        protocol.range().common(versions_of(&self.protocols, protocol)?)
    }

    /// A handle that calls the peer, unless the connection is closing.
    pub fn connection(self: &Arc<Self>) -> Option<Connection> {
        Connection::upgrade(&self.link, self.clone())
    }
}
