//! How this host shows itself to an etcd: files in the folder `etcd` of its data, which its owner puts there.
//!
//! `ca.pem`: every etcd is spoken to by TLS 1.3 and must have a certificate of this authority for the name or
//! address it is known by. `client.pem` and `client.key`: what this host shows then. `user`: a name, a colon
//! and a password in one line. What is not there is not used; what is there and no good is an error, and
//! nothing is said to any etcd: never less than what was asked for.

use std::{fs, io, path::Path, sync::Arc};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        self, ClientConfig, RootCertStore,
        pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, pem, pem::PemObject},
    },
};

/// Longest file that is read.
const FILE_MAX: u64 = 1 << 20;

/// A file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(in crate::protect) enum CredentialsError {
    /// It cannot be read.
    #[error("cannot read etcd/{file}")]
    Read {
        file: &'static str,
        #[source]
        source: io::Error,
    },
    /// It holds no certificates, or no key.
    #[error("etcd/{file} has not what it should have in PEM form")]
    Pem {
        file: &'static str,
        #[source]
        source: pem::Error,
    },
    /// A certificate or key is not what TLS takes.
    #[error("the certificates in etcd cannot be used")]
    Tls(#[source] rustls::Error),
    /// It is not `NAME:PASSWORD`.
    #[error("etcd/user is not a name, a colon and a password in one line")]
    User,
    /// A certificate without an authority, or without its key.
    #[error("etcd/{there} is of no use without etcd/{missing}")]
    Lacks { there: &'static str, missing: &'static str },
}

/// What is shown to an etcd.
#[derive(Clone, Default)]
pub(in crate::protect) struct Credentials {
    pub(in crate::protect) tls: Option<TlsConnector>,
    pub(in crate::protect) user: Option<User>,
}

/// A user of an etcd.
#[derive(Clone)]
pub(in crate::protect) struct User {
    pub(in crate::protect) name: String,
    pub(in crate::protect) password: String,
}

impl Credentials {
    /// By the files of this folder, which need not be there.
    pub(in crate::protect) fn of(folder: &Path) -> Result<Self, CredentialsError> {
        let lacks = |there, missing| Err(CredentialsError::Lacks { there, missing });
        let authorities = certificates(folder, "ca.pem")?;
        let shown = (certificates(folder, "client.pem")?, key(folder)?);
        let tls = match (authorities, shown) {
            (None, (None, None)) => None,
            (None, (Some(_), _)) => return lacks("client.pem", "ca.pem"),
            (_, (None, Some(_))) => return lacks("client.key", "client.pem"),
            (Some(_), (Some(_), None)) => return lacks("client.pem", "client.key"),
            (Some(authorities), (chain, key)) => Some(tls(authorities, chain.zip(key))?),
        };
        let user = read(folder, "user")?.map(|text| user(&text)).transpose()?;
        Ok(Self { tls, user })
    }
}

fn tls(
    authorities: Vec<CertificateDer<'static>>,
    shown: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<TlsConnector, CredentialsError> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority).map_err(CredentialsError::Tls)?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(CredentialsError::Tls)?.with_root_certificates(roots);
    let config = match shown {
        Some((chain, key)) => config.with_client_auth_cert(chain, key).map_err(CredentialsError::Tls)?,
        None => config.with_no_client_auth(),
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

/// By what name the certificate of `HOST:PORT` must be.
pub(in crate::protect) fn server_name(endpoint: &str) -> Result<ServerName<'static>, InvalidDnsNameError> {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    ServerName::try_from(host.trim_start_matches('[').trim_end_matches(']').to_owned())
}

fn user(text: &[u8]) -> Result<User, CredentialsError> {
    let line = std::str::from_utf8(text).map_err(|_| CredentialsError::User)?.trim_end_matches(['\r', '\n']);
    match line.split_once(':') {
        Some((name, password)) if !name.is_empty() && !password.contains('\n') => {
            Ok(User { name: name.to_owned(), password: password.to_owned() })
        }
        _ => Err(CredentialsError::User),
    }
}

fn certificates(
    folder: &Path,
    file: &'static str,
) -> Result<Option<Vec<CertificateDer<'static>>>, CredentialsError> {
    let Some(text) = read(folder, file)? else { return Ok(None) };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|source| CredentialsError::Pem { file, source })?;
    match found.is_empty() {
        true => Err(CredentialsError::Pem { file, source: pem::Error::NoItemsFound }),
        false => Ok(Some(found)),
    }
}

fn key(folder: &Path) -> Result<Option<PrivateKeyDer<'static>>, CredentialsError> {
    let file = "client.key";
    let Some(text) = read(folder, file)? else { return Ok(None) };
    PrivateKeyDer::from_pem_slice(&text).map(Some).map_err(|source| CredentialsError::Pem { file, source })
}

fn read(folder: &Path, file: &'static str) -> Result<Option<Vec<u8>>, CredentialsError> {
    let path = folder.join(file);
    let failed = |source| CredentialsError::Read { file, source };
    match fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed(source)),
        Ok(found) if found.len() > FILE_MAX => return Err(failed(io::ErrorKind::FileTooLarge.into())),
        Ok(_) => {}
    }
    fs::read(&path).map(Some).map_err(failed)
}
