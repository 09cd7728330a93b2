//! Credentials of this host for an etcd witness: files in the folder `etcd` of its data directory.
//!
//! `ca.pem`: connections use TLS 1.3, and every etcd must have a certificate of this authority for its name
//! or address. `client.pem` and `client.key`: the certificate of this host. `user`: a name, a colon and a
//! password in one line. An absent file is not used. An invalid file is an error, and no etcd is contacted:
//! the connection is never less secure than configured.

use std::{fs, io, path::Path, sync::Arc};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        self, ClientConfig, RootCertStore,
        pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, pem, pem::PemObject},
    },
};

/// Largest file that is read.
const FILE_MAX: u64 = 1 << 20;

/// Errors of a credentials file.
#[derive(Debug, thiserror::Error)]
pub(in crate::protect) enum CredentialsError {
    /// A file cannot be read.
    #[error("cannot read etcd/{file}")]
    Read { file: &'static str, source: io::Error },
    /// A file holds no certificates, or no key.
    #[error("etcd/{file} has no certificate or key in PEM form")]
    Pem { file: &'static str, source: pem::Error },
    /// TLS does not accept a certificate or key.
    #[error("the certificates in etcd cannot be used")]
    Tls(#[source] rustls::Error),
    /// The file `user` is not `NAME:PASSWORD`.
    #[error("etcd/user is not a name, a colon and a password in one line")]
    User,
    /// A certificate without an authority or without its key.
    #[error("etcd/{there} requires etcd/{missing}")]
    Lacks { there: &'static str, missing: &'static str },
}

/// Credentials for an etcd.
#[derive(Clone, Default)]
pub(in crate::protect) struct Credentials {
    pub(in crate::protect) tls: Option<TlsConnector>,
    pub(in crate::protect) user: Option<User>,
}

/// User name and password for an etcd.
#[derive(Clone)]
pub(in crate::protect) struct User {
    pub(in crate::protect) name: String,
    pub(in crate::protect) password: String,
}

impl Credentials {
    /// Reads the files of this folder, which may be absent.
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

/// The name that the certificate of `HOST:PORT` must have.
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
