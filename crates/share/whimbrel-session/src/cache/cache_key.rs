//! Key of an encrypted cache.
//!
//! Each file of the cache has a cipher of its own, by the key, a salt of the cache and the name of the file
//! (BLAKE3's derivation of keys). The file `key` of the cache has the salt and a value that only the right
//! key gives, so that a wrong key is told from damage.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use whimbrel_block::SectorCipher;
use whimbrel_core::Digest;
use whimbrel_wire::atomic_file;

/// File that an encrypted cache has.
const FILE: &str = "key";
const MAGIC: &[u8; 8] = b"WhSCkey1";
const SALT: usize = 16;
const CHECK: usize = 32;
/// Most bytes of a key as text, with blanks around it.
const MAX_TEXT: u64 = 4096;

/// Reasons why a cache cannot be used with a key, or without one.
#[derive(Debug, thiserror::Error)]
pub enum CacheKeyError {
    /// The cache is encrypted, and no key was given.
    #[error("the cache is encrypted: give the file of its key (`--cache-key-file`)")]
    Missing,
    /// The cache is encrypted with another key.
    #[error("the cache is encrypted with another key than that in {}", file.display())]
    Other {
        /// File with the key.
        file: PathBuf,
    },
    /// The cache has content that is not encrypted.
    #[error(
        "the cache is in use without a key: mount it without one, unmount it when all is written back, and remove it"
    )]
    NotEncrypted,
    /// A file has no key that could be used.
    #[error("{} is not the file of a key: {why}", file.display())]
    Unusable {
        /// File that was given.
        file: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A file cannot be read or written.
    #[error("cannot use {}", path.display())]
    File {
        /// File that was read or written.
        path: PathBuf,
        /// Cause reported by the system.
        source: io::Error,
    },
}

/// Key of one cache.
#[derive(Clone)]
pub(crate) struct CacheKey {
    secret: [u8; 32],
    salt: [u8; SALT],
}

impl CacheKey {
    /// Key of the cache in `dir`, by the file that was given for it; none if the cache is not encrypted. An
    /// empty cache for which a file is given becomes an encrypted one.
    pub(crate) fn open(
        dir: &Path,
        file: Option<&Path>,
        is_empty: bool,
    ) -> Result<Option<Self>, CacheKeyError> {
        let path = dir.join(FILE);
        let failed = |source| CacheKeyError::File { path: path.clone(), source };
        let stored = match fs::read(&path) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        match (file, stored) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(CacheKeyError::Missing),
            (Some(_), None) if !is_empty => Err(CacheKeyError::NotEncrypted),
            (Some(file), None) => {
                let key = Self { secret: read_secret(file, dir)?, salt: rand::random() };
                let stored = [&MAGIC[..], &key.salt, &key.check()].concat();
                atomic_file::replace(&path, &stored).map_err(failed)?;
                Ok(Some(key))
            }
            (Some(file), Some(stored)) => {
                let secret = read_secret(file, dir)?;
                let salt = stored.strip_prefix(MAGIC).and_then(|rest| rest.first_chunk::<SALT>());
                let damaged = || failed(io::ErrorKind::InvalidData.into());
                let key = Self { secret, salt: *salt.ok_or_else(damaged)? };
                match stored[MAGIC.len() + SALT..] == key.check() {
                    true => Ok(Some(key)),
                    false => Err(CacheKeyError::Other { file: file.to_owned() }),
                }
            }
        }
    }

    /// Cipher of the file with this name in the cache.
    pub(crate) fn cipher(&self, name: &str) -> SectorCipher {
        SectorCipher::new(self.derive("whimbrel 2026-11-30 file of a session's cache", name))
    }

    fn check(&self) -> [u8; CHECK] {
        self.derive("whimbrel 2026-11-30 check of a session's cache", "")
    }

    fn derive<const LEN: usize>(&self, context: &str, name: &str) -> [u8; LEN] {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(&self.secret).update(&self.salt).update(name.as_bytes());
        let mut out = [0; LEN];
        hasher.finalize_xof().fill(&mut out);
        out
    }
}

impl std::fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CacheKey")
    }
}

/// Reads 64 hexadecimal digits from a file that only its owner may read, outside of the cache.
fn read_secret(file: &Path, cache: &Path) -> Result<[u8; 32], CacheKeyError> {
    let failed = |source| CacheKeyError::File { path: file.to_owned(), source };
    let unusable = |why| CacheKeyError::Unusable { file: file.to_owned(), why };
    let meta = fs::metadata(file).map_err(failed)?;
    if meta.mode() & 0o077 != 0 {
        return Err(unusable("other users may read it; `chmod 600` it"));
    }
    let real = |path: &Path| path.canonicalize().map_err(failed);
    if real(file)?.starts_with(real(cache)?) {
        return Err(unusable("it lies in the cache that it protects, so a thief would have both"));
    }
    if meta.len() > MAX_TEXT {
        return Err(unusable("it is too long"));
    }
    let text = fs::read_to_string(file).map_err(failed)?;
    let key = text.trim().parse::<Digest>();
    key.map(|key| key.0)
        .map_err(|_| unusable("it has not 64 hexadecimal digits, as of `openssl rand -hex 32`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn key_file(dir: &Path, text: &str) -> PathBuf {
        let path = dir.join("a-key");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    #[test]
    fn a_cache_opens_with_its_own_key_and_no_other_way() {
        let (dir, keys, other) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let own = key_file(keys.path(), &format!("{}\n", "a7".repeat(32)));
        let open = |file: Option<&Path>, is_empty| CacheKey::open(dir.path(), file, is_empty);
        assert!(open(None, true).unwrap().is_none());
        assert!(matches!(open(Some(&own), false), Err(CacheKeyError::NotEncrypted)));
        let key = open(Some(&own), true).unwrap().unwrap();
        let again = open(Some(&own), false).unwrap().unwrap();
        assert_eq!((key.secret, key.salt), (again.secret, again.salt));
        assert!(matches!(open(None, false), Err(CacheKeyError::Missing)));
        let wrong = key_file(other.path(), &"a8".repeat(32));
        assert!(matches!(open(Some(&wrong), false), Err(CacheKeyError::Other { .. })));
        fs::write(dir.path().join(FILE), "damaged").unwrap();
        assert!(matches!(open(Some(&own), true), Err(CacheKeyError::File { .. })));
    }

    #[test]
    fn a_key_that_others_may_read_or_that_is_none_is_refused() {
        let (dir, keys) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let open = |file: &Path| CacheKey::open(dir.path(), Some(file), true);
        for text in ["", "a7", &"g".repeat(64), &"a7".repeat(40), &" ".repeat(5000)] {
            assert!(
                matches!(open(&key_file(keys.path(), text)), Err(CacheKeyError::Unusable { .. })),
                "{text}"
            );
        }
        let path = key_file(keys.path(), &"a7".repeat(32));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(open(&path), Err(CacheKeyError::Unusable { .. })));
        assert!(matches!(open(&key_file(dir.path(), &"a7".repeat(32))), Err(CacheKeyError::Unusable { .. })));
        assert!(matches!(open(Path::new("/nowhere")), Err(CacheKeyError::File { .. })));
        assert!(!dir.path().join(FILE).exists(), "a refused key made an encrypted cache");
    }
}
