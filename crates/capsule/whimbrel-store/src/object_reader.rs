//! Object reader: finds, reads, decodes and checks objects.
//!
//! Every returned object was hashed and compared with the requested digest, once per decoded frame. If
//! several packs have an object, a damaged or missing copy is skipped for the next one. Recursion ends
//! because a delta's base is only looked up in frames of less depth.

use crate::{
    error::{Result, StoreError},
    file_names::PackId,
    index::{ObjectLocation, PackLocation},
    index_cipher::IndexCipher,
    index_set::IndexSet,
    keys::DataKey,
    object_cache::{Cache, Weight},
    pack_file::PackFile,
    sealed_frame::PackKeys,
    vfs::Vfs,
};
use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Mutex, OnceLock},
};
use whimbrel_core::{Digest, lock};
use whimbrel_image::{
    Node, ShortDigest,
    pack_frame::{MAX_RAW, PackFrame, PackFrameError},
    tree::Nodes,
};

/// Most packs open at once.
const MAX_HANDLES: usize = 64;

pub(crate) struct Decoded {
    raw: Vec<u8>,
    ranges: Vec<Range<usize>>,
    digests: Vec<OnceLock<Digest>>,
}

impl Weight for Decoded {
    fn weight(&self) -> usize {
        self.raw.len() + self.ranges.len() * 64 + 128
    }
}

impl Weight for Node {
    fn weight(&self) -> usize {
        whimbrel_image::MAX_NODE
    }
}

impl Decoded {
    pub(crate) fn objects(&self) -> usize {
        self.ranges.len()
    }

    pub(crate) fn bytes(&self, slot: u8) -> &[u8] {
        &self.raw[self.ranges[usize::from(slot)].clone()]
    }

    /// Digest of the object in `slot`, computed once.
    pub(crate) fn digest(&self, slot: u8) -> Option<&Digest> {
        let cell = self.digests.get(usize::from(slot))?;
        Some(cell.get_or_init(|| Digest::of(self.bytes(slot))))
    }
}

#[derive(Clone)]
pub(crate) struct Object {
    frame: Arc<Decoded>,
    pub(crate) location: ObjectLocation,
}

impl Object {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.frame.bytes(self.location.slot)
    }

    /// Other objects of the same frame, with their digests.
    pub(crate) fn siblings(&self) -> impl Iterator<Item = (&Digest, &[u8])> {
        let others = (0..self.frame.objects().min(256)).map(|slot| slot as u8);
        let others = others.filter(|slot| *slot != self.location.slot);
        others.filter_map(|slot| Some((self.frame.digest(slot)?, self.frame.bytes(slot))))
    }
}

pub(crate) struct Objects {
    files: Arc<dyn Vfs>,
    /// Keys of packs, if the store is encrypted.
    pub(crate) pack_keys: Option<PackKeys>,
    pub(crate) indexes: IndexSet,
    frames: Cache<(PackId, u32), Decoded>,
    nodes: Cache<Digest, Node>,
    handles: Mutex<PackHandles>,
}

/// Open packs, and when each was last used.
#[derive(Default)]
struct PackHandles {
    open: HashMap<PackId, (Arc<PackFile>, u64)>,
    uses: u64,
}

impl PackHandles {
    fn get(&mut self, pack: PackId) -> Option<Arc<PackFile>> {
        self.uses += 1;
        let (handle, used) = self.open.get_mut(&pack)?;
        *used = self.uses;
        Some(handle.clone())
    }

    /// Adds an open pack, in place of the one that was not used for longest.
    fn insert(&mut self, pack: PackId, handle: Arc<PackFile>) {
        if self.open.len() >= MAX_HANDLES
            && let Some(oldest) = self.open.iter().min_by_key(|(_, (_, used))| *used).map(|(pack, _)| *pack)
        {
            self.open.remove(&oldest);
        }
        self.open.insert(pack, (handle, self.uses));
    }
}

/// Requested object: a digest, or the short digest of a delta's base.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    Digest(&'a Digest),
    Key(ShortDigest),
}

impl Wanted<'_> {
    fn key(&self) -> ShortDigest {
        match self {
            Self::Digest(digest) => ShortDigest::from(*digest),
            Self::Key(key) => *key,
        }
    }

    fn is(&self, found: &Digest) -> bool {
        match self {
            Self::Digest(digest) => *digest == found,
            Self::Key(key) => key.matches(found),
        }
    }

    fn missing(&self) -> StoreError {
        match self {
            Self::Digest(digest) => StoreError::Missing { digest: **digest },
            Self::Key(key) => StoreError::MissingBase { key: *key },
        }
    }
}

impl Objects {
    pub(crate) fn new(files: Arc<dyn Vfs>, cache_bytes: usize, key: Option<&DataKey>) -> Result<Self> {
        let refused = StoreError::Keys { reason: "the cipher of the indexes refuses the key" };
        let cipher = match key.map(IndexCipher::new) {
            None => None,
            Some(cipher) => Some(Arc::new(cipher.ok_or(refused)?)),
        };
        let catalog = IndexSet::open(files.clone(), cipher)?;
        let pack_keys = key.map(PackKeys::new);
        let frames = Cache::new(cache_bytes);
        let nodes = Cache::new(cache_bytes / 4);
        Ok(Self { files, pack_keys, indexes: catalog, frames, nodes, handles: Mutex::default() })
    }

    pub(crate) fn get(&self, digest: &Digest) -> Result<Object> {
        self.fetch(Wanted::Digest(digest), u8::MAX)
    }

    fn fetch(&self, wanted: Wanted<'_>, below: u8) -> Result<Object> {
        match self.fetch_once(wanted, below) {
            Err(StoreError::Missing { .. } | StoreError::MissingBase { .. } | StoreError::Io { .. }) => {
                // Another process may have published the object, or moved it to another pack.
                self.indexes.refresh()?;
                self.fetch_once(wanted, below)
            }
            other => other,
        }
    }

    fn fetch_once(&self, wanted: Wanted<'_>, below: u8) -> Result<Object> {
        let mut failure = None;
        for location in self.indexes.find(wanted.key()).into_iter().filter(|l| l.frame.depth < below) {
            match self.read(wanted, location) {
                Ok(object) => return Ok(object),
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| self.absent(wanted)))
    }

    /// Why no index names an object: there is none, unless an index cannot be read now.
    fn absent(&self, wanted: Wanted<'_>) -> StoreError {
        self.indexes.unread().unwrap_or_else(|| wanted.missing())
    }

    /// Checks by the indexes that an object is here.
    pub(crate) fn require(&self, digest: &Digest) -> Result<()> {
        if self.has(digest) { Ok(()) } else { Err(self.absent(Wanted::Digest(digest))) }
    }

    /// Digest of an object with this short digest, if there is an undamaged one.
    pub(crate) fn digest_of(&self, key: ShortDigest) -> Option<Digest> {
        let Object { frame, location } = self.fetch_once(Wanted::Key(key), u8::MAX).ok()?;
        frame.digest(location.slot).copied()
    }

    fn read(&self, wanted: Wanted<'_>, location: ObjectLocation) -> Result<Object> {
        let frame = self.frame(&location.frame).map_err(|error| match error {
            StoreError::Damaged { pack, offset, source, .. } => {
                StoreError::Damaged { object: describe(wanted), pack, offset, source }
            }
            other => other,
        })?;
        match frame.digest(location.slot) {
            Some(found) if wanted.is(found) => Ok(Object { frame, location }),
            Some(found) => {
                Err(damaged(describe(wanted), &location.frame, StoreError::Digest { found: *found }))
            }
            None => Err(damaged(
                describe(wanted),
                &location.frame,
                PackFrameError::Head { field: "object count" },
            )),
        }
    }

    /// Decoded frame at `place`. Its checksum was checked, its digests not yet.
    pub(crate) fn frame(&self, place: &PackLocation) -> Result<Arc<Decoded>> {
        let cached = (place.pack, place.offset);
        if let Some(frame) = self.frames.get(&cached) {
            return Ok(frame);
        }
        let frame = Arc::new(self.decode(place, &|key, below| self.base(key, below))?);
        self.frames.insert(cached, frame.clone());
        Ok(frame)
    }

    /// Base of a delta: the object with `key`, from a frame of depth less than `below`.
    pub(crate) fn base(&self, key: ShortDigest, below: u8) -> Result<Vec<u8>> {
        Ok(self.fetch(Wanted::Key(key), below)?.bytes().to_vec())
    }

    /// Decodes the frame at `place`, bypassing the cache. `base_of` finds the bases of deltas.
    pub(crate) fn decode(
        &self,
        place: &PackLocation,
        base_of: &dyn Fn(ShortDigest, u8) -> Result<Vec<u8>>,
    ) -> Result<Decoded> {
        let bytes = self.encoded(place)?;
        let damaged = |source: PackFrameError| damaged(String::from("of a frame"), place, source);
        let frame = PackFrame::parse(&bytes).map_err(damaged)?;
        if frame.head.depth > place.depth {
            return Err(damaged(PackFrameError::Head { field: "depth" }));
        }
        let base = self.bases(&frame, base_of, &damaged)?;
        let raw = frame.decode(&base).map_err(damaged)?;
        let ranges = frame.ranges();
        let digests = ranges.iter().map(|_| OnceLock::new()).collect();
        Ok(Decoded { raw, ranges, digests })
    }

    /// Concatenated bases of a delta. They are read in the order of their frames, so a frame with several of
    /// them is decoded once, even with a small cache or a deep frame.
    fn bases(
        &self,
        frame: &PackFrame<'_>,
        base_of: &dyn Fn(ShortDigest, u8) -> Result<Vec<u8>>,
        damaged: &dyn Fn(PackFrameError) -> StoreError,
    ) -> Result<Vec<u8>> {
        let place = |key: &ShortDigest| {
            let places = self.indexes.find(*key).into_iter().map(|l| l.frame);
            places.filter(|p| p.depth < frame.head.depth).map(|p| (p.pack, p.offset)).next()
        };
        let mut keys: Vec<(usize, ShortDigest)> = frame.bases().enumerate().collect();
        keys.sort_by_cached_key(|(_, key)| place(key));
        let (mut found, mut len) = (vec![Vec::new(); keys.len()], 0);
        for (number, key) in keys {
            found[number] = base_of(key, frame.head.depth)?;
            len += found[number].len();
            if len > MAX_RAW {
                return Err(damaged(PackFrameError::Head { field: "base length" }));
            }
        }
        Ok(found.concat())
    }

    /// Encoded bytes of a frame, unchecked and without its seal.
    pub(crate) fn encoded(&self, place: &PackLocation) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.handle(place.pack)?.read(place, &mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn handle(&self, pack: PackId) -> Result<Arc<PackFile>> {
        let found = lock(&self.handles).get(pack);
        if let Some(handle) = found {
            return Ok(handle);
        }
        let opened = Arc::new(PackFile::open(&*self.files, pack, self.pack_keys.as_ref())?);
        lock(&self.handles).insert(pack, opened.clone());
        Ok(opened)
    }

    /// Closes packs that were removed, so that their space is freed.
    pub(crate) fn close(&self, packs: impl IntoIterator<Item = PackId>) {
        let mut handles = lock(&self.handles);
        packs.into_iter().for_each(|pack| drop(handles.open.remove(&pack)));
    }

    pub(crate) fn has(&self, digest: &Digest) -> bool {
        let key = ShortDigest::from(digest);
        self.indexes.snapshot().iter().any(|index| index.find(key).next().is_some())
    }
}

fn describe(wanted: Wanted<'_>) -> String {
    match wanted {
        Wanted::Digest(digest) => digest.to_string(),
        Wanted::Key(key) => format!("{key}…"),
    }
}

pub(crate) fn damaged(
    object: String,
    place: &PackLocation,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> StoreError {
    StoreError::Damaged {
        object,
        pack: place.pack.to_string(),
        offset: place.offset.into(),
        source: source.into(),
    }
}

impl Nodes for Objects {
    type Error = StoreError;

    fn node(&self, digest: &Digest) -> Result<Arc<Node>> {
        if let Some(node) = self.nodes.get(digest) {
            return Ok(node);
        }
        let node = Arc::new(Node::decode(self.get(digest)?.bytes())?);
        self.nodes.insert(*digest, node.clone());
        Ok(node)
    }
}
