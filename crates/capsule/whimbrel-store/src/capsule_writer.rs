//! Capsule writer: receives images and blobs, and commits them as a capsule.
//!
//! The writer has a GC lease during its life, so that garbage collection spares what it wrote and the
//! existing objects that it relies on. A commit flushes (packs durable, then index durable), checks that the
//! capsule is complete, and sets the refs.

use crate::{
    changed_pages,
    error::{Result, StoreError},
    gc_lease::{Condemned, GcLease, Pinned, Purpose, gate},
    image_writer::ImageWriter,
    pack_writer::{self, Message},
    page_worker::{self, Framer, PageBatch, WriteContext},
    reachability,
    refs::Expected,
    store::Store,
    vfs::{Lock, LockMode},
};
use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc::{SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
};
use whimbrel_core::{CapsuleId, Digest, RefName};
use whimbrel_image::{Manifest, Node, pack_frame::Kind, tree};

/// Threads of a writer; they end when the capsule writer and its image writers are dropped.
pub(crate) struct WorkerThreads {
    pub(crate) context: Arc<WriteContext>,
    batches: Option<SyncSender<PageBatch>>,
    pack: Option<SyncSender<Message>>,
    threads: Vec<JoinHandle<()>>,
    roots: Mutex<HashSet<(Digest, u64)>>,
    /// Whether a base image is not complete in this store.
    partial: AtomicBool,
}

impl WorkerThreads {
    fn start(context: Arc<WriteContext>) -> Result<Self> {
        let (inner, failure) = (context.inner.clone(), context.failure.clone());
        let (pack, appender) = pack_writer::start(inner, context.lease.id, failure)?;
        let workers = context.inner.options.workers.max(1);
        let (batches, queue) = sync_channel(workers * 2);
        let queue = Arc::new(Mutex::new(queue));
        let mut threads = Self {
            context: context.clone(),
            batches: Some(batches),
            pack: Some(pack.clone()),
            threads: vec![appender],
            roots: Mutex::default(),
            partial: AtomicBool::new(false),
        };
        for _ in 0..workers {
            let (session, queue, pack) = (context.clone(), queue.clone(), pack.clone());
            let worker = thread::Builder::new().spawn(move || page_worker::run(session, queue, pack));
            threads.threads.push(worker.map_err(StoreError::io("start a thread of", "a writer"))?);
        }
        Ok(threads)
    }

    pub(crate) fn submit(&self, batch: PageBatch) -> Result<()> {
        let gone = || StoreError::Latched { action: "worker" };
        self.batches.as_ref().ok_or_else(gone)?.send(batch).map_err(|_| gone())
    }

    pub(crate) fn pack(&self) -> SyncSender<Message> {
        self.pack.clone().expect("the sender lives as long as the pool")
    }

    pub(crate) fn remember_root(&self, root: Digest, pages: u64) {
        self.roots.lock().unwrap_or_else(|e| e.into_inner()).insert((root, pages));
    }

    fn knows_root(&self, root: Digest, pages: u64) -> bool {
        self.roots.lock().unwrap_or_else(|e| e.into_inner()).contains(&(root, pages))
    }

    /// Frames the changed pages collected so far.
    pub(crate) fn frame_changed(&self) -> Result<()> {
        changed_pages::frame_pending(&self.context, &self.pack())
    }

    fn flush(&self) -> Result<()> {
        self.frame_changed()?;
        let gone = || StoreError::Latched { action: "append" };
        let (reply, answer) = sync_channel(1);
        self.pack().send(Message::Flush(reply)).map_err(|_| gone())?;
        answer.recv().map_err(|_| gone())?
    }
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        self.batches = None;
        self.pack = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Writer of capsules. Objects that are not committed when it is dropped are garbage.
pub struct CapsuleWriter {
    store: Store,
    threads: Arc<WorkerThreads>,
}

whimbrel_core::opaque_debug!(CapsuleWriter);

impl Store {
    /// Starts a writer with threads of its own.
    pub fn writer(&self) -> Result<CapsuleWriter> {
        let inner = &self.inner;
        inner.check_latch()?;
        let _gate = gate(&*inner.files, LockMode::Shared)?;
        inner.layout.check(&*inner.files)?;
        let condemned = Condemned::read(&*inner.files)?;
        let lease =
            inner.latching(GcLease::new(inner.files.clone(), Purpose::Write, condemned.generation))?;
        inner.objects.indexes.refresh()?;
        let avoid = condemned.ids().into_iter().chain(self.plain_packs().into_keys()).collect();
        let session = WriteContext::new(inner.clone(), lease, avoid);
        let threads = WorkerThreads::start(Arc::new(session))?;
        Ok(CapsuleWriter { store: self.clone(), threads: Arc::new(threads) })
    }
}

impl CapsuleWriter {
    /// Starts an image of `pages` pages with the content of `base` (the root of an image of the same length)
    /// or zeros, to which pages are written. Several images may be written at once.
    pub fn image(&self, base: Option<Digest>, pages: u64) -> Result<ImageWriter> {
        self.threads.context.check()?;
        if let Some(root) = base {
            self.pin_base(root, pages)?;
        }
        Ok(ImageWriter::new(self.threads.clone(), base, pages))
    }

    /// Root of an image of `grown` pages that begins as the image `root` of `pages` pages, with zeros after
    /// it. Writes one node for each level that the tree gains, whatever the size of the image.
    pub fn grow(&self, root: Option<Digest>, pages: u64, grown: u64) -> Result<Option<Digest>> {
        let Some(mut root) = root else { return Ok(None) };
        self.threads.context.check()?;
        self.pin_base(root, pages)?;
        for level in tree::height(pages)..tree::height(grown) {
            let mut node = Node::empty(level);
            node.set(0, Some(root));
            let bytes = node.encode().expect("a node with a child has an encoding");
            root = self.put_object(Kind::Nodes, &bytes)?;
        }
        Ok(Some(root))
    }

    /// Pins a base image after checking that it is complete.
    fn pin_base(&self, root: Digest, pages: u64) -> Result<()> {
        if self.threads.knows_root(root, pages) {
            return self.threads.flush();
        }
        let _gate = self.gate()?;
        if self.store.is_partial_image(root, pages)? {
            self.threads.partial.store(true, Ordering::Relaxed);
        } else if !self.store.refs_hold_image(root, pages)? {
            reachability::check_image(&self.store, Some(root), pages, &mut HashSet::new())?;
        }
        self.threads.context.lease.pin(Pinned::Image { root, pages })?;
        self.threads.remember_root(root, pages);
        Ok(())
    }

    fn gate(&self) -> Result<Lock> {
        gate(&*self.store.inner.files, LockMode::Shared)
    }

    /// Stores a blob of at most 256 MiB.
    pub fn put_blob(&self, bytes: &[u8]) -> Result<Digest> {
        self.put_object(Kind::Blob, bytes)
    }

    fn put_object(&self, kind: Kind, bytes: &[u8]) -> Result<Digest> {
        let session = &self.threads.context;
        session.check()?;
        let digest = Digest::of(bytes);
        let _claiming = session.claiming();
        if session.claim(&digest, &session.inner.objects.indexes.snapshot()) {
            Framer::new(&session.inner, self.threads.pack()).plain(kind, &[(digest, bytes)], 1)?;
        }
        Ok(digest)
    }

    /// Stores objects that are not in the store yet, `group` to a frame.
    pub(crate) fn put_objects(&self, kind: Kind, objects: &[&[u8]], group: usize) -> Result<()> {
        let session = &self.threads.context;
        session.check()?;
        let indexes = session.inner.objects.indexes.snapshot();
        let _claiming = session.claiming();
        let digested = objects.iter().map(|bytes| (Digest::of(bytes), *bytes));
        let new: Vec<_> = digested.filter(|(digest, _)| session.claim(digest, &indexes)).collect();
        Framer::new(&session.inner, self.threads.pack()).plain(kind, &new, group)
    }

    /// Stores those objects that the store lacks or will lose, `group` to a frame; `read` gets their digests,
    /// and returns their content. Returns how many they are.
    pub(crate) fn put_lacking(
        &self,
        kind: Kind,
        digests: &[Digest],
        group: usize,
        read: impl FnOnce(&[Digest]) -> Result<Vec<Vec<u8>>>,
    ) -> Result<u64> {
        let session = &self.threads.context;
        session.check()?;
        let indexes = session.inner.objects.indexes.snapshot();
        let _claiming = session.claiming();
        let new: Vec<Digest> =
            digests.iter().copied().filter(|digest| session.claim(digest, &indexes)).collect();
        let objects = read(&new)?;
        let objects: Vec<_> = new.iter().copied().zip(objects.iter().map(Vec::as_slice)).collect();
        Framer::new(&session.inner, self.threads.pack()).plain(kind, &objects, group)?;
        Ok(new.len() as u64)
    }

    /// Stores objects again, of which the store has damaged copies.
    pub(crate) fn put_copies(&self, kind: Kind, objects: &[(Digest, &[u8])], group: usize) -> Result<()> {
        let session = &self.threads.context;
        session.check()?;
        Framer::new(&session.inner, self.threads.pack()).plain(kind, objects, group)
    }

    /// Makes everything stored so far durable.
    pub(crate) fn flush(&self) -> Result<()> {
        self.threads.flush()?;
        self.threads.context.check()
    }

    /// Commits a capsule and points `refs` at it. On return all of it is durable. If it shares an image with
    /// a partial capsule, it is marked partial too.
    pub fn commit(&self, manifest: &Manifest, refs: &[RefName]) -> Result<CapsuleId> {
        let is_partial =
            || Ok(self.check_complete(manifest)? || self.threads.partial.load(Ordering::Relaxed));
        self.commit_if(manifest, refs, &is_partial)
    }

    /// Commits a capsule all of whose objects were put into this writer.
    pub(crate) fn commit_whole(&self, manifest: &Manifest, refs: &[RefName]) -> Result<CapsuleId> {
        self.commit_if(manifest, refs, &|| Ok(false))
    }

    /// Commits a capsule that is complete, or partial as `is_partial` says.
    fn commit_if(
        &self,
        manifest: &Manifest,
        refs: &[RefName],
        is_partial: &dyn Fn() -> Result<bool>,
    ) -> Result<CapsuleId> {
        let bytes = manifest.encode()?;
        let id = CapsuleId(self.put_object(Kind::Manifest, &bytes)?);
        self.threads.flush()?;
        self.threads.context.check()?;
        let gate = self.gate()?;
        if is_partial()? {
            self.store.mark_partial(&id)?;
        } else {
            self.store.record_complete(&id)?;
        }
        for name in refs {
            self.store.write_ref(name, &id, Expected::Anything)?;
        }
        drop(gate);
        // The capsule is durable: what follows only saves time and room.
        if let Err(error) = self.store.inner.latching(self.store.inner.objects.indexes.merge()) {
            tracing::warn!(error = &error as &dyn std::error::Error, "cannot merge indexes");
        }
        self.store.refill_reserve();
        Ok(id)
    }

    /// Fails if an object is missing, unless a partial capsule has the image: then returns true.
    fn check_complete(&self, manifest: &Manifest) -> Result<bool> {
        let not_whole = |source| StoreError::Incomplete { source: Box::new(source) };
        manifest
            .blobs()
            .try_for_each(|blob| reachability::check_object(&self.store, &blob))
            .map_err(not_whole)?;
        let (mut seen, mut partial) = (HashSet::new(), false);
        for image in &manifest.images {
            let Some(root) = image.root.filter(|root| !self.threads.knows_root(*root, image.pages)) else {
                continue;
            };
            match reachability::check_image(&self.store, image.root, image.pages, &mut seen) {
                Err(_) if self.store.is_partial_image(root, image.pages)? => partial = true,
                other => other.map_err(not_whole)?,
            }
        }
        Ok(partial)
    }
}
