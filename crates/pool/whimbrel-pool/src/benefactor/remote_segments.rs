//! Segments that lie in an object store instead of the disk: how they go there, how they are found again.
//!
//! A segment that is full is synced, uploaded whole as `NNNNNNNN.seg`, its heads are written down in
//! `NNNNNNNN.far` beside the others, and only then is the local file removed: at every instant one of the two
//! places has it. An object without heads here (a disk that was lost, a crash between the two steps) is read
//! through and taken in when the store is opened. A segment of which too little is left is emptied as any
//! other, and its object removed before its heads.

use super::{
    bucket::Bucket,
    chunk_store::{ChunkSlot, ChunkStore, Segment, State, name_of, number_of, release},
    error::{ChunkError, Result},
    segment::{self, RECORD},
};
use bytes::Bytes;
use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::PoisonError,
    time::Instant,
};
use whimbrel_wire::atomic_file;

/// A segment is closed at this size where it travels: chunks that are read alone are read by range.
pub(super) const PACK: u64 = 8 << 20;
/// The file with the number that the prefix in the object store is owned by.
const OWNER: &str = "owner";

/// An object store behind a [`ChunkStore`].
#[derive(Debug)]
pub struct ObjectTier {
    /// Which.
    pub tier: Bucket,
    /// Bytes of full segments that stay on the disk; the oldest go first. With 0 all go.
    pub keep_here: u64,
}

fn heads_of(number: u32) -> String {
    format!("{number:08}.far")
}

fn number_of_heads(name: &str) -> Option<u32> {
    name.strip_suffix(".far").filter(|digits| digits.len() == 8)?.parse().ok()
}

/// Numbers of the segments whose heads are in a folder.
pub(super) fn heads_in(dir: &Path) -> io::Result<BTreeSet<u32>> {
    let mut numbers = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        numbers.extend(entry?.file_name().to_str().and_then(number_of_heads));
    }
    Ok(numbers)
}

/// Chunks of a segment by its heads, each with where its frame lies, and the length of the segment.
fn slots(
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

/// The heads of the records of a segment, up to the first that is torn.
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

/// Takes over what the object store has and enters it into the index.
pub(super) fn load(dir: &Path, behind: &ObjectTier, state: &mut State) -> Result<()> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| ChunkError::Io { action, path, source }
    };
    let path = dir.join(OWNER);
    let known = match fs::read_to_string(&path) {
        Ok(text) => u64::from_str_radix(text.trim(), 16).ok(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(io("read", &path)(error)),
    };
    let owner = behind.tier.own(known)?;
    if known != Some(owner) {
        atomic_file::replace(&path, format!("{owner:016x}\n").as_bytes()).map_err(io("write", &path))?;
    }
    let here = heads_in(dir).map_err(io("read", dir))?;
    for name in behind.tier.list()? {
        let Some(number) = number_of(&name).filter(|number| !here.contains(number)) else { continue };
        // One that is still here is uploaded again.
        if !state.segments.contains_key(&number)
            && let Some(bytes) = behind.tier.get(&name, None)?
        {
            tracing::warn!(segment = name, "found in the object store, unknown here");
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
    let (found, length) = found.ok_or_else(|| io("understand")(io::ErrorKind::InvalidData.into()))?;
    if state.segments.remove(&number).is_some() {
        // It was uploaded, and the process ended before it removed the file.
        fs::remove_file(dir.join(name_of(number))).map_err(io("remove"))?;
        state.index.retain(|_, slot| slot.segment != number);
    }
    state.segments.insert(number, Segment { file: None, length, live: 0 });
    for (digest, slot) in found {
        // What was copied out of a segment that was being emptied is in a later one; of this one the object
        // may be gone.
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
    /// Bytes of a segment in the object store; an object that is gone or shorter has none.
    pub(super) fn read_far(&self, slot: &ChunkSlot) -> Result<Option<Bytes>> {
        let Some(behind) = &self.behind else { return Ok(None) };
        let range = slot.offset..slot.offset + u64::from(slot.length);
        let length = self.state().segments.get(&slot.segment).map_or(range.end, |segment| segment.length);
        let name = name_of(slot.segment);
        let get = |range| behind.tier.get(&name, Some(range));
        Ok(self.ahead.read((slot.segment, length), range, get)?)
    }

    /// Uploads full segments until no more than should be are here.
    pub fn offload(&self) -> Result<()> {
        let Some(behind) = &self.behind else { return Ok(()) };
        let _one = self.offloading.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let oldest = {
                let state = self.state();
                let newest = state.segments.last_key_value().map(|(number, _)| *number);
                let full =
                    |(number, segment): &(&u32, &Segment)| segment.file.is_some() && Some(**number) != newest;
                let here: u64 = state.segments.iter().filter(full).map(|(_, segment)| segment.length).sum();
                let oldest = state.segments.iter().find(full).filter(|_| here > behind.keep_here);
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
        behind.tier.put(&name_of(number), bytes.into())?;
        let path = self.dir.join(heads_of(number));
        atomic_file::replace(&path, &found).map_err(|error| self.failed("write", number)(error))?;
        if let Some(segment) = self.state().segments.get_mut(&number) {
            segment.file = None;
        }
        // Whoever reads from it has it open.
        fs::remove_file(self.dir.join(name_of(number))).map_err(|error| self.failed("remove", number)(error))
    }

    /// Removes a segment of which nothing is left.
    pub(super) fn remove_far(&self, number: u32) -> Result<()> {
        let Some(behind) = &self.behind else { return Ok(()) };
        // In this order: an object without heads would be taken in again.
        behind.tier.delete(&name_of(number))?;
        fs::remove_file(self.dir.join(heads_of(number))).map_err(|error| self.failed("remove", number)(error))
    }

    /// Whether more waits for the object store than should.
    pub(super) fn is_behind(&self) -> bool {
        let Some(behind) = &self.behind else { return false };
        let state = self.state();
        let here = state.segments.values().filter(|segment| segment.file.is_some());
        // The one that grows is no backlog.
        here.map(|segment| segment.length).sum::<u64>() > behind.keep_here + PACK
    }
}
