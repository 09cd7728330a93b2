//! The calls between clients, benefactors and the manager: headers and payloads. `docs/protocols/pool.md` has
//! the exchange.
//!
//! Headers are postcard; lists of chunks travel as payload in the forms of `lists`, so that thousands fit one
//! call and are bounded by the payload.

mod lists;

pub(crate) use lists::after;
pub use lists::{
    Located, Written, get_aged, get_bits, get_digests, get_located, get_numbers, get_written, put_aged,
    put_bits, put_digests, put_located, put_numbers, put_written,
};

use crate::policy::Policy;
use serde::{Deserialize, Serialize};
use whimbrel_core::Digest;
use whimbrel_wire::{Call, Code, PublicKey, range};

/// Longest chunk, raw. A frame of it fits a payload.
pub const MAX_CHUNK: usize = 4 << 20;
/// Shortest chunk that can be asked for.
pub const MIN_CHUNK: usize = 1 << 10;
/// Chunks in one request that names them in its header.
pub const MAX_BATCH: usize = 1000;
/// Chunks in one request that lists them in its payload.
pub const MAX_LIST: usize = 100_000;
/// Most copies of one chunk that a list tells of.
pub const MAX_COPIES: usize = 8;
/// Longest name of a file.
pub const MAX_NAME: usize = 255;
/// Longest name of a holder of a pin.
pub const MAX_HOLDER: usize = 200;

/// Codes of refusals that a program decides by.
pub mod code {
    use super::Code;
    /// No such file, folder, version or session.
    pub const NOT_FOUND: Code = Code::NOT_FOUND;
    /// The name is taken.
    pub const EXISTS: Code = Code(0x400);
    /// A file where a folder is needed.
    pub const NOT_A_FOLDER: Code = Code(0x401);
    /// A folder where a file is needed.
    pub const IS_A_FOLDER: Code = Code(0x402);
    /// The folder has something in it.
    pub const NOT_EMPTY: Code = Code(0x403);
    /// The pool has no space.
    pub const FULL: Code = Code(0x404);
    /// The request makes no sense.
    pub const INVALID: Code = Code(0x405);
    /// The database or disk failed.
    pub const STORAGE: Code = Code(0x406);
    /// The data is of another pool.
    pub const OTHER_POOL: Code = Code(0x407);
    /// The session has ended: its lease ran out.
    pub const SESSION_OVER: Code = Code(0x408);
    /// The stored bytes are not what they should be.
    pub const DAMAGED: Code = Code(0x409);
    /// What a commit builds on was dropped meanwhile.
    pub const GONE: Code = Code(0x40a);
    /// A version that would go is pinned.
    pub const PINNED: Code = Code(0x40b);
}

/// What a benefactor is called in maps; given by the manager.
pub type BenefactorId = u16;
/// A chunk, by the manager's number.
pub type ChunkId = u64;
/// A file or folder; also its inode.
pub type NodeId = u64;

/// How a benefactor is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenefactorAddress {
    /// Its number.
    pub id: BenefactorId,
    /// `host:port`.
    pub address: String,
    /// The key it must have.
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

/// What a benefactor says of itself, again and again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenefactorStatus {
    /// Name for people.
    pub name: String,
    /// Where clients reach it.
    pub address: String,
    /// The pool its data belongs to; 0 before the first registration.
    pub pool: u64,
    /// Bytes it gives.
    pub capacity: u64,
    /// Bytes of chunks it holds.
    pub used: u64,
    /// Bytes it can still take.
    pub free: u64,
    /// Chunks it holds.
    pub chunks: u64,
    /// It wants to leave.
    pub draining: bool,
    /// Bytes it should give back, for the owner of its disk needs them.
    pub owed: u64,
}

/// What the manager says to that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// Its number.
    pub id: BenefactorId,
    /// The pool.
    pub pool: u64,
    /// Seconds until it should say so again.
    pub interval: u32,
    /// Keys that may come to it: clients and other benefactors.
    pub admitted: Vec<(String, PublicKey)>,
    /// It shall leave and can: everything it holds is elsewhere.
    pub may_leave: bool,
}

/// A new session, or more space for one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserve {
    /// 0 begins a session.
    pub session: u64,
    /// Bytes it will write; may be 0, to keep the session.
    pub bytes: u64,
    /// Bytes of earlier grants that it has not written yet: what is written stands in what benefactors say
    /// they hold.
    pub unused: u64,
    /// Benefactors it wants to write to.
    pub width: u16,
    /// Those it has found dead or slow.
    pub avoid: Vec<BenefactorId>,
}

/// Answer to [`Reserve`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved {
    /// The session.
    pub session: u64,
    /// Seconds after which it ends unless it is renewed.
    pub lease: u32,
    /// Where to write.
    pub stripe: Vec<BenefactorAddress>,
    /// Bytes granted.
    pub bytes: u64,
}

/// A file or folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// The folder it is in; the root is in itself.
    pub parent: NodeId,
    /// Its name.
    pub name: String,
    /// Whether it is a folder.
    pub folder: bool,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Last change of content, nanoseconds since 1970.
    pub modified: i64,
    /// Last change at all.
    pub changed: i64,
    /// The version that is read; 0 before the first.
    pub version: u64,
}

/// What to change of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeChange {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last change of content.
    pub modified: Option<i64>,
}

/// A file or folder to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewNode {
    /// In which folder.
    pub parent: NodeId,
    /// Name.
    pub name: String,
    /// A folder.
    pub folder: bool,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Makes what a session wrote the new version of a file. The payload is its map. The same call again changes
/// nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The session.
    pub session: u64,
    /// Which of its commits, so that one that is sent again is known.
    pub number: u32,
    /// The file, if it exists.
    pub node: Option<NodeId>,
    /// What to make if it does not.
    pub make: NewNode,
    /// Bytes.
    pub size: u64,
    /// Last change of content, nanoseconds since 1970.
    pub modified: i64,
    /// Copies of every chunk there should be.
    pub copies: u8,
    /// Bytes that travelled for it.
    pub sent: u64,
    /// The version that it has most in common with; 0 for that of the file before.
    pub base: u64,
}

/// A version of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionInfo {
    /// Its number in the pool.
    pub id: u64,
    /// Its number in the file, from 1.
    pub number: u32,
    /// Bytes.
    pub size: u64,
    /// When it was committed, nanoseconds since 1970.
    pub created: i64,
    /// Chunks.
    pub chunks: u64,
    /// Bytes that travelled for it.
    pub sent: u64,
    /// When its content was made, by the clock of who wrote it, nanoseconds since 1970; 0 if that is not
    /// known.
    pub modified: i64,
    /// It was pinned by hand: it stays.
    pub pinned: bool,
    /// Who lives from it: it stays for as long as they do.
    pub holders: Vec<String>,
}

/// One benefactor in a status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenefactorInfo {
    /// Number.
    pub id: BenefactorId,
    /// Name.
    pub name: String,
    /// Address.
    pub address: String,
    /// `online`, `offline`, `lost`, `draining`.
    pub state: String,
    /// Bytes it gives.
    pub capacity: u64,
    /// Bytes it holds.
    pub used: u64,
    /// Bytes it can take.
    pub free: u64,
    /// Chunks it holds.
    pub chunks: u64,
    /// Wrong or missing chunks found there.
    pub faults: u64,
    /// Seconds since it was heard of.
    pub silent: u64,
}

/// The state of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// The pool.
    pub pool: u64,
    /// Its benefactors.
    pub benefactors: Vec<BenefactorInfo>,
    /// Files.
    pub files: u64,
    /// Versions of them.
    pub versions: u64,
    /// Bytes of all versions.
    pub logical: u64,
    /// Bytes of the chunks they consist of, once each.
    pub unique: u64,
    /// Chunks in use.
    pub chunks: u64,
    /// Chunks that have fewer copies than they should.
    pub repair: u64,
    /// Chunks without any copy that can be reached.
    pub lost: u64,
    /// Copies made by repair since the manager began.
    pub repaired: u64,
    /// Seconds until repair is done at its present rate; none while it stands.
    pub repair_eta: Option<u64>,
    /// Sessions that write.
    pub sessions: u64,
    /// Versions that are pinned, by hand or by those who live from them.
    pub pinned: u64,
}

/// What a policy does, or would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Purged {
    /// Path of the file.
    pub path: String,
    /// Which version.
    pub version: u32,
    /// Bytes of it.
    pub size: u64,
    /// Why.
    pub why: String,
    /// Who pins it, so that it stays after all.
    pub pinned_by: Vec<String>,
}

/// A pin of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinInfo {
    /// Path of the file.
    pub path: String,
    /// Which version.
    pub version: u32,
    /// Its number in the pool.
    pub id: u64,
    /// Bytes of it.
    pub size: u64,
    /// Who lives from it, and for how long that is believed; none for a pin that was set by hand.
    pub held: Option<Holding>,
}

/// Who holds a pin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// Whoever it is, as it calls itself: host and machine.
    pub holder: String,
    /// Seconds since it took it.
    pub since: u64,
    /// Seconds until it ends unless it is renewed.
    pub left: u64,
}

/// A list of chunks that a benefactor holds, of a range of digests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// First digest of the range.
    pub from: [u8; 32],
    /// Last digest of the range, included.
    pub to: [u8; 32],
    /// Seconds since the list was made; what came later is not in it.
    pub age: u32,
}

/// A copy that did not serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The chunk.
    pub chunk: ChunkId,
    /// Where.
    pub benefactor: BenefactorId,
    /// It gave wrong bytes, rather than none.
    pub wrong: bool,
}

call!(/// Benefactor to manager: here I am.
    Heartbeat = 0x00, BenefactorStatus => Registered);
call!(/// Benefactor to manager: which of these may go? Payload: digest and age of each ([`put_aged`]); answer: a bit each.
    FindGarbage = 0x01, Inventory => ());
call!(/// Client to manager: space, and where.
    ReserveSpace = 0x02, Reserve => Reserved);
call!(/// Client to manager: which of these are there? Payload: digests; answer: a chunk number each, 0 for none. The header
    /// is the session and how many copies must be in reach.
    FindChunks = 0x03, (u64, u8) => ());
call!(/// Client to manager: these were written ([`put_written`]); answer: a chunk number each. The header is the session.
    RegisterChunks = 0x04, u64 => ());
call!(/// Client to manager: the file is complete.
    CommitFile = 0x05, Commit => Node);
call!(/// Client to manager: the session ends without more.
    EndSession = 0x06, u64 => ());
call!(/// Client to manager: which chunks of this version may be built upon without being asked for, so many copies being wanted? Answer: a
    /// bit for each chunk of its map.
    FindReusable = 0x07, (u64, u8) => ());
call!(/// A child of a folder, by name.
    Lookup = 0x10, (NodeId, String) => Node);
call!(/// A node by its number.
    GetNode = 0x11, NodeId => Node);
call!(/// Children of a folder whose names come after the given one; payload: postcard of nodes.
    List = 0x12, (NodeId, String) => bool);
call!(/// Makes a folder, or an empty file.
    MakeNode = 0x13, NewNode => Node);
call!(/// Removes a file with its versions, or an empty folder if the flag says folder.
    Remove = 0x14, (NodeId, String, bool) => ());
call!(/// Moves `(from folder, name, to folder, name)`; a file in the way is replaced unless the flag forbids it.
    Rename = 0x15, (NodeId, String, NodeId, String, bool) => ());
call!(/// Changes attributes.
    Change = 0x16, (NodeId, NodeChange) => Node);
call!(/// Versions of a file, newest first; payload: postcard.
    Versions = 0x17, NodeId => ());
call!(/// A piece of the map of a version from an offset; the answer says how long the map is.
    ReadMap = 0x18, (u64, u64) => u64);
call!(/// Digest and places of chunks; payload: numbers; answer: [`put_located`] each.
    Locate = 0x19, () => Vec<BenefactorAddress>);
call!(/// Reader to manager: this copy did not serve.
    ReportFault = 0x1a, Fault => ());
call!(/// The policy of a file or folder as set on it, and as it holds there.
    GetPolicy = 0x1b, NodeId => (Option<Policy>, Policy));
call!(/// Sets the policy of a file or folder; none inherits.
    SetPolicy = 0x1c, (NodeId, Option<Policy>) => ());
call!(/// Applies policies now; with the flag only says what they would do. Payload: postcard.
    Purge = 0x1d, bool => ());
call!(/// Pins a version of a file, or lets it go.
    Pin = 0x1e, (NodeId, u32, bool) => ());
call!(/// The state of the pool.
    GetStatus = 0x1f, () => PoolStatus);
call!(/// Removes one version that is not the current one.
    DropVersion = 0x20, (NodeId, u32) => ());

call!(/// Has the benefactor of this name leave (true), or stay after all.
    Drain = 0x21, (String, bool) => ());

call!(/// Pins a version, by its number in the pool, for a holder, or goes on pinning it; the answer says for how many seconds.
    HoldPin = 0x22, (u64, String) => u32);
call!(/// Ends such a pin; with the flag that of whoever calls itself so, not only the caller's.
    ReleasePin = 0x23, (u64, String, bool) => ());
call!(/// All pins; with the flag only those that the caller holds. Payload: postcard.
    ListPins = 0x24, bool => ());

call!(/// Client to benefactor: digest and frame length of each chunk; the payload is the frames.
    PutChunks = 0x40, Vec<(Digest, u32)> => ());
call!(/// The frame of a chunk.
    GetChunk = 0x41, Digest => ());
call!(/// Makes chunks durable; payload: digests; answer: a bit for each that is not there.
    FlushChunks = 0x42, () => ());
call!(/// Manager to benefactor: copy chunks (payload: digests) to another; answer: a bit for each that could not be.
    CopyChunks = 0x43, BenefactorAddress => ());
call!(/// Manager to benefactor: report to me now, not when it is time. The answer, which comes when whoever is admitted by then
    /// may come to the benefactor too, is the [`admission`] that it holds.
    RequestHeartbeat = 0x44, () => Digest);

/// Names a list of those who are admitted.
pub fn admission(admitted: &[(String, PublicKey)]) -> Digest {
    let mut text = Vec::with_capacity(admitted.len() * 64);
    for (name, key) in admitted {
        text.extend_from_slice(&(name.len() as u64).to_le_bytes());
        text.extend_from_slice(name.as_bytes());
        text.extend_from_slice(&key.0);
    }
    Digest::of(&text)
}
