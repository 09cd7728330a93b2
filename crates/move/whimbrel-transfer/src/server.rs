//! Server of a transfer: answers the requests of other hosts from a store. Keeps no state between two calls.
//!
//! [`Access`] decides about every ref, manifest, node and blob; pages are served by their leaf, so they need
//! no decision of their own. An older version that a reply is coded against needs one too. Only objects of
//! this store are served: a server never asks a third host. Every reply is bounded, and calls block.
//!
//! `Absent` means for good: the object is not here, or damaged. An object that cannot be read at the moment
//! is a retryable refusal, or is left out of a reply that has others, since the peer may give up on what is
//! absent.

use crate::{
    CompressionLevel,
    compression::{CompressionError, compress},
    node_delta,
    protocol::*,
    short_leaf::ShortLeaf,
};
use bytes::Bytes;
use whimbrel_core::{CapsuleId, Digest, RefName, glob};
use whimbrel_image::{MAX_MANIFEST, Manifest, Node};
use whimbrel_store::{Store, StoreError};
use whimbrel_wire::{Answer, Call, Code, Refusal, Reply, Request};

/// Permissions of the peer of a call.
pub trait Access {
    /// Whether the peer may read the manifest of a capsule.
    fn allowed(&self, capsule: &CapsuleId) -> bool;

    /// Whether the peer may have the node or blob of this digest: a capsule that it may read leads to it.
    fn may_have(&self, digest: &Digest) -> bool;

    /// Whether the peer may see a ref.
    fn may_list(&self, name: &RefName, capsule: &CapsuleId) -> bool {
        let _ = name;
        self.allowed(capsule)
    }
}

impl<F: Fn(&CapsuleId) -> bool> Access for F {
    fn allowed(&self, capsule: &CapsuleId) -> bool {
        self(capsule)
    }

    fn may_have(&self, digest: &Digest) -> bool {
        self(&CapsuleId(*digest))
    }
}

/// Server of one store.
#[derive(Debug, Clone)]
pub struct Server {
    pub(crate) store: Store,
}

impl Server {
    /// Creates a server of `store`.
    pub fn new(store: Store) -> Self {
        Self { store }
    }

    /// Answers a request of the store's range. The caller answers [`RemotePull`], [`RemotePullStatus`] and
    /// [`Retain`].
    pub fn answer(&self, access: &dyn Access, request: &Request) -> Answer {
        match request.kind {
            ListRefs::KIND => self.list_refs(access, request.decode::<ListRefs>()?),
            HasObjects::KIND => self.has_objects(access, &request.payload),
            Objects::KIND => self.objects(access, &request.decode::<Objects>()?),
            BlobRange::KIND => self.blob_range(access, &request.decode::<BlobRange>()?),
            LeafPages::KIND => self.pages(access, request.decode::<LeafPages>()?),
            kind => Err(Refusal::unknown_kind(kind)),
        }
    }

    fn list_refs(&self, access: &dyn Access, page: ListRefsRequest) -> Answer {
        if page.pattern.len() > PATTERN_MAX {
            return Err(bad_request("the ref pattern is too long"));
        }
        let (refs, _) = self.store.readable_refs().map_err(|error| internal_error(&error))?;
        let behind = |name: &RefName| page.after.as_ref().is_none_or(|after| name > after);
        let mut listed = Vec::new();
        for (name, capsule) in refs {
            let fits = behind(&name) && glob::matches(page.pattern.as_bytes(), name.as_str().as_bytes());
            if !fits || !access.may_list(&name, &capsule) {
                continue;
            }
            if listed.len() == REFS_MAX {
                return Reply::of::<ListRefs>(&ListRefsReply { refs: listed, more: true }, Bytes::new());
            }
            listed.extend(self.ref_entry(name, capsule));
        }
        Reply::of::<ListRefs>(&ListRefsReply { refs: listed, more: false }, Bytes::new())
    }

    fn ref_entry(&self, name: RefName, capsule: CapsuleId) -> Option<RefEntry> {
        let manifest = self.store.manifest(&capsule).ok()?;
        let bytes = |memory: bool| {
            let images = manifest.images.iter().filter(|image| (image.name == "memory") == memory);
            images.fold(0, |sum, image| image.size().saturating_add(sum))
        };
        let whole = self.store.is_partial(&capsule).is_ok_and(|partial| !partial);
        Some(RefEntry { name, capsule, time: manifest.time, memory: bytes(true), disks: bytes(false), whole })
    }

    fn has_objects(&self, access: &dyn Access, digests: &[u8]) -> Answer {
        let (digests, rest) = digests.as_chunks::<32>();
        if digests.len() > DIGESTS_MAX || !rest.is_empty() {
            return Err(bad_request("not a list of digests, or too many digests"));
        }
        let digests: Vec<Digest> = digests.iter().map(|bytes| Digest(*bytes)).collect();
        let mut bitmap = vec![0u8; digests.len().div_ceil(8)];
        for (i, there) in self.store.has(&digests).into_iter().enumerate() {
            let may = || access.may_have(&digests[i]) || access.allowed(&CapsuleId(digests[i]));
            bitmap[i / 8] |= u8::from(there && may()) << (i % 8);
        }
        Reply::of::<HasObjects>(&(), bitmap.into())
    }

    fn objects(&self, access: &dyn Access, ask: &ObjectsRequest) -> Answer {
        if ask.wants.len() > WANTS_MAX {
            return Err(bad_request("too many objects requested"));
        }
        let (mut objects, mut raw) = (Vec::new(), Vec::new());
        // Nodes hardly compress: their raw size is about the size of the reply.
        let room = (ask.max_bytes.min(ANSWER_BYTES) as usize).max(1);
        for want in &ask.wants {
            if !objects.is_empty() && raw.len() >= room {
                break;
            }
            let (answer, bytes) = match self.object(access, ask.kind, want, room) {
                Err(_) if !objects.is_empty() => break,
                read => read?,
            };
            if !objects.is_empty() && raw.len() + bytes.len() > RAW_MAX {
                break;
            }
            raw.extend(bytes);
            objects.push(answer);
        }
        let payload =
            if raw.is_empty() { Vec::new() } else { compress(&raw, &[], ask.level.into()).map_err(codec)? };
        Reply::of::<Objects>(&ObjectsReply { objects }, payload.into())
    }

    fn object(
        &self,
        access: &dyn Access,
        kind: ObjectKind,
        want: &WantedObject,
        room: usize,
    ) -> Result<(ObjectAnswer, Vec<u8>), Refusal> {
        let absent = (ObjectAnswer::Absent, Vec::new());
        let Some(bytes) = self.readable(access, kind, &want.digest)? else { return Ok(absent) };
        let delta = match kind {
            ObjectKind::Node => self.node_delta(access, want, &bytes),
            ObjectKind::ShortLeaf => {
                let leaf = Node::decode(&bytes).ok().filter(|node| node.level() == 0 && !node.is_empty());
                let Some(leaf) = leaf else { return Ok(absent) };
                let short = ShortLeaf::of(&leaf).encode();
                return Ok((ObjectAnswer::Whole(short.len() as u32), short));
            }
            ObjectKind::Blob => self.blob_delta(access, want, &bytes),
            ObjectKind::Manifest => None,
        };
        Ok(match delta {
            Some(delta) => (ObjectAnswer::Delta(delta.len() as u32), delta),
            // A long blob is sent in ranges, so that nothing waits behind it.
            None if kind == ObjectKind::Blob && bytes.len() > RAW_MAX.min(room.saturating_mul(4)) => {
                (ObjectAnswer::Long(bytes.len() as u64), Vec::new())
            }
            None => (ObjectAnswer::Whole(bytes.len() as u32), bytes),
        })
    }

    /// Reads an object; none if it is not here or damaged.
    pub(crate) fn read(&self, digest: &Digest) -> Result<Option<Vec<u8>>, Refusal> {
        match self.store.blob(digest) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error @ (StoreError::Damaged { .. } | StoreError::MissingBase { .. })) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "a peer was told that a damaged object is absent"
                );
                Ok(None)
            }
            Err(error) => Err(internal_error(&error)),
        }
    }

    /// Reads the object, if it is here, of this kind, and permitted to the requester.
    fn readable(
        &self,
        access: &dyn Access,
        kind: ObjectKind,
        digest: &Digest,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        let may = match kind {
            ObjectKind::Manifest => access.allowed(&CapsuleId(*digest)),
            ObjectKind::Node | ObjectKind::ShortLeaf | ObjectKind::Blob => access.may_have(digest),
        };
        if !may {
            return Ok(None);
        }
        let Some(bytes) = self.read(digest)? else { return Ok(None) };
        let is_manifest = || bytes.len() <= MAX_MANIFEST && Manifest::decode(&bytes).is_ok();
        let fits = match kind {
            ObjectKind::Manifest => is_manifest(),
            ObjectKind::Node | ObjectKind::ShortLeaf => Node::decode(&bytes).is_ok(),
            // A manifest must not be readable as a blob.
            ObjectKind::Blob => !is_manifest() || access.allowed(&CapsuleId(*digest)),
        };
        Ok(fits.then_some(bytes))
    }

    fn node_delta(&self, access: &dyn Access, want: &WantedObject, bytes: &[u8]) -> Option<Vec<u8>> {
        let old = Node::decode(&self.readable(access, ObjectKind::Node, &want.similar?).ok()??).ok()?;
        let new = Node::decode(bytes).ok()?;
        let delta = (old.level() == new.level()).then(|| node_delta::encode(&old, &new));
        delta.filter(|delta| delta.len() < bytes.len())
    }

    /// Blob delta: the length, then a zstd frame against a similar blob.
    fn blob_delta(&self, access: &dyn Access, want: &WantedObject, bytes: &[u8]) -> Option<Vec<u8>> {
        let old = self.readable(access, ObjectKind::Blob, &want.similar?).ok()??;
        if old.len().max(bytes.len()) > SIMILAR_BLOB_MAX || bytes.is_empty() || old.is_empty() {
            return None;
        }
        let mut delta = (bytes.len() as u32).to_le_bytes().to_vec();
        delta.extend(compress(bytes, &old, BLOB_DELTA_LEVEL).ok()?);
        (delta.len() < bytes.len() / 2).then_some(delta)
    }

    fn blob_range(&self, access: &dyn Access, ask: &BlobRangeRequest) -> Answer {
        if ask.len as usize > RAW_MAX {
            return Err(bad_request("the blob range is too long"));
        }
        let none = || Refusal::new(Code::NOT_FOUND, "no such blob");
        let blob = self.readable(access, ObjectKind::Blob, &ask.digest)?.ok_or_else(none)?;
        let total = blob.len() as u64;
        let start = ask.offset.min(total) as usize;
        let piece = &blob[start..(start + ask.len as usize).min(blob.len())];
        let mut packed = compress(piece, &[], ask.level.into()).map_err(codec)?;
        if packed.len() > whimbrel_wire::MAX_PAYLOAD as usize {
            // 8 MiB of incompressible data make a slightly longer frame: send half of them.
            let half = BlobRangeRequest { len: ask.len / 2, ..ask.clone() };
            return self.blob_range(access, &half);
        }
        packed.shrink_to_fit();
        Reply::of::<BlobRange>(&BlobRangeReply { total, len: piece.len() as u32 }, packed.into())
    }
}

/// Level of blob deltas: device states are small, and the downtime includes every byte of them.
const BLOB_DELTA_LEVEL: CompressionLevel = CompressionLevel::Zstd(9);

pub(crate) fn bad_request(text: &str) -> Refusal {
    Refusal::new(Code::BAD_HEADER, text)
}

pub(crate) fn codec(error: CompressionError) -> Refusal {
    Refusal::new(Code::INTERNAL, error.to_string())
}

fn internal_error(error: &StoreError) -> Refusal {
    Refusal::new(Code::INTERNAL, error.to_string()).retryable()
}
