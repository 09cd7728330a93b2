//! Other hosts: what they may ask of this one, and how this one reaches them.

use crate::{error::HostError, host::Host};
use bytes::Bytes;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};
use tokio::net::TcpListener;
use whimbrel_core::{ByteSize, HostName};
use whimbrel_migrate::{
    link::{Answer, Link, LinkError},
    protocol::{self, HandoverId},
};
use whimbrel_wire::{
    BoxFuture, CallError, Code, ConnectError, Connection, Endpoint, Peer, Pending, PublicKey, Refusal, Reply,
    Request, Service, connect_tls, range, serve_tls,
};

/// All messages of a migration are one stream: pages, then the end of them, then the commit.
const STREAM: u16 = 1;
/// An engine's refusal; its text says all there is to know.
const REFUSED: Code = Code(256);

/// Serves other hosts on `listener` in the background.
pub(crate) fn serve(host: Arc<Host>, listener: TcpListener) {
    let endpoint = Endpoint::new(host.name.clone(), Peers::new(&host));
    let trust = host.trust.clone();
    let runtime = host.runtime.clone();
    runtime.spawn(async move {
        if let Err(error) = serve_tls(listener, &host.identity, trust, endpoint).await {
            tracing::error!(error = &error as &dyn std::error::Error, "other hosts are no longer served");
        }
    });
}

/// Answers what other hosts ask.
struct Peers {
    host: Weak<Host>,
    /// Handovers offered over each connection, by the address of its peer: what is lost with it.
    offered: Arc<Mutex<HashMap<usize, Vec<HandoverId>>>>,
}

impl Peers {
    fn new(host: &Arc<Host>) -> Self {
        Self { host: Arc::downgrade(host), offered: Arc::default() }
    }
}

impl Service for Peers {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Result<Reply, Refusal>> {
        if request.kind & 0xff00 != range::MIGRATE {
            return Box::pin(async move { Err(Refusal::unknown_kind(request.kind)) });
        }
        if request.kind == protocol::OFFER
            && let Some(handover) = protocol::handover_of(&request.header)
        {
            lock(&self.offered).entry(address_of(peer)).or_default().push(handover);
        }
        let host = self.host.clone();
        Box::pin(async move {
            let work = move || migrate(&host, request);
            // On a thread of its own, so that it ends as it should even if the connection does not last.
            tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(refused("the host failed")))
        })
    }

    fn connected(&self, connection: Connection) {
        let (host, offered) = (self.host.clone(), self.offered.clone());
        tokio::spawn(async move {
            connection.closed().await;
            let lost = lock(&offered).remove(&address_of(connection.peer())).unwrap_or_default();
            let Some(host) = host.upgrade() else { return };
            let forget =
                move || lost.into_iter().for_each(|handover| host.arrivals().connection_lost(handover));
            let _ = tokio::task::spawn_blocking(forget).await;
        });
    }
}

fn migrate(host: &Weak<Host>, request: Request) -> Result<Reply, Refusal> {
    let host = host.upgrade().ok_or_else(|| refused("the host is closing down"))?;
    let answer = host.arrivals().handle(request.kind, &request.header, request.payload);
    answer.map(|header| Reply { header: header.into(), payload: Bytes::new() }).map_err(|error| {
        tracing::warn!(error = &error as &dyn std::error::Error, "a message of a migration was refused");
        refused(&chain(&error))
    })
}

fn refused(text: &str) -> Refusal {
    Refusal::new(REFUSED, text)
}

/// An error and its causes on one line: the other host has no other way to see them.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn address_of(peer: &Peer) -> usize {
    std::ptr::from_ref(peer).addr()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    /// Key and address of a trusted host.
    pub(crate) fn peer(&self, name: &HostName) -> Result<(PublicKey, String), HostError> {
        let peer = self.trust.named(name).map_err(|source| HostError::Identity { source: source.into() })?;
        let peer = peer.ok_or_else(|| HostError::Untrusted { host: name.clone() })?;
        let no_address =
            || HostError::invalid(format!("no address is known for {name}: add it with `whimbrel trust`"));
        Ok((peer.key, peer.address.ok_or_else(no_address)?))
    }
}

/// A connection to another host, as a migration sees it. For plain threads.
pub(crate) struct PeerLink {
    connection: Connection,
}

impl PeerLink {
    pub(crate) fn connect(host: &Host, name: &HostName) -> Result<Self, HostError> {
        let (key, address) = host.peer(name)?;
        let endpoint = Endpoint::new(host.name.clone(), ());
        let connected = host.runtime.block_on(connect_tls(&address, key, &host.identity, &endpoint));
        let connection = connected.map_err(|source| match source {
            ConnectError::NotTrusted { .. } | ConnectError::WrongKey { .. } => {
                HostError::NotTrustedThere { host: name.clone(), source: source.into() }
            }
            source => HostError::Unreachable { host: name.clone(), source: source.into() },
        })?;
        Ok(Self { connection })
    }

    /// Limits what is sent, in bytes a second.
    pub(crate) fn limit(&self, rate: Option<ByteSize>) {
        self.connection.limit_rate(rate.map(|rate| rate.0));
    }

    pub(crate) fn bytes_both_ways(&self) -> u64 {
        let traffic = self.connection.traffic();
        traffic.sent + traffic.received
    }
}

impl Link for PeerLink {
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        let request = Request::new(kind, header.into(), payload).ordered(STREAM);
        let pending = self.connection.send_blocking(request).map_err(link_error)?;
        Ok(Box::new(OnItsWay(pending)))
    }

    fn bytes_sent(&self) -> u64 {
        self.connection.traffic().sent
    }
}

struct OnItsWay(Pending);

impl Answer for OnItsWay {
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError> {
        self.0.wait().map(|reply| reply.header).map_err(link_error)
    }
}

fn link_error(error: CallError) -> LinkError {
    match error {
        CallError::Refused { source } => LinkError::Refused { reason: source.text },
        error => LinkError::Lost { source: error.into() },
    }
}

/// No connection yet: the first attempt of a daemon that goes on with an older one's handover.
pub(crate) struct NoLink;

impl Link for NoLink {
    fn send(&self, _: u16, _: Vec<u8>, _: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        Err(LinkError::Lost { source: "there is none yet".into() })
    }

    fn bytes_sent(&self) -> u64 {
        0
    }
}
