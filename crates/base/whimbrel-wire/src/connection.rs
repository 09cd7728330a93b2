//! A connection as its users see it: calls, pending replies, counters and the end.
//!
//! Handles are cheap clones. When the last [`Connection`] and the last [`Pending`] are dropped, the
//! connection sends what is queued and closes. Dropping a `Pending` discards only the reply: the request is
//! still carried out. Replies arrive in any order and may be awaited in any. A reply is kept until its
//! `Pending` is awaited, so callers bound the memory by the number of `Pending`s that they hold.

use crate::{
    Call, CallError, CloseReason, Refusal, Reply, Request, RequestOrder,
    credit::{Class, PerClass, ReceiveCredit, SendCredit},
    frame::{Flags, WireFrame, WireFrameError},
    send_queue::SendQueue,
    token_bucket::TokenBucket,
};
use bytes::Bytes;
use std::{
    collections::HashMap,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};
use tokio::sync::{Notify, oneshot, watch};
use whimbrel_core::lock;

/// State that the tasks and handles of one connection share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) send_queue: SendQueue,
    pub(crate) send: PerClass<SendCredit>,
    pub(crate) receive: PerClass<ReceiveCredit>,
    pub(crate) counters: ConnectionCounters,
    pub(crate) limit: Mutex<TokenBucket>,
    pub(crate) limit_changed: Notify,
    calls: Mutex<Calls>,
    ended: watch::Sender<Option<CloseReason>>,
}

#[derive(Debug, Default)]
struct Calls {
    next: u64,
    waiting: HashMap<u64, oneshot::Sender<CallOutcome>>,
}

/// Counters and clocks; times are microseconds since the start of the connection.
#[derive(Debug)]
pub(crate) struct ConnectionCounters {
    began: Instant,
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
    pub(crate) received_at: AtomicU64,
    /// Start or last progress of the current write; `u64::MAX` if there is none.
    pub(crate) write_at: AtomicU64,
    pub(crate) round_trip: AtomicU64,
}

type CallOutcome = Result<Reply, Refusal>;

/// Received bytes that count against the peer's credit until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldCredit {
    pub(crate) shared: Arc<Shared>,
    pub(crate) class: Class,
    pub(crate) bytes: u32,
}

impl Drop for HeldCredit {
    fn drop(&mut self) {
        if self.shared.receive.of(self.class).release(self.bytes) {
            self.shared.send_queue.wake();
        }
    }
}

impl ConnectionCounters {
    pub(crate) fn now(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }
}

impl Shared {
    pub(crate) fn new(window: u32) -> Arc<Self> {
        let meters = ConnectionCounters {
            began: Instant::now(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            received_at: AtomicU64::new(0),
            write_at: AtomicU64::new(u64::MAX),
            round_trip: AtomicU64::new(0),
        };
        Arc::new(Self {
            send_queue: SendQueue::default(),
            send: PerClass::new(window, SendCredit::new),
            receive: PerClass::new(window, ReceiveCredit::new),
            counters: meters,
            limit: Mutex::default(),
            limit_changed: Notify::new(),
            calls: Mutex::default(),
            ended: watch::Sender::new(None),
        })
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        lock(&self.calls)
    }

    /// Ends the connection: every waiting and later call fails with `reason`, which only the first call sets.
    pub(crate) fn end(&self, reason: CloseReason) {
        let mut calls = self.calls();
        self.ended.send_if_modified(|ended| {
            let first = ended.is_none();
            ended.get_or_insert(reason);
            first
        });
        let forgotten = std::mem::take(&mut calls.waiting);
        drop(calls);
        self.send.of(Class::Bulk).close();
        self.send.of(Class::Control).close();
        self.send_queue.clear();
        // Dropping a sender wakes its caller, which then reads the reason.
        drop(forgotten);
    }

    pub(crate) fn reason(&self) -> CloseReason {
        self.ended.borrow().clone().unwrap_or(CloseReason::Local)
    }

    /// Passes a reply to the call that waits for it.
    pub(crate) fn reply(&self, frame: WireFrame) -> Result<(), WireFrameError> {
        let request = frame.head.request;
        let waiting =
            self.calls().waiting.remove(&request).ok_or(WireFrameError::UnknownReply { request })?;
        let answer = if frame.head.flags == Flags::REFUSAL {
            Err(Refusal::from_header(&frame.header)
                .ok_or(WireFrameError::Malformed { kind: frame.head.kind })?)
        } else {
            Ok(Reply { header: frame.header, payload: frame.payload })
        };
        // The caller may have dropped its `Pending`.
        drop(waiting.send(answer));
        Ok(())
    }

    /// Queues a frame once there is credit for it; false if the connection has ended.
    pub(crate) async fn send_frame(&self, frame: WireFrame) -> bool {
        let credit = self.send.of(Class::of(&frame.head));
        let sent = credit.take(frame.head.frame_len()).await;
        if sent {
            self.send_queue.push(frame);
        }
        sent
    }
}

/// Closes the connection when the last handle is dropped.
#[derive(Debug)]
pub(crate) struct Link {
    shared: Arc<Shared>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.send_queue.goodbye("");
    }
}

/// A handle of a connection to another host.
#[derive(Clone)]
pub struct Connection {
    link: Arc<Link>,
    pub(crate) peer: Arc<crate::Peer>,
}

/// Byte counters of a connection, counted in wire frames (TLS and TCP add under 1 %).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes passed to the transport.
    pub sent: u64,
    /// Bytes received from the transport.
    pub received: u64,
    /// Bytes sent or queued that the peer has not used up.
    pub in_flight: u64,
    /// Bytes received that this side has not used up.
    pub queued: u64,
}

/// A future reply. Threads outside a runtime call [`Pending::wait`].
#[derive(Debug)]
#[must_use = "dropping it forgets the reply"]
pub struct Pending {
    reply: oneshot::Receiver<CallOutcome>,
    link: Arc<Link>,
}

impl Connection {
    pub(crate) fn new(shared: Arc<Shared>, peer: impl FnOnce(Weak<Link>) -> crate::Peer) -> Self {
        let link = Arc::new(Link { shared });
        let peer = Arc::new(peer(Arc::downgrade(&link)));
        Self { link, peer }
    }

    pub(crate) fn upgrade(link: &Weak<Link>, peer: Arc<crate::Peer>) -> Option<Self> {
        link.upgrade().map(|link| Self { link, peer })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.link.shared
    }

    /// Peer at the other end of the connection.
    pub fn peer(&self) -> &crate::Peer {
        &self.peer
    }

    /// Sends a request and waits for its reply.
    pub async fn call(&self, request: Request) -> Result<Reply, CallError> {
        self.start(request).await?.await
    }

    /// Sends a request, waiting only for credit. Requests are sent in the order of the calls, but an
    /// unordered one without payload may overtake others. If the future is dropped early, nothing was sent.
    pub async fn start(&self, request: Request) -> Result<Pending, CallError> {
        let unsendable = |source| CallError::Unsendable { source };
        if request.kind & 0xff00 == crate::range::WIRE {
            return Err(unsendable(WireFrameError::Malformed { kind: request.kind }));
        }
        if let Some(source) = self.peer.refusal_by_version(request.kind) {
            return Err(CallError::Refused { source });
        }
        let (flags, stream) = match request.order {
            RequestOrder::Any => (Flags::NONE, 0),
            RequestOrder::Stream(stream) => (Flags::ORDERED, stream),
        };
        let frame = WireFrame::new(flags, request.kind, stream, 0, request.header, request.payload);
        let mut frame = frame.and_then(|frame| frame.with_rest(request.rest)).map_err(unsendable)?;
        let credit = self.shared().send.of(Class::of(&frame.head));
        if !credit.take(frame.head.frame_len()).await {
            return Err(CallError::Closed { source: self.shared().reason() });
        }
        let (answer, reply) = oneshot::channel();
        let mut calls = self.shared().calls();
        if self.shared().ended.borrow().is_some() {
            return Err(CallError::Closed { source: self.shared().reason() });
        }
        calls.next += 1;
        frame.head.request = calls.next;
        calls.waiting.insert(frame.head.request, answer);
        drop(calls);
        self.shared().send_queue.push(frame);
        Ok(Pending { reply, link: self.link.clone() })
    }

    /// Makes a typed call and returns the reply's header and payload.
    pub async fn request<C: Call>(
        &self,
        header: &C::Header,
        payload: Bytes,
    ) -> Result<(C::Reply, Bytes), CallError> {
        self.request_of_parts::<C>(header, payload, Vec::new()).await
    }

    /// Does what [`Connection::request`] does with a payload that lies in several places.
    pub async fn request_of_parts<C: Call>(
        &self,
        header: &C::Header,
        payload: Bytes,
        rest: Vec<Bytes>,
    ) -> Result<(C::Reply, Bytes), CallError> {
        let reply = self.call(Request { rest, ..Request::of::<C>(header, payload)? }).await?;
        Ok((reply.decode::<C>()?, reply.payload))
    }

    /// [`Connection::call`] for threads outside a runtime; blocks the thread.
    pub fn call_blocking(&self, request: Request) -> Result<Reply, CallError> {
        block_on(self.call(request))
    }

    /// [`Connection::start`] for threads outside a runtime; blocks the thread until there is credit.
    pub fn send_blocking(&self, request: Request) -> Result<Pending, CallError> {
        block_on(self.start(request))
    }

    /// Limits the send rate to `rate` bytes a second from now on; `None` removes the limit.
    pub fn limit_rate(&self, rate: Option<u64>) {
        let now = Duration::from_micros(self.shared().counters.now());
        lock(&self.shared().limit).set_rate(rate, now);
        self.shared().limit_changed.notify_one();
    }

    /// The counters of the connection so far.
    pub fn traffic(&self) -> Traffic {
        let both = |of: &dyn Fn(Class) -> u64| of(Class::Bulk) + of(Class::Control);
        Traffic {
            sent: self.shared().counters.sent.load(Ordering::Relaxed),
            received: self.shared().counters.received.load(Ordering::Relaxed),
            in_flight: both(&|class| self.shared().send.of(class).in_flight()),
            queued: both(&|class| self.shared().receive.of(class).queued()),
        }
    }

    /// Round trip time of the last ping, including its time in queues; `None` before the first.
    pub fn round_trip(&self) -> Option<Duration> {
        let micros = self.shared().counters.round_trip.load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros))
    }

    /// Closes the connection after sending what is queued; waiting calls fail with [`CloseReason::Local`].
    pub fn close(&self) {
        self.shared().send_queue.goodbye("");
    }

    /// Closes the connection at once: waiting calls fail, and what is queued is not sent.
    pub fn abort(&self) {
        self.shared().end(CloseReason::Local);
        self.shared().send_queue.goodbye("");
    }

    /// Waits for the end of the connection and returns the reason.
    pub async fn closed(&self) -> CloseReason {
        closed(self.shared()).await
    }

    /// The reason why the connection ended, if it has.
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.shared().ended.borrow().clone()
    }
}

pub(crate) async fn closed(shared: &Shared) -> CloseReason {
    // The sender lives in `shared`, so waiting cannot fail.
    let _ = shared.ended.subscribe().wait_for(Option::is_some).await;
    shared.reason()
}

whimbrel_core::opaque_debug!(Connection);

impl Pending {
    /// Waits for the reply in a thread outside a runtime; blocks the thread.
    pub fn wait(self) -> Result<Reply, CallError> {
        block_on(self)
    }

    /// Waits for at most `timeout`; none if the reply has not arrived by then. Not to be called again after a
    /// reply.
    pub fn wait_for(&mut self, timeout: Duration) -> Option<Result<Reply, CallError>> {
        block_on_until(self, Instant::now() + timeout)
    }
}

impl Future for Pending {
    type Output = Result<Reply, CallError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let arrived = std::task::ready!(Pin::new(&mut self.reply).poll(context));
        Poll::Ready(match arrived {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(source)) => Err(CallError::Refused { source }),
            Err(_) => Err(CallError::Closed { source: self.link.shared.reason() }),
        })
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs on this thread a future that needs no runtime, until a deadline.
fn block_on_until<F: Future + Unpin>(future: &mut F, deadline: Instant) -> Option<F::Output> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match Pin::new(&mut *future).poll(&mut context) {
            Poll::Ready(output) => return Some(output),
            Poll::Pending => {
                let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
                thread::park_timeout(left);
            }
        }
    }
}

/// Runs on this thread a future that needs no runtime (a semaphore, a oneshot).
fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
