//! Peer RPC: the calls that peers may make to this host. `peers` has the outbound side.
//!
//! Peers come over TLS, with the key under which they are trusted, or through the API socket, or this host
//! has connected to them. In all cases each request is judged by the entry that the trust list has for the
//! peer at that moment (`request_table`). A user who may open the API socket is root here already, so a host
//! behind it (one whose ssh runs `whimbrel dial-stdio`) may do everything, unless it has an entry.

pub(crate) mod request_table;

pub(crate) use crate::peers::connections::PeerConnections;
pub(crate) use crate::peers::link::PeerLink;
pub(crate) use crate::transfer::handoff::{ClaimMachine, GrantMachine, HandoffSubject, PrepareHandoff};
pub(crate) use crate::transfer::remote_objects::PeerObjects;
pub(crate) use crate::transfer::store_service::TransferState;
use whimbrel_core::{HostName, error_chain, lock};

use crate::transfer::store_service::Requester;
use crate::{
    core::{error::DaemonError, rights::Caller},
    daemon::Daemon,
    evacuate::{CapacityReply, EvacuateHost, QueryCapacity},
    guest::SetGuestPermissions,
    migrate::cpu_baseline::QueryCpu,
    network::{shared, tunnel},
    peers::{connections::RequestClass, hosts::QueryMachines},
};
use bytes::Bytes;
use request_table::{HostRequest, authorize};
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
    protocol::{self, HandoverId, Offer, PageQueryReply},
};
use whimbrel_transfer::Access as _;
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
        let identity = match host.identity() {
            Ok(identity) => identity,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                return tracing::error!(error, "other hosts are not served");
            }
        };
        if let Err(error) = serve_tls(listener, identity, trust, endpoint).await {
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

/// The use of a connection on this side.
enum ConnectionUse {
    /// For any calls, in both directions.
    Shared,
    /// For one purpose of this host's, so it is not added to the table of peers.
    Separate,
    /// For the pages of a machine that has left this host.
    Fetch(Arc<PageServer>),
}

/// Answers the calls of other hosts.
pub(crate) struct Peers {
    host: Weak<Daemon>,
    purpose: ConnectionUse,
    /// Handovers offered over each connection, by the address of its peer; lost with the connection.
    offered: Arc<Mutex<HashMap<usize, Vec<HandoverId>>>>,
}

impl Peers {
    pub(crate) fn new(host: &Weak<Daemon>) -> Self {
        Self { host: host.clone(), purpose: ConnectionUse::Shared, offered: Arc::default() }
    }

    /// For a connection that is not added to the table of peers.
    pub(crate) fn separate(host: &Weak<Daemon>) -> Self {
        Self { purpose: ConnectionUse::Separate, ..Self::new(host) }
    }
}

/// A separate connection to a trusted host, which nothing else uses. The peer's calls are answered as usual.
pub(crate) fn connect_separately(host: &Daemon, name: &HostName) -> Result<Connection, DaemonError> {
    crate::peers::link::connect(host, name, Peers::separate(&host.me))
}

/// A fetch connection: a new connection to a trusted host, which requests pages of `giving` over it. Other
/// calls are answered as usual, since that host may use the connection for more.
pub(crate) fn open_fetch_connection(
    host: &Daemon,
    name: &HostName,
    giving: Arc<PageServer>,
) -> Result<Connection, DaemonError> {
    let service = Peers { purpose: ConnectionUse::Fetch(giving), ..Peers::new(&host.me) };
    crate::peers::link::connect(host, name, service)
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
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        let Some(kind) = HostRequest::of(request.kind) else {
            return Box::pin(async move { Err(Refusal::unknown_kind(request.kind)) });
        };
        if kind == HostRequest::TunnelFrames {
            let host = self.host.clone();
            return Box::pin(async move {
                let host = live_daemon(&host)?;
                judge(&host, &Requester::of(peer), kind, &request)?;
                tunnel::pass_on(&host, peer, &request)
            });
        }
        if kind == HostRequest::Offer
            && let Some(handover) = protocol::handover_of(&request.header)
        {
            lock(&self.offered).entry(address_of(peer)).or_default().push(handover);
        }
        let call = IncomingCall {
            kind,
            asker: Requester::of(peer),
            connection: address_of(peer),
            page_server: match &self.purpose {
                ConnectionUse::Fetch(page_server) => Some(page_server.clone()),
                ConnectionUse::Shared | ConnectionUse::Separate => None,
            },
            request,
        };
        let host = self.host.clone();
        Box::pin(async move {
            let class = kind.class();
            let slot = live_daemon(&host)?.connections.request_slot(&peer.name, class).await;
            let work = move || {
                let _slot = slot;
                call.answer(&live_daemon(&host)?)
            };
            // On a thread of its own, so that it completes even if the connection does not last.
            match class {
                RequestClass::Lease => on_a_new_thread(work).await,
                RequestClass::Common => tokio::task::spawn_blocking(work).await.ok(),
            }
            .unwrap_or_else(|| Err(refused("the host failed")))
        })
    }

    /// Each request is judged with its object, by [`judge`].
    fn admits(&self, _: &Peer, _: u16) -> bool {
        true
    }

    fn connected(&self, connection: Connection) {
        if !matches!(self.purpose, ConnectionUse::Shared) {
            return;
        }
        if let Some(host) = self.host.upgrade() {
            let peer = connection.peer();
            // The name of a peer on the API socket is its own word. Where this host knows a route to the
            // host of that name, it calls it over that.
            if peer.identity != PeerIdentity::Stdio || host.route(&peer.name).is_err() {
                host.connections.arrived(&connection);
            }
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
                host.link_lost(gone, "the connection is over");
                lost.into_iter().for_each(|handover| host.arrivals().connection_lost(handover));
            };
            let _ = tokio::task::spawn_blocking(forget).await;
        });
    }
}

/// Runs `work` on a thread that nothing else occupies: the shared ones may all be waiting for disks. The
/// semaphore of its class bounds the number of such threads.
async fn on_a_new_thread(work: impl FnOnce() -> Answer + Send + 'static) -> Option<Answer> {
    let (send, answered) = tokio::sync::oneshot::channel();
    let run = move || drop(send.send(work()));
    std::thread::Builder::new().name("lease".into()).spawn(run).ok()?;
    answered.await.ok()
}

/// Whether the peer may make this request now; then by whom it is made.
fn judge(host: &Daemon, asker: &Requester, kind: HostRequest, request: &Request) -> Result<Caller, Refusal> {
    let caller = Caller::find(&host.trust, &asker.identity, &asker.name);
    let judged = authorize(&caller, kind, request, |id| host.tunnels.is_home_of(id));
    judged.inspect_err(|refusal| tracing::info!(peer = %asker.name, ?kind, %refusal, "refused a request"))?;
    Ok(caller)
}

/// A request of a peer, on its own thread.
struct IncomingCall {
    kind: HostRequest,
    asker: Requester,
    /// Address of the peer, which identifies the connection.
    connection: usize,
    /// The pages that this connection serves, if it was made for that.
    page_server: Option<Arc<PageServer>>,
    request: Request,
}

impl IncomingCall {
    fn answer(self, host: &Arc<Daemon>) -> Answer {
        let caller = judge(host, &self.asker, self.kind, &self.request)?;
        let Self { kind, asker, connection, page_server, request } = self;
        match kind {
            HostRequest::Fetch | HostRequest::Complete => serve_pages(page_server, kind, &request),
            HostRequest::OfferFetch => {
                accept_fetch_connection(host, &asker.name, host.tunnels.connection(connection), &request)
            }
            HostRequest::Offer => migrate(host, &asker, without_foreign_bases(host, &caller, request)?),
            // Content that is found by its digest alone may be anybody's.
            HostRequest::QueryPages if !caller.reads_everything() => nothing_found(),
            HostRequest::BootFile
            | HostRequest::Pages
            | HostRequest::Finish
            | HostRequest::Commit
            | HostRequest::CommitOrReturn
            | HostRequest::Abort
            | HostRequest::MissingPages
            | HostRequest::QueryPages
            | HostRequest::EarlyState
            | HostRequest::BootFilePages
            | HostRequest::LateFrames => migrate(host, &asker, request),
            HostRequest::PrepareHandoff | HostRequest::GrantMachine | HostRequest::ClaimMachine => {
                answer_handoff(host, &asker, &request)
            }
            HostRequest::QueryCapacity => answer_capacity(host, &asker, &request),
            HostRequest::QueryCpu => {
                let cpu = host.own_cpu().map_err(|error| refused(&error_chain(&error)))?;
                Reply::of::<QueryCpu>(&cpu, Bytes::new())
            }
            HostRequest::QueryMachines => {
                let after = request.decode::<QueryMachines>()?;
                let machines = host.answer_machines(&caller, after.as_ref());
                Reply::of::<QueryMachines>(&(), machines.map_err(|error| refused(&error_chain(&error)))?)
            }
            HostRequest::SetGuestPermissions => set_guest_permissions(host, &request),
            HostRequest::EvacuateHost => answer_evacuation(host, &caller, &request),
            HostRequest::ListRefs
            | HostRequest::HasObjects
            | HostRequest::Objects
            | HostRequest::BlobRange
            | HostRequest::LeafPages
            | HostRequest::RemotePull
            | HostRequest::RemotePullStatus
            | HostRequest::Retain => crate::transfer::store_service::answer(host, &asker, &caller, &request),
            HostRequest::StartProtection
            | HostRequest::ProtectionBlob
            | HostRequest::CompareDigests
            | HostRequest::EpochPages
            | HostRequest::EpochEnd
            | HostRequest::Heartbeat
            | HostRequest::EndProtection
            | HostRequest::Yield
            | HostRequest::Witness
            | HostRequest::Inputs => protection(host, &asker, request),
            HostRequest::OpenTunnel | HostRequest::CloseTunnel => {
                tunnel::open_or_close(host, &asker.name, connection, &request)
            }
            HostRequest::JoinNetwork => shared::join(host, &asker.name, connection, &request),
            HostRequest::NetworkAddresses => shared::learn(host, connection, &request),
            // Handled without a thread.
            HostRequest::TunnelFrames => Err(Refusal::unknown_kind(request.kind)),
        }
    }
}

/// Serves missing pages of a machine that has left this host.
fn serve_pages(page_server: Option<Arc<PageServer>>, kind: HostRequest, request: &Request) -> Answer {
    let page_server = page_server.ok_or_else(|| refused("this connection is not for fetching"))?;
    let answer = page_server.handle(kind as u16, &request.header);
    let (header, payload) = answer.map_err(|error| refused(&error_chain(&error)))?;
    Ok(Reply { header: header.into(), payload: payload.into() })
}

/// The offer without the capsules that its source may not read here: the machine would start from them.
fn without_foreign_bases(host: &Daemon, caller: &Caller, request: Request) -> Result<Request, Refusal> {
    if caller.reads_everything() {
        return Ok(request);
    }
    let bad = |error: postcard::Error| Refusal::new(Code::BAD_HEADER, error.to_string());
    let mut offer: Offer = postcard::from_bytes(&request.header).map_err(bad)?;
    let access = host.capsule_access(caller);
    offer.bases.truncate(protocol::BASES_MAX);
    offer.bases.retain(|capsule| access.allowed(capsule));
    let header = postcard::to_stdvec(&offer).map_err(bad)?;
    Ok(Request { header: header.into(), ..request })
}

/// The reply to a page query that finds nothing: the source then sends the pages.
fn nothing_found() -> Answer {
    let header = postcard::to_stdvec(&PageQueryReply { found: Vec::new() });
    let header = header.map_err(|error| refused(&error.to_string()))?;
    Ok(Reply { header: header.into(), payload: Bytes::new() })
}

fn live_daemon(host: &Weak<Daemon>) -> Result<Arc<Daemon>, Refusal> {
    host.upgrade().ok_or_else(|| refused("the host is closing down"))
}

/// Answers a capacity query. A host that may migrate machines here may ask.
fn answer_capacity(host: &Arc<Daemon>, asker: &Requester, request: &Request) -> Answer {
    let asked = request.decode::<QueryCapacity>()?;
    let room = host.spare_capacity(&asker.name, &asked);
    let room: CapacityReply = room.map_err(|error| refused(&error_chain(&error)))?;
    Reply::of::<QueryCapacity>(&room, Bytes::new())
}

/// Handles a message about an evacuation of this host that a peer requested.
fn answer_evacuation(host: &Arc<Daemon>, caller: &Caller, request: &Request) -> Answer {
    let order = request.decode::<EvacuateHost>()?;
    let said = host.answer_remote_evacuation(caller, &order, &request.payload);
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
    match request.kind {
        PrepareHandoff::KIND => {
            let what = request.decode::<PrepareHandoff>()?;
            host.prepare_handoff(&asker.name, &what).map_err(say)?;
            Reply::of::<PrepareHandoff>(&(), Bytes::new())
        }
        GrantMachine::KIND => {
            let what = request.decode::<GrantMachine>()?;
            host.accept_handoff(&what).map_err(say)?;
            Reply::of::<GrantMachine>(&(), Bytes::new())
        }
        _ => {
            let what = request.decode::<ClaimMachine>()?;
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

fn migrate(host: &Daemon, asker: &Requester, request: Request) -> Answer {
    let answer = host.arrivals().handle(&asker.name, request.kind, &request.header, request.payload);
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
            ("QueryCpu", call::<QueryCpu>()),
            ("QueryMachines", call::<QueryMachines>()),
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
