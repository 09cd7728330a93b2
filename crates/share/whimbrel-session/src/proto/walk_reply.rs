//! Reply to a tree listing: directories with their entries, each in postcard, compressed together with zstd.
//!
//! A directory is named by its identity, because the client may know it under another path by now, or not at
//! all yet.

use super::{
    EntriesError, Entry, Ident, MAX_LISTING,
    entries::{LEVEL, unpack_values},
};
use serde::{Deserialize, Serialize};

/// A listed directory and its entries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkedDir {
    /// Identity of the directory.
    pub ident: Ident,
    /// All of its entries; none if there are more than were wanted.
    pub entries: Option<Vec<Entry>>,
}

/// Encodes directories one after the other, up to [`MAX_LISTING`].
#[derive(Debug, Default)]
pub struct DirPacker {
    raw: Vec<u8>,
}

impl DirPacker {
    /// Adds a directory, unless the total would be too long.
    pub fn add(&mut self, dir: &WalkedDir) -> bool {
        let before = self.raw.len();
        let added = postcard::to_extend(dir, std::mem::take(&mut self.raw));
        // Serialising these types to postcard does not fail.
        self.raw = added.unwrap_or_default();
        let fits = self.raw.len() <= MAX_LISTING && self.raw.len() > before;
        if !fits {
            self.raw.truncate(before);
        }
        fits
    }

    /// Compresses the directories for the wire.
    pub fn finish(self) -> std::io::Result<Vec<u8>> {
        zstd::bulk::compress(&self.raw, LEVEL)
    }
}

/// Decodes directories from the wire.
pub fn unpack_dirs(bytes: &[u8]) -> Result<Vec<WalkedDir>, EntriesError> {
    unpack_values(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Attr, Kind, Name, Time};
    use proptest::prelude::*;

    fn dir(number: u64, names: usize) -> WalkedDir {
        let ident = Ident { dev: 1, ino: number, birth: 5 };
        let attr = Attr {
            ident,
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
        let name = |at: usize| Name::new(format!("{at:0>255}").as_bytes()).unwrap();
        let entries = (0..names).map(|at| Entry { name: name(at), attr }).collect();
        WalkedDir { ident, entries: Some(entries) }
    }

    #[test]
    fn what_would_be_too_long_is_left_out_and_the_rest_comes() {
        let dirs: Vec<_> = (0..30).map(|number| dir(number, 1000)).collect();
        let mut packer = DirPacker::default();
        let taken = dirs.iter().take_while(|dir| packer.add(dir)).count();
        assert!((10..30).contains(&taken), "{taken}");
        assert_eq!(unpack_dirs(&packer.finish().unwrap()).unwrap(), dirs[..taken]);
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(unpack_dirs(&bytes));
            drop(unpack_dirs(&zstd::bulk::compress(&bytes, 1).unwrap()));
        }
    }
}
