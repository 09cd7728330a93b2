//! TLS for the HTTP API: the certificate of a host, and what a client trusts.
//!
//! Unlike between hosts, the client has no certificate: a token in each request says who asks. The server has
//! one from files, or makes one for itself once, which clients pin by its fingerprint (SHA-256 of the
//! certificate, as `openssl x509 -fingerprint -sha256` prints it). TLS 1.3 only.

use crate::{atomic_file, tls::provider};
use rcgen::{CertificateParams, KeyPair};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, OtherError, RootCertStore, ServerConfig,
    SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem, pem::PemObject},
};
use std::{
    fmt, fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use whimbrel_core::{Digest, hex_id};

/// Time for a client to connect, and for each side to finish a handshake.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest file of certificates that is read; all public authorities take a quarter of a megabyte.
const FILE_MAX: u64 = 4 << 20;
/// Where Linux distributions keep the certificates of public authorities, as Go's `crypto/x509` looks for
/// them. `SSL_CERT_FILE` comes before them.
const AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// A certificate that cannot be used, or a server that is not trusted.
#[derive(Debug, thiserror::Error)]
pub enum WebTlsError {
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// A file has no certificate or no key in PEM.
    #[error("{} has no usable PEM", path.display())]
    Pem {
        /// Path of the file.
        path: PathBuf,
        /// Cause reported by the parser.
        source: pem::Error,
    },
    /// The secret key can be read by others.
    #[error("{} can be read by other users (mode {mode:03o}): chmod 600", path.display())]
    Exposed {
        /// Path of the file.
        path: PathBuf,
        /// Mode of the file.
        mode: u32,
    },
    /// A new certificate could not be made.
    #[error("cannot make a certificate")]
    Make {
        /// Cause reported by the generator.
        source: rcgen::Error,
    },
    /// Certificate and key do not fit, or TLS cannot be set up with them.
    #[error("TLS cannot use the certificate")]
    Tls {
        /// Cause reported by the TLS library.
        source: rustls::Error,
    },
    /// The certificate of the server is not the pinned one.
    #[error("the certificate of the server has the fingerprint {presented}, not the expected one")]
    WrongCertificate {
        /// Fingerprint of the certificate that was presented.
        presented: Fingerprint,
    },
    /// No authority vouches for the certificate of the server.
    #[error("the certificate of the server is not trusted")]
    Untrusted {
        /// Cause reported by the TLS library.
        source: rustls::Error,
    },
    /// The connection failed.
    #[error("cannot {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Cause reported by the kernel, or by TLS.
        source: io::Error,
    },
    /// Time ran out before the peer answered.
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Timeout,
    /// The address names no host that a certificate could be for.
    #[error("{name:?} is not the name of a host")]
    Name {
        /// Text that was to be a name.
        name: String,
    },
}

/// SHA-256 of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    fn of(certificate: &CertificateDer<'_>) -> Self {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, certificate);
        Self(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        hex_id::write(&self.0, f)
    }
}

/// A text that is no fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a fingerprint is sha256: and 64 hexadecimal digits, as the daemon prints it when it starts")]
pub struct FingerprintError;

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    /// Parses `sha256:` (optional) and the digits, with colons between them or without.
    fn from_str(text: &str) -> Result<Self, FingerprintError> {
        let digits = text.strip_prefix("sha256:").unwrap_or(text).replace(':', "");
        let digest: Digest = digits.parse().map_err(|_| FingerprintError)?;
        Ok(Self(*digest.as_bytes()))
    }
}

/// The certificate chain and the secret key of a server.
pub struct ServerCertificate {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl ServerCertificate {
    /// Reads a chain and its key from PEM files. The key may only be readable for its owner.
    pub fn read(chain: &Path, key: &Path) -> Result<Self, WebTlsError> {
        let mode = fs::metadata(key).map_err(file("read", key))?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(WebTlsError::Exposed { path: key.to_owned(), mode });
        }
        let secret = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(bad_pem(key))?;
        let certificates = certificates(chain)?;
        if certificates.is_empty() {
            return Err(bad_pem(chain)(pem::Error::NoItemsFound));
        }
        Ok(Self { chain: certificates, key: secret })
    }

    /// Reads the self-made certificate of a host from `dir`. The first call makes it, for `names`.
    pub fn load_or_create(dir: &Path, names: Vec<String>) -> Result<Self, WebTlsError> {
        let (chain, key) = (dir.join("api.crt"), dir.join("api.key"));
        if !chain.exists() {
            let made = |source| WebTlsError::Make { source };
            // A key that is there may be the one of a certificate that was lost, and is never replaced.
            let is_new = !key.exists();
            let pair = match is_new {
                true => KeyPair::generate().map_err(made)?,
                false => {
                    let text = fs::read_to_string(&key).map_err(file("read", &key))?;
                    KeyPair::from_pem(&text).map_err(made)?
                }
            };
            let certificate =
                CertificateParams::new(names).map_err(made)?.self_signed(&pair).map_err(made)?;
            // The certificate comes last: without one, the key of an interrupted start is used.
            let write = |path: &Path, text: String| {
                atomic_file::replace(path, text.as_bytes()).map_err(file("write", path))
            };
            if is_new {
                write(&key, pair.serialize_pem())?;
            }
            write(&chain, certificate.pem())?;
        }
        Self::read(&chain, &key)
    }

    /// Fingerprint of the server's own certificate, the first of the chain.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.chain[0])
    }

    /// The server's side of TLS with this certificate.
    pub fn acceptor(self) -> Result<Acceptor, WebTlsError> {
        let tls = |source| WebTlsError::Tls { source };
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&rustls::version::TLS13]).map_err(tls)?;
        let mut config = builder.with_no_client_auth().with_single_cert(self.chain, self.key).map_err(tls)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Acceptor(TlsAcceptor::from(Arc::new(config))))
    }
}

/// The server's side of TLS.
#[derive(Clone)]
pub struct Acceptor(TlsAcceptor);

impl Acceptor {
    /// Does one handshake, for at most ten seconds.
    pub async fn accept(&self, stream: TcpStream) -> Result<server::TlsStream<TcpStream>, WebTlsError> {
        let failed = |source| WebTlsError::Io { action: "finish the TLS handshake", source };
        let _ = stream.set_nodelay(true);
        let shaken = tokio::time::timeout(PATIENCE, self.0.accept(stream)).await;
        shaken.map_err(|_| WebTlsError::Timeout)?.map_err(failed)
    }
}

/// Connects to `host` and checks its certificate: by its fingerprint, or by the authorities that this
/// computer trusts (`SSL_CERT_FILE` names others).
pub async fn connect(
    host: &str,
    port: u16,
    pinned: Option<Fingerprint>,
) -> Result<client::TlsStream<TcpStream>, WebTlsError> {
    let io = |action| move |source| WebTlsError::Io { action, source };
    let dialled = tokio::time::timeout(PATIENCE, TcpStream::connect((host, port))).await;
    let stream = dialled.map_err(|_| WebTlsError::Timeout)?.map_err(io("connect"))?;
    let _ = stream.set_nodelay(true);
    connect_over(stream, host, pinned).await
}

/// Speaks TLS with `host` over a stream that leads there, and checks its certificate as [`connect`] does.
pub async fn connect_over<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    host: &str,
    pinned: Option<Fingerprint>,
) -> Result<client::TlsStream<S>, WebTlsError> {
    let name = ServerName::try_from(host.to_owned()).map_err(|_| WebTlsError::Name { name: host.into() })?;
    let connector = TlsConnector::from(Arc::new(client_config(pinned)?));
    let shaken = tokio::time::timeout(PATIENCE, connector.connect(name, stream)).await;
    shaken.map_err(|_| WebTlsError::Timeout)?.map_err(explain)
}

fn client_config(pinned: Option<Fingerprint>) -> Result<ClientConfig, WebTlsError> {
    let tls = |source| WebTlsError::Tls { source };
    let provider = provider();
    let builder = ClientConfig::builder_with_provider(provider.clone());
    let builder = builder.with_protocol_versions(&[&rustls::version::TLS13]).map_err(tls)?;
    let mut config = match pinned {
        Some(expected) => {
            let verifier = Arc::new(PinnedCertificate { expected, provider });
            builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth()
        }
        None => builder.with_root_certificates(authorities()?).with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // A resumed session would skip the check of the certificate.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

fn authorities() -> Result<RootCertStore, WebTlsError> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let usual = || AUTHORITIES.iter().map(PathBuf::from).find(|path| path.exists());
    let mut roots = RootCertStore::empty();
    if let Some(path) = named.or_else(usual) {
        roots.add_parsable_certificates(certificates(&path)?);
    }
    Ok(roots)
}

/// The reason why a certificate was rejected; rustls passes it on as the cause of its error.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the fingerprint of the certificate is {presented}")]
struct OtherCertificate {
    presented: Fingerprint,
}

/// Accepts one certificate, whatever its names and dates.
#[derive(Debug)]
struct PinnedCertificate {
    expected: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedCertificate {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let presented = Fingerprint::of(certificate);
        if presented == self.expected {
            return Ok(ServerCertVerified::assertion());
        }
        Err(CertificateError::Other(OtherError(Arc::new(OtherCertificate { presented }))).into())
    }

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
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Turns the error of a client's handshake into its specific form.
fn explain(source: io::Error) -> WebTlsError {
    let tls = source.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(cause)))) => {
            match cause.downcast_ref::<OtherCertificate>() {
                Some(other) => WebTlsError::WrongCertificate { presented: other.presented },
                None => WebTlsError::Io { action: "finish the TLS handshake", source },
            }
        }
        Some(error @ rustls::Error::InvalidCertificate(_)) => {
            WebTlsError::Untrusted { source: error.clone() }
        }
        _ => WebTlsError::Io { action: "finish the TLS handshake", source },
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, WebTlsError> {
    let text = read(path)?;
    CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(bad_pem(path))
}

fn read(path: &Path) -> Result<Vec<u8>, WebTlsError> {
    if fs::metadata(path).map_err(file("read", path))?.len() > FILE_MAX {
        return Err(file("read", path)(io::ErrorKind::FileTooLarge.into()));
    }
    fs::read(path).map_err(file("read", path))
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WebTlsError {
    let path = path.to_owned();
    move |source| WebTlsError::File { action, path, source }
}

fn bad_pem(path: &Path) -> impl FnOnce(pem::Error) -> WebTlsError {
    let path = path.to_owned();
    move |source| WebTlsError::Pem { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    fn names() -> Vec<String> {
        vec!["localhost".to_owned(), "127.0.0.1".to_owned()]
    }

    #[tokio::test]
    async fn a_pinned_certificate_is_accepted_and_any_other_is_refused_by_its_fingerprint() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let certificate = ServerCertificate::load_or_create(dir.path(), names()).unwrap();
        let (pin, listener) = (certificate.fingerprint(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let port = listener.local_addr().unwrap().port();
        let acceptor = certificate.acceptor().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                if let Ok(mut stream) = acceptor.accept(stream).await {
                    let _ = stream.write_all(b"hello").await;
                    let _ = stream.shutdown().await;
                }
            }
        });
        let mut said = String::new();
        connect("localhost", port, Some(pin)).await.unwrap().read_to_string(&mut said).await.unwrap();
        assert_eq!(said, "hello");
        let wrong = ServerCertificate::load_or_create(other.path(), names()).unwrap().fingerprint();
        let refused = connect("127.0.0.1", port, Some(wrong)).await.unwrap_err();
        assert!(matches!(refused, WebTlsError::WrongCertificate { presented } if presented == pin));
        let unknown = connect("127.0.0.1", port, None).await.unwrap_err();
        assert!(matches!(unknown, WebTlsError::Untrusted { .. }), "{unknown:?}");
    }

    #[test]
    fn a_certificate_is_made_once_and_its_key_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let first = ServerCertificate::load_or_create(dir.path(), names()).unwrap().fingerprint();
        assert_eq!(ServerCertificate::load_or_create(dir.path(), names()).unwrap().fingerprint(), first);
        let key = dir.path().join("api.key");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
        let exposed = ServerCertificate::load_or_create(dir.path(), names()).err();
        assert!(matches!(exposed, Some(WebTlsError::Exposed { mode: 0o640, .. })));
    }

    #[test]
    fn a_fingerprint_is_read_as_openssl_and_as_the_daemon_print_it() {
        let text = format!("sha256:{}", "0aFF".repeat(16).to_lowercase());
        let print: Fingerprint = text.parse().unwrap();
        assert_eq!(print.to_string(), text);
        assert_eq!(["0A:FF"; 16].join(":").parse(), Ok(print));
        for bad in ["", "sha256:", "sha256:0a", &"x".repeat(64), &"a".repeat(65)] {
            assert_eq!(bad.parse::<Fingerprint>(), Err(FingerprintError), "{bad}");
        }
    }
}
