//! The calls of a session, kinds 0x0500 and up.
//!
//! Every call except the first carries the key in its header. A call that changes names gives them as paths,
//! and is sent on one ordered stream, so that many can be in progress and are still made in order. Content is
//! read and written by path and identity: if the path leads to another file by now, the call is refused.

use super::{
    Attr, Claim, DigestedPages, Ident, Lock, Locked, Name, Op, OpDone, PackedPages, RelPath, Return,
    SessionKey, ShareKey, Time, Watch, Watched,
};
use serde::{Deserialize, Serialize};
use whimbrel_wire::{Call, Code, Refusal, Version, VersionRange, range};

/// Every version of these calls that a server answers, oldest first. A client names the newest in
/// [`Open`], and an older one to a server that refuses that. It does not use the changes added since.
pub const VERSIONS: &[Version] = &[
    Version { number: 1, reason: "the first: content by path and identity, changes of names in order" },
    Version { number: 2, reason: "`Op::Replace`: a file in place of another is one change" },
    Version { number: 3, reason: "`Op::If`: a change only of the file that the client knows" },
    Version { number: 4, reason: "`Op::Make`, `Op::SetTimes`, `XATTR`: owners, types and times of POSIX" },
    Version { number: 5, reason: "`WATCH`, `RETURN`, `CLAIM`, `LOCK`: leases, recalls and locks" },
];
/// First version with [`Op::If`].
pub const FIRST_WITH_CONDITIONS: u16 = 3;
/// First version with [`Op::Make`], [`Op::SetTimes`] and [`XattrCall`].
pub const FIRST_WITH_NODES: u16 = 4;
/// First version whose answers grant leases, with [`WatchCall`], [`ReturnCall`],
/// [`ClaimCall`] and [`LockCall`].
pub const FIRST_WITH_LEASES: u16 = 5;
/// Range of these versions.
pub const SPOKEN: VersionRange = VersionRange::of(VERSIONS);

/// Refusal codes of a session's requests.
pub mod code {
    use super::Code;
    /// There is no session with this key.
    pub const KEY: Code = Code(0x500);
    /// The directory is not exported here.
    pub const EXPORT: Code = Code(0x501);
    /// The two sides have different versions.
    pub const VERSION: Code = Code(0x502);
    /// The file is not in the state that the writer expects.
    pub const CONFLICT: Code = Code(0x503);
    /// The path leads to another file or to none, and the file requested is not open on the server.
    pub const STALE: Code = Code(0x504);
    /// Leases of other sessions come back first. A server waits instead of sending it.
    pub const RECALLING: Code = Code(0x505);
    /// Base of the codes for the server's `errno` values.
    pub const ERRNO: u16 = 0x1000;
}

/// The system's error number in a refusal, if it has one.
pub fn errno(refusal: &Refusal) -> Option<i32> {
    refusal.code.0.checked_sub(code::ERRNO).map(i32::from)
}

/// A header with the session's key in front.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Keyed<T> {
    /// Key of the session.
    pub key: SessionKey,
    /// Header of the call.
    pub body: T,
}

/// A file by path and identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// Path where it was last seen.
    pub path: RelPath,
    /// Identity of the file.
    pub ident: Ident,
}

macro_rules! calls {
    ($($(#[$doc:meta])* $call:ident = $number:literal: $header:ty => $reply:ty;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $call;
        impl Call for $call {
            const KIND: u16 = range::SESSION + $number;
            type Header = $header;
            type Reply = $reply;
        }
    )*};
}

calls! {
    /// Begins a session. Payload: the id of the client ([`ClientId`](super::ClientId)), or nothing. Requests
    /// of its earlier sessions that were not started yet are not carried out any more. Payload of the reply:
    /// 16 bytes that differ once the server may have lost what it had not synced; an older server sends none.
    /// From version 4 on, one more: 1 if clients may set owners and create devices, else 0.
    OpenCall = 0x01: Open => Opened;
    /// Ends a session.
    EndCall = 0x02: Keyed<End> => ();
    /// Looks up one name of a directory, and lists the directory if it is small.
    LookupCall = 0x03: Keyed<Lookup> => LookedUp;
    /// A part of a directory. Payload of the reply: packed entries.
    ListCall = 0x04: Keyed<List> => Listed;
    /// Gets attributes of many files.
    AttrCall = 0x05: Keyed<AttrBatch> => Vec<Option<Attr>>;
    /// Reads content. Payload of the reply: packed pages.
    ReadCall = 0x06: Keyed<Read> => ReadDone;
    /// Writes content. Payload: packed pages.
    WriteCall = 0x07: Keyed<Write> => WriteDone;
    /// Makes content durable.
    SyncCall = 0x08: Keyed<Sync> => Attr;
    /// Changes names or attributes. Payload of the reply: the file's version before, if the change leaves its
    /// content as it is ([`version_before`](super::version_before)).
    OpCall = 0x09: Keyed<Op> => OpDone;
    /// Reads the target of a symlink.
    ReadlinkCall = 0x0a: Keyed<RelPath> => Vec<u8>;
    /// Gets the free space of the server's disk.
    StatfsCall = 0x0b: Keyed<()> => FilesystemSpace;
    /// Lists many directories at once. Payload of the reply: packed directories.
    WalkCall = 0x0c: Keyed<ListTree> => Walked;
    /// Gets digests of content. Payload of the reply: a digest of each page that is not zeros.
    DigestCall = 0x0d: Keyed<Digests> => DigestsDone;
    /// Reads some pages of a range. Payload of the reply: packed pages.
    PagesCall = 0x0e: Keyed<ReadPages> => ReadDone;
    /// Lists the holes of a file. Payload of the reply: packed holes.
    HolesCall = 0x0f: Keyed<FileRef> => HolesDone;
    /// Copies content between files on the server. An older server refuses this kind.
    CopyCall = 0x10: Keyed<Copy> => Copied;
    /// Reads or changes extended attributes. Payload: the value to set. Payload of the reply: the value, or
    /// the names with a zero after each; after a change, the file's version before, as in [`OpCall`].
    XattrCall = 0x11: Keyed<Xattr> => Attr;
    /// Renews the leases of the session, and waits for news of them.
    WatchCall = 0x12: Keyed<Watch> => Watched;
    /// Gives recalled leases back.
    ReturnCall = 0x13: Keyed<Return> => ();
    /// Makes leases exclusive: content or names here are newer than on the server.
    ClaimCall = 0x14: Keyed<Claim> => ();
    /// Tests, sets or removes a lock of a range of a file.
    LockCall = 0x15: Keyed<Lock> => Locked;
}

/// Name of a request kind, for people; none if it is not a session's.
pub fn request_name(kind: u16) -> Option<&'static str> {
    const NAMES: [&str; 21] = [
        "open", "end", "lookup", "list", "attr", "read", "write", "sync", "op", "readlink", "room", "walk",
        "digest", "pages", "holes", "copy", "xattr", "watch", "return", "claim", "lock",
    ];
    NAMES.get(usize::from(kind.checked_sub(range::SESSION + 1)?)).copied()
}

/// Begins a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// Protocol version of the client, one of [`VERSIONS`].
    pub protocol: u16,
    /// The directory to open, as the server's user would name it.
    pub directory: Vec<u8>,
}

/// A session began.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Opened {
    /// Key for every other request.
    pub key: SessionKey,
    /// Attributes of the directory.
    pub root: Attr,
    /// Whether nothing can be written.
    pub read_only: bool,
    /// User that the server runs as.
    pub uid: u32,
    /// Group that the server runs as.
    pub gid: u32,
}

/// Ends a session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct End {}

/// Requests a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lookup {
    /// Path of the directory.
    pub dir: RelPath,
    /// Name in the directory; without one, the directory itself.
    pub name: Option<Name>,
    /// Most names of the directory for which all of them are returned.
    pub list: u32,
}

/// Result of a lookup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookedUp {
    /// Attributes; none if the directory has no such name.
    pub attr: Option<Attr>,
    /// Whether all names of the directory are in the payload.
    pub listed: bool,
}

/// Requests the names `from..` of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// Path of the directory.
    pub dir: RelPath,
    /// The listing to continue; zero starts one.
    pub listing: u64,
    /// First entry wanted.
    pub from: u64,
    /// Most entries to return.
    pub count: u32,
}

/// A part of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Number of the listing, for the other parts.
    pub listing: u64,
    /// Total number of entries.
    pub total: u64,
    /// First entry of the next part.
    pub next: u64,
}

/// Requests the names in directories, and in those below them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListTree {
    /// Paths of the directories, at most 1,000.
    pub dirs: Vec<RelPath>,
    /// Whether directories below follow, the nearest first, as far as there is room.
    pub below: bool,
    /// Total number of names after which no other directory is listed.
    pub names: u32,
    /// Most names of one directory: one with more is returned without them.
    pub most: u32,
}

/// Progress of a request for directories.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Walked {
    /// Number of the requested directories that were listed; at least one.
    pub reached: u32,
}

/// Requests attributes of files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttrBatch {
    /// Paths of the files, at most 1,000.
    pub paths: Vec<RelPath>,
}

/// A range of bytes in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u32,
}

/// Requests content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// File to read.
    pub file: FileRef,
    /// Range to read; the reply ends at the end of the file.
    pub range: Range,
    /// Compression level, used if it saves bytes.
    pub level: Option<i8>,
}

/// Content of a range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadDone {
    /// Attributes of the file when the content was read.
    pub attr: Attr,
    /// Shape of the payload.
    pub pages: PackedPages,
}

/// Requests digests of content instead of the content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    /// File to read.
    pub file: FileRef,
    /// Range to read; there are no digests beyond the end of the file.
    pub range: Range,
}

/// Digests of a range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DigestsDone {
    /// Attributes of the file when the content was read.
    pub attr: Attr,
    /// Shape of the payload.
    pub pages: DigestedPages,
    /// Key by which the users of one host may share what they read, if the server permits it.
    pub share: Option<ShareKey>,
}

/// Requests the missing pages of a range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadPages {
    /// File, range and compression level.
    pub read: Read,
    /// One bit per page, the lowest first, set if wanted. Other pages are left out like zeros.
    pub wanted: Vec<u8>,
}

/// Holes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolesDone {
    /// Attributes of the file when the holes were determined.
    pub attr: Attr,
}

/// Stores content in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Write {
    /// File to write.
    pub file: FileRef,
    /// Offset of the first byte.
    pub offset: u64,
    /// Modification times that the file may have: the last that the writer knows, or one that it set itself.
    /// Any other is a conflict.
    pub expect: Vec<Time>,
    /// Modification time to set.
    pub stamp: Time,
    /// Size to which a longer file is truncated first.
    pub cut: Option<u64>,
    /// Size that the file has in the end.
    pub size: Option<u64>,
    /// Shape of the payload.
    pub pages: PackedPages,
}

/// Result of a write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteDone {
    /// Attributes of the file after the write.
    pub attr: Attr,
}

/// Copies content within the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copy {
    /// File to copy from.
    pub from: FileRef,
    /// Last content change of that file as the client knows it; with any other the copy is
    /// [`STALE`](code::STALE).
    pub from_mtime: Time,
    /// Offset to copy from.
    pub from_offset: u64,
    /// File to copy to, which may be the same if the ranges do not overlap.
    pub to: FileRef,
    /// Offset to copy to.
    pub offset: u64,
    /// Most bytes to copy; the server may copy fewer.
    pub len: u64,
    /// Modification times that the written file may have, as in [`Write`].
    pub expect: Vec<Time>,
    /// Modification time of the written file to set.
    pub stamp: Time,
    /// Whether to reply only when the content is durable.
    pub durable: bool,
}

/// A request about extended attributes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Xattr {
    /// The file; any type, and a symlink is not followed.
    pub file: FileRef,
    /// What to do.
    pub action: XattrAction,
}

/// What to do with extended attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum XattrAction {
    /// Lists the names.
    List,
    /// Reads the value of a name.
    Get(Vec<u8>),
    /// Sets a name to the value in the payload, with the flags of setxattr(2).
    Set(Vec<u8>, u32),
    /// Removes a name.
    Remove(Vec<u8>),
}

/// Result of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// Number of bytes copied.
    pub len: u64,
    /// Attributes of the written file after the copy.
    pub attr: Attr,
}

/// Makes a file's content durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sync {
    /// The file to sync.
    pub file: FileRef,
}

/// Space of the server's file system, in units of `unit` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemSpace {
    /// Size of a unit in bytes.
    pub unit: u64,
    /// Total number of units.
    pub total: u64,
    /// Number of free units.
    pub free: u64,
    /// Units available to the server's user.
    pub available: u64,
    /// Total number of inodes.
    pub files: u64,
    /// Number of free inodes.
    pub files_free: u64,
}
