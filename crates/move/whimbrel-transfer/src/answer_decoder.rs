//! Answer decoder: turns replies into objects and compares each with the digest that was requested.
//!
//! Delta pages are decoded with the older pages on this side. A leaf of which only the differing pages
//! arrived is built from the older leaf and must have the requested digest. Anything that does not match is
//! the peer's fault; then nothing of the reply is used.

use crate::{
    BaseImage, ChildSet, CompressionError,
    base_images::{self, BaseLookup},
    compression::decompress,
    local_objects::LocalObjects,
    node_delta,
    page_answers::older_pages,
    page_frame::decode_pages,
    protocol::*,
    short_leaf::ShortLeaf,
};
use std::ops::Range;
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_image::{MAX_MANIFEST, MAX_NODE, Node, ShortDigest};

/// Error: a peer's reply has content that was not requested, as this digest shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("wrong data for {digest}")]
pub(crate) struct WrongContent {
    /// Digest that was requested.
    pub digest: Digest,
}

/// Result for one requested object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReceivedObject {
    Object(Vec<u8>),
    /// The object, of this many bytes, must be requested in ranges.
    Long(u64),
    /// The peer lacks it.
    Absent,
    /// The older version cannot be read here: request without it.
    NoSimilar,
}

/// Decodes the reply to a request for `wants`; returns as many results as were sent.
pub(crate) fn decode_objects(
    shelf: &dyn LocalObjects,
    kind: ObjectKind,
    wants: &[WantedObject],
    answer: &ObjectsReply,
    payload: &[u8],
) -> Result<Vec<ReceivedObject>, WrongContent> {
    let wrong = |i: usize| WrongContent {
        digest: wants.get(i).or(wants.first()).map_or(Digest([0; 32]), |w| w.digest),
    };
    if answer.objects.len() > wants.len() || (answer.objects.is_empty() && !wants.is_empty()) {
        return Err(wrong(0));
    }
    let raw = decompress_objects(&answer.objects, payload).map_err(|_| wrong(0))?;
    let (mut at, mut came) = (0, Vec::with_capacity(wants.len()));
    for (i, (want, object)) in wants.iter().zip(&answer.objects).enumerate() {
        let mut piece = |len: u32| {
            let start = at;
            at += len as usize;
            raw.get(start..at).ok_or(wrong(i))
        };
        let bytes = match object {
            ObjectAnswer::Absent => ReceivedObject::Absent,
            ObjectAnswer::Long(total) => ReceivedObject::Long(*total),
            ObjectAnswer::Whole(len) => ReceivedObject::Object(piece(*len)?.to_vec()),
            ObjectAnswer::Delta(len) => apply(shelf, kind, want, piece(*len)?)?,
        };
        // A short leaf can be compared with its digest only when the leaf is complete.
        if let ReceivedObject::Object(bytes) = &bytes
            && kind != ObjectKind::ShortLeaf
            && Digest::of(bytes) != want.digest
        {
            return Err(wrong(i));
        }
        came.push(bytes);
    }
    Ok(came)
}

pub(crate) fn decompress_objects(
    objects: &[ObjectAnswer],
    payload: &[u8],
) -> Result<Vec<u8>, CompressionError> {
    let len = |object: &ObjectAnswer| match object {
        ObjectAnswer::Whole(len) | ObjectAnswer::Delta(len) => *len as usize,
        ObjectAnswer::Long(_) | ObjectAnswer::Absent => 0,
    };
    let expected = objects.iter().map(len).fold(0usize, usize::saturating_add);
    if expected > RAW_MAX + MAX_MANIFEST {
        return Err(CompressionError::Length { found: expected, expected: RAW_MAX });
    }
    match (expected, payload) {
        (0, []) => Ok(Vec::new()),
        _ => decompress(payload, &[], expected),
    }
}

fn apply(
    shelf: &dyn LocalObjects,
    kind: ObjectKind,
    want: &WantedObject,
    delta: &[u8],
) -> Result<ReceivedObject, WrongContent> {
    let wrong = WrongContent { digest: want.digest };
    let similar = want.similar.ok_or(wrong)?;
    let Some(old) = shelf.object(&similar) else { return Ok(ReceivedObject::NoSimilar) };
    match kind {
        ObjectKind::Manifest | ObjectKind::ShortLeaf => Err(wrong),
        // No node has a delta this long, and a peer may send any.
        ObjectKind::Node if delta.len() > MAX_NODE + 64 => Err(wrong),
        ObjectKind::Node => {
            let old = Node::decode(&old).map_err(|_| wrong)?;
            node_delta::decode(&old, delta).map(ReceivedObject::Object).map_err(|_| wrong)
        }
        ObjectKind::Blob => {
            let (len, frame) = delta.split_first_chunk::<4>().ok_or(wrong)?;
            let len = u32::from_le_bytes(*len) as usize;
            if len > SIMILAR_BLOB_MAX || old.is_empty() {
                return Err(wrong);
            }
            decompress(frame, &old, len).map(ReceivedObject::Object).map_err(|_| wrong)
        }
    }
}

pub(crate) fn decode_blob_range(
    ask: &BlobRangeRequest,
    answer: &BlobRangeReply,
    payload: &[u8],
) -> Result<Vec<u8>, WrongContent> {
    let wrong = WrongContent { digest: ask.digest };
    let rest = answer.total.saturating_sub(ask.offset);
    let fits = answer.len <= ask.len && u64::from(answer.len) <= rest && (answer.len > 0 || rest == 0);
    if !fits || answer.total > whimbrel_image::pack_frame::MAX_BLOB as u64 {
        return Err(wrong);
    }
    decompress(payload, &[], answer.len as usize).map_err(|_| wrong)
}

/// Leaf of which pages were requested, as this side knows it.
#[derive(Debug, Clone)]
pub(crate) struct RequestedLeaf {
    pub(crate) leaf: Digest,
    /// Older leaf that was named, if it can still be read here.
    pub(crate) old: Option<Node>,
    /// Whether an older leaf was named.
    pub(crate) similar: bool,
    pub(crate) slots: RequestedSlots,
}

/// Pages of a leaf that were requested.
#[derive(Debug, Clone)]
pub(crate) enum RequestedSlots {
    /// Pages that differ from the older leaf.
    Differing,
    /// Pages of a leaf that is known.
    Given(ChildSet, Node),
    /// Pages of a leaf of which the short digests are known.
    Short(ChildSet, ShortLeaf),
}

#[derive(Debug)]
pub(crate) enum ReceivedLeaf {
    Pages {
        /// Slots of the leaf, and where their pages are in the buffer; none for zero pages.
        pages: Vec<(usize, Option<Range<usize>>)>,
        /// Encoded leaf, if it was built.
        node: Option<Vec<u8>>,
        /// Whether the pages were coded against older ones.
        delta: bool,
    },
    NoSimilar,
    Large,
    Absent,
    /// A page of a base image cannot be read here: request without base images.
    NoBases,
}

/// Leaves of a reply, and the buffer of their pages.
#[derive(Debug, Default)]
pub(crate) struct ReceivedPages {
    pub(crate) leaves: Vec<ReceivedLeaf>,
    pub(crate) buffer: Vec<u8>,
}

/// Decodes the reply to a request for the pages of `asked`, which named `bases`.
pub(crate) fn decode_leaf_pages(
    shelf: &dyn LocalObjects,
    asked: &[RequestedLeaf],
    bases: &[BaseImage],
    answer: &LeafPagesReply,
    payload: &[u8],
) -> Result<ReceivedPages, WrongContent> {
    let first = asked.first().map_or(Digest([0; 32]), |asked| asked.leaf);
    answer.check(asked.len(), payload.len()).map_err(|_| WrongContent { digest: first })?;
    let mut came = ReceivedPages::default();
    let (mut rest, mut leaves, mut asked) = (payload, &answer.leaves[..], asked);
    let mut bases = base_images::BasePages::new(shelf, bases);
    for frame in &answer.frames {
        let (numbers, behind) = rest.split_at(frame.bases as usize);
        let (bytes, frames) = behind.split_at(frame.bytes as usize);
        let (these, others) = leaves.split_at(usize::from(frame.leaves));
        let (mine, later) = asked.split_at(usize::from(frame.leaves));
        (rest, leaves, asked) = (frames, others, later);
        let similar = similar_of(&mut bases, numbers).ok_or(WrongContent { digest: first })?;
        decode_frame(shelf, mine, these, (similar, bytes), &mut came)?;
    }
    Ok(came)
}

/// Pages of base images that a frame is coded against.
enum Similar {
    Pages(Vec<u8>),
    Unreadable,
}

/// Reads the pages that `numbers` name; none if one does not exist.
fn similar_of(bases: &mut base_images::BasePages<'_>, numbers: &[u8]) -> Option<Similar> {
    let mut pages = Vec::new();
    for number in base_images::decode(numbers)? {
        match bases.digest(number) {
            BaseLookup::Nothing => return None,
            BaseLookup::Unknown => return Some(Similar::Unreadable),
            BaseLookup::Page(digest) => match bases.read(&digest) {
                Some(page) => pages.extend(page),
                None => return Some(Similar::Unreadable),
            },
        }
    }
    Some(Similar::Pages(pages))
}

fn decode_frame(
    shelf: &dyn LocalObjects,
    asked: &[RequestedLeaf],
    answers: &[LeafAnswer],
    (similar, frame): (Similar, &[u8]),
    came: &mut ReceivedPages,
) -> Result<(), WrongContent> {
    let Similar::Pages(mut prefix) = similar else {
        came.leaves.extend(answers.iter().map(|_| ReceivedLeaf::NoBases));
        return Ok(());
    };
    let Some(older) = older_of(shelf, asked, answers)? else {
        // The older pages cannot be read here any more.
        came.leaves.extend(answers.iter().map(|_| ReceivedLeaf::NoSimilar));
        return Ok(());
    };
    prefix.extend(older);
    let count = answers.iter().map(LeafAnswer::pages).sum();
    let mut at = came.buffer.len();
    if count > 0 {
        let wrong = |_| WrongContent { digest: asked[0].leaf };
        came.buffer.extend(decode_pages(frame, &prefix, count).map_err(wrong)?);
    } else if !frame.is_empty() {
        return Err(WrongContent { digest: asked[0].leaf });
    }
    for (asked, answer) in asked.iter().zip(answers) {
        let leaf = match answer {
            LeafAnswer::NoSimilar => ReceivedLeaf::NoSimilar,
            LeafAnswer::Large => ReceivedLeaf::Large,
            LeafAnswer::Absent => ReceivedLeaf::Absent,
            LeafAnswer::Sent { changed, zero, delta } => {
                let pages = place_pages(changed, zero, &mut at);
                let node = check_leaf(asked, *changed, &pages, &came.buffer)?;
                ReceivedLeaf::Pages { pages, node, delta: *delta }
            }
        };
        came.leaves.push(leaf);
    }
    Ok(())
}

/// Older pages that a frame is coded against; none if one of them cannot be read.
fn older_of(
    shelf: &dyn LocalObjects,
    asked: &[RequestedLeaf],
    answers: &[LeafAnswer],
) -> Result<Option<Vec<u8>>, WrongContent> {
    let mut older = Vec::new();
    for (asked, answer) in asked.iter().zip(answers) {
        let LeafAnswer::Sent { changed, zero, delta } = answer else { continue };
        if *delta && !asked.similar {
            return Err(WrongContent { digest: asked.leaf });
        }
        let differing = matches!(asked.slots, RequestedSlots::Differing);
        let old = match &asked.old {
            None if *delta || differing => return Ok(None),
            Some(old) if *delta => old,
            _ => continue,
        };
        for digest in older_pages(old, *changed, *zero) {
            match shelf.object(&digest) {
                Some(page) if page.len() == PAGE_SIZE => older.extend(page),
                _ => return Ok(None),
            }
        }
    }
    Ok(Some(older))
}

fn place_pages(changed: &ChildSet, zero: &ChildSet, at: &mut usize) -> Vec<(usize, Option<Range<usize>>)> {
    let place = |slot| {
        let place = (!zero.contains(slot)).then(|| {
            *at += PAGE_SIZE;
            *at - PAGE_SIZE..*at
        });
        (slot, place)
    };
    changed.iter().map(place).collect()
}

/// Compares the pages of a leaf with the request; returns the encoded leaf if only it confirms their digests.
fn check_leaf(
    asked: &RequestedLeaf,
    changed: ChildSet,
    pages: &[(usize, Option<Range<usize>>)],
    buffer: &[u8],
) -> Result<Option<Vec<u8>>, WrongContent> {
    let wrong = WrongContent { digest: asked.leaf };
    let digest =
        |place: &Option<Range<usize>>| place.as_ref().map(|place| Digest::of(&buffer[place.clone()]));
    match &asked.slots {
        RequestedSlots::Given(slots, leaf) => {
            if changed != *slots {
                return Err(wrong);
            }
            for (slot, place) in pages {
                let expected = leaf.child(*slot);
                if digest(place) != expected {
                    return Err(WrongContent { digest: expected.unwrap_or(asked.leaf) });
                }
            }
            Ok(None)
        }
        RequestedSlots::Short(slots, leaf) => {
            let right = |(slot, place): &(usize, Option<Range<usize>>)| {
                digest(place).is_some_and(|digest| leaf.key(*slot) == Some(ShortDigest::from(&digest)))
            };
            (changed == *slots && pages.iter().all(right)).then_some(None).ok_or(wrong)
        }
        RequestedSlots::Differing => {
            let mut node = asked.old.clone().ok_or(wrong)?;
            for (slot, place) in pages {
                node.set(*slot, digest(place));
            }
            let bytes = node.encode().ok_or(wrong)?;
            (Digest::of(&bytes) == asked.leaf).then_some(Some(bytes)).ok_or(wrong)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local_objects::BoxError;
    use whimbrel_core::CapsuleId;
    use whimbrel_image::pack_frame::Kind;

    /// Has one node, under every digest.
    struct OneNode;

    impl LocalObjects for OneNode {
        fn has(&self, digests: &[Digest]) -> Vec<bool> {
            vec![true; digests.len()]
        }

        fn object(&self, _: &Digest) -> Option<Vec<u8>> {
            Some(vec![0; MAX_NODE])
        }

        fn digest_of(&self, _: &ShortDigest) -> Option<Digest> {
            None
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

    #[test]
    fn a_delta_of_a_node_that_is_longer_than_any_is_wrong_content() {
        let digest = Digest::of(b"node");
        let want = WantedObject { digest, similar: Some(digest) };
        let wrong = apply(&OneNode, ObjectKind::Node, &want, &[0; MAX_NODE + 65]);
        assert!(wrong.is_err_and(|wrong| wrong.digest == digest));
    }
}
