//! Page worker: zero test, digest, dedup, grouping and compression of a batch of pages.
//!
//! Workers share only the writer's set of claims. The first thread to claim a digest stores the object and
//! all others rely on it. That is sound because nothing is acknowledged before the complete writer was
//! flushed. Pages of an image with a base are collected with their older versions, to be framed together
//! later.

use crate::{
    changed_pages::{self, ChangedPage, OldPage, PendingPages},
    error::{Result, StoreError},
    file_names::PackId,
    gc_lease::GcLease,
    image_writer::ImageState,
    index::{Index, PackLocation},
    object_reader::Object,
    pack_writer::{Failure, Message, NewFrame},
    remote_objects::LocalNodes,
    store::Inner,
};
use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard,
        mpsc::{Receiver, SyncSender},
    },
};
use whimbrel_core::{Digest, EXTENT_PAGES, PAGE_SIZE, is_zero};
use whimbrel_image::{
    Node, ShortDigest,
    pack_frame::{Bases, Encoder, Kind, PackFrameError},
    page_digests, tree,
};

/// Niceness of a worker: the machine, and resuming a paused machine, come first.
pub(crate) const NICE: i32 = 10;
/// Pages of a plain frame: 64 KiB decode in about 40 us, and compress within 10 % of a MiB.
const FRAME_PAGES: usize = 16;
const SHARDS: usize = 64;

/// State that the threads of one writer share.
pub(crate) struct WriteContext {
    pub(crate) inner: Arc<Inner>,
    pub(crate) lease: GcLease,
    /// Packs that must not be relied on: those that were condemned when the writer started, and in an
    /// encrypted store those that are not sealed.
    pub(crate) avoid: HashSet<PackId>,
    pub(crate) failure: Failure,
    pub(crate) pending_pages: PendingPages,
    /// Held shared from a claim until the object was sent to a pack or collected.
    claiming: RwLock<()>,
    /// Objects this writer stores, and whether other threads rely on that.
    claimed: Vec<Mutex<HashMap<ShortDigest, bool>>>,
}

impl WriteContext {
    pub(crate) fn new(inner: Arc<Inner>, lease: GcLease, avoid: HashSet<PackId>) -> Self {
        let claimed = (0..SHARDS).map(|_| Mutex::default()).collect();
        let (pending_pages, claiming) = Default::default();
        Self { inner, lease, avoid, failure: Failure::default(), pending_pages, claiming, claimed }
    }

    /// Claims an object; true if the caller has to store it, because no thread has done or claimed that.
    pub(crate) fn claim(&self, digest: &Digest, indexes: &[Arc<Index>]) -> bool {
        let key = ShortDigest::from(digest);
        let stored = |index: &Arc<Index>| index.find(key).any(|l| !self.avoid.contains(&l.frame.pack));
        if indexes.iter().any(stored) {
            return false;
        }
        match self.shard(digest).entry(key) {
            Entry::Vacant(free) => {
                free.insert(false);
                true
            }
            Entry::Occupied(mut taken) => {
                taken.insert(true);
                false
            }
        }
    }

    /// Withdraws a claim, unless another thread relies on it; returns whether it did.
    pub(crate) fn unclaim(&self, digest: &Digest) -> bool {
        match self.shard(digest).entry(ShortDigest::from(digest)) {
            Entry::Occupied(taken) if !taken.get() => {
                taken.remove();
                true
            }
            _ => false,
        }
    }

    fn shard(&self, digest: &Digest) -> MutexGuard<'_, HashMap<ShortDigest, bool>> {
        self.claimed[usize::from(digest.0[31]) % SHARDS].lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Lock to hold from a claim until the object is stored.
    pub(crate) fn claiming(&self) -> RwLockReadGuard<'_, ()> {
        self.claiming.read().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits until the objects of all claims made so far are stored.
    pub(crate) fn wait_for_claims(&self) {
        drop(self.claiming.write().unwrap_or_else(|e| e.into_inner()));
    }

    /// Returns the first error of any thread.
    pub(crate) fn check(&self) -> Result<()> {
        self.inner.check_latch()?;
        self.failure.get().map_or(Ok(()), |source| Err(StoreError::Writer { source: source.clone() }))
    }
}

pub(crate) struct PageBatch {
    pub(crate) image: Arc<ImageState>,
    pub(crate) order: u64,
    pub(crate) pages: Vec<u64>,
    pub(crate) data: Vec<u8>,
}

/// Object to be stored as a delta, if that pays.
pub(crate) struct Candidate<'a> {
    pub(crate) digest: Digest,
    pub(crate) bytes: &'a [u8],
    pub(crate) old: Object,
}

/// Encodes objects as frames and sends them to the pack writer.
pub(crate) struct Framer {
    encoder: Encoder,
    /// Encoder with a higher level, for changed pages, of which there are few.
    high_level_encoder: Encoder,
    delta_level: i32,
    pack: SyncSender<Message>,
}

impl Framer {
    pub(crate) fn new(inner: &Inner, pack: SyncSender<Message>) -> Self {
        let delta_level = inner.options.delta_level;
        let (encoder, high_level_encoder) = (Encoder::new(inner.options.level), Encoder::new(delta_level));
        Self { encoder, high_level_encoder, delta_level, pack }
    }

    fn send(&self, kind: Kind, depth: u8, keys: Vec<ShortDigest>, bytes: Vec<u8>) -> Result<()> {
        let sent = self.pack.send(Message::Frame(NewFrame { kind, depth, keys, bytes }));
        sent.map_err(|_| StoreError::Latched { action: "append" })
    }

    /// Stores `objects` as plain frames, `group` to a frame.
    pub(crate) fn plain(&mut self, kind: Kind, objects: &[(Digest, &[u8])], group: usize) -> Result<()> {
        for objects in objects.chunks(group) {
            let frame = self.encode(kind, objects)?;
            self.send(kind, 0, objects.iter().map(|(digest, _)| ShortDigest::from(digest)).collect(), frame)?;
        }
        Ok(())
    }

    fn encode(&mut self, kind: Kind, objects: &[(Digest, &[u8])]) -> Result<Vec<u8>> {
        let lengths: Vec<usize> = objects.iter().map(|(_, bytes)| bytes.len()).collect();
        let raw = objects.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>().concat();
        self.encoder.encode(kind, &raw, &lengths).map_err(|source| StoreError::Encode { source })
    }

    /// Stores `candidates` as deltas where that is clearly smaller, otherwise plain.
    pub(crate) fn deltas(
        &mut self,
        kind: Kind,
        candidates: &[Candidate<'_>],
        group: usize,
        plain: usize,
    ) -> Result<()> {
        for candidates in candidates.chunks(group) {
            let objects: Vec<(Digest, &[u8])> = candidates.iter().map(|c| (c.digest, c.bytes)).collect();
            let delta =
                self.encode_delta(kind, candidates).map_err(|source| StoreError::Encode { source })?;
            let plain_bytes: usize = objects
                .chunks(plain)
                .map(|o| self.encode(kind, o).map(|f| f.len()))
                .sum::<Result<usize>>()?;
            if delta.len() * 10 >= plain_bytes * 7 {
                self.plain(kind, &objects, plain)?;
                continue;
            }
            let depth = 1 + candidates.iter().map(|c| c.old.location.frame.depth).max().unwrap_or(0);
            self.send(
                kind,
                depth,
                objects.iter().map(|(digest, _)| ShortDigest::from(digest)).collect(),
                delta,
            )?;
        }
        Ok(())
    }

    /// Stores changed pages as one frame: as a delta against `bases` if that pays, otherwise plain.
    pub(crate) fn changed(&mut self, objects: &[(Digest, &[u8])], bases: Bases<'_>) -> Result<()> {
        let failed = |source| StoreError::Encode { source };
        let lengths: Vec<usize> = objects.iter().map(|(_, bytes)| bytes.len()).collect();
        let raw = objects.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>().concat();
        let keys = || objects.iter().map(|(digest, _)| ShortDigest::from(digest)).collect::<Vec<_>>();
        if !bases.keys.is_empty() {
            let delta = Encoder::encode_delta(Kind::Pages, &raw, &lengths, bases, self.delta_level);
            let (delta, plain) = (delta.map_err(failed)?, self.encode(Kind::Pages, objects)?);
            if delta.len() * 20 < plain.len() * 19 {
                return self.send(Kind::Pages, bases.depth + 1, keys(), delta);
            }
        }
        let plain = self.high_level_encoder.encode(Kind::Pages, &raw, &lengths).map_err(failed)?;
        self.send(Kind::Pages, 0, keys(), plain)
    }

    fn encode_delta(
        &self,
        kind: Kind,
        candidates: &[Candidate<'_>],
    ) -> std::result::Result<Vec<u8>, PackFrameError> {
        let lengths: Vec<usize> = candidates.iter().map(|c| c.bytes.len()).collect();
        let raw = candidates.iter().map(|c| c.bytes).collect::<Vec<_>>().concat();
        let base = candidates.iter().map(|c| c.old.bytes()).collect::<Vec<_>>().concat();
        let keys: Vec<ShortDigest> =
            candidates.iter().map(|c| ShortDigest::from(&Digest::of(c.old.bytes()))).collect();
        let depth = candidates.iter().map(|c| c.old.location.frame.depth).max().unwrap_or(0);
        Encoder::encode_delta(
            kind,
            &raw,
            &lengths,
            Bases { keys: &keys, raw: &base, depth },
            self.delta_level,
        )
    }
}

/// Processes batches until there are no more.
pub(crate) fn run(
    session: Arc<WriteContext>,
    batches: Arc<Mutex<Receiver<PageBatch>>>,
    pack: SyncSender<Message>,
) {
    // On Linux this applies to the calling thread. If refused, the thread works at normal priority.
    let _ = rustix::process::setpriority_process(None, NICE);
    let mut framer = Framer::new(&session.inner, pack.clone());
    loop {
        let next = batches.lock().unwrap_or_else(|e| e.into_inner()).recv();
        let Ok(batch) = next else { return };
        let _done = batch.image.done_on_drop();
        if session.check().is_err() {
            continue;
        }
        let claiming = session.claiming();
        let stored = store_batch(&session, &mut framer, &batch).and_then(|(digests, many)| {
            changed_pages::frame(&session, &pack, many)?;
            Ok(digests)
        });
        drop(claiming);
        match stored {
            Ok(digests) => {
                batch.image.record(batch.order, batch.pages.iter().copied().zip(digests).collect())
            }
            Err(error) => drop(session.failure.set(Arc::new(error))),
        }
    }
}

/// Digests of the pages of a batch, none for zeros, and the changed pages that should be framed now.
type Stored = (Vec<Option<Digest>>, changed_pages::UnpackedPages);

fn store_batch(session: &WriteContext, framer: &mut Framer, batch: &PageBatch) -> Result<Stored> {
    let indexes = session.inner.objects.indexes.snapshot();
    let mut old = OldPages {
        session,
        image: &batch.image,
        extent: None,
        frame_siblings: Vec::new(),
        seen: HashSet::new(),
    };
    let contents = batch.data.as_chunks::<PAGE_SIZE>().0;
    let digests = digests(contents);
    let (mut plain, mut changed) = (Vec::new(), Vec::new());
    for ((page, bytes), digest) in batch.pages.iter().zip(contents).zip(&digests) {
        let Some(digest) = *digest else { continue };
        let before = old.digest(*page)?;
        if before == Some(digest) || !session.claim(&digest, &indexes) {
            continue;
        }
        if batch.image.base.is_some() && batch.image.may_try_delta() {
            let old = before.map(|before| old.page(&before)).transpose()?.flatten();
            let (image, order) = (batch.image.clone(), batch.order);
            changed.push(ChangedPage { image, page: *page, order, digest, bytes: Box::new(*bytes), old });
        } else {
            plain.push((digest, &bytes[..]));
        }
    }
    framer.plain(Kind::Pages, &plain, FRAME_PAGES)?;
    Ok((
        digests,
        session
            .pending_pages
            .add(changed_pages::UnpackedPages { pages: changed, frame_siblings: old.frame_siblings }),
    ))
}

/// Digests of `pages`, none for zeros.
fn digests(pages: &[[u8; PAGE_SIZE]]) -> Vec<Option<Digest>> {
    let used: Vec<bool> = pages.iter().map(|page| !is_zero(page)).collect();
    let some: Vec<&[u8; PAGE_SIZE]> =
        pages.iter().zip(&used).filter(|(_, used)| **used).map(|(page, _)| page).collect();
    let mut digests = page_digests(&some).into_iter();
    used.into_iter().map(|used| if used { digests.next() } else { None }).collect()
}

struct OldPages<'a> {
    session: &'a WriteContext,
    image: &'a ImageState,
    extent: Option<(u64, Option<Arc<Node>>)>,
    frame_siblings: Vec<OldPage>,
    seen: HashSet<PackLocation>,
}

impl OldPages<'_> {
    fn digest(&mut self, page: u64) -> Result<Option<Digest>> {
        if self.image.base.is_none() {
            return Ok(None);
        }
        let extent = page / EXTENT_PAGES as u64;
        if self.extent.as_ref().is_none_or(|(at, _)| *at != extent) {
            let leaf =
                match tree::leaf(&LocalNodes(&self.session.inner), self.image.base, self.image.pages, extent)
                {
                    // The base is partial here, or cannot be read now: no delta.
                    Err(StoreError::Missing { .. } | StoreError::Io { .. }) => None,
                    other => other?,
                };
            self.extent = Some((extent, leaf));
        }
        let leaf = self.extent.as_ref().and_then(|(_, leaf)| leaf.as_ref());
        Ok(leaf.and_then(|leaf| leaf.child(page as usize % EXTENT_PAGES)))
    }

    /// Older version of a page, if it can be the base of a delta.
    fn page(&mut self, digest: &Digest) -> Result<Option<OldPage>> {
        let Some(object) = usable_base(self.session, digest, Kind::Pages)? else { return Ok(None) };
        let place = object.location.frame;
        if place.depth == 0 && self.seen.insert(place) {
            self.frame_siblings.extend(object.siblings().filter_map(|(digest, bytes)| {
                let bytes = Box::new(*bytes.first_chunk()?);
                Some(OldPage { key: ShortDigest::from(digest), bytes, depth: 0 })
            }));
        }
        let Some(bytes) = object.bytes().first_chunk() else { return Ok(None) };
        Ok(Some(OldPage { key: ShortDigest::from(digest), bytes: Box::new(*bytes), depth: place.depth }))
    }
}

/// Object as the base of a delta; none if it is too deep, in a condemned pack, damaged or cannot be read.
/// What is wrong with old content must not stop a new checkpoint.
pub(crate) fn usable_base(session: &WriteContext, digest: &Digest, kind: Kind) -> Result<Option<Object>> {
    let usable = |old: &Object| {
        let place = &old.location.frame;
        place.kind == kind && place.depth < kind.max_depth() && !session.avoid.contains(&place.pack)
    };
    match session.inner.objects.get(digest) {
        Ok(old) => Ok(Some(old).filter(usable)),
        Err(
            StoreError::Damaged { .. }
            | StoreError::Missing { .. }
            | StoreError::MissingBase { .. }
            | StoreError::Io { .. },
        ) => Ok(None),
        Err(error) => Err(error),
    }
}
