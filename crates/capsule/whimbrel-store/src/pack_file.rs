//! Pack file: one open pack, and the key of its frames if they are sealed.

use crate::{
    error::{Result, StoreError},
    file_names::PackId,
    index::PackLocation,
    object_reader::damaged,
    sealed_frame::{PackKey, PackKeys},
    vfs::{ReadAt, Vfs},
};
use std::sync::Arc;

/// A pack that is open for reading.
pub(crate) struct PackFile {
    id: PackId,
    pub(crate) file: Arc<dyn ReadAt>,
    pub(crate) key: Option<PackKey>,
}

impl PackFile {
    /// Opens a pack; `keys` are those of the store, if it is encrypted.
    pub(crate) fn open(files: &dyn Vfs, id: PackId, keys: Option<&PackKeys>) -> Result<Self> {
        let path = id.path();
        let file = files.open(&path).map_err(StoreError::io("open", &path))?;
        let key = match (id.is_sealed(), keys) {
            (false, _) => None,
            (true, Some(keys)) => {
                Some(keys.of(id).map_err(|source| StoreError::Seal { source: source.into() })?)
            }
            (true, None) => {
                return Err(StoreError::Keys { reason: "a pack is sealed, and the store is not encrypted" });
            }
        };
        Ok(Self { id, file, key })
    }

    /// Reads the frame at `place` into `bytes`, without its seal. Its content is unchecked.
    pub(crate) fn read(&self, place: &PackLocation, bytes: &mut Vec<u8>) -> Result<()> {
        bytes.resize(place.len as usize, 0);
        self.file.read_at(u64::from(place.offset), bytes).map_err(|source| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => damaged(String::from("of a frame"), place, source),
            _ => StoreError::Io { action: "read", path: self.id.path(), source },
        })?;
        match &self.key {
            Some(key) => key
                .open(place.offset, bytes)
                .map_err(|source| damaged(String::from("of a frame"), place, source)),
            None => Ok(()),
        }
    }
}
