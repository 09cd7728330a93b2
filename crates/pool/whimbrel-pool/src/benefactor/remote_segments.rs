//! The object tier: full segments that are stored in an object store instead of on the disk.
//!
//! A full segment is synced and uploaded as `NNNNNNNN.seg`. Its record heads are stored on the disk as
//! `NNNNNNNN.far`, and only then is the local file removed, so one of the two places always has the segment.
//! An object without heads on the disk (after a lost disk, or a crash between the two steps) is read and
//! added when the store is opened. Sparse segments are compacted like local ones; their object is removed
//! before their heads.

use super::{
    bucket::{Bucket, TierError, TierOwner},
    chunk_store::{ChunkSlot, ChunkStore, Segment, State, name_of, number_of, release},
    error::{ChunkError, Result},
    segment::{self, RECORD},
    segment_heads,
};
use bytes::Bytes;
use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Instant,
};
use whimbrel_core::lock;
use whimbrel_wire::atomic_file;

/// Length at which a segment is full if it will be uploaded. Single chunks are read by range.
pub(super) const REMOTE_SEGMENT: u64 = 8 << 20;
/// File of earlier versions with the number of the owner of the object store's prefix.
const OWNER: &str = "owner";

/// The object tier of a [`ChunkStore`].
#[derive(Debug)]
pub struct ObjectTier {
    bucket: Bucket,
    /// Bytes of full segments that stay on the disk; the oldest are uploaded first. With 0 all are uploaded.
    keep_local: u64,
    /// Owner of the prefix; once the prefix is claimed, with the pool of its segments.
    owner: Mutex<TierOwner>,
}

impl ObjectTier {
    /// Claims the prefix of `bucket` for `owner`, with `take_over` also from another benefactor. `dir` is the
    /// folder of the chunk store; see [`TierOptions`](super::TierOptions) for `keep_local`.
    pub fn claim(
        bucket: Bucket,
        dir: &Path,
        owner: TierOwner,
        take_over: bool,
        keep_local: u64,
    ) -> Result<Self> {
        let path = dir.join(OWNER);
        let known = match fs::read_to_string(&path) {
            Ok(text) => u64::from_str_radix(text.trim(), 16).ok(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(ChunkError::Io { action: "read", path, source }),
        };
        let owner = Mutex::new(bucket.claim(owner, known, take_over)?);
        Ok(Self { bucket, keep_local, owner })
    }

    /// Pool of the segments; none before the first registration of the owner.
    pub fn pool(&self) -> Option<u64> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner).pool
    }

    /// Records the pool of the segments in the object store.
    fn set_pool(&self, pool: u64) -> std::result::Result<(), TierError> {
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        if owner.pool != Some(pool) {
            let bound = TierOwner { pool: Some(pool), ..owner.clone() };
            self.bucket.set_owner(&bound)?;
            *owner = bound;
        }
        Ok(())
    }

    /// Fails if another benefactor has taken the prefix over, whose segments have the same names.
    fn check_owner(&self) -> std::result::Result<(), TierError> {
        let key = self.owner.lock().unwrap_or_else(PoisonError::into_inner).key;
        self.bucket.check_owner(&key)
    }
}

fn heads_of(number: u32) -> String {
    format!("{number:08}.far")
}

fn number_of_heads(name: &str) -> Option<u32> {
    name.strip_suffix(".far").filter(|digits| digits.len() == 8)?.parse().ok()
}

pub(super) fn heads_in(dir: &Path) -> io::Result<BTreeSet<u32>> {
    let mut numbers = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        numbers.extend(entry?.file_name().to_str().and_then(number_of_heads));
    }
    Ok(numbers)
}

/// The chunks of a segment with the positions of their frames, and the length of the segment, from its heads.
pub(super) fn slots(
    number: u32,
    heads: &[u8],
    touched: Instant,
) -> Option<(Vec<(whimbrel_core::Digest, ChunkSlot)>, u64)> {
    let (heads, rest) = heads.as_chunks::<RECORD>();
    let (mut found, mut at) = (Vec::new(), 0);
    for head in heads {
        let (digest, length) = segment::parse(head)?;
        let offset = at + RECORD as u64;
        found.push((digest, ChunkSlot { segment: number, offset, length, touched }));
        at = offset + u64::from(length);
    }
    rest.is_empty().then_some((found, at))
}

/// The record heads of a segment up to the first torn record.
fn heads(bytes: &[u8]) -> Vec<u8> {
    let (mut heads, mut rest) = (Vec::new(), bytes);
    while let Some((head, behind)) = rest.split_first_chunk::<RECORD>() {
        let Some((_, length)) = segment::parse(head) else { break };
        let Some(next) = behind.get(length as usize..) else { break };
        heads.extend_from_slice(head);
        rest = next;
    }
    heads
}

/// Adds the segments of the object store to the index.
pub(super) fn load(dir: &Path, behind: &ObjectTier, state: &mut State) -> Result<()> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| ChunkError::Io { action, path, source }
    };
    let here = heads_in(dir).map_err(io("read", dir))?;
    for name in behind.bucket.list()? {
        let Some(number) = number_of(&name).filter(|number| !here.contains(number)) else { continue };
        // A segment that is also on the disk is uploaded again.
        if !state.segments.contains_key(&number)
            && let Some(bytes) = behind.bucket.get(&name, None)?
        {
            tracing::warn!(segment = name, "added an unknown segment from the object store");
            let path = dir.join(heads_of(number));
            atomic_file::replace(&path, &heads(&bytes)).map_err(io("write", &path))?;
        }
    }
    for number in heads_in(dir).map_err(io("read", dir))? {
        insert(dir, number, state)?;
    }
    Ok(())
}

fn insert(dir: &Path, number: u32, state: &mut State) -> Result<()> {
    let path = dir.join(heads_of(number));
    let io = |action| {
        let path: PathBuf = path.clone();
        move |source| ChunkError::Io { action, path, source }
    };
    let bytes = fs::read(&path).map_err(io("read"))?;
    let found = slots(number, &bytes, Instant::now());
    let (found, length) = found.ok_or_else(|| io("parse")(io::ErrorKind::InvalidData.into()))?;
    if state.segments.remove(&number).is_some() {
        // The segment was uploaded, but the process ended before it removed the file.
        fs::remove_file(dir.join(name_of(number))).map_err(io("remove"))?;
        state.index.retain(|_, slot| slot.segment != number);
    }
    state.segments.insert(number, Segment { file: None, length, live: 0 });
    for (digest, slot) in found {
        // A later segment has a copy from compacting this one, whose object may be gone.
        if state.index.get(&digest).is_some_and(|known| known.segment > number) {
            continue;
        }
        if let Some(old) = state.index.insert(digest, slot) {
            release(state, &old);
        }
        if let Some(segment) = state.segments.get_mut(&number) {
            segment.live += RECORD as u64 + u64::from(slot.length);
        }
    }
    Ok(())
}

impl ChunkStore {
    /// Bytes of a segment in the object store; none if the object is missing or shorter.
    pub(super) fn read_remote(&self, slot: &ChunkSlot) -> Result<Option<Bytes>> {
        let Some(behind) = &self.object_tier else { return Ok(None) };
        let range = slot.offset..slot.offset + u64::from(slot.length);
        let length = self.state().segments.get(&slot.segment).map_or(range.end, |segment| segment.length);
        let name = name_of(slot.segment);
        let get = |range| behind.bucket.get(&name, Some(range));
        Ok(self.readahead.read((slot.segment, length), range, get)?)
    }

    /// Binds the prefix of the object store to a pool, so that its segments never enter another one.
    pub fn bind_tier(&self, pool: u64) -> Result<()> {
        Ok(self.object_tier.as_ref().map_or(Ok(()), |behind| behind.set_pool(pool))?)
    }

    /// Pool of the segments in the object store, if it is known.
    pub fn tier_pool(&self) -> Option<u64> {
        self.object_tier.as_ref()?.pool()
    }

    /// Uploads full segments until at most `keep_here` bytes of them are on the disk.
    pub fn offload(&self) -> Result<()> {
        let Some(behind) = &self.object_tier else { return Ok(()) };
        let _one = lock(&self.offloading);
        loop {
            let oldest = {
                let state = self.state();
                let newest = state.segments.last_key_value().map(|(number, _)| *number);
                let full =
                    |(number, segment): &(&u32, &Segment)| segment.file.is_some() && Some(**number) != newest;
                let here: u64 = state.segments.iter().filter(full).map(|(_, segment)| segment.length).sum();
                let oldest = state.segments.iter().find(full).filter(|_| here > behind.keep_local);
                oldest.and_then(|(number, segment)| Some((*number, segment.file.clone()?, segment.length)))
            };
            let Some((number, file, length)) = oldest else { return Ok(()) };
            let mut bytes = vec![0; length as usize];
            file.read_exact_at(&mut bytes, 0).map_err(|error| self.failed("read", number)(error))?;
            self.upload(behind, number, bytes)?;
        }
    }

    fn upload(&self, behind: &ObjectTier, number: u32, bytes: Vec<u8>) -> Result<()> {
        let found = heads(&bytes);
        behind.check_owner()?;
        behind.bucket.put(&name_of(number), bytes.into())?;
        let path = self.dir.join(heads_of(number));
        atomic_file::replace(&path, &found).map_err(|error| self.failed("write", number)(error))?;
        if let Some(segment) = self.state().segments.get_mut(&number) {
            segment.file = None;
        }
        segment_heads::remove(&self.dir, number);
        // Readers have the file open.
        fs::remove_file(self.dir.join(name_of(number))).map_err(|error| self.failed("remove", number)(error))
    }

    /// Removes a segment without chunks.
    pub(super) fn remove_remote(&self, number: u32) -> Result<()> {
        let Some(behind) = &self.object_tier else { return Ok(()) };
        behind.check_owner()?;
        // The object first, because an object without heads would be added again.
        behind.bucket.delete(&name_of(number))?;
        fs::remove_file(self.dir.join(heads_of(number))).map_err(|error| self.failed("remove", number)(error))
    }

    /// Whether more full segments wait for upload than may stay on the disk.
    pub(super) fn must_offload(&self) -> bool {
        let Some(behind) = &self.object_tier else { return false };
        let state = self.state();
        let here = state.segments.values().filter(|segment| segment.file.is_some());
        // The growing segment cannot be uploaded yet.
        here.map(|segment| segment.length).sum::<u64>() > behind.keep_local + REMOTE_SEGMENT
    }
}
