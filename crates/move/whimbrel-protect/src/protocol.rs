//! The messages of a protection. docs/protocols/protect.md tells the story.
//!
//! Every message is a request of the wire protocol; its header is one of these types in postcard form, its
//! payload what the doc of the kind says. Those with pages are handled in the order in which they were sent;
//! those without a payload are answered at once, however much is on its way.

use crate::codec::{BlockSize, CodecOptions};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use whimbrel_core::{HostName, PageRun, WitnessAddress};
use whimbrel_migrate::protocol::{Offer, Offered};

/// Offer a machine to be protected; header [`StartRequest`], reply [`Offered`].
pub const START: u16 = 0x0300;
/// A piece of a file that the machine boots from; header [`Blob`], payload the piece.
pub const BLOB: u16 = 0x0301;
/// Which pages differ; header [`Compare`], payload 16 bytes a page; reply: one bit a page.
pub const COMPARE_DIGESTS: u16 = 0x0302;
/// Pages of an epoch; header [`EpochPages`], payload as in [`crate::codec`]; reply [`PagesToResend`].
pub const EPOCH_PAGES: u16 = 0x0303;
/// All of an epoch was sent; header [`EpochEnd`], payload the device state if it did not come as pages; reply
/// empty: it is committed.
pub const EPOCH_END: u16 = 0x0304;
/// The primary lives; header [`ProtectionId`]; reply [`HeartbeatReply`].
pub const HEARTBEAT: u16 = 0x0305;
/// The protection ends, the machine stays where it is; header [`EndProtection`]; reply [`StandbyOutcome`].
/// May come again.
pub const END: u16 = 0x0306;
/// The primary will never run the machine again; header [`ProtectionId`]; reply [`StandbyOutcome`] when it
/// runs. May come again.
pub const YIELD: u16 = 0x0307;
/// What a witness is asked; header [`WitnessRequest`], reply [`crate::lease::Verdict`].
pub const WITNESS: u16 = 0x0308;
/// What reached the guest, and what has left; header [`InputFrames`], payload the frames; reply empty: they
/// are kept.
pub const INPUTS: u16 = 0x0309;

/// Most frames in one [`INPUTS`], and most bytes of all but the last of them.
pub const INPUTS_FRAMES_MAX: usize = 4096;
/// See [`INPUTS_FRAMES_MAX`].
pub const INPUTS_BYTES_MAX: usize = 2 << 20;
/// Most bytes of content in all pages of an epoch. What is dirty beyond that comes as a copy that is no
/// epoch.
pub const EPOCH_BYTES_MAX: usize = 256 << 20;
/// The array that the device state of an epoch is sent as, cut into pages: most of it is as it was in the one
/// before.
pub const DEVICES: u32 = u32::MAX;
/// Most pages in one question which of them differ.
pub const COMPARE_PAGES_MAX: u64 = 1 << 16;

/// Names one protection of one machine, from its beginning until it has ended or the standby has taken over.
/// Random: what a later one may do, an earlier one may not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProtectionId(pub [u8; 16]);

impl fmt::Display for ProtectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ProtectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProtectionId({self})")
    }
}

/// The text is no id of a protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an id of a protection has 32 hexadecimal digits")]
pub struct ParseProtectionIdError;

impl FromStr for ProtectionId {
    type Err = ParseProtectionIdError;

    fn from_str(text: &str) -> Result<Self, ParseProtectionIdError> {
        let hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| hex);
        number.map(|number| Self(number.to_be_bytes())).ok_or(ParseProtectionIdError)
    }
}

/// What the standby is to hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRequest {
    /// This protection.
    pub id: ProtectionId,
    /// The machine, as it would be offered for a migration.
    pub offer: Offer,
    /// How pages are coded.
    pub coding: CodecOptions,
    /// How long a lease lasts.
    pub lease_ms: u32,
    /// Who decides when the two hosts lose each other; none if a person does.
    pub witness: Option<WitnessAddress>,
    /// How the standby is to protect the machine when it has taken it over: a request of its own API. None if
    /// not at all.
    pub then: Option<String>,
    /// Which epochs the standby is to keep as capsules; none if none.
    pub keep: Option<SnapshotRule>,
    /// Who is the primary, if that is not who sends this: its machine is about to move there
    /// ([`crate::inherited_primary`]).
    pub heir: Option<HostName>,
}

/// Which epochs are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRule {
    /// One in so many milliseconds.
    pub every_ms: u64,
    /// The last so many of them.
    pub count: u32,
}

/// What the standby says to [`START`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartReply {
    /// Whether it has room.
    pub offered: Offered,
    /// Whether it still has pages of the protection before.
    pub has_pages: bool,
}

/// A piece of a boot file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// This protection.
    pub id: ProtectionId,
    /// Which file and where.
    pub piece: whimbrel_migrate::protocol::BootFileRange,
}

/// Which of these pages differ?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compare {
    /// This protection.
    pub id: ProtectionId,
    /// Of which array.
    pub array: u32,
    /// Which pages.
    pub run: PageRun,
}

/// Pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochPages {
    /// This protection.
    pub id: ProtectionId,
    /// The epoch they belong to; none while the first copy is made, when there is nothing to keep whole.
    pub epoch: Option<u64>,
    /// Of which array.
    pub array: u32,
    /// The unit of its blocks.
    pub block: BlockSize,
}

/// The standby's answer to a piece.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PagesToResend {
    /// Pages that did not come out as their digests say.
    pub pages: Vec<u64>,
}

/// The end of an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochEnd {
    /// This protection.
    pub id: ProtectionId,
    /// The epoch.
    pub epoch: u64,
    /// Pages of it: those the standby must have.
    pub pages: u64,
    /// Length of the device state if it came as pages of [`DEVICES`]; none if it is the payload.
    pub device_bytes: Option<u32>,
    /// Addresses seen on each network port, to announce them.
    pub ports: Vec<Vec<u8>>,
}

/// Frames that reached the guest, in the order in which they did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFrames {
    /// This protection.
    pub id: ProtectionId,
    /// Number of the first.
    pub first: u64,
    /// Of each: by which port, when (in microseconds since some moment), and its length.
    pub frames: Vec<(u16, u64, u32)>,
    /// Fingerprints of frames that have left.
    pub left: Vec<u64>,
    /// Of an epoch that is not sealed yet: the first input that may not be in it.
    pub image: Option<(u64, u64)>,
}

/// The end of a protection whose machine stays with the primary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndProtection {
    /// Which.
    pub id: ProtectionId,
    /// Whether another protection is to follow, for which the pages are of use.
    pub keep: bool,
}

/// The standby's answer to a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HeartbeatReply {
    /// It will not take over for as long as a lease lasts, counted from when the heartbeat was sent.
    Promise,
    /// It has asked whether it may take over, or has done so, or does not know the protection.
    NoPromise(StandbyOutcome),
}

/// What has become of a protection at the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StandbyOutcome {
    /// It stands by.
    Standing,
    /// It is finding out whether it may run the machine.
    Asking,
    /// The machine is the standby's.
    TakenOver,
    /// It has nothing of the machine, and never will have by this protection.
    Ended,
}

/// A question to a witness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WitnessRequest {
    /// Which protection.
    pub id: ProtectionId,
    /// What.
    pub question: crate::lease::WitnessQuery,
}
