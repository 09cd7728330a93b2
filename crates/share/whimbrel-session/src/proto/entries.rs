//! Directory entries on the wire: postcard, one after the other, compressed together with zstd.
//!
//! A part of a directory is bounded in entries and bytes before anything is allocated for it.

use super::{Attr, Name};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Largest uncompressed part of a directory, in bytes.
pub const MAX_LISTING: usize = 6 << 20;
/// Listings compress well at any level; the lowest costs the server least.
pub(super) const LEVEL: i32 = 1;

/// One name of a directory and its attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Name of the entry.
    pub name: Name,
    /// Attributes of the file.
    pub attr: Attr,
}

/// Reasons why bytes are not valid entries.
#[derive(Debug, thiserror::Error)]
pub enum EntriesError {
    /// The compression is invalid, or the content is longer than [`MAX_LISTING`].
    #[error("a listing cannot be decompressed")]
    Packed(#[source] std::io::Error),
    /// An entry cannot be decoded.
    #[error("a listing has an invalid entry")]
    Entry(#[source] postcard::Error),
}

/// Encodes entries for the wire; `None` if they are longer than [`MAX_LISTING`].
pub fn pack_entries(entries: &[Entry]) -> Option<Vec<u8>> {
    let mut raw = Vec::with_capacity(entries.len() * 64);
    for entry in entries {
        raw = postcard::to_extend(entry, raw).ok()?;
        if raw.len() > MAX_LISTING {
            return None;
        }
    }
    zstd::bulk::compress(&raw, LEVEL).ok()
}

/// Decodes entries from the wire.
pub fn unpack_entries(bytes: &[u8]) -> Result<Vec<Entry>, EntriesError> {
    unpack_values(bytes)
}

/// Decodes values that were written one after the other and compressed together.
pub(super) fn unpack_values<T: DeserializeOwned>(bytes: &[u8]) -> Result<Vec<T>, EntriesError> {
    let raw = zstd::bulk::decompress(bytes, MAX_LISTING).map_err(EntriesError::Packed)?;
    let mut rest = &raw[..];
    let mut all = Vec::new();
    while !rest.is_empty() {
        let (one, more) = postcard::take_from_bytes(rest).map_err(EntriesError::Entry)?;
        all.push(one);
        rest = more;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Ident, Kind, Time};
    use proptest::prelude::*;

    fn entry(number: u64) -> Entry {
        let attr = Attr {
            ident: Ident { dev: 1, ino: number, birth: 5 },
            kind: Kind::File,
            mode: 0o644,
            links: 1,
            uid: 0,
            gid: 0,
            size: number,
            blocks: 8,
            mtime: Time { seconds: -1, nanos: 7 },
            ctime: Time::default(),
        };
        Entry { name: Name::new(format!("file-{number}\n").as_bytes()).unwrap(), attr }
    }

    #[test]
    fn a_large_directory_is_a_fraction_of_its_size_on_the_wire() {
        let entries: Vec<_> = (0..5000).map(entry).collect();
        let packed = pack_entries(&entries).unwrap();
        assert!(packed.len() < 5000 * 15, "{} bytes", packed.len());
        assert_eq!(unpack_entries(&packed).unwrap(), entries);
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(unpack_entries(&bytes));
            drop(unpack_entries(&zstd::bulk::compress(&bytes, 1).unwrap()));
        }
    }
}
