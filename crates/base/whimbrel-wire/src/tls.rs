//! TLS 1.3 over TCP with pinned keys: no authorities, no names, no dates, no resumption.
//!
//! Both sides present a certificate that is only an envelope for an ed25519 key. Whom to believe is decided
//! by that key alone; that the peer has its secret is proved by the handshake signature, which rustls checks.
//! A stranger costs a handshake and holds nothing: their number at once and their time are bounded.

use crate::{
    ConnectError, ConnectStep, Connection, Endpoint, Identity, PeerIdentity, PublicKey, Rights, Trust,
    TrustError,
    endpoint::{TransportPeer, connect_known, part},
};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, OtherError, ServerConfig,
    SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ParsedCertificate,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use std::{io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

/// DER of an ed25519 SubjectPublicKeyInfo up to the key itself (RFC 8410, section 4).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
/// TLS records gathered before a write; larger than rustls' 64 KiB, to spend fewer system calls on bulk.
const SEND_BUFFER: usize = 256 << 10;

fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    // AES-128 first: as safe here as AES-256 and a fifth faster.
    provider
        .cipher_suites
        .sort_by_key(|suite| suite.suite() != rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

fn key_of(certificate: &CertificateDer<'_>) -> Result<PublicKey, rustls::Error> {
    let spki = ParsedCertificate::try_from(certificate)?.subject_public_key_info();
    let key = spki.strip_prefix(&SPKI_PREFIX).and_then(|key| <[u8; 32]>::try_from(key).ok());
    key.map(PublicKey).ok_or(CertificateError::BadEncoding.into())
}

/// Which keys are believed.
#[derive(Debug)]
enum Pin {
    Only(PublicKey),
    Listed(Arc<Trust>),
}

/// Why a key was not believed; travels through rustls as the cause of its error.
#[derive(Debug, Clone, thiserror::Error)]
enum Disbelief {
    #[error("another key than the pinned {expected}")]
    Wrong { expected: PublicKey, presented: PublicKey },
    #[error("not a trusted key: {key}")]
    Stranger { key: PublicKey },
    #[error("cannot tell whom to trust")]
    Unreadable { source: Arc<TrustError> },
}

/// Believes pinned keys, for either side of a handshake.
#[derive(Debug)]
struct Pinned {
    pin: Pin,
    provider: Arc<CryptoProvider>,
}

impl Pinned {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let presented = key_of(certificate)?;
        let disbelief = match &self.pin {
            Pin::Only(expected) if *expected == presented => return Ok(()),
            Pin::Only(expected) => Disbelief::Wrong { expected: *expected, presented },
            Pin::Listed(trust) => match trust.find(&presented) {
                Ok(Some(_)) => return Ok(()),
                Ok(None) => Disbelief::Stranger { key: presented },
                Err(source) => Disbelief::Unreadable { source: Arc::new(source) },
            },
        };
        Err(CertificateError::Other(OtherError(Arc::new(disbelief))).into())
    }

    fn verify(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }
}

/// TLS 1.2 is never offered; should it be spoken all the same, it is not believed.
fn no_tls12() -> Result<HandshakeSignatureValid, rustls::Error> {
    Err(rustls::Error::General("TLS 1.2 is not spoken here".to_owned()))
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(certificate).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verify(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(certificate).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verify(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

fn tls_error(source: rustls::Error) -> ConnectError {
    ConnectError::Tls { source }
}

fn client_config(identity: &Identity, expected: PublicKey) -> Result<ClientConfig, ConnectError> {
    let provider = provider();
    let verifier = Pinned { pin: Pin::Only(expected), provider: provider.clone() };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls_error)?;
    let mut config = builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(vec![identity.certificate()], identity.secret())
        .map_err(tls_error)?;
    // A resumed session would skip the look at the key.
    config.resumption = rustls::client::Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

fn server_config(identity: &Identity, trust: Arc<Trust>) -> Result<ServerConfig, ConnectError> {
    let provider = provider();
    let verifier = Pinned { pin: Pin::Listed(trust), provider: provider.clone() };
    let builder = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls_error)?;
    let mut config = builder
        .with_client_cert_verifier(Arc::new(verifier))
        .with_single_cert(vec![identity.certificate()], identity.secret())
        .map_err(tls_error)?;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    Ok(config)
}

/// Says what an error of a handshake, or of the first read after it, means.
fn explain(error: ConnectError, ours: PublicKey) -> ConnectError {
    let (stage, source) = match error {
        ConnectError::Io { stage, source } => (stage, source),
        other => return other,
    };
    let Some(tls) = source.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) else {
        return ConnectError::Io { stage, source };
    };
    match tls {
        rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(cause))) => {
            match cause.downcast_ref::<Disbelief>().cloned() {
                Some(Disbelief::Wrong { expected, presented }) => {
                    ConnectError::WrongKey { expected, presented }
                }
                Some(Disbelief::Stranger { key }) => ConnectError::Stranger { key },
                Some(Disbelief::Unreadable { source }) => ConnectError::Trust { source },
                None => tls_error(tls.clone()),
            }
        }
        rustls::Error::AlertReceived(rustls::AlertDescription::CertificateUnknown) => {
            ConnectError::NotTrusted { ours }
        }
        other => tls_error(other.clone()),
    }
}

fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // BBR keeps a lossy long line busy where the default backs off; a kernel without it keeps its default.
    if let Err(error) = rustix::net::sockopt::set_tcp_congestion(stream, "bbr") {
        tracing::trace!(%error, "no BBR on this kernel");
    }
    Ok(())
}

/// Connects to `address` (`host:port`), where the host with the key `expected` must answer. Several
/// connections for bulk are several calls.
pub async fn connect_tls(
    address: &str,
    expected: PublicKey,
    identity: &Identity,
    endpoint: &Endpoint,
) -> Result<Connection, ConnectError> {
    let after = endpoint.settings.handshake;
    let io = |stage| move |source| ConnectError::Io { stage, source };
    let late = |stage| move |_| ConnectError::Timeout { stage, after };
    let dialled = timeout(after, TcpStream::connect(address)).await.map_err(late(ConnectStep::Dial))?;
    let stream = dialled.map_err(io(ConnectStep::Dial))?;
    tune(&stream).map_err(io(ConnectStep::Dial))?;
    let connector = TlsConnector::from(Arc::new(client_config(identity, expected)?));
    // Not sent: SNI is off.
    let name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
    let ours = identity.public_key();
    let shaken = timeout(after, connector.connect(name, stream)).await.map_err(late(ConnectStep::Tls))?;
    let stream = shaken.map_err(|source| explain(io(ConnectStep::Tls)(source), ours))?;
    let peer = TransportPeer { identity: PeerIdentity::Key(expected), rights: Rights::all(), name: None };
    let connected = carry(stream.into(), peer, endpoint).await;
    connected.map_err(|error| explain(error, ours))
}

async fn carry(
    mut stream: TlsStream<TcpStream>,
    peer: TransportPeer,
    endpoint: &Endpoint,
) -> Result<Connection, ConnectError> {
    match &mut stream {
        TlsStream::Client(stream) => stream.get_mut().1.set_buffer_limit(Some(SEND_BUFFER)),
        TlsStream::Server(stream) => stream.get_mut().1.set_buffer_limit(Some(SEND_BUFFER)),
    }
    let (reader, writer) = tokio::io::split(stream);
    connect_known(reader, writer, peer, endpoint).await
}

/// What every accepted connection needs.
struct Server {
    acceptor: TlsAcceptor,
    trust: Arc<Trust>,
    endpoint: Endpoint,
    ours: PublicKey,
}

/// Serves whoever `trust` lists until the future is dropped, which closes the connections it accepted.
///
/// # Errors
/// Only when TLS cannot be set up. A peer that fails is logged, a stranger with its key.
pub async fn serve_tls(
    listener: TcpListener,
    identity: &Identity,
    trust: Arc<Trust>,
    endpoint: Endpoint,
) -> Result<(), ConnectError> {
    let config = Arc::new(server_config(identity, trust.clone())?);
    let ours = identity.public_key();
    let handshakes = Arc::new(Semaphore::new(endpoint.settings.max_handshakes));
    let server = Arc::new(Server { acceptor: TlsAcceptor::from(config), trust, endpoint, ours });
    let mut peers = JoinSet::new();
    loop {
        while peers.try_join_next().is_some() {}
        let Ok(place) = handshakes.clone().acquire_owned().await else { return Ok(()) };
        match listener.accept().await {
            Ok((stream, from)) => {
                let server = server.clone();
                peers.spawn(async move { server.attend(stream, from, place).await });
            }
            Err(error) => {
                // Out of descriptors, or the peer was gone already: neither is a reason to stop listening.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Closes an accepted connection when its task is dropped, even if a service keeps a handle.
struct CloseOnDrop(Connection);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Server {
    async fn attend(&self, stream: TcpStream, from: SocketAddr, place: OwnedSemaphorePermit) {
        let accepted = self.accept(stream).await;
        drop(place);
        match accepted {
            Ok(connection) => {
                tracing::debug!(%from, peer = %connection.peer().name, "connected");
                CloseOnDrop(connection).0.closed().await;
            }
            Err(ConnectError::Stranger { key }) => {
                tracing::warn!(%from, %key, "refused a stranger; to let it in: whimbrel trust add NAME {key}");
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(%from, %error, cause, "refused a connection");
            }
        }
    }

    async fn accept(&self, stream: TcpStream) -> Result<Connection, ConnectError> {
        let after = self.endpoint.settings.handshake;
        let failed = |source| ConnectError::Io { stage: ConnectStep::Tls, source };
        tune(&stream).map_err(failed)?;
        let accepting = self.acceptor.accept(stream).into_fallible();
        let shaken = timeout(after, accepting).await;
        let stream = match shaken.map_err(|_| ConnectError::Timeout { stage: ConnectStep::Tls, after })? {
            Ok(stream) => stream,
            Err((error, mut stream)) => {
                let (mut reader, mut writer) = stream.split();
                part(&mut reader, &mut writer).await;
                return Err(explain(failed(error), self.ours));
            }
        };
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let key = key_of(certificate.ok_or(tls_error(rustls::Error::NoCertificatesPresented))?);
        let key = key.map_err(tls_error)?;
        let trusted =
            self.trust.find(&key).map_err(|source| ConnectError::Trust { source: Arc::new(source) })?;
        // Looked up again for its rights; it may have been removed since the handshake began.
        let trusted = trusted.ok_or(ConnectError::Stranger { key })?;
        let identity = PeerIdentity::Key(key);
        let peer = TransportPeer { identity, rights: trusted.rights, name: Some(trusted.name) };
        let connected = carry(stream.into(), peer, &self.endpoint).await;
        connected.map_err(|error| explain(error, self.ours))
    }
}
