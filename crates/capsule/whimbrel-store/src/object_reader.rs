//! Object reader: finds, reads, decodes and checks objects.
//!
//! Every returned object was hashed and compared with the requested digest, once per decoded frame. If
//! several packs have an object, a damaged or missing copy is skipped for the next one. Recursion ends
//! because a delta's base is only looked up in frames of less depth.

use crate::{
    error::{Result, StoreError},
    file_names::PackId,
    index::{ObjectLocation, PackLocation},
    index_set::IndexSet,
    object_cache::{Cache, Weight},
    vfs::{ReadAt, Vfs},
};
use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Mutex, OnceLock},
};
use whimbrel_core::Digest;
use whimbrel_image::{
    Node, ShortDigest,
    pack_frame::{MAX_RAW, PackFrame, PackFrameError},
    tree::Nodes,
};

/// Most packs open at once.
const MAX_HANDLES: usize = 256;

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
    pub(crate) indexes: IndexSet,
    frames: Cache<(PackId, u32), Decoded>,
    nodes: Cache<Digest, Node>,
    handles: Mutex<HashMap<PackId, Arc<dyn ReadAt>>>,
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
    pub(crate) fn new(files: Arc<dyn Vfs>, cache_bytes: usize) -> Result<Self> {
        let catalog = IndexSet::open(files.clone())?;
        let frames = Cache::new(cache_bytes);
        let nodes = Cache::new(cache_bytes / 4);
        Ok(Self { files, indexes: catalog, frames, nodes, handles: Mutex::default() })
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
        Err(failure.unwrap_or_else(|| wanted.missing()))
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

    /// Stored bytes of a frame, unchecked.
    pub(crate) fn encoded(&self, place: &PackLocation) -> Result<Vec<u8>> {
        let path = place.pack.path();
        let pack = self.handle(place.pack)?;
        let mut bytes = vec![0; place.len as usize];
        match pack.read_at(u64::from(place.offset), &mut bytes) {
            Ok(()) => Ok(bytes),
            Err(source) if source.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(damaged(String::from("of a frame"), place, source))
            }
            Err(source) => Err(StoreError::Io { action: "read", path, source }),
        }
    }

    pub(crate) fn handle(&self, pack: PackId) -> Result<Arc<dyn ReadAt>> {
        let handles = || self.handles.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(handle) = handles().get(&pack) {
            return Ok(handle.clone());
        }
        let path = pack.path();
        let opened = self.files.open(&path).map_err(StoreError::io("open", &path))?;
        let mut handles = handles();
        if handles.len() >= MAX_HANDLES {
            handles.clear();
        }
        handles.insert(pack, opened.clone());
        Ok(opened)
    }

    /// Closes packs that were removed, so that their space is freed.
    pub(crate) fn close(&self, packs: impl IntoIterator<Item = PackId>) {
        let mut handles = self.handles.lock().unwrap_or_else(|e| e.into_inner());
        packs.into_iter().for_each(|pack| drop(handles.remove(&pack)));
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
