//! Other hosts: what they may ask of this one. How this one reaches them is in `link`, and over ssh in `ssh`.
//!
//! They come by TLS, by the key they are trusted under, or through the socket of the API. Whoever may open that
//! socket is root here already, so a host behind it (one whose ssh runs `whimbrel serve --stdio`) may do all.

mod link;
mod ssh;

pub(crate) use link::{NoLink, PeerLink};
pub(crate) use ssh::SshError;

use crate::host::Host;
use bytes::Bytes;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};
use whimbrel_migrate::protocol::{self, HandoverId};
use whimbrel_wire::{
    BoxFuture, Code, Connection, Endpoint, Peer, PeerIdentity, Refusal, Reply, Request, Rights, Service,
    connect_io, range, serve_tls,
};

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

/// Serves one host whose bytes come through the socket of the API, until it is gone.
pub(crate) async fn serve_stream(host: Arc<Host>, stream: impl AsyncRead + AsyncWrite + Send + 'static) {
    let endpoint = Endpoint::new(host.name.clone(), Peers::new(&host));
    let (reader, writer) = tokio::io::split(stream);
    match connect_io(reader, writer, PeerIdentity::Stdio, Rights::all(), &endpoint).await {
        Ok(connection) => {
            tracing::info!(peer = %connection.peer().name, "a host has come through the socket of the API");
        }
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "a host that came through the socket of the API was not understood");
        }
    }
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
