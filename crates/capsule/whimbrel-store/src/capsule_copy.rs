//! Copies of capsules in other stores.
//!
//! Every node and page of the capsule is looked up in the other store by its index there, and what that lacks
//! is read here, a batch at a time with several threads, since a store may be far away. So the copy is
//! complete by its making when it is committed.

use crate::{
    capsule_writer::CapsuleWriter,
    error::{Result, StoreError},
    remote_objects::LocalNodes,
    store::Store,
};
use std::{collections::HashSet, thread};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE, RefName};
use whimbrel_image::{
    pack_frame::Kind,
    tree::{Visit, walk},
};

/// Pages of a batch, and of a frame.
const BATCH: usize = 1024;
const PAGES: usize = 32;
/// Nodes of a batch, and of a frame.
const NODE_BATCH: usize = 64;
const NODES: usize = 8;
/// Threads that read a batch.
const READERS: usize = 16;

/// Receives the bytes of pages looked at and in total, and returns whether to go on.
pub type CopyProgress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

struct Copier<'a, 'p> {
    from: &'a Store,
    writer: CapsuleWriter,
    pages: Vec<Digest>,
    nodes: Vec<Digest>,
    looked_at: u64,
    total: u64,
    copied: u64,
    progress: &'a mut CopyProgress<'p>,
}

impl Store {
    /// Copies a complete capsule into another store, under `refs` there. Returns how many pages that lacked.
    /// What was copied before a cancel or an error is garbage there, and is not copied again while it lasts.
    pub fn copy_to(
        &self,
        id: &CapsuleId,
        to: &Store,
        refs: &[RefName],
        progress: &mut CopyProgress<'_>,
    ) -> Result<u64> {
        let manifest = self.manifest(id)?;
        let total = manifest.images.iter().map(|image| image.size()).sum();
        let (pages, nodes) = (Vec::new(), Vec::new());
        let (writer, looked_at, copied) = (to.writer()?, 0, 0);
        let mut copier = Copier { from: self, writer, pages, nodes, looked_at, total, copied, progress };
        let mut seen = HashSet::new();
        for image in &manifest.images {
            walk(&LocalNodes(&self.inner), image.root, image.pages, &mut |visit| match visit {
                Visit::Node { digest, .. } => {
                    let is_new = seen.insert(digest);
                    if is_new {
                        copier.node(digest)?;
                    }
                    Ok(is_new)
                }
                Visit::Page { digest, .. } => copier.page(digest).map(|()| false),
            })?;
        }
        copier.flush_pages()?;
        copier.flush_nodes()?;
        for blob in manifest.blobs() {
            copier.writer.put_blob(&self.blob(&blob)?)?;
        }
        copier.writer.commit_whole(&manifest, refs)?;
        Ok(copier.copied)
    }
}

impl Store {
    /// Reads objects, in order, with several threads if they are many: a store may be far away.
    pub fn blobs(&self, digests: &[Digest]) -> Vec<Result<Vec<u8>>> {
        let part = digests.len().div_ceil(READERS).max(PAGES);
        let read = |part: &[Digest]| part.iter().map(|digest| self.blob(digest)).collect::<Vec<_>>();
        if digests.len() <= part {
            return read(digests);
        }
        thread::scope(|scope| {
            let readers: Vec<_> = digests.chunks(part).map(|part| scope.spawn(move || read(part))).collect();
            let joined = readers.into_iter().map(|reader| reader.join().expect("a reader does not panic"));
            joined.flatten().collect()
        })
    }
}

impl Copier<'_, '_> {
    fn node(&mut self, digest: Digest) -> Result<()> {
        self.nodes.push(digest);
        if self.nodes.len() < NODE_BATCH { Ok(()) } else { self.flush_nodes() }
    }

    fn page(&mut self, digest: Digest) -> Result<()> {
        self.pages.push(digest);
        if self.pages.len() < BATCH { Ok(()) } else { self.flush_pages() }
    }

    fn flush_nodes(&mut self) -> Result<()> {
        let nodes = std::mem::take(&mut self.nodes);
        self.copy(Kind::Nodes, &nodes, NODES).map(drop)
    }

    fn flush_pages(&mut self) -> Result<()> {
        let pages = std::mem::take(&mut self.pages);
        self.looked_at += (pages.len() * PAGE_SIZE) as u64;
        self.copied += self.copy(Kind::Pages, &pages, PAGES)?;
        if (self.progress)(self.looked_at, self.total) { Ok(()) } else { Err(StoreError::Cancelled) }
    }

    /// Copies what is not there yet, `group` objects to a frame. Returns how many that were.
    fn copy(&self, kind: Kind, digests: &[Digest], group: usize) -> Result<u64> {
        self.writer
            .put_lacking(kind, digests, group, |lacking| self.from.blobs(lacking).into_iter().collect())
    }
}
