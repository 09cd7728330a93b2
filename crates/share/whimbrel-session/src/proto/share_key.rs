//! Share keys: secret names under which users of one client host share content that a server let them read.
//!
//! A server makes a key for each version of a file from a secret of its own, and sends it with the file's
//! digests, so only to those who may read the file. The name of a piece is made of that key and the digests
//! of its pages. Guessing the content without the key therefore does not reveal whether somebody here has
//! read it. Pure.

use super::{Attr, PAGE};
use serde::{Deserialize, Serialize};
use std::fmt;
use whimbrel_core::Digest;

/// Pages of a shared piece.
pub const PIECE_PAGES: usize = 16;
/// Bytes of a shared piece; pieces begin at multiples of this.
pub const PIECE: u64 = (PIECE_PAGES * PAGE) as u64;

/// Key of one version of a file, known only to those who may read it. Never printed.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareKey([u8; 32]);

impl ShareKey {
    /// Makes the key of a file's current version from a server's secret.
    pub fn of(secret: &[u8; 32], attr: &Attr) -> Option<Self> {
        let said = postcard::to_allocvec(&(secret, attr.ident, attr.version())).ok()?;
        Some(Self(Digest::of(&said).0))
    }

    /// Name of a piece with pages of these digests, `None` for zeros.
    pub fn name(&self, pages: &[Option<Digest>]) -> String {
        let mut said = self.0.to_vec();
        for page in pages {
            // No digest is all zeros except by a chance of one in 2^256.
            said.extend_from_slice(&page.map_or([0; 32], |digest| digest.0));
        }
        Digest::of(&said).to_string()
    }
}

impl fmt::Debug for ShareKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ShareKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Ident, Kind, Time};

    fn attr(ino: u64, seconds: i64) -> Attr {
        let time = Time { seconds, nanos: 0 };
        Attr {
            ident: Ident { dev: 1, ino, birth: 2 },
            kind: Kind::File,
            mode: 0o600,
            links: 1,
            uid: 0,
            gid: 0,
            size: 5,
            blocks: 8,
            mtime: time,
            ctime: time,
        }
    }

    #[test]
    fn a_name_is_of_one_content_of_one_version_of_one_file_of_one_server() {
        let pages = [Some(Digest::of(b"a")), None, Some(Digest::of(b"b"))];
        let name = |secret: u8, ino, seconds, pages: &[Option<Digest>]| {
            ShareKey::of(&[secret; 32], &attr(ino, seconds)).unwrap().name(pages)
        };
        let first = name(1, 1, 1, &pages);
        assert_eq!(first, name(1, 1, 1, &pages));
        let moved = [None, pages[0], pages[2]];
        let others =
            [name(2, 1, 1, &pages), name(1, 2, 1, &pages), name(1, 1, 2, &pages), name(1, 1, 1, &moved)];
        assert!(others.iter().all(|other| *other != first));
    }
}
