//! The calls between clients, benefactors and the manager: headers and payloads. `docs/protocols/pool.md` has the exchange.
//!
//! Headers are postcard; lists of chunks travel as payload in the fixed forms below, so that thousands fit one call and are
//! bounded by the payload. Every list is checked for its length before it is believed.

use crate::policy::Policy;
use bytes::{BufMut, Bytes, BytesMut};
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
/// Longest name of a file.
pub const MAX_NAME: usize = 255;

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
}

/// What a benefactor is called in maps; given by the manager.
pub type BenefactorId = u16;
/// A chunk, by the manager's number.
pub type ChunkId = u64;
/// A file or folder; also its inode.
pub type NodeId = u64;

/// How a benefactor is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
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
pub struct Status {
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
    /// Draining is done: everything it holds is elsewhere.
    pub may_leave: bool,
}

/// A new session, or more space for one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserve {
    /// 0 begins a session.
    pub session: u64,
    /// Bytes it will write; may be 0, to keep the session.
    pub bytes: u64,
    /// Bytes of earlier grants that it has not written yet: what is written stands in what benefactors say they hold.
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
    pub stripe: Vec<Place>,
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
pub struct Make {
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

/// Makes what a session wrote the new version of a file. The payload is its map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The session.
    pub session: u64,
    /// The file, if it exists.
    pub node: Option<NodeId>,
    /// What to make if it does not.
    pub make: Make,
    /// Bytes.
    pub size: u64,
    /// Last change of content, nanoseconds since 1970.
    pub modified: i64,
    /// Copies of every chunk there should be.
    pub copies: u8,
    /// Bytes that travelled for it.
    pub sent: u64,
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
    /// Policies leave it alone.
    pub pinned: bool,
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
    Register = 0x00, Status => Registered);
call!(/// Benefactor to manager: which of these may go? Payload: digest and age of each ([`put_aged`]); answer: a bit each.
    AskGarbage = 0x01, Inventory => ());
call!(/// Client to manager: space, and where.
    ReserveSpace = 0x02, Reserve => Reserved);
call!(/// Client to manager: which of these are there? Payload: digests; answer: a chunk number each, 0 for none. The header
    /// is the session and how many copies must be in reach.
    AskKnown = 0x03, (u64, u8) => ());
call!(/// Client to manager: these were written ([`put_written`]); answer: a chunk number each. The header is the session.
    Enroll = 0x04, u64 => ());
call!(/// Client to manager: the file is complete.
    CommitFile = 0x05, Commit => Node);
call!(/// Client to manager: the session ends without more.
    EndSession = 0x06, u64 => ());
call!(/// A child of a folder, by name.
    Lookup = 0x10, (NodeId, String) => Node);
call!(/// A node by its number.
    GetNode = 0x11, NodeId => Node);
call!(/// Children of a folder whose names come after the given one; payload: postcard of nodes.
    List = 0x12, (NodeId, String) => bool);
call!(/// Makes a folder, or an empty file.
    MakeNode = 0x13, Make => Node);
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
    Locate = 0x19, () => Vec<Place>);
call!(/// Reader to manager: this copy did not serve.
    ReportFault = 0x1a, Fault => ());
call!(/// The policy of a folder as set on it, and as it holds there.
    GetPolicy = 0x1b, NodeId => (Option<Policy>, Policy));
call!(/// Sets the policy of a folder; none inherits.
    SetPolicy = 0x1c, (NodeId, Option<Policy>) => ());
call!(/// Applies policies now; with the flag only says what they would do. Payload: postcard.
    Purge = 0x1d, bool => ());
call!(/// Pins a version of a file, or lets it go.
    Pin = 0x1e, (NodeId, u32, bool) => ());
call!(/// The state of the pool.
    AskStatus = 0x1f, () => PoolStatus);
call!(/// Removes one version that is not the current one.
    DropVersion = 0x20, (NodeId, u32) => ());

call!(/// Client to benefactor: digest and frame length of each chunk; the payload is the frames.
    PutChunks = 0x40, Vec<(Digest, u32)> => ());
call!(/// The frame of a chunk.
    GetChunk = 0x41, Digest => ());
call!(/// Makes chunks durable; payload: digests; answer: a bit for each that is not there.
    FlushChunks = 0x42, () => ());
call!(/// Manager to benefactor: copy chunks (payload: digests) to another; answer: a bit for each that could not be.
    CopyChunks = 0x43, Place => ());

/// The digest that follows; none after the last.
pub(crate) fn after(digest: Digest) -> Option<Digest> {
    let mut bytes = digest.0;
    for byte in bytes.iter_mut().rev() {
        *byte = byte.wrapping_add(1);
        if *byte != 0 {
            return Some(Digest(bytes));
        }
    }
    None
}

/// Digests one after the other.
pub fn put_digests<'a>(digests: impl IntoIterator<Item = &'a Digest>) -> Bytes {
    let mut out = BytesMut::new();
    digests.into_iter().for_each(|digest| out.put_slice(&digest.0));
    out.freeze()
}

/// Fixed pieces of a payload, at most [`MAX_LIST`].
fn pieces<const N: usize>(payload: &[u8]) -> Option<Vec<[u8; N]>> {
    let (pieces, rest) = payload.as_chunks::<N>();
    (rest.is_empty() && pieces.len() <= MAX_LIST).then(|| pieces.to_vec())
}

/// What [`put_digests`] made.
pub fn get_digests(payload: &[u8]) -> Option<Vec<Digest>> {
    Some(pieces::<32>(payload)?.into_iter().map(Digest).collect())
}

/// Numbers, eight bytes each.
pub fn put_numbers(numbers: impl IntoIterator<Item = u64>) -> Bytes {
    let mut out = BytesMut::new();
    numbers.into_iter().for_each(|number| out.put_u64_le(number));
    out.freeze()
}

/// What [`put_numbers`] made.
pub fn get_numbers(payload: &[u8]) -> Option<Vec<u64>> {
    Some(pieces::<8>(payload)?.into_iter().map(u64::from_le_bytes).collect())
}

/// A bit for each.
pub fn put_bits(bits: &[bool]) -> Bytes {
    let mut out = vec![0_u8; bits.len().div_ceil(8)];
    bits.iter().enumerate().filter(|(_, bit)| **bit).for_each(|(at, _)| out[at / 8] |= 1 << (at % 8));
    out.into()
}

/// The first `count` bits of what [`put_bits`] made; missing ones are false.
pub fn get_bits(payload: &[u8], count: usize) -> Vec<bool> {
    (0..count).map(|at| payload.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1)).collect()
}

/// Digests with the seconds since they were last put.
pub fn put_aged(chunks: &[(Digest, u32)]) -> Bytes {
    let mut out = BytesMut::with_capacity(chunks.len() * 36);
    for (digest, age) in chunks {
        out.put_slice(&digest.0);
        out.put_u32_le(*age);
    }
    out.freeze()
}

/// What [`put_aged`] made.
pub fn get_aged(payload: &[u8]) -> Option<Vec<(Digest, u32)>> {
    let split = |piece: [u8; 36]| {
        let (digest, age) = piece.split_first_chunk::<32>()?;
        Some((Digest(*digest), u32::from_le_bytes(age.try_into().ok()?)))
    };
    pieces::<36>(payload)?.into_iter().map(split).collect()
}

/// A chunk that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Its name.
    pub digest: Digest,
    /// Raw bytes.
    pub length: u32,
    /// Bytes as stored.
    pub stored: u32,
    /// Who has it, at most eight.
    pub places: Vec<BenefactorId>,
}

/// Most copies of one chunk that a list tells of.
pub const MAX_COPIES: usize = 8;

/// Chunks that were written, as payload.
pub fn put_written(chunks: &[Written]) -> Bytes {
    let mut out = BytesMut::new();
    for chunk in chunks {
        out.put_slice(&chunk.digest.0);
        out.put_u32_le(chunk.length);
        out.put_u32_le(chunk.stored);
        put_places(&mut out, &chunk.places);
    }
    out.freeze()
}

fn put_places(out: &mut BytesMut, places: &[BenefactorId]) {
    let places = &places[..places.len().min(MAX_COPIES)];
    out.put_u8(places.len() as u8);
    places.iter().for_each(|place| out.put_u16_le(*place));
}

/// Reads a payload from its front.
struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn places(&mut self) -> Option<Vec<BenefactorId>> {
        let [count] = self.array::<1>()?;
        if usize::from(count) > MAX_COPIES {
            return None;
        }
        (0..count).map(|_| Some(u16::from_le_bytes(self.array()?))).collect()
    }
}

fn all<T>(payload: &[u8], mut one: impl FnMut(&mut Cursor<'_>) -> Option<T>) -> Option<Vec<T>> {
    let mut cursor = Cursor(payload);
    let mut out = Vec::new();
    while !cursor.0.is_empty() {
        if out.len() >= MAX_LIST {
            return None;
        }
        out.push(one(&mut cursor)?);
    }
    Some(out)
}

/// What [`put_written`] made.
pub fn get_written(payload: &[u8]) -> Option<Vec<Written>> {
    all(payload, |cursor| {
        let digest = Digest(cursor.array()?);
        let length = u32::from_le_bytes(cursor.array()?);
        let stored = u32::from_le_bytes(cursor.array()?);
        let places = cursor.places()?;
        (length > 0 && length as usize <= MAX_CHUNK).then_some(Written { digest, length, stored, places })
    })
}

/// Where a chunk is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// Its name.
    pub digest: Digest,
    /// Who has it.
    pub places: Vec<BenefactorId>,
}

/// Places of chunks, as payload; a chunk that is unknown has the digest of zeros and no place.
pub fn put_located(chunks: &[Located]) -> Bytes {
    let mut out = BytesMut::new();
    for chunk in chunks {
        out.put_slice(&chunk.digest.0);
        put_places(&mut out, &chunk.places);
    }
    out.freeze()
}

/// What [`put_located`] made.
pub fn get_located(payload: &[u8]) -> Option<Vec<Located>> {
    all(payload, |cursor| {
        let digest = Digest(cursor.array()?);
        Some(Located { digest, places: cursor.places()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_come_back_and_torn_ones_are_refused() {
        let digests = [Digest::of(b"a"), Digest::of(b"b")];
        assert_eq!(get_digests(&put_digests(&digests)).unwrap(), digests);
        assert!(get_digests(&put_digests(&digests)[1..]).is_none());
        assert_eq!(get_numbers(&put_numbers([1, 1 << 40])).unwrap(), [1, 1 << 40]);
        let aged = [(digests[0], 7), (digests[1], u32::MAX)];
        assert_eq!(get_aged(&put_aged(&aged)).unwrap(), aged);
        let written = [Written { digest: digests[0], length: 9, stored: 7, places: vec![1, 300] }];
        let payload = put_written(&written);
        assert_eq!(get_written(&payload).unwrap(), written);
        assert!((1..payload.len()).all(|end| get_written(&payload[..end]).is_none()));
        let located = [Located { digest: digests[1], places: vec![] }];
        assert_eq!(get_located(&put_located(&located)).unwrap(), located);
    }

    #[test]
    fn a_chunk_without_length_or_with_too_much_of_it_is_refused() {
        for length in [0, MAX_CHUNK as u32 + 1] {
            let chunk = Written { digest: Digest::of(b""), length, stored: 1, places: vec![] };
            assert!(get_written(&put_written(&[chunk])).is_none(), "{length}");
        }
    }

    #[test]
    fn bits_come_back() {
        let bits: Vec<bool> = (0..29).map(|n| n % 3 == 0).collect();
        assert_eq!(get_bits(&put_bits(&bits), 29), bits);
        assert_eq!(get_bits(&[], 3), [false; 3]);
    }
}
