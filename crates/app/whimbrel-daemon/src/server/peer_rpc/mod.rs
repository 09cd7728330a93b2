//! Peer RPC: the calls that peers may make to this host. `peers` has the outbound side.
//!
//! Peers come over TLS, with the key under which they are trusted, or through the API socket. Who may open
//! that socket is root here already, so a host behind it (one whose ssh runs `whimbrel dial-stdio`) may do
//! everything.

pub(crate) use crate::peers::connections::PeerConnections;
pub(crate) use crate::peers::link::PeerLink;
pub(crate) use crate::transfer::handoff::{ClaimMachine, GrantMachine, HandoffSubject, PrepareHandoff};
pub(crate) use crate::transfer::remote_objects::PeerObjects;
pub(crate) use crate::transfer::store_service::TransferState;
use whimbrel_core::{HostName, error_chain, lock};

use crate::transfer::store_service::Requester;
use crate::{
    core::{
        error::DaemonError,
        refs,
        rights::{self, Access as Way},
    },
    daemon::Daemon,
    evacuate::{CapacityReply, EvacuateHost, QueryCapacity},
    guest::SetGuestPermissions,
    network::tunnel,
};
use bytes::Bytes;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};
use whimbrel_migrate::{
    postcopy::{PageServer, messages},
    protocol::{self, HandoverId},
};
use whimbrel_wire::{
    Answer, BoxFuture, Call, Code, Connection, Endpoint, Peer, PeerIdentity, Protocol, Refusal, Reply,
    Request, Rights, Service, Version, connect_io, range, serve_tls,
};

/// Code of an engine's refusal; only the text differs.
pub(crate) const REFUSED: Code = Code(256);

/// Versions of calls between hosts that belong to no engine: handoffs, evacuations, permissions of guests.
const HOST_CALLS: Protocol = Protocol {
    name: "host",
    kinds: (range::MIGRATE + 0x40, range::MIGRATE + 0xff),
    versions: &[Version {
        number: 1,
        reason: "the first: handoff of suspended machines, capacity, evacuation",
    }],
};

/// Protocols of the calls that this host makes and answers.
pub(crate) const PROTOCOLS: [Protocol; 5] = [
    protocol::PROTOCOL,
    HOST_CALLS,
    whimbrel_transfer::protocol::PROTOCOL,
    whimbrel_protect::protocol::PROTOCOL,
    tunnel::protocol::PROTOCOL,
];

/// Serves other hosts on `listener` in the background.
pub(crate) fn serve(host: Arc<Daemon>, listener: TcpListener) {
    let endpoint = Endpoint::new(host.name.clone(), Peers::new(&host.me)).with_protocols(PROTOCOLS);
    let trust = host.trust.clone();
    let runtime = host.runtime.clone();
    runtime.spawn(async move {
        if let Err(error) = serve_tls(listener, &host.identity, trust, endpoint).await {
            tracing::error!(error = &error as &dyn std::error::Error, "other hosts are no longer served");
        }
    });
}

/// Serves one host that comes through the API socket, until it is gone.
pub(crate) async fn serve_stream(host: Arc<Daemon>, stream: impl AsyncRead + AsyncWrite + Send + 'static) {
    let endpoint = Endpoint::new(host.name.clone(), Peers::new(&host.me)).with_protocols(PROTOCOLS);
    let (reader, writer) = tokio::io::split(stream);
    match connect_io(reader, writer, PeerIdentity::Stdio, Rights::all(), &endpoint).await {
        Ok(connection) => {
            tracing::info!(peer = %connection.peer().name, "a host connected through the API socket");
        }
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "the handshake of a host on the API socket failed");
        }
    }
}

/// Answers the calls of other hosts.
pub(crate) struct Peers {
    host: Weak<Daemon>,
    /// Handovers offered over each connection, by the address of its peer; lost with the connection.
    offered: Arc<Mutex<HashMap<usize, Vec<HandoverId>>>>,
}

impl Peers {
    pub(crate) fn new(host: &Weak<Daemon>) -> Self {
        Self { host: host.clone(), offered: Arc::default() }
    }
}

/// A separate connection to a trusted host, which nothing else uses. The peer's calls are answered as usual.
pub(crate) fn connect_separately(host: &Daemon, name: &HostName) -> Result<Connection, DaemonError> {
    crate::peers::link::connect(host, name, SeparateService(Peers::new(&host.me)))
}

/// Answers as usual, but does not add the connection to the table of peers.
pub(crate) struct SeparateService(pub(crate) Peers);

impl Service for SeparateService {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        self.0.handle(peer, request)
    }
}

/// A fetch connection: a new connection to a trusted host, which requests pages of `giving` over it. Other
/// calls are answered as usual, since that host may use the connection for more.
pub(crate) fn open_fetch_connection(
    host: &Daemon,
    name: &HostName,
    giving: Arc<PageServer>,
) -> Result<Connection, DaemonError> {
    crate::peers::link::connect(
        host,
        name,
        FetchService { page_server: giving, others: Peers::new(&host.me) },
    )
}

struct FetchService {
    page_server: Arc<PageServer>,
    others: Peers,
}

impl Service for FetchService {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        if !matches!(request.kind, messages::FETCH | messages::COMPLETE) {
            return self.others.handle(peer, request);
        }
        let giving = self.page_server.clone();
        Box::pin(async move {
            let answer = tokio::task::spawn_blocking(move || giving.handle(request.kind, &request.header));
            let answer = answer.await.map_err(|_| refused("the host failed"))?;
            let (header, payload) = answer.map_err(|error| refused(&error_chain(&error)))?;
            Ok(Reply { header: header.into(), payload: payload.into() })
        })
    }
}

/// Accepts the fetch connection that the source of a machine offers.
fn accept_fetch_connection(
    host: &Daemon,
    peer: &HostName,
    connection: Option<Connection>,
    request: &Request,
) -> Answer {
    let connection = connection.ok_or_else(|| refused("the connection is over"))?;
    let attend: messages::OfferFetch =
        postcard::from_bytes(&request.header).map_err(|error| refused(&error.to_string()))?;
    let attended = host.fetchers.accept_connection(peer, connection, &attend).map_err(|why| refused(&why))?;
    let header = postcard::to_stdvec(&attended).map_err(|error| refused(&error.to_string()))?;
    Ok(Reply { header: header.into(), payload: Bytes::new() })
}

impl Service for Peers {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Result<Reply, Refusal>> {
        let asker = Requester::of(peer);
        let host = self.host.clone();
        // On a thread of its own, so that it completes even if the connection does not last.
        let on_a_thread = |work: Box<dyn FnOnce() -> Answer + Send>| -> BoxFuture<'a, Answer> {
            Box::pin(async move {
                let done = tokio::task::spawn_blocking(work).await;
                done.unwrap_or_else(|_| Err(refused("the host failed")))
            })
        };
        match request.kind {
            kind if kind & 0xff00 == range::STORE => {
                return on_a_thread(Box::new(move || {
                    crate::transfer::store_service::answer(&live_daemon(&host)?, &asker, &request)
                }));
            }
            PrepareHandoff::KIND | GrantMachine::KIND | ClaimMachine::KIND => {
                return on_a_thread(Box::new(move || answer_handoff(&live_daemon(&host)?, &asker, &request)));
            }
            QueryCapacity::KIND => {
                return on_a_thread(Box::new(move || answer_capacity(&live_daemon(&host)?, &request)));
            }
            EvacuateHost::KIND => {
                return on_a_thread(Box::new(move || {
                    answer_evacuation(&live_daemon(&host)?, &asker, &request)
                }));
            }
            kind if kind & 0xff00 == crate::protect::RANGE => {
                return on_a_thread(Box::new(move || protection(&live_daemon(&host)?, &asker, request)));
            }
            SetGuestPermissions::KIND => {
                return on_a_thread(Box::new(move || set_guest_permissions(&live_daemon(&host)?, &request)));
            }
            kind if kind & 0xff00 == tunnel::RANGE => {
                return Box::pin(async move { tunnel::handle(live_daemon(&host)?, peer, request).await });
            }
            kind if kind & 0xff00 != range::MIGRATE => {
                return Box::pin(async move { Err(Refusal::unknown_kind(kind)) });
            }
            _ => {}
        }
        if request.kind == protocol::OFFER
            && let Some(handover) = protocol::handover_of(&request.header)
        {
            lock(&self.offered).entry(address_of(peer)).or_default().push(handover);
        }
        if request.kind == messages::OFFER_FETCH {
            let (name, address) = (peer.name.clone(), address_of(peer));
            return on_a_thread(Box::new(move || {
                let host = live_daemon(&host)?;
                accept_fetch_connection(&host, &name, host.tunnels.connection(address), &request)
            }));
        }
        on_a_thread(Box::new(move || {
            let host = live_daemon(&host)?;
            migrate(&host, request)
        }))
    }

    fn connected(&self, connection: Connection) {
        if let Some(host) = self.host.upgrade() {
            host.connections.arrived(&connection);
            host.tunnels.arrived(&connection);
        }
        let (host, offered) = (self.host.clone(), self.offered.clone());
        tokio::spawn(async move {
            connection.closed().await;
            let lost = lock(&offered).remove(&address_of(connection.peer())).unwrap_or_default();
            let Some(host) = host.upgrade() else { return };
            let gone = address_of(connection.peer());
            let forget = move || {
                host.tunnels.left(gone);
                lost.into_iter().for_each(|handover| host.arrivals().connection_lost(handover));
            };
            let _ = tokio::task::spawn_blocking(forget).await;
        });
    }
}

fn live_daemon(host: &Weak<Daemon>) -> Result<Arc<Daemon>, Refusal> {
    host.upgrade().ok_or_else(|| refused("the host is closing down"))
}

/// Answers a capacity query. A host that may migrate machines here may ask.
fn answer_capacity(host: &Arc<Daemon>, request: &Request) -> Answer {
    let asked = request.decode::<QueryCapacity>()?;
    let room: CapacityReply = host.spare_capacity(&asked).map_err(|error| refused(&error_chain(&error)))?;
    Reply::of::<QueryCapacity>(&room, Bytes::new())
}

/// Handles a message about an evacuation of this host that a peer requested.
fn answer_evacuation(host: &Arc<Daemon>, asker: &Requester, request: &Request) -> Answer {
    let order = request.decode::<EvacuateHost>()?;
    let said = host.answer_remote_evacuation(&asker.identity, &order, &request.payload);
    Reply::of::<EvacuateHost>(&(), said.into())
}

/// Sets the guest permissions of a machine that came from the peer, which proves it by the handover's id.
fn set_guest_permissions(host: &Arc<Daemon>, request: &Request) -> Answer {
    let taken = host.save_guest_permissions(request.decode::<SetGuestPermissions>()?);
    Reply::of::<SetGuestPermissions>(&taken, Bytes::new())
}

/// Handles a handoff: the right to resume a suspended machine.
fn answer_handoff(host: &Arc<Daemon>, asker: &Requester, request: &Request) -> Answer {
    let say = |error: DaemonError| refused(&error_chain(&error));
    let may = |way: Way, what: &HandoffSubject| {
        let name = refs::machine_ref(&what.machine);
        match rights::peer_may(&host.trust, &asker.identity, way, &name) {
            true => Ok(()),
            false => Err(refused(&format!("{} may not do that with {} here", asker.name, what.machine))),
        }
    };
    match request.kind {
        PrepareHandoff::KIND => {
            let what = request.decode::<PrepareHandoff>()?;
            may(Way::Write, &what)?;
            host.prepare_handoff(&asker.name, &what).map_err(say)?;
            Reply::of::<PrepareHandoff>(&(), Bytes::new())
        }
        GrantMachine::KIND => {
            let what = request.decode::<GrantMachine>()?;
            may(Way::Write, &what)?;
            host.accept_handoff(&what).map_err(say)?;
            Reply::of::<GrantMachine>(&(), Bytes::new())
        }
        _ => {
            let what = request.decode::<ClaimMachine>()?;
            may(Way::Read, &what)?;
            let given = host.release_to(&asker.name, &what).map_err(say)?;
            Reply::of::<ClaimMachine>(&given, Bytes::new())
        }
    }
}

/// Standbys and leases.
fn protection(host: &Arc<Daemon>, asker: &Requester, request: Request) -> Answer {
    let Request { kind, header, payload, .. } = request;
    let answer = host.answer_protection(&asker.name, kind, &header, payload);
    answer.map(|header| Reply { header: header.into(), payload: Bytes::new() }).map_err(|error| {
        tracing::warn!(error = &error as &dyn std::error::Error, "a message of a protection was refused");
        refused(&error_chain(&error))
    })
}

fn migrate(host: &Daemon, request: Request) -> Answer {
    let answer = host.arrivals().handle(request.kind, &request.header, request.payload);
    answer.map(|header| Reply { header: header.into(), payload: Bytes::new() }).map_err(|error| {
        tracing::warn!(error = &error as &dyn std::error::Error, "a message of a migration was refused");
        refused(&error_chain(&error))
    })
}

pub(crate) fn refused(text: &str) -> Refusal {
    Refusal::new(REFUSED, text)
}

fn address_of(peer: &Peer) -> usize {
    std::ptr::from_ref(peer).addr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_wire::golden::{call, check};

    #[test]
    fn messages_keep_their_bytes_as_long_as_their_version_stays() {
        let samples = [
            ("PrepareHandoff", call::<PrepareHandoff>()),
            ("GrantMachine", call::<GrantMachine>()),
            ("ClaimMachine", call::<ClaimMachine>()),
            ("QueryCapacity", call::<QueryCapacity>()),
            ("SetGuestPermissions", call::<SetGuestPermissions>()),
            ("EvacuateHost", call::<EvacuateHost>()),
        ];
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/server/peer_rpc/messages.txt");
        check(path, HOST_CALLS.range(), &samples);
    }

    #[test]
    fn no_kind_belongs_to_two_protocols() {
        for (index, one) in PROTOCOLS.iter().enumerate() {
            for other in &PROTOCOLS[index + 1..] {
                assert!(one.kinds.1 < other.kinds.0 || other.kinds.1 < one.kinds.0, "{one:?}, {other:?}");
            }
        }
    }
}
