//! Names of the files of a store, and the format of its small files.
//!
//! Small files (refs, GC leases, the list of condemned packs) are lines of text, of which the last is the
//! xxh3 of those before. They are published atomically: written under a temporary name, synced, renamed,
//! directory synced.

use crate::{
    error::{Result, StoreError},
    keys::KeyId,
    vfs::Vfs,
};
use std::fmt;
use whimbrel_core::loss::{Loss, is_back};
use xxhash_rust::xxh3::xxh3_64;

pub(crate) const PACKS: &str = "packs";
pub(crate) const INDEX: &str = "index";
pub(crate) const REFS: &str = "refs";
pub(crate) const LEASES: &str = "leases";
/// Directory of marks for partial capsules.
pub(crate) const PARTIAL: &str = "partial";
/// Directory of the bytes that garbage collection may use on a full disk.
pub(crate) const RESERVE: &str = "reserve";
pub(crate) const TEMP: &str = "tmp";
pub(crate) const MARKER: &str = "whimbrel-store";
/// Wrapped key of an encrypted store.
pub(crate) const KEYS: &str = "keys";
/// Second copy of [`KEYS`], for when the first is damaged.
pub(crate) const KEYS_COPY: &str = "keys.copy";
pub(crate) const CONDEMNED: &str = "condemned";

pub(crate) const PACK_HEAD: usize = 24;
const PACK_MAGIC: [u8; 8] = *b"WHPACK\x00\x01";
/// Bit of a sequence number that says that the frames of the pack are sealed.
const SEALED: u32 = 1 << 31;

/// Name of a pack: the GC lease of its writer and a sequence number, whose highest bit says whether its
/// frames are sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PackId {
    pub(crate) lease: u64,
    pub(crate) seq: u32,
}

impl PackId {
    /// The pack with sealed frames.
    pub(crate) fn sealed(self) -> Self {
        Self { seq: self.seq | SEALED, ..self }
    }

    /// Whether the frames of the pack are sealed.
    pub(crate) fn is_sealed(&self) -> bool {
        self.seq & SEALED != 0
    }

    pub(crate) fn path(&self) -> String {
        format!("{PACKS}/{self}")
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (lease, seq) = name.strip_suffix(".pack")?.split_once('-')?;
        let id =
            Self { lease: u64::from_str_radix(lease, 16).ok()?, seq: u32::from_str_radix(seq, 16).ok()? };
        (id.to_string() == name).then_some(id)
    }

    /// First bytes of the pack; `key` is the data key of its frames.
    pub(crate) fn head(&self, key: Option<KeyId>) -> [u8; PACK_HEAD] {
        let mut head = [0; PACK_HEAD];
        head[..8].copy_from_slice(&PACK_MAGIC);
        head[8..16].copy_from_slice(&self.lease.to_le_bytes());
        head[16..20].copy_from_slice(&self.seq.to_le_bytes());
        head[20..].copy_from_slice(&key_mark(key).to_le_bytes());
        head
    }
}

/// Part of a data key's name that is in the heads of its packs; 0 without a key.
pub(crate) fn key_mark(key: Option<KeyId>) -> u32 {
    key.map_or(0, |KeyId(id)| id as u32)
}

impl fmt::Display for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{:08x}.pack", self.lease, self.seq)
    }
}

/// Publishes a file atomically and durably: the old version remains until the new one is durable.
pub(crate) fn publish(files: &dyn Vfs, dir: &str, name: &str, bytes: &[u8]) -> Result<()> {
    let temp = format!("{TEMP}/{:016x}", rand::random::<u64>());
    let path = if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") };
    let mut file = files.create(&temp).map_err(StoreError::io("create", &temp))?;
    let written = file
        .append(bytes)
        .map_err(StoreError::io("append to", &temp))
        .and_then(|()| match is_back(Loss::SmallFileNotSynced) {
            true => Ok(()),
            false => file.sync().map_err(StoreError::io("sync", &temp)),
        })
        .and_then(|()| files.rename(&temp, &path).map_err(StoreError::io("rename", &path)));
    if written.is_err() {
        let _ = files.remove(&temp);
    }
    written?;
    if is_back(Loss::RefNameNotSynced) && dir == REFS {
        return Ok(());
    }
    files.sync_dir(dir).map_err(StoreError::io("sync", dir))
}

/// Renames a damaged file, so that it can be made again and nothing of it is lost.
pub(crate) fn set_aside(files: &dyn Vfs, path: &str) -> Result<()> {
    let aside = format!("{path}.damaged-{:08x}", rand::random::<u32>());
    files.rename(path, &aside).map_err(StoreError::io("rename", path))
}

/// Appends the checksum line to `lines`.
pub(crate) fn with_checksum(lines: &str) -> Vec<u8> {
    format!("{lines}{:016x}\n", xxh3_64(lines.as_bytes())).into_bytes()
}

/// Reads a small file that was made with [`with_checksum`]; none if it does not exist.
pub(crate) fn read_checked(files: &dyn Vfs, path: &str) -> Result<Option<String>> {
    const MAX: u64 = 64 << 20;
    let fail = |action| StoreError::io(action, path);
    let file = match files.open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fail("open")(error)),
    };
    let damaged = || StoreError::SmallFile { path: path.to_owned() };
    let size = file.size().map_err(fail("size"))?;
    if !(17..=MAX).contains(&size) {
        return Err(damaged());
    }
    let mut bytes = vec![0; size as usize];
    file.read_at(0, &mut bytes).map_err(fail("read"))?;
    let (lines, _) = bytes.split_at(bytes.len() - 17);
    let lines = std::str::from_utf8(lines).map_err(|_| damaged())?;
    if with_checksum(lines) == bytes { Ok(Some(lines.to_owned())) } else { Err(damaged()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pack_names_and_heads_are_pinned() {
        let id = PackId { lease: 0x0123_4567_89ab_cdef, seq: 7 };
        assert_eq!(id.to_string(), "0123456789abcdef-00000007.pack");
        assert_eq!(PackId::parse(&id.to_string()), Some(id));
        assert_eq!(PackId::parse("123-7.pack"), None);
        assert_eq!(id.sealed().to_string(), "0123456789abcdef-80000007.pack");
        assert!(id.sealed().is_sealed() && !id.is_sealed());
        assert_eq!(
            &id.sealed().head(Some(KeyId(0x9988_7766_5544_3322)))[16..],
            b"\x07\0\0\x80\x22\x33\x44\x55"
        );
        assert_eq!(&id.head(None), b"WHPACK\x00\x01\xef\xcd\xab\x89\x67\x45\x23\x01\x07\0\0\0\0\0\0\0");
    }
}
