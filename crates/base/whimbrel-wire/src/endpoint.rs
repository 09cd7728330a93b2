//! The local endpoint of connections: its name, service and limits, and the hello over a byte stream.

use crate::{
    ConnectError, ConnectStep, Connection, Hello, HelloError, Peer, PeerIdentity, Protocol, ProtocolVersions,
    Rights, Role, Service, Trust, TrustedPeer, VersionRange, connection::Shared, connection_tasks, credit,
    hello,
};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};
use whimbrel_core::HostName;

/// Limits of an endpoint's connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointSettings {
    /// Bytes of bulk in flight in each direction, at least [`crate::MIN_WINDOW`]; the smaller side's counts.
    pub window: u32,
    /// A peer that makes no progress for this long counts as dead.
    pub dead_after: Duration,
    /// Timeout of each step of connecting.
    pub handshake: Duration,
    /// Unordered requests handled at once per connection.
    pub max_handlers: usize,
    /// Connections that may be in their handshake at once, which bounds what untrusted peers can use.
    pub max_handshakes: usize,
}

impl Default for EndpointSettings {
    fn default() -> Self {
        Self {
            window: credit::DEFAULT_WINDOW,
            dead_after: Duration::from_secs(10),
            handshake: Duration::from_secs(10),
            max_handlers: 256,
            max_handshakes: 64,
        }
    }
}

/// The local side of connections.
#[derive(Clone)]
pub struct Endpoint {
    /// Name that this side sends in its hello.
    pub name: HostName,
    /// The kind of program that this side is.
    pub role: Role,
    /// Service that answers the peers' requests.
    pub service: Arc<dyn Service>,
    /// Limits of the connections.
    pub settings: EndpointSettings,
    /// Versions that this side offers.
    pub versions: VersionRange,
    /// Trust list that names the hosts that this side dials, and gives them their rights here. Without one,
    /// they name themselves and may send every request that the service answers.
    pub trust: Option<Arc<Trust>>,
    /// Protocols of the calls that this side makes and answers.
    pub protocols: Vec<Protocol>,
}

impl Endpoint {
    /// A host called `name` whose peers' requests `service` answers (`()` refuses them all).
    pub fn new(name: HostName, service: impl Service) -> Self {
        let settings = EndpointSettings::default();
        let (service, versions) = (Arc::new(service), VersionRange::OURS);
        Self { name, role: Role::HOST, service, settings, versions, trust: None, protocols: Vec::new() }
    }

    /// Gives the endpoint a trust list for the peers that it dials.
    pub fn with_trust(self, trust: Arc<Trust>) -> Self {
        Self { trust: Some(trust), ..self }
    }

    /// Adds the protocols of the endpoint's engines.
    pub fn with_protocols(self, protocols: impl Into<Vec<Protocol>>) -> Self {
        Self { protocols: protocols.into(), ..self }
    }

    /// The dialled peer that was authenticated as `identity`.
    pub(crate) fn dialled(&self, identity: PeerIdentity) -> Result<TransportPeer, ConnectError> {
        match &self.trust {
            None => Ok(TransportPeer { identity, grants: Grants::Fixed(Rights::all()) }),
            Some(trust) => TransportPeer::listed(identity, trust.clone()),
        }
    }

    fn hello(&self) -> Hello {
        let window = self.settings.window.max(credit::MIN_WINDOW);
        let listed = |protocol: &Protocol| ProtocolVersions {
            first_kind: protocol.kinds.0,
            versions: protocol.range(),
        };
        let protocols = self.protocols.iter().map(listed).collect();
        Hello { versions: self.versions, role: self.role, window, name: self.name.clone(), protocols }
    }
}

whimbrel_core::opaque_debug!(Endpoint);

/// The source of a peer's name and rights.
#[derive(Clone)]
pub(crate) enum Grants {
    /// Rights that the transport gives; the peer names itself.
    Fixed(Rights),
    /// The entry of a trust list, as it was when the connection was made. Rights are looked up again for
    /// every request.
    Listed(Arc<Trust>, Arc<TrustedPeer>),
}

impl Grants {
    /// Whether a peer that was authenticated as `identity` may send requests of `kind` now.
    pub(crate) fn allow(&self, identity: &PeerIdentity, kind: u16) -> bool {
        match self {
            Self::Fixed(rights) => rights.allow(kind),
            Self::Listed(trust, _) => {
                matches!(trust.entry(identity), Ok(Some(entry)) if entry.rights.allow(kind))
            }
        }
    }

    /// Whether the entry is still the one with which the connection was made. An unreadable list refuses
    /// requests, but a slip in an editor does not end connections.
    pub(crate) fn are_unchanged(&self, identity: &PeerIdentity) -> bool {
        match self {
            Self::Fixed(_) => true,
            Self::Listed(trust, entry) => {
                trust.entry(identity).map_or(true, |now| now.as_ref() == Some(entry))
            }
        }
    }
}

/// The peer as the transport knows it before the hello.
pub(crate) struct TransportPeer {
    pub(crate) identity: PeerIdentity,
    pub(crate) grants: Grants,
}

impl TransportPeer {
    /// A peer that must have an entry in `trust`.
    pub(crate) fn listed(identity: PeerIdentity, trust: Arc<Trust>) -> Result<Self, ConnectError> {
        let entry = trust.entry(&identity);
        let entry = entry.map_err(|source| ConnectError::Trust { source: Arc::new(source) })?;
        match (entry, identity) {
            (Some(entry), identity) => Ok(Self { identity, grants: Grants::Listed(trust, entry) }),
            (None, PeerIdentity::Key(key)) => Err(ConnectError::UntrustedKey { key }),
            (None, identity) => Err(ConnectError::Unlisted { identity }),
        }
    }
}

/// Exchanges hellos over a byte stream and starts a connection. The caller has authenticated the other end as
/// `identity`. Must be called inside a runtime, which then runs the connection.
pub async fn connect_io(
    reader: impl AsyncRead + Unpin + Send + 'static,
    writer: impl AsyncWrite + Unpin + Send + 'static,
    identity: PeerIdentity,
    rights: Rights,
    endpoint: &Endpoint,
) -> Result<Connection, ConnectError> {
    let peer = TransportPeer { identity, grants: Grants::Fixed(rights) };
    connect_authenticated(reader, writer, peer, endpoint).await
}

pub(crate) async fn connect_authenticated(
    mut reader: impl AsyncRead + Unpin + Send + 'static,
    mut writer: impl AsyncWrite + Unpin + Send + 'static,
    peer: TransportPeer,
    endpoint: &Endpoint,
) -> Result<Connection, ConnectError> {
    let after = endpoint.settings.handshake;
    let exchanged = timeout(after, exchange_hellos(&mut reader, &mut writer, &endpoint.hello())).await;
    let theirs = exchanged.map_err(|_| ConnectError::Timeout { stage: ConnectStep::Hello, after })??;
    let agreed = endpoint.hello().agree(&theirs);
    if agreed.is_err() {
        close_gracefully(&mut reader, &mut writer).await;
    }
    let (version, window) = agreed.map_err(|source| ConnectError::Hello { source })?;
    let mismatches = theirs.mismatches(&endpoint.protocols);
    let shared = Shared::new(window);
    let name = match &peer.grants {
        Grants::Listed(_, entry) => entry.name.clone(),
        Grants::Fixed(_) => theirs.name,
    };
    let TransportPeer { identity, grants } = peer;
    let (role, protocols) = (theirs.role, theirs.protocols);
    let connection = Connection::new(shared.clone(), |link| Peer {
        identity,
        name,
        role,
        grants,
        version,
        window,
        mismatches,
        protocols,
        link,
    });
    // Called first, so that the service knows the connection before it handles a request of it.
    endpoint.service.connected(connection.clone());
    connection_tasks::start(reader, writer, shared, &connection, endpoint);
    Ok(connection)
}

async fn exchange_hellos(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    ours: &Hello,
) -> Result<Hello, ConnectError> {
    let failed = |source: io::Error| ConnectError::Io { step: ConnectStep::Hello, source };
    writer.write_all(&ours.encode()).await.map_err(failed)?;
    writer.flush().await.map_err(failed)?;
    let mut fixed = [0; hello::FIXED];
    let mut got = 0;
    while got < fixed.len() {
        match reader.read(&mut fixed[got..]).await.map_err(failed)? {
            0 if got == 0 => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
            0 => break,
            more => got += more,
        }
    }
    let bad = |source: HelloError| ConnectError::Hello { source };
    if got < fixed.len() {
        return Hello::parse(&fixed[..got]).map_err(bad);
    }
    let rest = Hello::rest_len(&fixed).map_err(bad)?;
    let mut whole = fixed.to_vec();
    whole.resize(fixed.len() + rest, 0);
    reader.read_exact(&mut whole[fixed.len()..]).await.map_err(failed)?;
    Hello::parse(&whole).map_err(bad)
}

/// Ends a stream so that the peer still receives what was sent: closing a socket with unread bytes would send
/// a reset. Bounded in time and bytes.
pub(crate) async fn close_gracefully(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
) {
    let parting = async {
        writer.shutdown().await?;
        tokio::io::copy(&mut reader.take(1 << 20), &mut tokio::io::sink()).await
    };
    // The result does not matter, the stream is dropped next.
    let _ = timeout(connection_tasks::LINGER, parting).await;
}
