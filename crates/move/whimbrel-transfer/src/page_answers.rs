//! Page answers: the pages of each requested leaf, coded against older ones, in frames of a size that suits
//! the link.
//!
//! Leaves are answered in the requested order until the reply is full; the rest is left out and requested
//! again.

use crate::{
    BASES_MAX, ChildSet, CompressionLevel, base_images, local_objects, node_delta,
    page_frame::encode_pages,
    protocol::*,
    server::{Access, Server, bad_request, codec},
    similar_pages::SimilarPages,
};
use std::collections::HashSet;
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_image::Node;
use whimbrel_wire::{Answer, Code, Refusal, Reply};

/// Bytes that a page probably takes: as a difference, and without an older version.
const DELTA_PAGE_BYTES: usize = 300;
const PLAIN_PAGE_BYTES: usize = 1500;
/// Fewest pages in a frame that is not the last.
const FRAME_PAGES_MIN: usize = 16;

pub(crate) struct LeafWant {
    /// None for a leaf that is not here, or not for this peer.
    leaf: Option<Digest>,
    similar: Option<Digest>,
    slots: WantedSlots,
}

struct LeafPart {
    answer: LeafAnswer,
    pages: Vec<u8>,
    older: Vec<u8>,
    older_digests: Vec<Digest>,
    differing: bool,
}

impl LeafPart {
    fn without_pages(answer: LeafAnswer) -> Self {
        Self { answer, pages: Vec::new(), older: Vec::new(), older_digests: Vec::new(), differing: false }
    }
}

struct Builder<'a> {
    answer: LeafPagesReply,
    similar: SimilarPages<'a>,
    payload: Vec<u8>,
    pages: usize,
    level: CompressionLevel,
    capacity: usize,
}

impl Server {
    pub(crate) fn pages(&self, access: &dyn Access, mut ask: LeafPagesRequest) -> Answer {
        if ask.wants.len() > WANTS_MAX || ask.bases.len() > BASES_MAX {
            return Err(bad_request("too many leaves or base images requested"));
        }
        let wants = self.expand(access, &ask.wants)?;
        ask.bases.retain(|base| access.may_have(&base.root));
        let room = ask.max_bytes.clamp(1, ANSWER_BYTES) as usize;
        let answer = LeafPagesReply { leaves: Vec::new(), frames: Vec::new() };
        let similar = SimilarPages::new(&self.store, &ask.bases);
        let level = ask.level.into();
        let mut builder = Builder { answer, similar, payload: Vec::new(), pages: 0, level, capacity: room };
        let mut wants = wants.iter();
        while builder.has_room() && !wants.as_slice().is_empty() {
            let parts = match self.parts(&mut wants, room) {
                Err(_) if !builder.answer.leaves.is_empty() => break,
                read => read?,
            };
            if !builder.add(parts).map_err(codec)? {
                break;
            }
        }
        Reply::of::<LeafPages>(&builder.answer, builder.payload.into())
    }

    /// Leaves of all requests, as many as a reply can have.
    fn expand(&self, access: &dyn Access, wants: &[WantedLeafPages]) -> Result<Vec<LeafWant>, Refusal> {
        let mut leaves = Vec::new();
        let may = |digest: &Digest| access.may_have(digest);
        for want in wants {
            match want {
                WantedLeafPages::Leaf { leaf, similar, slots } => {
                    let similar = similar.filter(may);
                    leaves.push(LeafWant { leaf: may(leaf).then_some(*leaf), similar, slots: *slots });
                }
                WantedLeafPages::Children { node, similar, children } => {
                    let level_one = |digest| may(digest).then(|| self.level_one(digest)).flatten();
                    let found = (level_one(node), level_one(similar));
                    // Not there: the requester gets a result for each leaf and requests them in another way.
                    let (Some(new), Some(old)) = found else {
                        let absent = || LeafWant { leaf: None, similar: None, slots: WantedSlots::Differing };
                        leaves.extend(children.iter().map(|_| absent()));
                        continue;
                    };
                    for slot in children.iter() {
                        let pair = new.child(slot).zip(old.child(slot));
                        let (leaf, similar) =
                            pair.ok_or_else(|| bad_request("one of the nodes lacks a requested leaf"))?;
                        let slots = WantedSlots::Differing;
                        leaves.push(LeafWant { leaf: Some(leaf), similar: Some(similar), slots });
                    }
                }
            }
            if leaves.len() >= LEAVES_MAX {
                break;
            }
        }
        leaves.truncate(LEAVES_MAX);
        Ok(leaves)
    }

    fn level_one(&self, digest: &Digest) -> Option<Node> {
        local_objects::node(&self.store, digest).filter(|node| node.level() == 1)
    }

    /// Next leaves, as many as make a frame.
    fn parts(
        &self,
        wants: &mut std::slice::Iter<'_, LeafWant>,
        room: usize,
    ) -> Result<Vec<LeafPart>, Refusal> {
        let (mut parts, mut bytes, mut pages) = (Vec::new(), 0, 0);
        while let Some(want) = wants.as_slice().first() {
            let part = match self.part(want) {
                // The next frame begins with what cannot be read, and ends the reply.
                Err(_) if !parts.is_empty() => break,
                read => read?,
            };
            wants.next();
            let each = if part.older.is_empty() { PLAIN_PAGE_BYTES } else { DELTA_PAGE_BYTES };
            let count = part.pages.len() / PAGE_SIZE;
            (bytes, pages) = (bytes + count * each, pages + count);
            parts.push(part);
            if pages >= FRAME_PAGES - 256 || (bytes >= room && pages >= FRAME_PAGES_MIN) {
                break;
            }
        }
        Ok(parts)
    }

    fn part(&self, want: &LeafWant) -> Result<LeafPart, Refusal> {
        let leaf =
            |digest: &Digest| local_objects::node(&self.store, digest).filter(|node| node.level() == 0);
        let old = want.similar.as_ref().and_then(leaf);
        let changed = match (want.slots, &old) {
            (WantedSlots::Differing, None) => return Ok(LeafPart::without_pages(LeafAnswer::NoSimilar)),
            _ => match &want.leaf {
                Some(leaf) => self.read(leaf)?.and_then(|bytes| Node::decode(&bytes).ok()),
                None => None,
            },
        };
        let absent = || Ok(LeafPart::without_pages(LeafAnswer::Absent));
        let Some(new) = changed.filter(|node| node.level() == 0) else { return absent() };
        let changed = match (want.slots, &old) {
            (WantedSlots::These(slots), _) => slots,
            (WantedSlots::Differing, old) => {
                old.as_ref().map_or(ChildSet::NONE, |old| node_delta::changed(old, &new))
            }
        };
        let zero: ChildSet = changed.iter().filter(|slot| new.child(*slot).is_none()).collect();
        let digests = changed.without(&zero).iter().filter_map(|slot| new.child(slot));
        let Some(pages) = self.read_pages(digests)? else { return absent() };
        let places: Vec<Digest> = old.iter().flat_map(|old| older_pages(old, changed, zero)).collect();
        let older = old.and_then(|_| self.read_pages(places.iter().copied()).ok()?);
        let answer = LeafAnswer::Sent { changed, zero, delta: older.is_some() };
        let differing = want.slots == WantedSlots::Differing;
        Ok(LeafPart { answer, pages, older: older.unwrap_or_default(), older_digests: places, differing })
    }

    fn read_pages(&self, digests: impl Iterator<Item = Digest>) -> Result<Option<Vec<u8>>, Refusal> {
        let mut pages = Vec::new();
        for digest in digests {
            match self.read(&digest)?.filter(|page| page.len() == PAGE_SIZE) {
                Some(page) => pages.extend(page),
                None => return Ok(None),
            }
        }
        Ok(Some(pages))
    }
}

/// Older pages that a leaf's pages are coded against, in the order in which both sides join them.
pub(crate) fn older_pages(old: &Node, changed: ChildSet, zero: ChildSet) -> impl Iterator<Item = Digest> {
    changed.without(&zero).iter().filter_map(|slot| old.child(slot))
}

impl Builder<'_> {
    fn has_room(&self) -> bool {
        self.payload.len() < self.capacity
            && self.pages < ANSWER_PAGES
            && self.answer.frames.len() < LEAVES_MAX
    }

    /// Adds a frame of `parts`, or of the first of them if all are too much. False when the reply is full.
    fn add(&mut self, mut parts: Vec<LeafPart>) -> Result<bool, crate::CompressionError> {
        let all = parts.len();
        loop {
            let pages = parts.iter().flat_map(|part| &part.pages).copied().collect::<Vec<u8>>();
            let (numbers, older) = self.older(&parts, &pages);
            let frame = match pages.is_empty() {
                true => Vec::new(),
                false => encode_pages(&pages, &older, self.level)?,
            };
            let limit = whimbrel_wire::MAX_PAYLOAD as usize;
            let over = self.payload.len() + numbers.len() + frame.len() > (self.capacity * 2).min(limit);
            if over && parts.len() > 1 {
                parts.truncate(parts.len() / 2);
                continue;
            }
            if over && !self.answer.leaves.is_empty() {
                return Ok(false);
            }
            if over && parts[0].differing {
                parts = vec![LeafPart::without_pages(LeafAnswer::Large)];
                continue;
            }
            self.pages += pages.len() / PAGE_SIZE;
            self.answer.frames.push(LeafPagesFrame {
                leaves: parts.len() as u16,
                bases: numbers.len() as u32,
                bytes: frame.len() as u32,
            });
            self.answer.leaves.extend(parts.iter().map(|part| part.answer));
            self.payload.extend(numbers);
            self.payload.extend(frame);
            return Ok(parts.len() == all);
        }
    }
}

impl Builder<'_> {
    /// Prefix of the pages of a frame: similar pages of base images and their numbers, then the older
    /// versions.
    fn older(&mut self, parts: &[LeafPart], pages: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let places: HashSet<Digest> = parts.iter().flat_map(|part| &part.older_digests).copied().collect();
        let (numbers, mut older) = self.similar.choose(pages.as_chunks().0, places);
        parts.iter().for_each(|part| older.extend_from_slice(&part.older));
        (base_images::encode(&numbers), older)
    }
}

impl LeafPagesReply {
    /// Refuses a reply that does not match a request for `asked` leaves.
    pub fn check(&self, asked: usize, payload: usize) -> Result<(), Refusal> {
        let leaves: usize = self.frames.iter().map(|frame| usize::from(frame.leaves)).sum();
        let bytes: u64 =
            self.frames.iter().map(|frame| u64::from(frame.bases) + u64::from(frame.bytes)).sum();
        let zeros = |leaf: &LeafAnswer| match leaf {
            LeafAnswer::Sent { changed, zero, .. } => zero.is_within(changed),
            _ => true,
        };
        let fits = leaves == self.leaves.len() && bytes == payload as u64 && self.leaves.iter().all(zeros);
        // Pages can be counted once no leaf has more zero pages than changed ones.
        let full = || {
            self.frames.iter().all(|frame| frame.leaves > 0)
                && self.pages_by_frame().all(|p| p <= FRAME_PAGES)
        };
        let some = asked == 0 || (!self.leaves.is_empty() && self.leaves.len() <= asked);
        match fits && full() && some {
            true => Ok(()),
            false => Err(Refusal::new(Code::BAD_HEADER, "the reply does not match its request")),
        }
    }

    fn pages_by_frame(&self) -> impl Iterator<Item = usize> {
        let mut leaves = self.leaves.iter();
        self.frames
            .iter()
            .map(move |frame| leaves.by_ref().take(usize::from(frame.leaves)).map(LeafAnswer::pages).sum())
    }
}

impl LeafAnswer {
    /// Number of its pages in the payload.
    pub fn pages(&self) -> usize {
        match self {
            Self::Sent { changed, zero, .. } => changed.len() - zero.len(),
            _ => 0,
        }
    }
}
