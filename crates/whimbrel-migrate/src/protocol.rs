//! The messages of a migration, in the order they are sent. docs/protocols/migrate.md tells the story.
//!
//! Every message is a request of the wire protocol; its header is one of these types in postcard form, its
//! payload what the doc of the kind says. The requests of one handover are handled in the order they came.

use crate::{base::BegunAs, fit::Misfit};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use whimbrel_core::{CapsuleId, Digest, HostName, MachineConfig, MachineName};

/// Offer a machine; header [`Offer`], reply [`Offered`].
pub const OFFER: u16 = 0x0100;
/// A piece of a file that the machine boots from; header [`BlobPiece`], payload the piece.
pub const BLOB: u16 = 0x0101;
/// Pages; header [`Pages`], payload as in [`crate::codec`].
pub const PAGES: u16 = 0x0102;
/// All pages are sent; header [`Finish`], payload the device state. Answered once loaded and written down.
pub const FINISH: u16 = 0x0103;
/// The source has committed: run it; header [`HandoverId`]. May come again.
pub const COMMIT: u16 = 0x0104;
/// The source has given up; header [`HandoverId`].
pub const ABORT: u16 = 0x0105;

/// Most bytes of a blob in one message.
pub const BLOB_PIECE_MAX: usize = 4 << 20;
/// Most bytes of a blob.
pub const BLOB_MAX: u64 = 1 << 30;
/// Most bytes of device state.
pub const DEVICE_STATE_MAX: usize = 8 << 20;
/// Most capsules that a source names as ones it has.
pub const BASES_MAX: usize = 64;
/// Most bytes of a path of a file that a source names.
pub const PATH_MAX: usize = 4096;
/// Most arrays a machine may have (memory and disks).
pub const ARRAYS_MAX: usize = 64;

/// Names one attempt to move one machine. Random, so that a late message of an older attempt finds nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HandoverId(pub [u8; 16]);

impl fmt::Display for HandoverId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for HandoverId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandoverId({self})")
    }
}

/// The handover that a message is about: it stands first in every header.
pub fn handover_of(header: &[u8]) -> Option<HandoverId> {
    postcard::take_from_bytes(header).ok().map(|(handover, _)| handover)
}

/// What the source wants to move. The target reserves everything that this names before it accepts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// This attempt.
    pub handover: HandoverId,
    /// The machine's name, which must be free on the target.
    pub name: MachineName,
    /// What it is made of.
    pub config: MachineConfig,
    /// Its page arrays: memory first, then the disks in order.
    pub arrays: Vec<ArrayOffer>,
    /// Its identity, which it keeps.
    pub vmgenid: String,
    /// The capsule it last came from or was saved as.
    pub origin: Option<CapsuleId>,
    /// Files it boots from, with their sizes.
    pub blobs: Vec<(Digest, u64)>,
    /// Version of the QEMU that runs it.
    pub qemu_version: String,
    /// Room that its disks take.
    pub disk_bytes: u64,
    /// The processor that it runs on.
    pub processor: String,
    /// Where its network stays, if that is not to be the target's.
    pub tunnel: Option<HomeNetwork>,
    /// Capsules that the source has whole and that resemble it, the best first: an array may begin as an image of one.
    pub bases: Vec<CapsuleId>,
    /// Files under its disks that the target may reach as well.
    pub files: Vec<SharedFile>,
    /// The source's name, if pages of the machine may stay there at the pause.
    pub leaves: Option<HostName>,
}

/// A file that lies under a disk and is never written. Both hosts reach the same one if a mark that the source has just
/// laid beside it is there on the target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedFile {
    /// Which disk, from 0.
    pub disk: u32,
    /// Where it is.
    pub path: String,
    /// Its length in bytes.
    pub len: u64,
    /// When it was changed last, in nanoseconds since 1970.
    pub changed: i64,
    /// Name of the file that is the mark, in the same directory.
    pub mark: String,
    /// What is in that.
    pub secret: [u8; 32],
}

impl Offer {
    /// Whether the target may begin an array as this.
    pub fn names(&self, begun: &BegunAs) -> bool {
        match begun {
            BegunAs::Zeros => true,
            BegunAs::Capsule(capsule) => self.bases.contains(capsule),
            BegunAs::File => !self.files.is_empty(),
        }
    }
}

/// The host that has a machine's network while it runs on another one, and the tunnel between the two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeNetwork {
    /// The host.
    pub home: HostName,
    /// The tunnel, until the machine is home again.
    pub id: TunnelId,
    /// The capsule as which that host suspended the machine, if that is how it came away.
    pub capsule: Option<CapsuleId>,
}

/// Names a tunnel. Random, and told only to those who have the machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TunnelId(pub [u8; 16]);

impl fmt::Display for TunnelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TunnelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Whoever knows it may open the tunnel: a log shows its beginning.
        write!(f, "TunnelId({:02x}{:02x}…)", self.0[0], self.0[1])
    }
}

/// The text is no id of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an id of a tunnel has 32 hexadecimal digits")]
pub struct ParseTunnelIdError;

impl FromStr for TunnelId {
    type Err = ParseTunnelIdError;

    fn from_str(text: &str) -> Result<Self, ParseTunnelIdError> {
        let hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| hex);
        number.map(|number| Self(number.to_be_bytes())).ok_or(ParseTunnelIdError)
    }
}

/// One page array of an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayOffer {
    /// `memory`, `disk0`, …
    pub name: String,
    /// Its length.
    pub pages: u64,
}

/// What the target says to an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offered {
    /// Room is reserved.
    Accepted(Accepted),
    /// The machine does not fit; nothing was reserved.
    Misfit(Misfit),
}

/// The target has reserved room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// Blobs of the offer that the target lacks.
    pub blobs_missing: Vec<Digest>,
    /// What each array begins as; zeros where nothing is said.
    pub begun_as: Vec<BegunAs>,
}

/// A piece of a blob; pieces come in order of their offsets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobPiece {
    /// This attempt.
    pub handover: HandoverId,
    /// The whole blob's digest.
    pub digest: Digest,
    /// Where the piece belongs.
    pub offset: u64,
}

/// Pages of one array.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// This attempt.
    pub handover: HandoverId,
    /// Which pages and how they are encoded.
    pub batch: crate::codec::BatchHeader,
}

/// The end of the copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finish {
    /// This attempt.
    pub handover: HandoverId,
    /// Addresses seen on each network port, opaque to the protocol, so that the target can announce them.
    pub ports: Vec<Vec<u8>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_it_is_written_and_nothing_else_is() {
        let id = TunnelId([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "0", &"+".repeat(32), &"0".repeat(31), &"g".repeat(32)] {
            assert_eq!(bad.parse::<TunnelId>(), Err(ParseTunnelIdError));
        }
    }
}
