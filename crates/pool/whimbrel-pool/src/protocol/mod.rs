//! The pool protocol: calls between clients, benefactors and the manager; see `docs/protocols/pool.md`.
//!
//! Headers are postcard. Chunk lists are payloads in the formats of `lists`: one call holds thousands of
//! items, and the payload limit bounds the list.

mod administration;
mod call_names;
mod groups;
mod lists;
mod quotas;
mod shards;

pub use administration::{
    BackupPiece, BackupReport, MemberDetails, MemberLabels, MemberReport, RemovedMember,
};
pub use call_names::call_name;
pub use groups::{GroupInfo, NewGroup};
pub(crate) use lists::next_digest;
pub use lists::{
    LocatedChunk, WrittenChunk, get_aged, get_bits, get_digests, get_located, get_numbers, get_written,
    put_aged, put_bits, put_digests, put_located, put_numbers, put_written,
};

pub use quotas::{QuotaInfo, QuotaSubject};
pub use shards::{CodedChunk, CodedPiece, CodingOrder, MadePiece, RebuildOrder};

use crate::{backup::BackupName, erasure::Coding, policy::Policy};
use serde::{Deserialize, Serialize};
use whimbrel_core::Digest;
use whimbrel_wire::{Call, Code, Invitation, Protocol, PublicKey, Version, range};

/// Versions of these messages.
pub const PROTOCOL: Protocol = Protocol {
    name: "pool",
    kinds: (range::POOL, range::POOL + 0xff),
    versions: &[
        Version { number: 1, reason: "the first: chunks by digest, versions by chunk maps, pins" },
        Version {
            number: 2,
            reason: "a chunk map may end with a seal, so that a manager cannot change it unseen",
        },
    ],
};

/// Longest chunk in raw bytes; its frame fits in a payload.
pub const MAX_CHUNK: usize = 4 << 20;
/// Shortest chunk size that can be configured.
pub(crate) const MIN_CHUNK: usize = 1 << 10;
/// Most chunks in one request that names them in its header.
pub const MAX_BATCH: usize = 1000;
/// Most chunks in one request that lists them in its payload.
pub(crate) const MAX_LIST: usize = 100_000;
/// Most copies of one chunk in a list.
pub(crate) const MAX_COPIES: usize = 8;
/// Longest label of a benefactor.
pub(crate) const MAX_LABEL: usize = 64;
/// Longest name of a file.
pub const MAX_NAME: usize = 255;
/// Longest name of the holder of a pin.
pub(crate) const MAX_HOLDER: usize = 200;

/// Codes of refusals, for programs.
pub mod code {
    use super::Code;
    /// The file, folder, version or session does not exist.
    pub const NOT_FOUND: Code = Code::NOT_FOUND;
    /// The name is in use.
    pub const EXISTS: Code = Code(0x400);
    /// The node is a file where a folder is required.
    pub(crate) const NOT_A_FOLDER: Code = Code(0x401);
    /// The node is a folder where a file is required.
    pub const IS_A_FOLDER: Code = Code(0x402);
    /// The folder is not empty.
    pub const NOT_EMPTY: Code = Code(0x403);
    /// The pool has no free space.
    pub const FULL: Code = Code(0x404);
    /// The request is invalid.
    pub const INVALID: Code = Code(0x405);
    /// The database or disk failed.
    pub const STORAGE: Code = Code(0x406);
    /// The data belongs to another pool.
    pub(crate) const OTHER_POOL: Code = Code(0x407);
    /// The write session has ended because its lease expired.
    pub(crate) const SESSION_OVER: Code = Code(0x408);
    /// The stored bytes are damaged.
    pub const DAMAGED: Code = Code(0x409);
    /// The version that a commit is based on was removed.
    pub const GONE: Code = Code(0x40a);
    /// A version that would be removed is pinned.
    pub const PINNED: Code = Code(0x40b);
    /// A benefactor that would be removed has the last copy of a chunk.
    pub const LAST_COPY: Code = Code(0x40c);
    /// A group lacks files.
    pub const INCOMPLETE: Code = Code(0x40d);
    /// A folder or a member would have more bytes than its quota.
    pub const QUOTA: Code = Code(0x40e);
}

/// Number of a benefactor in maps, assigned by the manager.
pub type BenefactorId = u16;
/// Number of a chunk, assigned by the manager.
pub type ChunkId = u64;
/// Number of a file or folder; also its inode number.
pub type NodeId = u64;

/// Address and key of a benefactor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenefactorAddress {
    /// Number of the benefactor.
    pub id: BenefactorId,
    /// Network address, `host:port`.
    pub address: String,
    /// Key that the benefactor must present.
    pub key: PublicKey,
}

macro_rules! call {
    ($(#[$doc:meta])* $name:ident = $kind:expr, $header:ty => $reply:ty) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name;
        impl Call for $name {
            const KIND: u16 = range::POOL + $kind;
            type Header = $header;
            type Reply = $reply;
        }
    };
}

/// Status that a benefactor reports with every heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenefactorStatus {
    /// Name for people.
    pub name: String,
    /// Address for clients.
    pub address: String,
    /// Pool that its data belongs to; 0 before the first registration.
    pub pool: u64,
    /// Bytes that it offers to the pool.
    pub capacity: u64,
    /// Bytes of its chunks.
    pub used: u64,
    /// Bytes that it can still store.
    pub free: u64,
    /// Number of its chunks.
    pub chunks: u64,
    /// Whether it wants to leave the pool.
    pub draining: bool,
    /// Bytes that it should free because the owner of its disk needs them.
    pub owed: u64,
}

/// The manager's reply to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// Number of the benefactor.
    pub id: BenefactorId,
    /// Id of the pool.
    pub pool: u64,
    /// Seconds until the next heartbeat.
    pub interval: u32,
    /// Keys of members that may connect to it: clients and other benefactors.
    pub admitted: Vec<(String, PublicKey)>,
    /// Whether it is draining and all its chunks have enough copies elsewhere.
    pub may_leave: bool,
}

/// Starts a write session, or reserves more space for one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserve {
    /// The session; 0 starts a new one.
    pub session: u64,
    /// Bytes that will be written; 0 only renews the session.
    pub bytes: u64,
    /// Bytes of earlier grants that are not written yet. Written bytes count in the reports of benefactors.
    pub unused: u64,
    /// Number of benefactors to write to.
    pub width: u16,
    /// Benefactors that were found dead or slow.
    pub avoid: Vec<BenefactorId>,
}

/// The manager's reply to [`Reserve`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved {
    /// The write session.
    pub session: u64,
    /// Seconds after which the session ends unless renewed.
    pub lease: u32,
    /// Benefactors to write to.
    pub stripe: Vec<BenefactorAddress>,
    /// Bytes granted to the session.
    pub bytes: u64,
}

/// A file or folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Number of the node.
    pub id: NodeId,
    /// Folder that contains it; the root's is the root itself.
    pub parent: NodeId,
    /// Name in its folder.
    pub name: String,
    /// Whether it is a folder.
    pub folder: bool,
    /// Permission bits of its mode.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id of the owner.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Last change of content, in nanoseconds since 1970.
    pub modified: i64,
    /// Last change of content or attributes.
    pub changed: i64,
    /// The current version; 0 before the first.
    pub version: u64,
}

/// Attributes to change of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeChange {
    /// Permission bits of its mode.
    pub mode: Option<u32>,
    /// User id of the owner.
    pub uid: Option<u32>,
    /// Group id of the owner.
    pub gid: Option<u32>,
    /// Last change of content, in nanoseconds since 1970.
    pub modified: Option<i64>,
}

/// A file or folder to create.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewNode {
    /// Folder that will contain it.
    pub parent: NodeId,
    /// Name in the folder.
    pub name: String,
    /// Whether it is a folder.
    pub folder: bool,
    /// Permission bits of its mode.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id of the owner.
    pub gid: u32,
}

/// Commits what a session wrote as a new version. The payload is the chunk map. Repetition changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The write session.
    pub session: u64,
    /// Number of the commit in the session, by which a repeated one is recognised.
    pub number: u32,
    /// The file, if it exists.
    pub node: Option<NodeId>,
    /// The file to create if there is none.
    pub make: NewNode,
    /// Size in bytes.
    pub size: u64,
    /// Last change of content, in nanoseconds since 1970.
    pub modified: i64,
    /// Required copies of every chunk.
    pub copies: u8,
    /// Bytes that were sent for it.
    pub sent: u64,
    /// The version with the most common content; 0 means the previous version of the file.
    pub base: u64,
}

/// A version of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionInfo {
    /// Number of the version in the pool.
    pub id: u64,
    /// Number of the version in the file, from 1.
    pub number: u32,
    /// Size in bytes.
    pub size: u64,
    /// Time of the commit, in nanoseconds since 1970.
    pub created: i64,
    /// Number of chunks.
    pub chunks: u64,
    /// Bytes that were sent for it.
    pub sent: u64,
    /// Time of its content by the writer's clock, in nanoseconds since 1970; 0 if unknown.
    pub modified: i64,
    /// Whether a user pinned the version.
    pub pinned: bool,
    /// Holders of pins; the version stays while it has one.
    pub holders: Vec<String>,
}

/// One benefactor in the status of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenefactorInfo {
    /// Number of the benefactor.
    pub id: BenefactorId,
    /// Name for people.
    pub name: String,
    /// Address for clients.
    pub address: String,
    /// State: `online`, `offline`, `lost`, `draining`.
    pub state: String,
    /// Bytes that it offers.
    pub capacity: u64,
    /// Bytes of its chunks.
    pub used: u64,
    /// Bytes that it can still store.
    pub free: u64,
    /// Number of its chunks.
    pub chunks: u64,
    /// Number of damaged or missing chunks found there.
    pub faults: u64,
    /// Seconds since its last heartbeat.
    pub silent: u64,
}

/// The state of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Id of the pool.
    pub pool: u64,
    /// All benefactors of the pool.
    pub benefactors: Vec<BenefactorInfo>,
    /// Number of files.
    pub files: u64,
    /// Number of versions.
    pub versions: u64,
    /// Bytes of all versions.
    pub logical: u64,
    /// Bytes of their distinct chunks.
    pub unique: u64,
    /// Number of chunks in use.
    pub chunks: u64,
    /// Chunks with fewer copies than required.
    pub repair: u64,
    /// Chunks without a reachable copy.
    pub lost: u64,
    /// Copies made by repair since the manager started.
    pub repaired: u64,
    /// Seconds until repair ends at its present rate; none if there is no progress.
    pub repair_eta: Option<u64>,
    /// Number of open write sessions.
    pub sessions: u64,
    /// Versions pinned by users or holders.
    pub pinned: u64,
}

/// A version that policies remove, or would remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Purged {
    /// Path of the file.
    pub path: String,
    /// Number of the version in the file.
    pub version: u32,
    /// Size in bytes.
    pub size: u64,
    /// Reason, for people.
    pub why: String,
    /// Pins that retain the version.
    pub pinned_by: Vec<String>,
}

/// A pin of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinInfo {
    /// Path of the file.
    pub path: String,
    /// Number of the version in the file.
    pub version: u32,
    /// Number of the version in the pool.
    pub id: u64,
    /// Size in bytes.
    pub size: u64,
    /// Holder and remaining time of the pin; none if a user pinned the version.
    pub held: Option<PinHolder>,
}

/// The holder of a pin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinHolder {
    /// Name that the holder gave itself: host and machine.
    pub holder: String,
    /// Seconds since the pin was set.
    pub since: u64,
    /// Seconds until the pin ends unless renewed.
    pub left: u64,
}

/// Progress of a benefactor that reads and checks its chunks. Times are ages in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubReport {
    /// Age of the start of this round.
    pub age: u64,
    /// Bytes checked in this round.
    pub bytes: u64,
    /// Bytes that the benefactor has.
    pub of: u64,
    /// Damaged copies found in this round.
    pub damaged: u64,
    /// Age of the end of the last complete round; none before the first.
    pub ended: Option<u64>,
    /// Damaged copies found in the last complete round.
    pub last_damaged: u64,
    /// Whether a round at the set rate takes longer than the set time.
    pub late: bool,
}

/// Header of a list with all chunks that a benefactor has in a range of digests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// First digest of the range.
    pub from: [u8; 32],
    /// Last digest of the range, inclusive.
    pub to: [u8; 32],
    /// Seconds since the list was made; later chunks are missing in it.
    pub age: u32,
}

/// A copy of a chunk that could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Number of the chunk.
    pub chunk: ChunkId,
    /// Benefactor that has the copy.
    pub benefactor: BenefactorId,
    /// Whether it returned wrong bytes, rather than none.
    pub wrong: bool,
}

call!(/// Benefactor to manager: registers, renews the registration and reports the status.
    Heartbeat = 0x00, BenefactorStatus => Registered);
call!(/// Benefactor to manager: which chunks can be deleted. Payload: [`put_aged`]; answer: a bit each.
    FindGarbage = 0x01, Inventory => ());
call!(/// Benefactor to manager: tells how far it has checked its chunks.
    ReportScrub = 0x08, ScrubReport => ());
call!(/// Benefactor to manager: lists damaged chunks that it has removed. Payload: digests, at most [`MAX_BATCH`].
    ReportDamage = 0x09, () => ());
call!(/// Client to manager: reserves space and gets the stripe.
    ReserveSpace = 0x02, Reserve => Reserved);
call!(/// Client to manager: finds stored chunks. Header: session and number of copies that must be reachable.
    /// Payload: digests; answer: a chunk number each, 0 for none.
    FindChunks = 0x03, (u64, u8) => ());
call!(/// Client to manager: registers written chunks ([`put_written`]). Header: session; answer: numbers.
    RegisterChunks = 0x04, u64 => ());
call!(/// Client to manager: commits a complete file.
    CommitFile = 0x05, Commit => Node);
call!(/// Client to manager: ends the write session.
    EndSession = 0x06, u64 => ());
call!(/// Client to manager: which chunks of a version can be used without [`FindChunks`]. Header: the version
    /// and the copies required. Answer: a bit for each chunk of its map.
    FindReusable = 0x07, (u64, u8) => ());
call!(/// Finds a child of a folder by name.
    Lookup = 0x10, (NodeId, String) => Node);
call!(/// Reads a node by its number.
    GetNode = 0x11, NodeId => Node);
call!(/// Lists children of a folder with names after the given one; answer: whether more follow, and nodes.
    List = 0x12, (NodeId, String) => bool);
call!(/// Creates a folder or an empty file.
    MakeNode = 0x13, NewNode => Node);
call!(/// Removes a file with its versions, or an empty folder if the flag says folder.
    Remove = 0x14, (NodeId, String, bool) => ());
call!(/// Moves `(from folder, name, to folder, name)`; the flag refuses to replace a file.
    Rename = 0x15, (NodeId, String, NodeId, String, bool) => ());
call!(/// Changes attributes of a node.
    Change = 0x16, (NodeId, NodeChange) => Node);
call!(/// Lists the versions of a file, newest first; payload: postcard.
    Versions = 0x17, NodeId => ());
call!(/// Reads a part of a version's map from an offset; the answer is the length of the map.
    ReadMap = 0x18, (u64, u64) => u64);
call!(/// Finds digests and places of chunks. Payload: numbers; answer: [`put_located`].
    Locate = 0x19, () => Vec<BenefactorAddress>);
call!(/// Reader to manager: reports a copy that could not be read.
    ReportFault = 0x1a, Fault => ());
call!(/// Reads the policy set on a file or folder, and the one that applies to it.
    GetPolicy = 0x1b, NodeId => (Option<Policy>, Policy));
call!(/// Sets the policy of a file or folder; none inherits it.
    SetPolicy = 0x1c, (NodeId, Option<Policy>) => ());
call!(/// Applies policies now, or with the flag only lists what they would remove. Payload: postcard.
    Purge = 0x1d, bool => ());
call!(/// Pins a version of a file for a user, or unpins it.
    Pin = 0x1e, (NodeId, u32, bool) => ());
call!(/// Reads the status of the pool.
    GetStatus = 0x1f, () => PoolStatus);
call!(/// Removes one version, which must not be the current one.
    DropVersion = 0x20, (NodeId, u32) => ());

call!(/// Starts (true) or cancels draining of the benefactor with this name.
    Drain = 0x21, (String, bool) => ());

call!(/// Sets or renews a holder's pin of a version (its number in the pool); answer: seconds until it ends.
    HoldPin = 0x22, (u64, String) => u32);
call!(/// Removes such a pin; with the flag also one that another host holds under this name.
    ReleasePin = 0x23, (u64, String, bool) => ());
call!(/// Lists all pins, or with the flag only those of the caller. Payload: postcard.
    ListPins = 0x24, bool => ());

call!(/// Reads the last reports of scrubs, by name of the benefactor.
    ListScrubs = 0x25, () => Vec<(String, ScrubReport)>);

call!(/// Admin to manager: makes a backup now and sends it to the places of backups.
    MakeBackup = 0x26, () => BackupReport);
call!(/// Lists the backups that a manager or benefactor has, oldest first, with their lengths.
    ListBackups = 0x27, () => Vec<(BackupName, u64)>);
call!(/// Reads a piece of such a backup from an offset; the answer is the length of the backup.
    ReadBackup = 0x28, (BackupName, u64) => u64);

call!(/// Admin to manager: removes the member with this name for good: its rights, and its copies if it is a
    /// benefactor. With the flag, also if chunks have no other copy.
    Expel = 0x29, (String, bool) => RemovedMember);
call!(/// Admin to manager: removes a benefactor that does not return; the flag as for [`Expel`].
    Forget = 0x2a, (String, bool) => RemovedMember);
call!(/// Admin to manager: sets the labels of the benefactor with this name.
    LabelMember = 0x2b, (String, MemberLabels) => ());
call!(/// Reads the labels of benefactors, and what concerns all of them.
    ListMembers = 0x2c, () => MemberReport);

call!(/// Reads the coding set on a file or folder, and the one that applies to it.
    GetCoding = 0x2d, NodeId => (Option<Coding>, Option<Coding>));
call!(/// Sets the coding of a file or folder; none inherits it.
    SetCoding = 0x2e, (NodeId, Option<Coding>) => ());
call!(/// Finds the pieces of chunks. Payload: numbers, at most [`MAX_BATCH`]; answer: as for [`Locate`], and
    /// postcard of the [`CodedChunk`]s among them.
    LocatePieces = 0x2f, () => Vec<BenefactorAddress>);

call!(/// Begins a group `(folder, name)`; the answer is the hidden folder into which its files are written.
    BeginGroup = 0x30, (NodeId, String, NewGroup) => Node);
call!(/// Commits a group: all its files are visible from then on. Repetition changes nothing.
    CommitGroup = 0x31, (NodeId, String) => Node);
call!(/// Removes an open group with its files.
    AbandonGroup = 0x32, (NodeId, String) => ());
call!(/// Lists the groups in a folder, those that were begun first come first. Payload: postcard of [`GroupInfo`]s.
    ListGroups = 0x33, NodeId => ());
call!(/// Removes all groups of a job; answer: how many went, and how many stay because of pins.
    EndJob = 0x34, String => (u64, u64));

call!(/// Client to manager: has chunks of a session copied from one benefactor to another. Header: session, source,
    /// target. Payload: digests, at most [`MAX_BATCH`]; answer: a bit for each failure.
    OrderCopies = 0x35, (u64, BenefactorId, BenefactorId) => ());

call!(/// Admin to manager: sets the quota of a folder or a member in bytes; none removes it.
    SetQuota = 0x36, (QuotaSubject, Option<u64>) => ());
call!(/// Lists all quotas, and what counts against them.
    ListQuotas = 0x37, () => Vec<QuotaInfo>);

call!(/// Client to benefactor: stores chunks. Header: digest and frame length of each; payload: frames.
    PutChunks = 0x40, Vec<(Digest, u32)> => ());
call!(/// Reads the frame of a chunk.
    GetChunk = 0x41, Digest => ());
call!(/// Makes chunks durable. Payload: digests; answer: a bit for each that is missing.
    FlushChunks = 0x42, () => ());
call!(/// Manager to benefactor: copies chunks to another. Payload: digests; answer: a bit for each failure.
    CopyChunks = 0x43, BenefactorAddress => ());
call!(/// Manager to benefactor: requests a heartbeat now. The answer is the [`admission`] that it holds;
    /// it is sent once everybody admitted by then may connect to the benefactor.
    RequestHeartbeat = 0x44, () => Digest);

call!(/// Reads the frames of several chunks. Payload: digests, at most [`MAX_BATCH`]; answer: lengths and frames of
    /// the first of them, at least one, as many as fit into an answer and can be read.
    GetChunks = 0x47, () => Vec<u32>);

call!(/// Manager to benefactor: cuts chunks into pieces and stores these. Payload: digests, at most [`MAX_BATCH`];
    /// answer: the pieces of each chunk, none for a chunk that failed.
    CodeChunks = 0x48, CodingOrder => Vec<Vec<MadePiece>>);
call!(/// Manager to benefactor: makes a lost piece again and stores it.
    RebuildPiece = 0x49, RebuildOrder => ());
call!(/// Asks for a ticket to the Unix socket of the benefactor, for members on the same host.
    InviteLocally = 0x4a, () => Invitation);

call!(/// Manager to benefactor: stores the next piece of a backup, which is the payload.
    PutBackup = 0x45, BackupPiece => ());
call!(/// Manager to benefactor: requests an inventory now.
    RequestInventory = 0x46, () => ());

/// Digest of a list of admitted members.
pub fn admission(admitted: &[(String, PublicKey)]) -> Digest {
    let mut text = Vec::with_capacity(admitted.len() * 64);
    for (name, key) in admitted {
        text.extend_from_slice(&(name.len() as u64).to_le_bytes());
        text.extend_from_slice(name.as_bytes());
        text.extend_from_slice(&key.0);
    }
    Digest::of(&text)
}
