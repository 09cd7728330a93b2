//! Incoming requests: who asks, may they, in which order, and what becomes of the answer.
//!
//! Unordered requests run at once, up to a number of handlers; those of one stream run one after the other. A
//! request's bytes stay on the peer's account until its answer has left, and no new handler starts while
//! answers of a whole window wait for a peer that does not take them. Handlers are dropped when the
//! connection ends: what must be finished then belongs into a task of its own.

use crate::{
    Answer, Connection, PublicKey, Refusal, Request, Rights, Role,
    call::Code,
    connection::{HeldCredit, Link, Shared},
    frame::{Flags, WireFrame},
};
use bytes::Bytes;
use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
};
use tokio::{
    sync::{Notify, Semaphore},
    task::JoinSet,
};
use whimbrel_core::HostName;

/// A future in a box.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What vouches for a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerIdentity {
    /// It proved to have the secret of this key.
    Key(PublicKey),
    /// The user's ssh vouches for this destination.
    Ssh(String),
    /// Whoever started this process and holds its standard input and output.
    Stdio,
}

/// Who is at the other end of a connection.
#[derive(Clone)]
pub struct Peer {
    /// What vouches for it.
    pub identity: PeerIdentity,
    /// The name it is trusted under; without a trust file, the name it gave.
    pub name: HostName,
    /// What it is.
    pub role: Role,
    /// What it may ask of us.
    pub rights: Rights,
    /// Version both speak.
    pub version: u16,
    /// Bytes of bulk in flight, each way.
    pub window: u32,
    pub(crate) link: Weak<Link>,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({} by {:?})", self.name, self.identity)
    }
}

/// Answers requests.
pub trait Service: Send + Sync + 'static {
    /// Answers one request. The payload's credit goes back to the peer when the answer has left, so not
    /// answering is how a service slows its peer down. Must not block the thread.
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer>;

    /// A connection came about, and none of its requests is handled before this returns: the handle calls the
    /// peer, a kept handle keeps the connection open. Must not block.
    fn connected(&self, _connection: Connection) {}
}

/// Refuses everything: the side that only calls.
impl Service for () {
    fn handle<'a>(&'a self, _peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async move { Err(Refusal::unknown_kind(request.kind)) })
    }
}

/// A request and the number its answer must carry.
struct Job {
    id: u64,
    request: Request,
    held: HeldCredit,
}

type Streams = HashMap<u16, VecDeque<Job>>;

/// What every handler of a connection shares.
struct Desk {
    service: Arc<dyn Service>,
    peer: Arc<Peer>,
    shared: Arc<Shared>,
    slots: Semaphore,
    /// Streams that have a task; the task ends when its queue is empty.
    streams: Mutex<Streams>,
    /// Bytes of answers that wait for credit.
    backlog: AtomicU64,
    less_backlog: Notify,
}

/// Starts handlers; dropping it drops them all.
pub(crate) struct Dispatcher {
    desk: Arc<Desk>,
    tasks: JoinSet<()>,
}

impl Dispatcher {
    pub(crate) fn new(
        service: Arc<dyn Service>,
        peer: Arc<Peer>,
        shared: Arc<Shared>,
        max_handlers: usize,
    ) -> Self {
        let desk = Desk {
            service,
            peer,
            shared,
            slots: Semaphore::new(max_handlers),
            streams: Mutex::default(),
            backlog: AtomicU64::new(0),
            less_backlog: Notify::new(),
        };
        Self { desk: Arc::new(desk), tasks: JoinSet::new() }
    }

    /// Takes a request in.
    pub(crate) fn request(&mut self, frame: WireFrame, held: HeldCredit) {
        while self.tasks.try_join_next().is_some() {}
        let ordered = frame.head.flags == Flags::ORDERED;
        let (id, stream) = (frame.head.request, frame.head.stream);
        let request = Request::new(frame.head.kind, frame.header, frame.payload);
        let desk = self.desk.clone();
        if !ordered {
            let job = Job { id, request, held };
            self.tasks.spawn(async move {
                // The semaphore is never closed.
                let _slot = desk.slots.acquire().await;
                desk.answer(job).await;
            });
            return;
        }
        let job = Job { id, request: request.ordered(stream), held };
        match self.desk.streams().entry(stream) {
            Entry::Occupied(mut queue) => queue.get_mut().push_back(job),
            Entry::Vacant(place) => {
                place.insert(VecDeque::from([job]));
                self.tasks.spawn(async move { desk.drain(stream).await });
            }
        }
    }
}

impl Desk {
    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next request of `stream`, or none, and then the stream has no task any more.
    fn next(&self, stream: u16) -> Option<Job> {
        let mut streams = self.streams();
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
        self.room_for_answers().await;
        let kind = request.kind;
        let answer = self.ask(request).await;
        let frame = answer_frame(kind, id, answer);
        let bytes = u64::from(frame.head.frame_len());
        self.backlog.fetch_add(bytes, Ordering::AcqRel);
        // Without a connection there is nobody to tell.
        let _sent = self.shared.send_frame(frame).await;
        self.backlog.fetch_sub(bytes, Ordering::AcqRel);
        self.less_backlog.notify_waiters();
        drop(held);
    }

    async fn room_for_answers(&self) {
        loop {
            let less = self.less_backlog.notified();
            if self.backlog.load(Ordering::Acquire) < u64::from(self.peer.window) {
                return;
            }
            less.await;
        }
    }

    async fn ask(&self, request: Request) -> Answer {
        let kind = request.kind;
        if !self.peer.rights.allow(kind) {
            return Err(Refusal::new(
                Code::FORBIDDEN,
                format!("requests of kind {kind:#06x} are not allowed"),
            ));
        }
        // A panic is one handler's failure: the caller gets an answer, the connection lives on.
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
    // At most 1,000 characters: four bytes each are far below the limit of a header.
    frame(Flags::REFUSAL, header, Bytes::new()).expect("a refusal is short")
}

impl Peer {
    /// A handle that calls the peer, unless the connection is closing.
    pub fn connection(self: &Arc<Self>) -> Option<Connection> {
        Connection::upgrade(&self.link, self.clone())
    }
}
