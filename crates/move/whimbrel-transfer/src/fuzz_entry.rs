//! Fuzz entry of the transfer: runs every decoder of peer data on the fuzzer's bytes.
//!
//! The requester has one older leaf and one older blob, and requested a few things of each kind.

use crate::{
    BaseImage, BoxError, ChildSet, LocalObjects,
    answer_decoder::{RequestedLeaf, RequestedSlots, decode_blob_range, decode_leaf_pages, decode_objects},
    node_delta,
    protocol::*,
    short_leaf::ShortLeaf,
};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE};
use whimbrel_image::{Node, ShortDigest, pack_frame::Kind};

/// Store with an older leaf with pages at slots 0 to 3, its page, and an older blob.
struct FuzzObjects;

const LEAF: Digest = Digest([1; 32]);
const BLOB: Digest = Digest([2; 32]);
const PAGE: Digest = Digest([3; 32]);
const WANTED: Digest = Digest([4; 32]);

fn leaf() -> Node {
    let mut node = Node::empty(0);
    (0..4).for_each(|slot| node.set(slot, Some(PAGE)));
    node
}

impl LocalObjects for FuzzObjects {
    fn has(&self, digests: &[Digest]) -> Vec<bool> {
        digests.iter().map(|digest| self.object(digest).is_some()).collect()
    }

    fn object(&self, digest: &Digest) -> Option<Vec<u8>> {
        match *digest {
            LEAF => leaf().encode(),
            BLOB => Some(vec![7; 1000]),
            PAGE => Some(vec![9; PAGE_SIZE]),
            _ => None,
        }
    }

    fn digest_of(&self, key: &ShortDigest) -> Option<Digest> {
        [LEAF, BLOB, PAGE].into_iter().find(|digest| key.matches(digest))
    }

    fn store(&self, _: Kind, _: &[&[u8]]) -> Result<(), BoxError> {
        Ok(())
    }

    fn flush(&self) -> Result<(), BoxError> {
        Ok(())
    }

    fn is_complete(&self, _: &CapsuleId) -> bool {
        false
    }
}

/// Decoder: whether it accepts a header and a payload.
type Decoder = fn(&[u8], &[u8]) -> bool;

/// Decodes bytes as a reply of each kind; returns whether any was accepted. The header comes first, after its
/// length in two bytes.
pub fn decode_any(bytes: &[u8]) -> bool {
    let Some((len, rest)) = bytes.split_first_chunk::<2>() else { return false };
    let Some((header, payload)) = rest.split_at_checked(u16::from_le_bytes(*len).into()) else {
        return false;
    };
    let sorts: [Decoder; 6] = [pages, objects, piece, delta, short_leaf, requests];
    // Runs all of them, whatever the first returns.
    sorts.map(|sort| sort(header, payload)).contains(&true)
}

fn pages(header: &[u8], payload: &[u8]) -> bool {
    let Ok(answer) = postcard::from_bytes::<LeafPagesReply>(header) else { return false };
    let differing =
        RequestedLeaf { leaf: WANTED, old: Some(leaf()), similar: true, slots: RequestedSlots::Differing };
    let known = RequestedLeaf {
        leaf: WANTED,
        old: None,
        similar: false,
        slots: RequestedSlots::Given((0..2).collect::<ChildSet>(), leaf()),
    };
    let slots = RequestedSlots::Short((0..4).collect::<ChildSet>(), ShortLeaf::of(&leaf()));
    let short = RequestedLeaf { slots, ..known.clone() };
    let orders = [
        [differing.clone(), known.clone()],
        [known, differing.clone()],
        [short.clone(), differing.clone()],
        [differing, short],
    ];
    let bases = [BaseImage { root: LEAF, pages: 200 }];
    orders.iter().any(|asked| decode_leaf_pages(&FuzzObjects, asked, &bases, &answer, payload).is_ok())
}

fn objects(header: &[u8], payload: &[u8]) -> bool {
    let Ok(answer) = postcard::from_bytes::<ObjectsReply>(header) else { return false };
    let sorts = [(ObjectKind::Manifest, BLOB), (ObjectKind::Node, LEAF), (ObjectKind::Blob, BLOB)];
    sorts.iter().any(|(kind, similar)| {
        let wants = [WantedObject { digest: WANTED, similar: Some(*similar) }; 3];
        decode_objects(&FuzzObjects, *kind, &wants, &answer, payload).is_ok()
    })
}

fn piece(header: &[u8], payload: &[u8]) -> bool {
    let Ok(answer) = postcard::from_bytes::<BlobRangeReply>(header) else { return false };
    let ask = BlobRangeRequest { digest: WANTED, offset: 100, len: 1 << 20, level: 3 };
    decode_blob_range(&ask, &answer, payload).is_ok_and(|piece| {
        assert!(piece.len() <= ask.len as usize, "a longer piece than was asked for");
        true
    })
}

fn delta(_: &[u8], payload: &[u8]) -> bool {
    node_delta::decode(&leaf(), payload).is_ok_and(|bytes| {
        assert!(Node::decode(&bytes).is_ok(), "a difference leads to a node or nowhere");
        true
    })
}

fn short_leaf(_: &[u8], payload: &[u8]) -> bool {
    ShortLeaf::decode(payload).is_some_and(|short| {
        assert_eq!(short.encode(), payload, "one encoding for a leaf");
        true
    })
}

fn requests(header: &[u8], _: &[u8]) -> bool {
    let asks = [
        postcard::from_bytes::<LeafPagesRequest>(header).is_ok(),
        postcard::from_bytes::<ObjectsRequest>(header).is_ok(),
        postcard::from_bytes::<ListRefsRequest>(header).is_ok(),
        postcard::from_bytes::<ListRefsReply>(header).is_ok(),
        postcard::from_bytes::<RemotePullRequest>(header).is_ok(),
        postcard::from_bytes::<RetainRequest>(header).is_ok(),
    ];
    asks.contains(&true)
}
