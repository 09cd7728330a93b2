//! Capsule writer: writes a capsule of this host as a version of a file in a pool.
//!
//! Pages are written leaf by leaf, each distinct leaf once, then nodes, blobs, the index. Groups that a
//! previous version of the file has are reused without reading them (`previous_version`); the pool
//! deduplicates chunks of the others. So a later version of a machine costs only its changes. The file
//! appears when all of it is safe, or not at all.

use super::{
    capsule_file::{CHUNK, CapsuleFileIndex, FileRange, GROUP, NodePlace, Trailer, groups},
    previous_version::PreviousVersion,
};
use std::{collections::HashSet, ops::ControlFlow, sync::Arc};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE, PageRun};
use whimbrel_image::{
    ImageRef, Manifest, Node,
    tree::{Nodes, Visit, walk},
};
use whimbrel_pool::{chunk_map::ChunkRef, client::WriteFile};
use whimbrel_store::{Store, StoreError};

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Reasons why a capsule was not written.
#[derive(Debug, thiserror::Error)]
pub(super) enum CapsuleWriteError {
    /// The capsule cannot be read here.
    #[error("cannot read the capsule")]
    Store(#[from] StoreError),
    /// The pool refused or failed.
    #[error("the pool cannot store the capsule")]
    Pool(#[source] Cause),
    #[error("cancelled")]
    Cancelled,
}

struct Local<'a>(&'a Store);

impl Nodes for Local<'_> {
    type Error = StoreError;

    fn node(&self, digest: &Digest) -> Result<Arc<Node>, StoreError> {
        Ok(Arc::new(Node::decode(&self.0.blob(digest)?)?))
    }
}

struct FileWriter<'a> {
    store: &'a Store,
    file: &'a WriteFile,
    previous: Option<&'a PreviousVersion<'a>>,
    position: u64,
    index: CapsuleFileIndex,
    pages: u64,
}

/// A node, and the place of its first occurrence.
struct NodeVisit<'a> {
    digest: Digest,
    level: u8,
    image: &'a ImageRef,
    page: u64,
}

/// Writes a complete capsule. The caller commits the file. Returns how many pages were not in the `older`
/// version.
pub(super) fn write(
    store: &Store,
    capsule: &CapsuleId,
    file: &WriteFile,
    older: Option<&PreviousVersion<'_>>,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<u64, CapsuleWriteError> {
    let manifest = store.manifest(capsule)?;
    let nodes = nodes_of(store, &manifest)?;
    let mut sender = FileWriter {
        store,
        file,
        previous: older,
        position: 0,
        index: CapsuleFileIndex::default(),
        pages: 0,
    };
    for met in &nodes {
        let pages = match met.level {
            0 => Some(sender.leaf(met)?),
            _ => None,
        };
        sender.index.nodes.push(NodePlace { digest: met.digest, at: 0, length: 0, pages });
        if progress(sender.position).is_break() {
            return Err(CapsuleWriteError::Cancelled);
        }
    }
    for (at, met) in nodes.iter().enumerate() {
        let bytes = store.blob(&met.digest)?;
        (sender.index.nodes[at].at, sender.index.nodes[at].length) = (sender.position, bytes.len() as u32);
        sender.put(&bytes)?;
    }
    for digest in manifest.blobs().chain([capsule.0]) {
        // Aligned to a chunk: kernels and initial RAM disks are equal in every version.
        sender.align()?;
        let bytes = store.blob(&digest)?;
        sender.index.blobs.push(FileRange { digest, at: sender.position, length: bytes.len() as u64 });
        sender.put(&bytes)?;
    }
    let index = sender.index.encode().map_err(|error| CapsuleWriteError::Pool(error.into()))?;
    let trailer = Trailer { capsule: *capsule, at: sender.position, length: index.len() as u64 };
    sender.put(&index)?;
    sender.put(&trailer.encode())?;
    Ok(sender.pages)
}

/// All nodes of a capsule, each once, in the order of its images.
fn nodes_of<'a>(store: &Store, manifest: &'a Manifest) -> Result<Vec<NodeVisit<'a>>, StoreError> {
    let (mut nodes, mut seen) = (Vec::new(), HashSet::new());
    for image in &manifest.images {
        walk(&Local(store), image.root, image.pages, &mut |visit| match visit {
            Visit::Node { digest, level, page } => {
                let new = seen.insert(digest);
                nodes.extend(new.then_some(NodeVisit { digest, level, image, page }));
                Ok(new && level > 0)
            }
            Visit::Page { .. } => Ok(false),
        })?;
    }
    Ok(nodes)
}

impl FileWriter<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), CapsuleWriteError> {
        self.file.write_at(self.position, bytes).map_err(|error| CapsuleWriteError::Pool(error.into()))?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    fn align(&mut self) -> Result<(), CapsuleWriteError> {
        let over = (self.position % CHUNK as u64) as usize;
        if over > 0 { self.put(&vec![0; CHUNK - over]) } else { Ok(()) }
    }

    /// Writes the groups of a leaf. Returns where they start.
    fn leaf(&mut self, met: &NodeVisit<'_>) -> Result<u64, CapsuleWriteError> {
        let leaf = Local(self.store).node(&met.digest)?;
        let begin = self.position;
        let all: Vec<usize> = groups(&leaf).collect();
        let known = match self.previous {
            Some(older) => older.groups(&met.image.name, met.page, &met.digest, &leaf),
            None => vec![None; all.len()],
        };
        let all: Vec<(usize, Option<Vec<ChunkRef>>)> = all.into_iter().zip(known).collect();
        // Adjacent groups of the image that are both known, or both not.
        let together = |a: &(usize, Option<_>), b: &(usize, Option<_>)| {
            a.1.is_some() == b.1.is_some() && (a.1.is_some() || a.0 + 1 == b.0)
        };
        for run in all.chunk_by(together) {
            match run[0].1 {
                Some(_) => self.take_over(run)?,
                None => self.read(met, &leaf, run[0].0, run.len())?,
            }
        }
        Ok(begin)
    }

    /// Reuses groups that the older version has.
    fn take_over(&mut self, run: &[(usize, Option<Vec<ChunkRef>>)]) -> Result<(), CapsuleWriteError> {
        let pieces: Vec<ChunkRef> =
            run.iter().filter_map(|(_, pieces)| pieces.as_ref()).flatten().copied().collect();
        self.file.append_known(&pieces).map_err(|error| CapsuleWriteError::Pool(error.into()))?;
        self.position += (run.len() * CHUNK) as u64;
        Ok(())
    }

    /// Reads adjacent groups from the store and writes them.
    fn read(
        &mut self,
        met: &NodeVisit<'_>,
        leaf: &Node,
        group: usize,
        count: usize,
    ) -> Result<(), CapsuleWriteError> {
        let slots = group * GROUP..(group + count) * GROUP;
        let first = met.page + slots.start as u64;
        let length = met.image.pages.saturating_sub(first).min(slots.len() as u64);
        let mut bytes = vec![0; count * CHUNK];
        let image = self.store.image(met.image.root, met.image.pages);
        image.read(PageRun::new(first, length), &mut bytes[..length as usize * PAGE_SIZE])?;
        self.pages += slots.filter(|slot| leaf.child(*slot).is_some()).count() as u64;
        self.put(&bytes)
    }
}
