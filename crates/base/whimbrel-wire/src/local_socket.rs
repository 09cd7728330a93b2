//! Unix sockets between programs of one host: a peer that TLS has authenticated continues without TLS.
//!
//! Encryption costs two programs of one host a tenth to a fifth of their time with bulk data, and protects it
//! from nobody: the kernel passes the bytes from one to the other. The peer asks over TLS for an
//! [`Invitation`] and presents its ticket at an abstract socket, which says who it is; the proof that it gets
//! back says the same of this side. An abstract name exists in one network namespace only, so a peer that is
//! elsewhere finds nothing there and stays with TLS. The socket is open to every user of the host: a ticket
//! is random, is taken once, and expires.

use crate::{
    ConnectError, ConnectStep, Connection, Endpoint, PeerIdentity, PublicKey, Trust,
    endpoint::{TransportPeer, connect_authenticated},
    tls::CloseOnDrop,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};
use whimbrel_core::{Digest, lock};

/// Time for which a ticket is taken, and for either side to present what it has.
const TICKET_LIFETIME: Duration = Duration::from_secs(5);
/// Most tickets that are valid at once; more are refused, which leaves the peer with TLS.
const MAX_TICKETS: usize = 1024;
/// Send buffer of the sockets: most of a batch of chunks at once, for fewer changes between the two programs.
const SEND_BUFFER: usize = 1 << 20;

type Secret = [u8; 32];

/// How a peer that is authenticated already gets a connection through a Unix socket.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invitation {
    name: String,
    ticket: Secret,
    proof: Secret,
}

whimbrel_core::opaque_debug!(Invitation, LocalSocket);

/// A peer that has a ticket.
struct Invited {
    identity: PeerIdentity,
    proof: Secret,
    until: Instant,
}

/// A Unix socket for peers that were authenticated in another way.
pub struct LocalSocket {
    name: String,
    listener: UnixListener,
    /// Peers under the digests of their tickets, so that the time of a search tells nothing of a ticket.
    invited: Mutex<HashMap<Digest, Invited>>,
}

fn secret() -> io::Result<Secret> {
    let mut secret = Secret::default();
    aws_lc_rs::rand::fill(&mut secret).map_err(|_| io::Error::other("no random numbers"))?;
    Ok(secret)
}

/// The path by which an abstract socket is opened.
fn path(name: &str) -> String {
    format!("\0whimbrel-{name}")
}

impl LocalSocket {
    /// Opens a socket with a new name. Must be called inside a runtime.
    pub fn open() -> io::Result<Self> {
        let name = Digest::of(&secret()?).to_string();
        let listener = UnixListener::bind(path(&name))?;
        Ok(Self { name, listener, invited: Mutex::default() })
    }

    /// A ticket for a peer that another connection has authenticated.
    pub fn invite(&self, identity: &PeerIdentity) -> io::Result<Invitation> {
        let (ticket, proof, now) = (secret()?, secret()?, Instant::now());
        let mut invited = lock(&self.invited);
        invited.retain(|_, peer| peer.until > now);
        if invited.len() >= MAX_TICKETS {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let (identity, until) = (identity.clone(), now + TICKET_LIFETIME);
        invited.insert(Digest::of(&ticket), Invited { identity, proof, until });
        Ok(Invitation { name: self.name.clone(), ticket, proof })
    }

    /// Serves invited peers, as far as `trust` lists them, until the future is dropped, which closes their
    /// connections.
    pub async fn serve(self: Arc<Self>, trust: Arc<Trust>, endpoint: Endpoint) {
        let mut peers = JoinSet::new();
        let handshakes = Arc::new(Semaphore::new(endpoint.settings.max_handshakes));
        loop {
            while peers.try_join_next().is_some() {}
            match (self.listener.accept().await, handshakes.clone().try_acquire_owned()) {
                (Ok((stream, _)), Ok(permit)) => {
                    let (socket, trust, endpoint) = (self.clone(), trust.clone(), endpoint.clone());
                    peers.spawn(async move {
                        let accepted = socket.accept(stream, trust, &endpoint).await;
                        drop(permit);
                        match accepted {
                            Ok(connection) => drop(CloseOnDrop(connection).0.closed().await),
                            Err(error) => tracing::debug!(%error, "refused a local connection"),
                        }
                    });
                }
                // Others of this host occupy it; whoever is refused stays with TLS.
                (Ok(_), Err(_)) => {}
                (Err(error), _) => {
                    tracing::warn!(%error, "cannot accept a local connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn accept(
        &self,
        mut stream: UnixStream,
        trust: Arc<Trust>,
        endpoint: &Endpoint,
    ) -> Result<Connection, ConnectError> {
        let identity = in_time(async {
            let mut ticket = Secret::default();
            stream.read_exact(&mut ticket).await?;
            let invited = lock(&self.invited).remove(&Digest::of(&ticket));
            let invited = invited.filter(|peer| peer.until > Instant::now());
            let Some(Invited { identity, proof, .. }) = invited else {
                return Err(io::ErrorKind::PermissionDenied.into());
            };
            stream.write_all(&proof).await?;
            Ok(identity)
        })
        .await?;
        connect(stream, TransportPeer::listed(identity, trust)?, endpoint).await
    }
}

/// Connects through the socket of an invitation, which a connection to `key` has brought.
pub async fn connect_local(
    invitation: &Invitation,
    key: PublicKey,
    endpoint: &Endpoint,
) -> Result<Connection, ConnectError> {
    let peer = endpoint.dialled(PeerIdentity::Key(key))?;
    let stream = in_time(async {
        let mut stream = UnixStream::connect(path(&invitation.name)).await?;
        stream.write_all(&invitation.ticket).await?;
        let mut proof = Secret::default();
        stream.read_exact(&mut proof).await?;
        if proof == invitation.proof { Ok(stream) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    })
    .await?;
    connect(stream, peer, endpoint).await
}

async fn in_time<T>(presenting: impl Future<Output = io::Result<T>>) -> Result<T, ConnectError> {
    let (step, after) = (ConnectStep::Dial, TICKET_LIFETIME);
    let presented = timeout(after, presenting).await;
    let presented = presented.map_err(|_| ConnectError::Timeout { stage: step, after })?;
    presented.map_err(|source| ConnectError::Io { step, source })
}

async fn connect(
    stream: UnixStream,
    peer: TransportPeer,
    endpoint: &Endpoint,
) -> Result<Connection, ConnectError> {
    if let Err(error) = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER) {
        tracing::debug!(%error, "the send buffer stays small");
    }
    let (reader, writer) = stream.into_split();
    connect_authenticated(reader, writer, peer, endpoint).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CallError, Identity, Request, Rights, TrustedPeer};
    use bytes::Bytes;

    /// A socket that is served, with a trust list that has a key as `friend`.
    fn served(key: PublicKey) -> (Arc<LocalSocket>, Arc<Trust>, JoinSet<()>, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let (trust, rights) = (Arc::new(Trust::load(dir.path()).unwrap()), Rights::all());
        let (name, address) = ("friend".parse().unwrap(), None);
        trust.add(TrustedPeer { name, key: Some(key), address, rights, read: None, write: None }).unwrap();
        let (socket, mut tasks) = (Arc::new(LocalSocket::open().unwrap()), JoinSet::new());
        tasks.spawn(socket.clone().serve(trust.clone(), endpoint()));
        (socket, trust, tasks, dir)
    }

    fn endpoint() -> Endpoint {
        Endpoint::new("member".parse().unwrap(), ())
    }

    fn key() -> PublicKey {
        Identity::ephemeral().unwrap().public_key()
    }

    #[tokio::test]
    async fn a_peer_with_a_ticket_is_connected_once_and_ends_with_the_server() {
        let (guest, host) = (key(), key());
        let (socket, _trust, mut tasks, _dir) = served(guest);
        let invitation = socket.invite(&PeerIdentity::Key(guest)).unwrap();
        let connection = connect_local(&invitation, host, &endpoint()).await.unwrap();
        assert_eq!(connection.peer().identity, PeerIdentity::Key(host));
        let refused = connection.call(Request::new(0x0701, Bytes::new(), vec![1; 3 << 20].into())).await;
        assert!(matches!(refused, Err(CallError::Refused { .. })), "{refused:?}");
        assert!(connect_local(&invitation, host, &endpoint()).await.is_err(), "a ticket is taken once");
        tasks.shutdown().await;
        connection.closed().await;
    }

    #[tokio::test]
    async fn nobody_comes_in_without_a_ticket_of_a_peer_that_is_trusted_still() {
        let guest = key();
        let (socket, trust, _tasks, _dir) = served(guest);
        let invite = || socket.invite(&PeerIdentity::Key(guest)).unwrap();
        let made_up = Invitation { ticket: [7; 32], ..invite() };
        assert!(connect_local(&made_up, key(), &endpoint()).await.is_err());
        let stranger = socket.invite(&PeerIdentity::Key(key())).unwrap();
        assert!(connect_local(&stranger, key(), &endpoint()).await.is_err(), "a key that is not listed");
        let late = invite();
        trust.remove(&"friend".parse().unwrap()).unwrap();
        assert!(connect_local(&late, key(), &endpoint()).await.is_err(), "trust that has ended");
    }

    #[tokio::test]
    async fn a_program_that_has_the_name_but_not_the_proof_is_not_talked_to() {
        let (socket, _trust, _tasks, _dir) = served(key());
        let name = format!("impostor-{}", std::process::id());
        let listener = UnixListener::bind(path(&name)).unwrap();
        let answer = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(&[0; 32]).await.unwrap();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.unwrap();
            rest.len()
        });
        let invitation = socket.invite(&PeerIdentity::Key(key())).unwrap();
        let invitation = Invitation { name, ..invitation };
        let error = connect_local(&invitation, key(), &endpoint()).await.unwrap_err();
        assert!(matches!(error, ConnectError::Io { step: ConnectStep::Dial, .. }), "{error:?}");
        assert_eq!(answer.await.unwrap(), 32, "it gets a ticket that nobody else takes, and nothing more");
    }
}
