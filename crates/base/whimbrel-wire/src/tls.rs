//! The TLS transport: TLS 1.3 over TCP with pinned keys, without authorities, names, dates or resumption.
//!
//! Both sides present a certificate that only carries an ed25519 key, and only that key decides whether the
//! peer is trusted. The handshake signature, which rustls checks, proves that the peer has its secret. An
//! untrusted peer costs one handshake; their number and their time are bounded, and none of them keeps others
//! waiting.

use crate::{
    ConnectError, ConnectStep, Connection, Endpoint, Identity, PeerIdentity, PublicKey, Trust, TrustError,
    endpoint::{TransportPeer, close_gracefully, connect_authenticated},
    handshakes::Handshakes,
    log_limit::LogLimit,
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
use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use whimbrel_core::lock;

/// DER of an ed25519 SubjectPublicKeyInfo up to the key itself (RFC 8410, section 4).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
/// TLS records gathered before a write; larger than rustls' 64 KiB, to spend fewer system calls on bulk.
const SEND_BUFFER: usize = 256 << 10;

pub(crate) fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    // AES-128 first: as secure here as AES-256, and a fifth faster.
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

#[derive(Debug)]
enum AcceptedKeys {
    Only(PublicKey),
    Listed(Arc<Trust>),
}

/// The reason why a key was rejected; rustls passes it on as the cause of its error.
#[derive(Debug, Clone, thiserror::Error)]
enum KeyRejection {
    #[error("the key is not the pinned {expected}")]
    Wrong { expected: PublicKey, presented: PublicKey },
    #[error("not a trusted key: {key}")]
    Untrusted { key: PublicKey },
    #[error("cannot read the trust list")]
    Unreadable { source: Arc<TrustError> },
}

/// A verifier of pinned keys, for either side of a handshake.
#[derive(Debug)]
struct KeyVerifier {
    pin: AcceptedKeys,
    provider: Arc<CryptoProvider>,
}

impl KeyVerifier {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let presented = key_of(certificate)?;
        let disbelief = match &self.pin {
            AcceptedKeys::Only(expected) if *expected == presented => return Ok(()),
            AcceptedKeys::Only(expected) => KeyRejection::Wrong { expected: *expected, presented },
            AcceptedKeys::Listed(trust) => match trust.find(&presented) {
                Ok(Some(_)) => return Ok(()),
                Ok(None) => KeyRejection::Untrusted { key: presented },
                Err(source) => KeyRejection::Unreadable { source: Arc::new(source) },
            },
        };
        Err(CertificateError::Other(OtherError(Arc::new(disbelief))).into())
    }
}

/// Methods that both sides of a handshake share: TLS 1.2 is never offered, and refused if a peer uses it.
macro_rules! ed25519_in_tls13 {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _certificate: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Err(rustls::Error::General("TLS 1.2 is not supported".to_owned()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            let algorithms = &self.provider.signature_verification_algorithms;
            verify_tls13_signature(message, certificate, signature, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }
    };
}

impl ServerCertVerifier for KeyVerifier {
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

    ed25519_in_tls13!();
}

impl ClientCertVerifier for KeyVerifier {
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

    ed25519_in_tls13!();
}

fn tls_error(source: rustls::Error) -> ConnectError {
    ConnectError::Tls { source }
}

fn client_config(identity: &Identity, expected: PublicKey) -> Result<ClientConfig, ConnectError> {
    let provider = provider();
    let verifier = KeyVerifier { pin: AcceptedKeys::Only(expected), provider: provider.clone() };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls_error)?;
    let mut config = builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(vec![identity.certificate()], identity.secret())
        .map_err(tls_error)?;
    // A resumed session would skip the check of the key.
    config.resumption = rustls::client::Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

fn server_config(identity: &Identity, trust: Arc<Trust>) -> Result<ServerConfig, ConnectError> {
    let provider = provider();
    let verifier = KeyVerifier { pin: AcceptedKeys::Listed(trust), provider: provider.clone() };
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

/// Turns the error of a handshake, or of the first read after it, into its specific form.
fn explain(error: ConnectError, ours: PublicKey) -> ConnectError {
    let (stage, source) = match error {
        ConnectError::Io { step: stage, source } => (stage, source),
        other => return other,
    };
    let Some(tls) = source.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) else {
        return ConnectError::Io { step: stage, source };
    };
    match tls {
        rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(cause))) => {
            match cause.downcast_ref::<KeyRejection>().cloned() {
                Some(KeyRejection::Wrong { expected, presented }) => {
                    ConnectError::WrongKey { expected, presented }
                }
                Some(KeyRejection::Untrusted { key }) => ConnectError::UntrustedKey { key },
                Some(KeyRejection::Unreadable { source }) => ConnectError::Trust { source },
                None => tls_error(tls.clone()),
            }
        }
        rustls::Error::AlertReceived(rustls::AlertDescription::CertificateUnknown) => {
            ConnectError::NotTrusted { ours }
        }
        other => tls_error(other.clone()),
    }
}

fn configure_socket(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // BBR keeps a lossy long line busy where the default backs off. A kernel without BBR uses its default.
    if let Err(error) = rustix::net::sockopt::set_tcp_congestion(stream, "bbr") {
        tracing::trace!(%error, "no BBR on this kernel");
    }
    Ok(())
}

/// Connects to `address` (`host:port`), where the host with the key `expected` must answer.
pub async fn connect_tls(
    address: &str,
    expected: PublicKey,
    identity: &Identity,
    endpoint: &Endpoint,
) -> Result<Connection, ConnectError> {
    let after = endpoint.settings.handshake;
    let io = |stage| move |source| ConnectError::Io { step: stage, source };
    let late = |stage| move |_| ConnectError::Timeout { stage, after };
    let dialled = timeout(after, TcpStream::connect(address)).await.map_err(late(ConnectStep::Dial))?;
    let stream = dialled.map_err(io(ConnectStep::Dial))?;
    configure_socket(&stream).map_err(io(ConnectStep::Dial))?;
    let connector = TlsConnector::from(Arc::new(client_config(identity, expected)?));
    // Not sent, because SNI is off.
    let name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
    let ours = identity.public_key();
    let shaken = timeout(after, connector.connect(name, stream)).await.map_err(late(ConnectStep::Tls))?;
    let stream = shaken.map_err(|source| explain(io(ConnectStep::Tls)(source), ours))?;
    let peer = endpoint.dialled(PeerIdentity::Key(expected))?;
    let connected = connect_over(stream.into(), peer, endpoint).await;
    connected.map_err(|error| explain(error, ours))
}

async fn connect_over(
    mut stream: TlsStream<TcpStream>,
    peer: TransportPeer,
    endpoint: &Endpoint,
) -> Result<Connection, ConnectError> {
    match &mut stream {
        TlsStream::Client(stream) => stream.get_mut().1.set_buffer_limit(Some(SEND_BUFFER)),
        TlsStream::Server(stream) => stream.get_mut().1.set_buffer_limit(Some(SEND_BUFFER)),
    }
    let (reader, writer) = tokio::io::split(stream);
    connect_authenticated(reader, writer, peer, endpoint).await
}

/// State that every accepted connection needs.
struct Server {
    acceptor: TlsAcceptor,
    trust: Arc<Trust>,
    endpoint: Endpoint,
    ours: PublicKey,
    /// Lines about refused connections.
    refusals: Mutex<LogLimit>,
}

/// Serves the peers in `trust` until the future is dropped, which closes the accepted connections.
///
/// # Errors
/// Only if TLS cannot be set up. A failed connection is logged, for an untrusted peer with its key.
pub async fn serve_tls(
    listener: TcpListener,
    identity: &Identity,
    trust: Arc<Trust>,
    endpoint: Endpoint,
) -> Result<(), ConnectError> {
    let config = Arc::new(server_config(identity, trust.clone())?);
    let ours = identity.public_key();
    let mut handshakes = Handshakes::new(endpoint.settings.max_handshakes);
    let (acceptor, refusals) = (TlsAcceptor::from(config), Mutex::default());
    let server = Arc::new(Server { acceptor, trust, endpoint, ours, refusals });
    let mut peers = JoinSet::new();
    loop {
        while peers.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, from)) => {
                let (server, evicted) = (server.clone(), handshakes.begin(from.ip()));
                peers.spawn(async move { server.serve_peer(stream, from, evicted).await });
            }
            Err(error) => {
                // Out of descriptors, or the peer has gone; in both cases continue to listen.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Closes an accepted connection when its task is dropped, even if a service holds a handle.
pub(crate) struct CloseOnDrop(pub(crate) Connection);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Server {
    async fn serve_peer(&self, stream: TcpStream, from: SocketAddr, mut evicted: oneshot::Receiver<()>) {
        let accepted = tokio::select! {
            accepted = self.accept(stream) => accepted,
            _ = &mut evicted => {
                return self.log_refusal(|| tracing::warn!(%from, "a handshake gave way to newer ones"));
            }
        };
        drop(evicted);
        match accepted {
            Ok(connection) => {
                tracing::debug!(%from, peer = %connection.peer().name, "connected");
                CloseOnDrop(connection).0.closed().await;
            }
            Err(ConnectError::UntrustedKey { key }) => self.log_refusal(|| {
                tracing::warn!(%from, %key, "untrusted peer refused; to trust it: whimbrel trust add NAME {key}");
            }),
            Err(error) => self.log_refusal(|| {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(%from, %error, cause, "refused a connection");
            }),
        }
    }

    /// Writes a line about a refused connection, unless strangers cause too many.
    fn log_refusal(&self, write: impl FnOnce()) {
        let Some(left_out) = lock(&self.refusals).admit(Instant::now()) else { return };
        if left_out > 0 {
            tracing::warn!(left_out, "there were too many refused connections to log all of them");
        }
        write();
    }

    async fn accept(&self, stream: TcpStream) -> Result<Connection, ConnectError> {
        let after = self.endpoint.settings.handshake;
        let failed = |source| ConnectError::Io { step: ConnectStep::Tls, source };
        configure_socket(&stream).map_err(failed)?;
        let accepting = self.acceptor.accept(stream).into_fallible();
        let shaken = timeout(after, accepting).await;
        let stream = match shaken.map_err(|_| ConnectError::Timeout { stage: ConnectStep::Tls, after })? {
            Ok(stream) => stream,
            Err((error, mut stream)) => {
                let (mut reader, mut writer) = stream.split();
                close_gracefully(&mut reader, &mut writer).await;
                return Err(explain(failed(error), self.ours));
            }
        };
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let key = key_of(certificate.ok_or(tls_error(rustls::Error::NoCertificatesPresented))?);
        let key = key.map_err(tls_error)?;
        // Looked up again: the entry may have been removed during the handshake.
        let peer = TransportPeer::listed(PeerIdentity::Key(key), self.trust.clone())?;
        let connected = connect_over(stream.into(), peer, &self.endpoint).await;
        connected.map_err(|error| explain(error, self.ours))
    }
}
