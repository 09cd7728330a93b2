//! Messages of a protection, as docs/protocols/protect.md describes them.
//!
//! Every message is a request of the wire protocol; its header is one of these types in postcard form, its
//! payload is documented at the kind. Messages with pages are handled in the order in which they were sent;
//! messages without a payload are answered at once and overtake them.

use crate::codec::{BlockSize, CodecOptions};
use serde::{Deserialize, Serialize};
use whimbrel_core::{HostName, PageRun, WitnessAddress, hex_id};
use whimbrel_migrate::protocol::{Offer, Offered};

/// Offers a machine to the standby; header [`StartRequest`], reply [`StartReply`].
pub const START: u16 = 0x0300;
/// A range of a boot file; header [`Blob`], payload the bytes of the range.
pub const BLOB: u16 = 0x0301;
/// Asks which pages differ; header [`Compare`], payload 16 bytes a page; reply: one bit a page.
pub const COMPARE_DIGESTS: u16 = 0x0302;
/// Pages of an epoch; header [`EpochPages`], payload as in [`crate::codec`]; reply [`PagesToResend`].
pub const EPOCH_PAGES: u16 = 0x0303;
/// End of an epoch; header [`EpochEnd`], payload the device state if it did not come as pages; reply empty:
/// the epoch is committed.
pub const EPOCH_END: u16 = 0x0304;
/// Heartbeat of the primary; header [`ProtectionId`]; reply [`HeartbeatReply`].
pub const HEARTBEAT: u16 = 0x0305;
/// Ends the protection, the machine stays with the primary; header [`EndProtection`]; reply
/// [`StandbyOutcome`]. May be repeated.
pub const END: u16 = 0x0306;
/// The primary does not run the machine again unless this protection ends; header [`ProtectionId`]; reply
/// [`StandbyOutcome`] once the standby runs it, or could not load it. May be repeated.
pub const YIELD: u16 = 0x0307;
/// Query to a witness; header [`WitnessRequest`], reply [`crate::lease::WitnessReply`].
pub const WITNESS: u16 = 0x0308;
/// Frames that reached the guest and fingerprints of sent ones; header [`InputFrames`], payload the frames;
/// reply empty: they are stored.
pub const INPUTS: u16 = 0x0309;

/// Most frames in one [`INPUTS`] message.
pub const INPUTS_FRAMES_MAX: usize = 4096;
/// Most bytes of all frames of one [`INPUTS`] message except the last.
pub const INPUTS_BYTES_MAX: usize = 2 << 20;
/// Most bytes of content that are copied in one pause. More is sent in rounds before.
pub const EPOCH_BYTES_MAX: usize = 256 << 20;
/// Most pages of an epoch: 4 GiB of content. The standby holds what is beyond 256 MiB in a file.
pub const EPOCH_PAGES_MAX: usize = 1 << 20;
/// Array number of the device state, which is sent as pages: most of it equals the epoch before.
pub const DEVICES: u32 = u32::MAX;
/// Most pages in one comparison.
pub const COMPARE_PAGES_MAX: u64 = 1 << 16;

hex_id! {
    /// Identifies one protection of one machine, from its start until it has ended or the standby has taken
    /// over. Random, so that a message of an earlier protection is never taken for a later one's.
    pub struct ProtectionId;
}

/// Request to start a protection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRequest {
    /// Id of this protection.
    pub id: ProtectionId,
    /// The machine, as it would be offered for a migration.
    pub offer: Offer,
    /// Codec of the pages.
    pub coding: CodecOptions,
    /// Term of a lease.
    pub lease_ms: u32,
    /// Witness that decides when the hosts lose contact; none if a person does.
    pub witness: Option<WitnessAddress>,
    /// Protection that the standby requests after a takeover, in JSON of its API; none without one.
    pub then: Option<String>,
    /// Epochs that the standby stores as capsules, if any.
    pub keep: Option<SnapshotRule>,
    /// The primary, if it is not the host that sends this: its machine is about to move there
    /// ([`crate::inherited_primary`]).
    pub heir: Option<HostName>,
}

/// Rule for the epochs that are stored as capsules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRule {
    /// Interval in milliseconds.
    pub every_ms: u64,
    /// Number of capsules that are retained.
    pub count: u32,
}

/// Reply to [`START`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartReply {
    /// Whether the standby accepts the offer.
    pub offered: Offered,
    /// Whether it still has pages of the previous protection.
    pub has_pages: bool,
}

/// A range of a boot file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// Id of this protection.
    pub id: ProtectionId,
    /// File and position of the range.
    pub piece: whimbrel_migrate::protocol::BootFileRange,
}

/// Request to compare pages by their digests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compare {
    /// Id of this protection.
    pub id: ProtectionId,
    /// Array of the pages.
    pub array: u32,
    /// Range of pages.
    pub run: PageRun,
}

/// Header of a batch of pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochPages {
    /// Id of this protection.
    pub id: ProtectionId,
    /// Epoch of the pages; none during seeding, when there is nothing to commit.
    pub epoch: Option<u64>,
    /// Array of the pages.
    pub array: u32,
    /// Unit of the blocks.
    pub block: BlockSize,
}

/// Reply to a batch of pages.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PagesToResend {
    /// Pages whose digest was wrong.
    pub pages: Vec<u64>,
}

/// End of an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochEnd {
    /// Id of this protection.
    pub id: ProtectionId,
    /// Number of the epoch.
    pub epoch: u64,
    /// Number of pages that the standby must have received.
    pub pages: u64,
    /// Length of the device state if it came as pages of [`DEVICES`]; none if it is the payload.
    pub device_bytes: Option<u32>,
    /// Addresses seen on each network port, to announce them.
    pub ports: Vec<Vec<u8>>,
}

/// Frames that reached the guest, in the order of arrival.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFrames {
    /// Id of this protection.
    pub id: ProtectionId,
    /// Number of the first frame.
    pub first: u64,
    /// Port, time (in microseconds since an arbitrary moment) and length of each frame.
    pub frames: Vec<(u16, u64, u32)>,
    /// Fingerprints of frames that the guest sent.
    pub left: Vec<u64>,
    /// An epoch in progress, and the first input that it may lack.
    pub image: Option<(u64, u64)>,
}

/// End of a protection whose machine stays with the primary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndProtection {
    /// Id of this protection.
    pub id: ProtectionId,
    /// Whether another protection will follow that can use the pages.
    pub keep: bool,
}

/// Reply to a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HeartbeatReply {
    /// The standby will not take over for one term from when the heartbeat was sent.
    Promise,
    /// The standby asks to take over, has taken over, or does not know the protection.
    NoPromise(StandbyOutcome),
}

/// Outcome of a protection at the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StandbyOutcome {
    /// The standby stands by.
    Standing,
    /// The standby asks whether it may run the machine.
    Asking,
    /// The standby has the machine.
    TakenOver,
    /// The standby has nothing of the machine and never will by this protection.
    Ended,
}

/// Request to a witness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WitnessRequest {
    /// Id of the protection.
    pub id: ProtectionId,
    /// The query itself.
    pub question: crate::lease::WitnessQuery,
}
