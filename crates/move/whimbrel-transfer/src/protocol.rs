//! The messages of a sync. docs/protocols/sync.md tells the story.
//!
//! Every message is a call of the wire in the range of the store; headers are these types in postcard form.
//! The server keeps nothing between two calls, and every answer is bounded by the numbers here and by
//! `max_bytes` of its request.

use crate::{BaseImage, ChildSet};
use serde::{Deserialize, Serialize};
use whimbrel_core::{CapsuleId, Digest, RefName};
use whimbrel_image::pack_frame::Kind;
use whimbrel_wire::{Call, range};

/// Most objects or leaves that one request wants.
pub const WANTS_MAX: usize = 512;
/// Most digests in one `HAVE`, `ANNOUNCE` or `WHO_HAS`.
pub const DIGESTS_MAX: usize = 65_536;
/// Most refs in one page of a catalog.
pub const REFS_MAX: usize = 256;
/// Most refs that one `TAKE` sets.
pub const REMOTE_PULL_REFS_MAX: usize = 64;
/// Raw bytes of the objects in one answer, and of a piece of a blob.
pub const RAW_MAX: usize = 8 << 20;
/// Bytes of the longest pattern of refs.
pub const PATTERN_MAX: usize = 256;
/// Pages in one frame of an answer: large frames of changed pages are a fifth smaller than those of 512.
pub const FRAME_PAGES: usize = 4096;
/// Pages in one answer: a window of the wire, raw.
pub const ANSWER_PAGES: usize = 4096;
/// Most leaves in one answer: their entries must fit a header.
pub const LEAVES_MAX: usize = 880;
/// Bytes of an answer that a server aims at, whatever a request says.
pub const ANSWER_BYTES: u32 = 4 << 20;
/// Longest blob that serves as the older version of another.
pub const SIMILAR_BLOB_MAX: usize = 4 << 20;

/// Lists refs; header [`CatalogPage`].
#[derive(Debug)]
pub struct ListRefs;

/// Which refs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogPage {
    /// `*` stands for any characters, `?` for one.
    pub pattern: String,
    /// Only refs behind this one.
    pub after: Option<RefName>,
}

/// A ref and the capsule it names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefEntry {
    /// Its name.
    pub name: RefName,
    /// What it names.
    pub capsule: CapsuleId,
    /// Milliseconds since 1970 at which the capsule was made.
    pub time: u64,
    /// Bytes of its memory, zeros included; 0 if it is inactive.
    pub memory: u64,
    /// Bytes of its disks, zeros included.
    pub disks: u64,
    /// Whether all of it is there.
    pub whole: bool,
}

/// A page of the catalog.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogAnswer {
    /// In the order of names.
    pub refs: Vec<RefEntry>,
    /// Whether there are refs behind the last.
    pub more: bool,
}

/// Which digests are there; the digests are the payload, the answer's payload is a bitmap.
#[derive(Debug)]
pub struct HasObjects;

/// Whole objects: manifests, tree nodes, blobs; header [`ObjectsAsk`].
#[derive(Debug)]
pub struct Objects;

/// What objects are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ObjectKind {
    /// Capsule manifests.
    Manifest,
    /// Tree nodes.
    Node,
    /// Blobs of at most [`RAW_MAX`]; longer ones come in pieces.
    Blob,
    /// Tree nodes that are leaves, by the first halves of their digests.
    ShortLeaf,
}

impl From<ObjectKind> for Kind {
    fn from(kind: ObjectKind) -> Self {
        match kind {
            ObjectKind::Manifest => Kind::Manifest,
            ObjectKind::Node | ObjectKind::ShortLeaf => Kind::Nodes,
            ObjectKind::Blob => Kind::Blob,
        }
    }
}

/// An object that is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WantObject {
    /// Its digest.
    pub digest: Digest,
    /// An object that the asker holds and that resembles it.
    pub similar: Option<Digest>,
}

/// Objects of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectsAsk {
    /// Their kind.
    pub kind: ObjectKind,
    /// Which ones.
    pub wants: Vec<WantObject>,
    /// How hard the answer is compressed: a [`Level`](crate::Level).
    pub level: i8,
    /// Bytes that the answer should not exceed by much.
    pub max_bytes: u32,
}

/// What became of a wanted object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectAnswer {
    /// Its bytes, so many, are next in the answer.
    Whole(u32),
    /// So many bytes that make it out of `similar` are next in the answer.
    Delta(u32),
    /// It is there and does not fit an answer: ask for pieces. So many bytes.
    Long(u64),
    /// It is not there, or not for this asker.
    Absent,
}

/// Header of the answer; the payload is the packed bytes of all objects. Wants that were left out for want of
/// room stand at the end and have no entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectsAnswer {
    /// In the order of wants.
    pub objects: Vec<ObjectAnswer>,
}

/// A piece of a blob; header [`BlobRangeRequest`], the answer's payload packed.
#[derive(Debug)]
pub struct BlobRange;

/// Which piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRangeRequest {
    /// The blob's digest.
    pub digest: Digest,
    /// Where it begins.
    pub offset: u64,
    /// Raw bytes, at most [`RAW_MAX`].
    pub len: u32,
    /// How hard the answer is compressed: a [`Level`](crate::Level).
    pub level: i8,
}

/// A piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRangeReply {
    /// Bytes of the whole blob.
    pub total: u64,
    /// Raw bytes of the piece.
    pub len: u32,
}

/// Pages; header [`LeafPagesRequest`].
#[derive(Debug)]
pub struct LeafPages;

/// Which pages of a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WantSlots {
    /// Those whose digest differs from `similar`. Without `similar`, none.
    Differing,
    /// These; the asker knows the leaf and thereby their digests.
    These(ChildSet),
}

/// Pages that are wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WantedLeafPages {
    /// Of one leaf.
    Leaf {
        /// The leaf's digest.
        leaf: Digest,
        /// An older leaf of the same place that the asker holds.
        similar: Option<Digest>,
        /// Which pages.
        slots: WantSlots,
    },
    /// The differing pages of several leaves under one node, which the asker holds as it holds `similar`.
    Children {
        /// A node of level 1.
        node: Digest,
        /// An older node of the same place.
        similar: Digest,
        /// Which of the leaves; both nodes have them, and different ones.
        children: ChildSet,
    },
}

/// Pages of many leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeafPagesRequest {
    /// What is wanted.
    pub wants: Vec<WantedLeafPages>,
    /// Images that the asker holds whole, where it pays to look for similar pages in them; at most
    /// [`BASES_MAX`](crate::BASES_MAX).
    pub bases: Vec<BaseImage>,
    /// How hard the answer is compressed: a [`Level`](crate::Level).
    pub level: i8,
    /// Bytes that the answer should not exceed by much.
    pub max_bytes: u32,
}

/// What became of one leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeafAnswer {
    /// Its pages are next in the answer.
    Sent {
        /// The slots answered: those asked for, or those that differ.
        changed: ChildSet,
        /// Those of them that are zero, and not in the payload.
        zero: ChildSet,
        /// Whether pages are coded against those of `similar`.
        delta: bool,
    },
    /// The older leaf is not there: ask without it.
    NoSimilar,
    /// More differs than fits an answer: ask for the leaf, then for its pages in portions.
    Large,
    /// The leaf, or one of its pages, is not there.
    Absent,
}

/// Header of the answer. The leaves are those of all wants in order, children in order of slots; leaves that
/// were left out for want of room stand at the end and have no entry. The payload is the frames one after the
/// other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeafPagesReply {
    /// In the order of wants.
    pub leaves: Vec<LeafAnswer>,
    /// In the order of leaves.
    pub frames: Vec<LeafPagesFrame>,
}

/// A frame of pages: its part of the payload is a list of pages of base images, then what is coded against
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeafPagesFrame {
    /// Leaves of which it has the pages.
    pub leaves: u16,
    /// Bytes of the list.
    pub bases: u32,
    /// Bytes of the rest.
    pub bytes: u32,
}

/// Asks the peer to pull a capsule over this connection; answered when it is whole there and the refs are
/// set.
#[derive(Debug)]
pub struct RemotePull;

/// What to take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemotePullRequest {
    /// The capsule.
    pub capsule: CapsuleId,
    /// Refs to point at it.
    pub refs: Vec<RefName>,
    /// A capsule of the same machine that the peer may hold, newest first.
    pub bases: Vec<CapsuleId>,
}

/// It was taken.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemotePullReply {
    /// Bytes that crossed the connection for it, both ways.
    pub bytes: u64,
    /// Pages that came over it.
    pub pages: u64,
}

/// How far the peer is with taking a capsule; header the capsule's id.
#[derive(Debug)]
pub struct RemotePullStatus;

/// Progress of a pull.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemotePullProgress {
    /// Bytes received.
    pub received: u64,
    /// Bytes that are probably left.
    pub left: u64,
    /// Bytes a second.
    pub rate: u64,
}

/// Says what a host holds; header [`AnnounceAsk`].
#[derive(Debug)]
pub struct Announce;

/// Capsules and image roots that a host holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnnounceAsk {
    /// Whether earlier announcements of the same host are void.
    pub replace: bool,
    /// At most 1,800 in one message: headers are short.
    pub holdings: Vec<Holding>,
}

/// Most holdings in one message.
pub const HOLDINGS_MAX: usize = 1800;

/// One thing that a host holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holding {
    /// A capsule's id or the root of an image.
    pub digest: Digest,
    /// All of it, or a part.
    pub whole: bool,
}

/// Who holds a capsule or an image; header the digests, at most [`HOLDINGS_MAX`].
#[derive(Debug)]
pub struct FindHolders;

/// For each digest, the names of those who have it, whole holders first.
pub type WhoHasAnswer = Vec<Vec<String>>;

macro_rules! call {
    ($call:ty, $number:literal, $header:ty, $reply:ty) => {
        impl Call for $call {
            const KIND: u16 = range::STORE + $number;
            type Header = $header;
            type Reply = $reply;
        }
    };
}

call!(ListRefs, 0, CatalogPage, CatalogAnswer);
call!(HasObjects, 1, (), ());
call!(Objects, 2, ObjectsAsk, ObjectsAnswer);
call!(BlobRange, 3, BlobRangeRequest, BlobRangeReply);
call!(LeafPages, 4, LeafPagesRequest, LeafPagesReply);
call!(RemotePull, 5, RemotePullRequest, RemotePullReply);
call!(RemotePullStatus, 6, CapsuleId, Option<RemotePullProgress>);
call!(Announce, 7, AnnounceAsk, ());
call!(FindHolders, 8, Vec<Digest>, WhoHasAnswer);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_messages_fit_a_header() {
        let fits =
            |bytes: Vec<u8>| assert!(bytes.len() <= whimbrel_wire::MAX_HEADER as usize, "{}", bytes.len());
        let digest = Digest([255; 32]);
        let slots: ChildSet = (0..256).collect();
        let leaf =
            WantedLeafPages::Leaf { leaf: digest, similar: Some(digest), slots: WantSlots::These(slots) };
        let bases = vec![BaseImage { root: digest, pages: u64::MAX }; crate::BASES_MAX];
        let ask = LeafPagesRequest { wants: vec![leaf; WANTS_MAX], bases, level: -1, max_bytes: u32::MAX };
        fits(postcard::to_stdvec(&ask).unwrap());
        let want = WantObject { digest, similar: Some(digest) };
        let ask =
            ObjectsAsk { kind: ObjectKind::Blob, wants: vec![want; WANTS_MAX], level: -1, max_bytes: 1 };
        fits(postcard::to_stdvec(&ask).unwrap());
        let sent = LeafAnswer::Sent { changed: slots, zero: slots, delta: true };
        let frame = LeafPagesFrame { leaves: 1, bases: 4096, bytes: 4096 };
        let answer = LeafPagesReply { leaves: vec![sent; LEAVES_MAX], frames: vec![frame; LEAVES_MAX] };
        fits(postcard::to_stdvec(&answer).unwrap());
        let holdings = vec![Holding { digest, whole: true }; HOLDINGS_MAX];
        fits(postcard::to_stdvec(&AnnounceAsk { replace: true, holdings }).unwrap());
    }
}
