//! Messages of a transfer, described in docs/protocols/transfer.md.
//!
//! Every message is a call of the wire in the range of the store; headers are these types in postcard form.
//! The server keeps nothing between two calls, and every reply is bounded by the numbers here and by
//! `max_bytes` of its request.

use crate::{BaseImage, ChildSet};
use serde::{Deserialize, Serialize};
use whimbrel_core::{CapsuleId, Digest, RefName};
use whimbrel_image::pack_frame::Kind;
use whimbrel_wire::{Call, Code, Protocol, Refusal, Request, Version, range};

/// Versions of these messages.
pub const PROTOCOL: Protocol = Protocol {
    name: "transfer",
    kinds: (range::STORE, range::STORE + 0xff),
    versions: &[Version { number: 1, reason: "the first: trees are compared, pages sent as differences" }],
};

/// Most objects or leaves in one request.
pub const WANTS_MAX: usize = 512;
/// Most digests in one [`HasObjects`].
pub const DIGESTS_MAX: usize = 65_536;
/// Most refs that one [`RemotePull`] sets.
pub const REMOTE_PULL_REFS_MAX: usize = 64;
/// Most refs in one reply of [`ListRefs`].
pub(crate) const REFS_MAX: usize = 256;
/// Raw bytes of the objects in one reply, and of a range of a blob.
pub const RAW_MAX: usize = 8 << 20;
/// Bytes of the longest ref pattern.
pub(crate) const PATTERN_MAX: usize = 256;
/// Pages in one frame of a reply: large frames of changed pages are a fifth smaller than those of 512.
pub const FRAME_PAGES: usize = 4096;
/// Pages in one reply: a window of the wire, uncompressed.
pub(crate) const ANSWER_PAGES: usize = 4096;
/// Most leaves in one reply: their entries must fit a header.
pub(crate) const LEAVES_MAX: usize = 880;
/// Most bytes that a server plans for a reply, whatever the request allows.
pub(crate) const ANSWER_BYTES: u32 = 4 << 20;
/// Longest blob that serves as the older version of another.
pub(crate) const SIMILAR_BLOB_MAX: usize = 4 << 20;

/// Call that lists refs; header [`ListRefsRequest`].
#[derive(Debug)]
pub struct ListRefs;

/// Selection of refs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListRefsRequest {
    /// Ref pattern: `*` stands for any characters, `?` for one.
    pub pattern: String,
    /// Ref after which the list starts, if any.
    pub after: Option<RefName>,
}

/// Ref and the capsule that it names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefEntry {
    /// Name of the ref.
    pub name: RefName,
    /// Id of the capsule.
    pub capsule: CapsuleId,
    /// Creation time of the capsule, in milliseconds since 1970.
    pub time: u64,
    /// Bytes of its memory, zeros included; 0 for a disk-only capsule.
    pub memory: u64,
    /// Bytes of its disks, zeros included.
    pub disks: u64,
    /// Whether the capsule is complete there.
    pub whole: bool,
}

/// Part of a list of refs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListRefsReply {
    /// Refs in the order of their names.
    pub refs: Vec<RefEntry>,
    /// Whether further refs follow.
    pub more: bool,
}

/// Call that asks which objects exist; the digests are the payload, the reply's payload is a bitmap.
#[derive(Debug)]
pub struct HasObjects;

/// Call for complete objects (manifests, tree nodes, blobs); header [`ObjectsRequest`].
#[derive(Debug)]
pub struct Objects;

/// Kind of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ObjectKind {
    /// Manifest of a capsule.
    Manifest,
    /// Node of an image's tree.
    Node,
    /// Blob of at most [`RAW_MAX`]; longer ones are sent in ranges.
    Blob,
    /// Leaf, as the short digests of its pages.
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

/// Request for one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WantedObject {
    /// Digest of the object.
    pub digest: Digest,
    /// Similar object that the requester has.
    pub similar: Option<Digest>,
}

/// Request for objects of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectsRequest {
    /// Kind of the objects.
    pub kind: ObjectKind,
    /// Objects that are requested.
    pub wants: Vec<WantedObject>,
    /// Compression level of the reply: a [`CompressionLevel`](crate::CompressionLevel).
    pub level: i8,
    /// Bytes that the reply should not exceed by much.
    pub max_bytes: u32,
}

/// Result for one requested object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectAnswer {
    /// The object, of this many bytes, is next in the payload.
    Whole(u32),
    /// A delta to `similar`, of this many bytes, is next in the payload.
    Delta(u32),
    /// The object, of this many bytes, does not fit a reply: request it in ranges.
    Long(u64),
    /// The object is not there, or this requester may not have it.
    Absent,
}

/// Header of the reply; the payload is the compressed bytes of all objects. Requests at the end that did not
/// fit have no entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectsReply {
    /// Results in the order of the requests.
    pub objects: Vec<ObjectAnswer>,
}

/// Call for a range of a blob; header [`BlobRangeRequest`], the reply's payload is compressed.
#[derive(Debug)]
pub struct BlobRange;

/// Range of a blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRangeRequest {
    /// Digest of the blob.
    pub digest: Digest,
    /// Start of the range.
    pub offset: u64,
    /// Raw bytes, at most [`RAW_MAX`].
    pub len: u32,
    /// Compression level of the reply: a [`CompressionLevel`](crate::CompressionLevel).
    pub level: i8,
}

/// Header of the reply with a range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRangeReply {
    /// Bytes of the complete blob.
    pub total: u64,
    /// Raw bytes of the range.
    pub len: u32,
}

/// Call for pages of leaves; header [`LeafPagesRequest`].
#[derive(Debug)]
pub struct LeafPages;

/// Selection of the pages of a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WantedSlots {
    /// Pages whose digest differs from `similar`; none without `similar`.
    Differing,
    /// Pages at these slots; the requester knows their digests from the leaf.
    These(ChildSet),
}

/// Request for pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WantedLeafPages {
    /// Pages of one leaf.
    Leaf {
        /// Digest of the leaf.
        leaf: Digest,
        /// Older leaf of the same place that the requester has.
        similar: Option<Digest>,
        /// Selection of the pages.
        slots: WantedSlots,
    },
    /// Differing pages of several leaves under one node, which the requester has, as it has `similar`.
    Children {
        /// Node of level 1.
        node: Digest,
        /// Older node of the same place.
        similar: Digest,
        /// Leaves that are requested; both nodes have them, and they differ.
        children: ChildSet,
    },
}

/// Request for pages of many leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeafPagesRequest {
    /// Pages that are requested.
    pub wants: Vec<WantedLeafPages>,
    /// Images that the requester has completely, in which it pays to look for similar pages; at most
    /// [`BASES_MAX`](crate::BASES_MAX).
    pub bases: Vec<BaseImage>,
    /// Compression level of the reply: a [`CompressionLevel`](crate::CompressionLevel).
    pub level: i8,
    /// Bytes that the reply should not exceed by much.
    pub max_bytes: u32,
}

/// Result for one leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeafAnswer {
    /// The pages are next in the payload.
    Sent {
        /// Slots that are answered: those requested, or those that differ.
        changed: ChildSet,
        /// Slots among them with zero pages, which are not in the payload.
        zero: ChildSet,
        /// Whether pages are coded against those of `similar`.
        delta: bool,
    },
    /// The older leaf is not there: request without it.
    NoSimilar,
    /// The differing pages do not fit a reply: request the leaf, then its pages in parts.
    Large,
    /// The leaf, or one of its pages, is not there.
    Absent,
}

/// Header of the reply. The leaves are those of all requests in order, children in the order of their slots;
/// leaves at the end that did not fit have no entry. The payload is the concatenated frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeafPagesReply {
    /// Results in the order of the requests.
    pub leaves: Vec<LeafAnswer>,
    /// Frames in the order of the leaves.
    pub frames: Vec<LeafPagesFrame>,
}

/// Frame of pages: its part of the payload is a list of pages of base images, then the pages coded against
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeafPagesFrame {
    /// Number of leaves whose pages it has.
    pub leaves: u16,
    /// Bytes of the list.
    pub bases: u32,
    /// Bytes of the coded pages.
    pub bytes: u32,
}

/// Call that makes the peer pull a capsule over this connection; answered when it is complete there and the
/// refs are set.
#[derive(Debug)]
pub struct RemotePull;

/// Capsule to pull.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemotePullRequest {
    /// Id of the capsule.
    pub capsule: CapsuleId,
    /// Refs to point at the capsule.
    pub refs: Vec<RefName>,
    /// Capsules of the same machine that the peer may have, newest first.
    pub bases: Vec<CapsuleId>,
}

impl RemotePullRequest {
    /// The request of a [`RemotePull`], unless it is for too much.
    pub fn of(request: &Request) -> Result<Self, Refusal> {
        let asked = request.decode::<RemotePull>()?;
        match asked.refs.len() {
            0..=REMOTE_PULL_REFS_MAX => Ok(asked),
            refs => Err(Refusal::new(
                Code::TOO_LONG,
                format!("one pull sets at most {REMOTE_PULL_REFS_MAX} refs, not {refs}"),
            )),
        }
    }
}

/// Result of a remote pull.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemotePullReply {
    /// Bytes sent over the connection for it, both ways.
    pub bytes: u64,
    /// Pages received over the connection.
    pub pages: u64,
}

/// Call for the progress of a remote pull; header the capsule's id.
#[derive(Debug)]
pub struct RemotePullStatus;

/// Progress of a remote pull.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemotePullProgress {
    /// Number of bytes received.
    pub received: u64,
    /// Estimated bytes still to receive.
    pub left: u64,
    /// Bytes a second.
    pub rate: u64,
}

/// Call of a host that reads capsules lazily, so that they are retained here; header [`RetainRequest`].
#[derive(Debug)]
pub struct Retain;

/// Capsules that another host has in part and reads the rest of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetainRequest {
    /// Whether these are all of them; others may be released.
    pub all: bool,
    /// The capsules, at most [`RETAINED_MAX`].
    pub capsules: Vec<CapsuleId>,
}

/// Most capsules that one host retains for another.
pub const RETAINED_MAX: usize = 1024;

macro_rules! call {
    ($call:ty, $number:literal, $header:ty, $reply:ty) => {
        impl Call for $call {
            const KIND: u16 = range::STORE + $number;
            type Header = $header;
            type Reply = $reply;
        }
    };
}

call!(ListRefs, 0, ListRefsRequest, ListRefsReply);
call!(HasObjects, 1, (), ());
call!(Objects, 2, ObjectsRequest, ObjectsReply);
call!(BlobRange, 3, BlobRangeRequest, BlobRangeReply);
call!(LeafPages, 4, LeafPagesRequest, LeafPagesReply);
call!(RemotePull, 5, RemotePullRequest, RemotePullReply);
call!(RemotePullStatus, 6, CapsuleId, Option<RemotePullProgress>);
// Numbers 7 and 8 were those of announcements, which earlier versions still send.
call!(Retain, 9, RetainRequest, ());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_that_sets_too_many_refs_is_refused() {
        let asked = |refs: usize| {
            let refs = (0..refs).map(|at| format!("r{at}").parse().unwrap()).collect();
            let header = RemotePullRequest { capsule: CapsuleId(Digest([1; 32])), refs, bases: vec![] };
            RemotePullRequest::of(&Request::of::<RemotePull>(&header, Default::default()).unwrap())
        };
        assert!(asked(REMOTE_PULL_REFS_MAX).is_ok());
        let refused = asked(REMOTE_PULL_REFS_MAX + 1).unwrap_err();
        assert_eq!(refused.to_string(), "one pull sets at most 64 refs, not 65 (code 6)");
    }

    #[test]
    fn the_largest_messages_fit_a_header() {
        let fits =
            |bytes: Vec<u8>| assert!(bytes.len() <= whimbrel_wire::MAX_HEADER as usize, "{}", bytes.len());
        let digest = Digest([255; 32]);
        let slots: ChildSet = (0..256).collect();
        let leaf =
            WantedLeafPages::Leaf { leaf: digest, similar: Some(digest), slots: WantedSlots::These(slots) };
        let bases = vec![BaseImage { root: digest, pages: u64::MAX }; crate::BASES_MAX];
        let ask = LeafPagesRequest { wants: vec![leaf; WANTS_MAX], bases, level: -1, max_bytes: u32::MAX };
        fits(postcard::to_stdvec(&ask).unwrap());
        let want = WantedObject { digest, similar: Some(digest) };
        let ask =
            ObjectsRequest { kind: ObjectKind::Blob, wants: vec![want; WANTS_MAX], level: -1, max_bytes: 1 };
        fits(postcard::to_stdvec(&ask).unwrap());
        let sent = LeafAnswer::Sent { changed: slots, zero: slots, delta: true };
        let frame = LeafPagesFrame { leaves: 1, bases: 4096, bytes: 4096 };
        let answer = LeafPagesReply { leaves: vec![sent; LEAVES_MAX], frames: vec![frame; LEAVES_MAX] };
        fits(postcard::to_stdvec(&answer).unwrap());
        let capsules = vec![CapsuleId(digest); RETAINED_MAX];
        fits(postcard::to_stdvec(&RetainRequest { all: true, capsules }).unwrap());
    }
}
