//! The identity of a host: an ed25519 key that it generated, and the certificate that carries the key in TLS.
//!
//! The certificate is generated at every start; its issuer, name and dates are never checked. The secret is
//! `identity.key` (PKCS #8 in PEM, mode 0600). As in ssh, a secret that others can read is refused.

use crate::{IdentityError, PublicKey, atomic_file};
use rcgen::{CertificateParams, KeyPair, PKCS_ED25519};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::{fmt, fs, io, os::unix::fs::PermissionsExt, path::Path};

const FILE: &str = "identity.key";

/// The secret key of this host.
pub struct Identity {
    public: PublicKey,
    certificate: CertificateDer<'static>,
    pkcs8: Vec<u8>,
}

impl Identity {
    /// Loads the identity from `dir`. The first call creates the folder and a key, durably.
    pub fn load_or_create(dir: &Path) -> Result<Self, IdentityError> {
        let path = dir.join(FILE);
        let file = |action, source| IdentityError::File { action, path: path.clone(), source };
        if !path.exists() {
            fs::create_dir_all(dir).map_err(|source| file("create", source))?;
            let key = KeyPair::generate_for(&PKCS_ED25519).map_err(|source| IdentityError::Key { source })?;
            match atomic_file::create(&path, key.serialize_pem().as_bytes()) {
                // Another process was faster; use its key.
                Err(source) if source.kind() == io::ErrorKind::AlreadyExists => {}
                made => made.map_err(|source| file("create", source))?,
            }
        }
        let mode = fs::metadata(&path).map_err(|source| file("read", source))?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(IdentityError::Exposed { path, mode });
        }
        let pem = fs::read_to_string(&path).map_err(|source| file("read", source))?;
        let damaged = |source| IdentityError::Damaged { path: path.clone(), source };
        Self::from_key(&KeyPair::from_pkcs8_pem_and_sign_algo(&pem, &PKCS_ED25519).map_err(damaged)?)
    }

    /// A new identity that is not stored.
    pub fn ephemeral() -> Result<Self, IdentityError> {
        Self::from_key(&KeyPair::generate_for(&PKCS_ED25519).map_err(|source| IdentityError::Key { source })?)
    }

    fn from_key(key: &KeyPair) -> Result<Self, IdentityError> {
        let key_error = |source| IdentityError::Key { source };
        let params = CertificateParams::new(vec!["whimbrel.invalid".to_owned()]).map_err(key_error)?;
        let certificate = params.self_signed(key).map_err(key_error)?.der().clone();
        let public = <[u8; 32]>::try_from(key.public_key_raw()).map_err(|_| IdentityError::NotEd25519)?;
        Ok(Self { public: PublicKey(public), certificate, pkcs8: key.serialize_der() })
    }

    /// The public key, which other hosts put into their trust lists.
    pub fn public_key(&self) -> PublicKey {
        self.public
    }

    pub(crate) fn certificate(&self) -> CertificateDer<'static> {
        self.certificate.clone()
    }

    pub(crate) fn secret(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.pkcs8.clone()).into()
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.public.fingerprint())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rivals_that_create_at_once_agree_on_one_key() {
        let dir = tempfile::tempdir().unwrap();
        let keys: Vec<_> = std::thread::scope(|scope| {
            let make = || Identity::load_or_create(&dir.path().join("deep")).unwrap().public_key();
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]));
        let files: Vec<_> = fs::read_dir(dir.path().join("deep")).unwrap().collect();
        assert_eq!(files.len(), 1, "no leftovers");
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        Identity::load_or_create(dir.path()).unwrap();
        let path = dir.path().join(FILE);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let refused = Identity::load_or_create(dir.path());
        assert!(matches!(refused, Err(IdentityError::Exposed { mode: 0o644, .. })));
    }

    #[test]
    fn a_damaged_key_is_an_error_and_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        Identity::load_or_create(dir.path()).unwrap();
        fs::write(dir.path().join(FILE), "garbage").unwrap();
        assert!(matches!(Identity::load_or_create(dir.path()), Err(IdentityError::Damaged { .. })));
        assert_eq!(fs::read_to_string(dir.path().join(FILE)).unwrap(), "garbage");
    }
}
