//! Capsule reader: reads objects of a capsule in a pool by their digests.
//!
//! Only the index is in memory. Pages are found by the leaf that lists them; a page whose leaf belongs to
//! another capsule (one that was made here on top of this one) is looked up in all leaves, which are read
//! once for that. The caller compares digests.

use super::capsule_file::{CapsuleFileIndex, FileRange, GROUP, NodePlace, TRAILER, Trailer, page_at};
use bytes::Bytes;
use std::{
    collections::HashMap,
    io,
    ops::Range,
    sync::{Arc, OnceLock},
};
use tokio::{sync::Semaphore, task::JoinSet};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE};
use whimbrel_image::{FAN_OUT, Node};
use whimbrel_pool::{
    chunk_map::ChunkRef,
    client::{Pool, PoolError, ReadFile},
};
use whimbrel_store::PageWant;

/// Most concurrent reads.
const READS: usize = 16;
/// Longest read of adjacent wanted pages.
const RUN: u64 = 1 << 20;

pub(super) struct PooledCapsule {
    pool: Pool,
    file: Arc<ReadFile>,
    capsule: CapsuleId,
    index: CapsuleFileIndex,
    nodes: HashMap<Digest, NodePlace>,
    blobs: HashMap<Digest, FileRange>,
    /// Offset of every page; built when a leaf is not known.
    pages: OnceLock<HashMap<Digest, u64>>,
}

type Cause = Box<dyn std::error::Error + Send + Sync>;

fn short() -> Cause {
    io::Error::from(io::ErrorKind::UnexpectedEof).into()
}

impl PooledCapsule {
    pub(super) fn open(pool: &Pool, version: u64) -> Result<Self, Cause> {
        let file = Arc::new(pool.block(pool.read(version))?);
        let size = file.size();
        let read = |at: u64, length: u64| pool.block(file.read_at(at, length as usize));
        let trailer = read(size.saturating_sub(TRAILER as u64), TRAILER as u64)?;
        let trailer = Trailer::decode(&trailer, size)?;
        let index = CapsuleFileIndex::decode(&read(trailer.at, trailer.length)?, size)?;
        let nodes = index.nodes.iter().map(|node| (node.digest, *node)).collect();
        let blobs = index.blobs.iter().map(|blob| (blob.digest, *blob)).collect();
        let (pool, capsule) = (pool.clone(), trailer.capsule);
        Ok(Self { pool, file, capsule, index, nodes, blobs, pages: OnceLock::new() })
    }

    pub(super) fn capsule(&self) -> CapsuleId {
        self.capsule
    }

    /// Start of the groups of a leaf, if it is here.
    pub(super) fn pages_at(&self, leaf: &Digest) -> Option<u64> {
        self.nodes.get(leaf)?.pages
    }

    /// The chunks of a range of the file, aligned to chunks.
    pub(super) fn chunks(&self, range: Range<u64>) -> Option<&[ChunkRef]> {
        self.file.pieces_of(range)
    }

    /// Nodes in the order of the file.
    pub(super) fn nodes(&self) -> &[NodePlace] {
        &self.index.nodes
    }

    /// Digests of all objects except nodes and pages.
    pub(super) fn blobs(&self) -> impl Iterator<Item = &Digest> {
        self.index.blobs.iter().map(|blob| &blob.digest)
    }

    /// Whether it has an object that is not a page.
    pub(super) fn has(&self, digest: &Digest) -> bool {
        self.nodes.contains_key(digest) || self.blobs.contains_key(digest)
    }

    /// Reads an object that is not a page. Blocks.
    pub(super) fn object(&self, digest: &Digest) -> Option<Result<Bytes, PoolError>> {
        let node = self.nodes.get(digest).map(|node| (node.at, u64::from(node.length)));
        let (at, length) = node.or_else(|| self.blobs.get(digest).map(|blob| (blob.at, blob.length)))?;
        Some(self.pool.block(self.file.read_at(at, length as usize)))
    }

    /// Reads the pages of the leaf in `place` whose digests are `wanted`. Blocks.
    pub(super) fn pages_of(
        &self,
        place: &NodePlace,
        leaf: &Node,
        wanted: impl Fn(&Digest) -> bool,
    ) -> Result<Vec<Bytes>, Cause> {
        let Some(base) = place.pages else { return Ok(Vec::new()) };
        let slots: Vec<usize> =
            leaf.children().filter(|(_, digest)| wanted(digest)).map(|(slot, _)| slot).collect();
        let offsets = slots.iter().filter_map(|slot| page_at(leaf, *slot)).map(|at| base + at).collect();
        self.read_pages(offsets)
    }

    /// Reads the wanted pages that are here, in order; `leaf` looks up nodes on this host. Without
    /// `thorough`, pages of leaves of other capsules are not searched. Blocks.
    pub(super) fn pages(
        &self,
        wants: &[PageWant],
        thorough: bool,
        leaf: impl Fn(&Digest) -> Option<Node>,
    ) -> Result<Vec<Option<Bytes>>, Cause> {
        let mut places = Vec::new();
        for want in wants {
            places.extend(self.places(want, thorough, &leaf)?);
        }
        let mut read = self.read_pages(places.iter().flatten().copied().collect())?.into_iter();
        Ok(places.into_iter().map(|place| place.and_then(|_| read.next())).collect())
    }

    /// Offset of each wanted page, if it is here.
    fn places(
        &self,
        want: &PageWant,
        thorough: bool,
        leaf: impl Fn(&Digest) -> Option<Node>,
    ) -> Result<Vec<Option<u64>>, Cause> {
        if let Some(NodePlace { pages: Some(base), .. }) = self.nodes.get(&want.leaf) {
            let node = match leaf(&want.leaf) {
                Some(node) => node,
                None => self.leaf(&want.leaf)?,
            };
            let slots = (0..FAN_OUT).filter(|slot| want.slots[slot / 64] >> (slot % 64) & 1 == 1);
            return Ok(slots.map(|slot| page_at(&node, slot).map(|at| base + at)).collect());
        }
        if !thorough {
            return Ok(vec![None; want.digests.len()]);
        }
        let all = match self.pages.get() {
            Some(all) => all,
            None => {
                let all = self.all_pages()?;
                self.pages.get_or_init(|| all)
            }
        };
        Ok(want.digests.iter().map(|digest| all.get(digest).copied()).collect())
    }

    fn leaf(&self, digest: &Digest) -> Result<Node, Cause> {
        let bytes = self.object(digest).ok_or_else(short)??;
        Ok(Node::decode(&bytes)?)
    }

    fn all_pages(&self) -> Result<HashMap<Digest, u64>, Cause> {
        let mut all = HashMap::new();
        for (place, base) in self.index.nodes.iter().filter_map(|place| Some((place, place.pages?))) {
            let leaf = self.leaf(&place.digest)?;
            let at = |slot: usize| page_at(&leaf, slot).map(|at| base + at);
            all.extend(leaf.children().filter_map(|(slot, digest)| Some((digest, at(slot)?))));
        }
        Ok(all)
    }

    /// Reads the pages at these offsets: adjacent ones in one read, several reads at a time.
    fn read_pages(&self, offsets: Vec<u64>) -> Result<Vec<Bytes>, Cause> {
        let page = PAGE_SIZE as u64;
        let mut order: Vec<usize> = (0..offsets.len()).collect();
        order.sort_unstable_by_key(|at| offsets[*at]);
        // A page that is wanted twice is in one run with itself.
        let next = |a: &usize, b: &usize| offsets[*b] <= offsets[*a] + page;
        let runs = order.chunk_by(next).flat_map(|run| run.chunks((RUN / page) as usize));
        let runs: Vec<Vec<usize>> = runs.map(<[usize]>::to_vec).collect();
        self.pool.block(async {
            let (mut reads, room) = (JoinSet::new(), Arc::new(Semaphore::new(READS)));
            for run in runs {
                let (first, last) = (offsets[run[0]], offsets[run[run.len() - 1]]);
                let (file, room) = (self.file.clone(), room.clone());
                reads.spawn(async move {
                    let _turn = room.acquire().await;
                    let bytes = file.read_at(first, (last - first + page) as usize).await;
                    bytes.map(|bytes| (run, first, bytes))
                });
            }
            let mut out = vec![Bytes::new(); offsets.len()];
            while let Some(read) = reads.join_next().await {
                let (run, first, bytes) = read??;
                for at in run {
                    let from = (offsets[at] - first) as usize;
                    out[at] = bytes
                        .get(from..from + PAGE_SIZE)
                        .map(|_| bytes.slice(from..from + PAGE_SIZE))
                        .ok_or_else(short)?;
                }
            }
            Ok(out)
        })
    }
}

/// Pages to fetch when one is wanted: those of its chunk are read anyway.
pub(super) const CLUSTER: u64 = GROUP as u64;
