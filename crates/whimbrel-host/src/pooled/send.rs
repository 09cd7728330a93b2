//! A capsule of this host becomes a version of a file in a pool.
//!
//! Pages go leaf by leaf, a leaf that occurs twice once, then nodes, blobs, the index. The pool keeps chunks that it has, so a later
//! version of a machine costs what changed. The file appears whole when all of it is safe, or not at all.

use super::layout::{CHUNK, GROUP, Index, NodePlace, Place, Trailer, groups};
use std::{collections::HashSet, ops::ControlFlow, sync::Arc};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE};
use whimbrel_image::{
    Manifest, Node,
    tree::{Nodes, Visit, walk},
};
use whimbrel_pool::client::WriteFile;
use whimbrel_store::{Store, StoreError};

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why a capsule was not written.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    /// It cannot be read here.
    #[error("cannot read the capsule")]
    Store(#[from] StoreError),
    /// The pool does not take it.
    #[error("the pool does not take it")]
    Pool(#[source] Cause),
    /// The user did not want it any more.
    #[error("cancelled")]
    Cancelled,
}

struct Here<'a>(&'a Store);

impl Nodes for Here<'_> {
    type Error = StoreError;

    fn node(&self, digest: &Digest) -> Result<Arc<Node>, StoreError> {
        Ok(Arc::new(Node::decode(&self.0.blob(digest)?)?))
    }
}

struct Sender<'a> {
    store: &'a Store,
    file: &'a WriteFile,
    /// Bytes written.
    at: u64,
    index: Index,
    pages: u64,
}

/// Writes a capsule that is whole here. The caller commits the file. Returns its pages.
pub(super) fn write(
    store: &Store,
    capsule: &CapsuleId,
    file: &WriteFile,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<u64, SendError> {
    let manifest = store.manifest(capsule)?;
    let nodes = nodes_of(store, &manifest)?;
    let mut sender = Sender { store, file, at: 0, index: Index::default(), pages: 0 };
    for (digest, level) in &nodes {
        let pages = match level {
            0 => Some(sender.leaf(digest)?),
            _ => None,
        };
        sender.index.nodes.push(NodePlace { digest: *digest, at: 0, length: 0, pages });
        if progress(sender.at).is_break() {
            return Err(SendError::Cancelled);
        }
    }
    for (at, (digest, _)) in nodes.iter().enumerate() {
        let bytes = store.blob(digest)?;
        (sender.index.nodes[at].at, sender.index.nodes[at].length) = (sender.at, bytes.len() as u32);
        sender.put(&bytes)?;
    }
    for digest in manifest.blobs().chain([capsule.0]) {
        // From the begin of a chunk: kernels and initial RAM disks are the same in every version.
        sender.align()?;
        let bytes = store.blob(&digest)?;
        sender.index.blobs.push(Place { digest, at: sender.at, length: bytes.len() as u64 });
        sender.put(&bytes)?;
    }
    let index = sender.index.encode().map_err(|error| SendError::Pool(error.into()))?;
    let trailer = Trailer { capsule: *capsule, at: sender.at, length: index.len() as u64 };
    sender.put(&index)?;
    sender.put(&trailer.encode())?;
    Ok(sender.pages)
}

/// All nodes of a capsule, each once, in the order of its images.
fn nodes_of(store: &Store, manifest: &Manifest) -> Result<Vec<(Digest, u8)>, StoreError> {
    let (mut nodes, mut seen) = (Vec::new(), HashSet::new());
    for image in &manifest.images {
        walk(&Here(store), image.root, image.pages, &mut |visit| match visit {
            Visit::Node { digest, level, .. } => {
                let new = seen.insert(digest);
                nodes.extend(new.then_some((digest, level)));
                Ok(new && level > 0)
            }
            Visit::Page { .. } => Ok(false),
        })?;
    }
    Ok(nodes)
}

impl Sender<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), SendError> {
        self.file.write_at(self.at, bytes).map_err(|error| SendError::Pool(error.into()))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn align(&mut self) -> Result<(), SendError> {
        let over = (self.at % CHUNK as u64) as usize;
        if over > 0 { self.put(&vec![0; CHUNK - over]) } else { Ok(()) }
    }

    /// The groups of a leaf; says where they begin.
    fn leaf(&mut self, digest: &Digest) -> Result<u64, SendError> {
        let leaf = Here(self.store).node(digest)?;
        let begin = self.at;
        for group in groups(&leaf) {
            let mut bytes = vec![0; CHUNK];
            for slot in 0..GROUP {
                let Some(page) = leaf.child(group * GROUP + slot) else { continue };
                let page = self.store.blob(&page)?;
                let room = &mut bytes[slot * PAGE_SIZE..][..PAGE_SIZE];
                room[..page.len().min(PAGE_SIZE)].copy_from_slice(&page[..page.len().min(PAGE_SIZE)]);
                self.pages += 1;
            }
            self.put(&bytes)?;
        }
        Ok(begin)
    }
}
