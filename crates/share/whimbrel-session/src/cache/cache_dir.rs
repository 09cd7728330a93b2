//! Directory of a cache, with its key if it is encrypted.

use super::{
    cache_file::CacheFile,
    cache_key::{CacheKey, CacheKeyError},
    storage::DiskStorage,
};
use std::{
    fs::{self, OpenOptions},
    io,
    path::{Path, PathBuf},
};
use whimbrel_block::SectorCipher;
use whimbrel_wire::atomic_file;

/// Bytes of the length before the content of a small file.
const LENGTH: usize = 8;

/// Directory of a cache.
#[derive(Debug, Clone)]
pub struct CacheDir {
    path: PathBuf,
    key: Option<CacheKey>,
}

impl CacheDir {
    /// Directory of a cache that a session has, with the file of its key if it is encrypted.
    pub fn open(path: &Path, key_file: Option<&Path>) -> Result<Self, CacheKeyError> {
        Ok(Self { path: path.to_owned(), key: CacheKey::open(path, key_file, false)? })
    }

    /// Directory of the cache whose files were opened now. An empty one for which a key is given becomes an
    /// encrypted one.
    pub(crate) fn of(
        path: &Path,
        files: DiskStorage,
        key_file: Option<&Path>,
    ) -> Result<(Self, DiskStorage), CacheKeyError> {
        let failed = |source| CacheKeyError::File { path: path.to_owned(), source };
        let key = CacheKey::open(path, key_file, files.is_empty().map_err(failed)?)?;
        let files = match &key {
            Some(key) => files.encrypted_with(key),
            None => files,
        };
        Ok((Self { path: path.to_owned(), key }, files))
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether its files are encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.key.is_some()
    }

    /// Opens the file with this name.
    pub(crate) fn open_file(&self, name: &str, options: &OpenOptions) -> io::Result<CacheFile> {
        let file = options.open(self.path.join(name))?;
        Ok(CacheFile::new(file, self.key.as_ref().map(|key| key.cipher(name))))
    }

    /// Replaces the small file with this name, durably.
    pub(crate) fn replace(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let path = self.path.join(name);
        let Some(key) = &self.key else { return atomic_file::replace(&path, content) };
        let mut sealed = (content.len() as u64).to_le_bytes().to_vec();
        sealed.extend(content);
        sealed.resize(sealed.len().next_multiple_of(SectorCipher::SECTOR), 0);
        key.cipher(name).encrypt(0, &mut sealed).map_err(io::Error::other)?;
        atomic_file::replace(&path, &sealed)
    }

    /// Content of the small file with this name.
    ///
    /// # Errors
    /// `FileTooLarge` if it has more than `max` bytes, `InvalidData` if it is not of this cache.
    pub(crate) fn load(&self, name: &str, max: u64) -> io::Result<Vec<u8>> {
        let path = self.path.join(name);
        let most = max + LENGTH as u64 + SectorCipher::SECTOR as u64;
        let len = fs::metadata(&path)?.len();
        if len > if self.key.is_some() { most } else { max } {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let mut bytes = fs::read(&path)?;
        let Some(key) = &self.key else { return Ok(bytes) };
        key.cipher(name).decrypt(0, &mut bytes).map_err(io::Error::other)?;
        let (length, content) = bytes.split_first_chunk::<LENGTH>().ok_or(io::ErrorKind::InvalidData)?;
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        content.get(..length).map(<[u8]>::to_vec).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn small_files_come_back_and_tell_nothing() {
        let (dir, keys) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let key = keys.path().join("key");
        fs::write(&key, "5c".repeat(32)).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        for key_file in [None, Some(&*key)] {
            let path = dir.path().join(format!("{}", key_file.is_some()));
            let files = DiskStorage::open(&path).unwrap();
            let (cache, _files) = CacheDir::of(&path, files, key_file).unwrap();
            for len in [0, 1, 503, 504, 505, 5000] {
                let content = vec![7; len];
                cache.replace("small", &content).unwrap();
                assert_eq!(cache.load("small", len as u64).unwrap(), content);
                let stored = fs::read(path.join("small")).unwrap();
                assert_eq!(
                    len > 15 && stored.windows(16).any(|part| part == [7; 16]),
                    len > 15 && key_file.is_none()
                );
            }
            assert_eq!(cache.load("small", 100).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
            assert_eq!(cache.load("none", 100).unwrap_err().kind(), io::ErrorKind::NotFound);
            fs::write(path.join("small"), [1; 512]).unwrap();
            assert_eq!(cache.load("small", 1000).is_err(), key_file.is_some(), "damaged");
        }
    }
}
