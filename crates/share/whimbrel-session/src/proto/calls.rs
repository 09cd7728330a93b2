//! The calls of a session, kinds 0x0500 and up.
//!
//! Every call but the first carries the key in its header. A call that changes names says them as paths, and
//! is sent on one ordered stream, so that many may be under way and still happen in their order. Content is
//! read and written by path and identity: a path that leads to another file by now is refused, not served.

use super::{Attr, DigestedPages, Ident, Name, PackedPages, RelPath, SessionKey, ShareKey, Time};
use serde::{Deserialize, Serialize};
use whimbrel_wire::{Call, Code, Refusal, range};

/// Version of the calls in this file.
pub const PROTOCOL: u16 = 2;
/// The oldest version a server answers: what came since are changes that such a client does not ask for.
pub const OLDEST_PROTOCOL: u16 = 1;

/// Why a request of a session is refused.
pub mod code {
    use super::Code;
    /// The key is not that of a living session.
    pub const KEY: Code = Code(0x500);
    /// What is asked for is not exported here.
    pub const EXPORT: Code = Code(0x501);
    /// The sides speak different versions.
    pub const VERSION: Code = Code(0x502);
    /// The file is not as the writer thinks.
    pub const CONFLICT: Code = Code(0x503);
    /// The path leads to another file, or to none, and the file asked for is not at hand.
    pub const STALE: Code = Code(0x504);
    /// The system's own number follows, plus this.
    pub const ERRNO: u16 = 0x1000;
}

/// The system's number in a refusal, if it was the system that refused.
pub fn errno(refusal: &Refusal) -> Option<i32> {
    refusal.code.0.checked_sub(code::ERRNO).map(i32::from)
}

/// A header with the key in front.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Keyed<T> {
    /// The session's.
    pub key: SessionKey,
    /// What is asked.
    pub body: T,
}

/// A file by path and identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// Where it was last seen.
    pub path: RelPath,
    /// What it is.
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
    /// Begins a session. Payload: what the client is known by ([`ClientId`](super::ClientId)), or nothing.
    /// What that client asked for in earlier sessions and was not done yet is not done any more.
    OpenCall = 0x01: Open => Opened;
    /// Ends it.
    EndCall = 0x02: Keyed<End> => ();
    /// One name of a directory, and the directory along with it if it is small.
    LookupCall = 0x03: Keyed<Lookup> => LookedUp;
    /// A part of a directory. Payload of the reply: packed entries.
    ListCall = 0x04: Keyed<List> => Listed;
    /// Attributes of many files.
    AttrCall = 0x05: Keyed<AttrBatch> => Vec<Option<Attr>>;
    /// Content. Payload of the reply: packed pages.
    ReadCall = 0x06: Keyed<Read> => ReadDone;
    /// Content. Payload: packed pages.
    WriteCall = 0x07: Keyed<Write> => WriteDone;
    /// Makes content durable.
    SyncCall = 0x08: Keyed<Sync> => Attr;
    /// Changes names or attributes.
    OpCall = 0x09: Keyed<Op> => OpDone;
    /// Where a symlink points.
    ReadlinkCall = 0x0a: Keyed<RelPath> => Vec<u8>;
    /// Room on the server's disk.
    StatfsCall = 0x0b: Keyed<()> => FilesystemSpace;
    /// Many directories at once. Payload of the reply: packed directories.
    WalkCall = 0x0c: Keyed<ListTree> => Walked;
    /// What content is, by its digests. Payload of the reply: a digest of each page that is not zeros.
    DigestCall = 0x0d: Keyed<Digests> => DigestsDone;
    /// Some pages of a stretch. Payload of the reply: packed pages.
    PagesCall = 0x0e: Keyed<ReadPages> => ReadDone;
    /// Where a file has holes. Payload of the reply: packed holes.
    HolesCall = 0x0f: Keyed<FileRef> => HolesDone;
    /// From one file into another, without the content coming here. A server that is older than this call
    /// refuses its kind.
    CopyCall = 0x10: Keyed<Copy> => Copied;
}

/// What a request of this kind is called, for people; none if it is no session's.
pub fn request_name(kind: u16) -> Option<&'static str> {
    const NAMES: [&str; 16] = [
        "open", "end", "lookup", "list", "attr", "read", "write", "sync", "op", "readlink", "room", "walk",
        "digest", "pages", "holes", "copy",
    ];
    NAMES.get(usize::from(kind.checked_sub(range::SESSION + 1)?)).copied()
}

/// Begins a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// [`PROTOCOL`].
    pub protocol: u16,
    /// The directory wanted, as the server's user would name it.
    pub directory: Vec<u8>,
}

/// A session began.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Opened {
    /// To be shown with every request.
    pub key: SessionKey,
    /// The directory.
    pub root: Attr,
    /// Nothing can be written.
    pub read_only: bool,
    /// Who the server runs as.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// Ends a session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct End {}

/// Asks for a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lookup {
    /// The directory.
    pub dir: RelPath,
    /// The name in it; without one, the directory itself.
    pub name: Option<Name>,
    /// If the directory has no more names than this, they come along.
    pub list: u32,
}

/// What a name is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookedUp {
    /// The file; none if the directory has no such name.
    pub attr: Option<Attr>,
    /// Whether all names of the directory are in the payload.
    pub listed: bool,
}

/// Asks for names `from..` of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// The directory.
    pub dir: RelPath,
    /// The listing to go on with; zero makes one.
    pub listing: u64,
    /// The first entry wanted.
    pub from: u64,
    /// How many at most.
    pub count: u32,
}

/// A part of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Names the rest.
    pub listing: u64,
    /// Entries in all.
    pub total: u64,
    /// Where the next part begins.
    pub next: u64,
}

/// Asks for the names in directories, and in those below them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListTree {
    /// These, at most 1,000.
    pub dirs: Vec<RelPath>,
    /// Those below them as well, the nearest first, as far as there is room.
    pub below: bool,
    /// Names in all after which no other directory is begun.
    pub names: u32,
    /// A directory of more names than this comes without them.
    pub most: u32,
}

/// How far a walk came.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Walked {
    /// Of the directories asked for, so many were looked at; at least one.
    pub reached: u32,
}

/// Asks for attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttrBatch {
    /// Of these, at most 1,000.
    pub paths: Vec<RelPath>,
}

/// A stretch of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// Asks for content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// Of this file.
    pub file: FileRef,
    /// Of this stretch; what lies past the end of the file does not come.
    pub range: Range,
    /// Pack it at this level, if that saves bytes.
    pub level: Option<i8>,
}

/// Content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadDone {
    /// The file as it was when the content was read.
    pub attr: Attr,
    /// The shape of the payload.
    pub pages: PackedPages,
}

/// Asks what content is, without the content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    /// Of this file.
    pub file: FileRef,
    /// Of this stretch; what lies past the end of the file has none.
    pub range: Range,
}

/// What content is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DigestsDone {
    /// The file as it was when the content was read.
    pub attr: Attr,
    /// The shape of the payload.
    pub pages: DigestedPages,
    /// By which the users of one host may share what they read, if the server lets them.
    pub share: Option<ShareKey>,
}

/// Asks for the pages of a stretch that are lacking.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadPages {
    /// The stretch.
    pub read: Read,
    /// A bit a page, the lowest first: set where it is wanted. The others are left out as zeros are.
    pub wanted: Vec<u8>,
}

/// Holes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolesDone {
    /// The file as it was when they were looked for.
    pub attr: Attr,
}

/// Stores content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Write {
    /// In this file.
    pub file: FileRef,
    /// From this byte on.
    pub offset: u64,
    /// The content's last change as the writer knows it, or one made by the writer itself. Any other is a
    /// conflict.
    pub expect: Vec<Time>,
    /// What the last change is to be from now on.
    pub stamp: Time,
    /// The file is cut to this first, if it is longer.
    pub cut: Option<u64>,
    /// And has this size in the end.
    pub size: Option<u64>,
    /// The shape of the payload.
    pub pages: PackedPages,
}

/// The file after a write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteDone {
    /// Its attributes.
    pub attr: Attr,
}

/// Copies content within the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copy {
    /// Out of this file.
    pub from: FileRef,
    /// Its content's last change as the client knows it; with any other the copy is [`STALE`](code::STALE).
    pub from_mtime: Time,
    /// From this byte on.
    pub from_offset: u64,
    /// Into this one, which may be the same if the stretches do not overlap.
    pub to: FileRef,
    /// From this byte on.
    pub offset: u64,
    /// So many bytes, or fewer, as the server likes and as there are.
    pub len: u64,
    /// The last change of the file that is written, as of a [`Write`].
    pub expect: Vec<Time>,
    /// What its last change is to be from now on.
    pub stamp: Time,
    /// Answer only when the content is durable.
    pub durable: bool,
}

/// Content was copied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// So many bytes.
    pub len: u64,
    /// The file that was written, after it.
    pub attr: Attr,
}

/// Makes a file's content durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sync {
    /// This one.
    pub file: FileRef,
}

/// A change of names or attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// A new, empty file; its last change is `stamp`, by which it is known again.
    Create {
        /// Its name.
        path: RelPath,
        /// Permission bits.
        mode: u16,
        /// Last change.
        stamp: Time,
    },
    /// A new directory.
    Mkdir {
        /// Its name.
        path: RelPath,
        /// Permission bits.
        mode: u16,
    },
    /// A new symlink.
    Symlink {
        /// Its name.
        path: RelPath,
        /// Where it points; never looked at by the server.
        target: Vec<u8>,
    },
    /// Another name for a file.
    Link {
        /// The file.
        from: RelPath,
        /// The new name.
        path: RelPath,
    },
    /// Takes a name away, unless it names another file than this by now.
    Unlink {
        /// The name.
        path: RelPath,
        /// The file it should name, if known.
        ident: Option<Ident>,
        /// The file is still used by the client and stays readable for it.
        keep: bool,
    },
    /// Takes an empty directory away.
    Rmdir {
        /// Its name.
        path: RelPath,
    },
    /// Another name for the same.
    Rename {
        /// The old name.
        from: RelPath,
        /// The new name.
        path: RelPath,
        /// Fails if the new name is taken.
        no_replace: bool,
    },
    /// Attributes; those not given stay.
    SetAttr {
        /// Of this file.
        path: RelPath,
        /// Permission bits.
        mode: Option<u16>,
        /// Owner.
        uid: Option<u32>,
        /// Group.
        gid: Option<u32>,
        /// Last change of the content.
        mtime: Option<Time>,
    },
    /// A new, empty file like that of a create, at once in place of the file that may have the name.
    Replace {
        /// Its name.
        path: RelPath,
        /// Permission bits.
        mode: u16,
        /// Last change.
        stamp: Time,
    },
}

impl Op {
    /// The name that the change makes, takes away or is about.
    pub fn path(&self) -> &RelPath {
        match self {
            Op::Create { path, .. }
            | Op::Mkdir { path, .. }
            | Op::Symlink { path, .. }
            | Op::Link { path, .. }
            | Op::Unlink { path, .. }
            | Op::Rmdir { path }
            | Op::Rename { path, .. }
            | Op::SetAttr { path, .. }
            | Op::Replace { path, .. } => path,
        }
    }

    /// What it does, for people.
    pub fn verb(&self) -> &'static str {
        match self {
            Op::Create { .. } => "create",
            Op::Mkdir { .. } => "make the directory",
            Op::Symlink { .. } => "make the symlink",
            Op::Link { .. } => "link",
            Op::Unlink { .. } => "remove",
            Op::Rmdir { .. } => "remove the directory",
            Op::Rename { .. } => "rename to",
            Op::SetAttr { .. } => "change the attributes of",
            Op::Replace { .. } => "replace",
        }
    }
}

/// A change was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpDone {
    /// What the path names now, if anything.
    pub attr: Option<Attr>,
}

/// Room on the server's disk, in units of `unit` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemSpace {
    /// Bytes of a unit.
    pub unit: u64,
    /// Units in all.
    pub total: u64,
    /// Free units.
    pub free: u64,
    /// Free units for the server's user.
    pub available: u64,
    /// Inodes in all.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
}
