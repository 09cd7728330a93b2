//! What this client wrote last of a file, or of a series of timesteps (`A.Ni.Tj`): the next one has much of
//! it, and what it has need not be asked for chunk by chunk.
//!
//! Only a help. Whoever builds on a version asks the manager first whether it is still there and which of its
//! chunks stand, in a session that keeps them from then on. It is in memory and bounded; what was not written
//! for longest goes first.

use super::write_session::WriteSession;
use crate::{
    chunk_map::ChunkRef,
    policy::timestep,
    protocol::{ChunkId, NewNode, NodeId},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use whimbrel_core::Digest;

/// Series that are remembered, and chunks of all of them: some sixteen megabytes.
const SERIES: usize = 64;
const CHUNKS: usize = 1 << 18;
/// Of a file with fewer chunks one question is all there is to save.
const WORTH: usize = 32;

/// A version of which it is known what it holds.
#[derive(Debug)]
pub(super) struct KnownVersion {
    pub(super) version: u64,
    /// Chunks of its map, each as often as it is in it.
    pub(super) pieces: usize,
    /// Where a chunk is in the map, and its number.
    chunks: HashMap<Digest, (usize, ChunkId)>,
}

impl KnownVersion {
    /// The chunks that stand, by what is said of each place of the map.
    pub(super) fn standing(&self, stands: &[bool]) -> HashMap<Digest, ChunkId> {
        let stands = |at: &usize| stands.get(*at) == Some(&true);
        let standing = self.chunks.iter().filter(|(_, (at, _))| stands(at));
        standing.map(|(digest, (_, chunk))| (*digest, *chunk)).collect()
    }
}

/// The folder, and what all timesteps of a name have in common.
type Key = (NodeId, String);

fn key(make: &NewNode) -> Key {
    (make.parent, timestep(&make.name).map_or(&*make.name, |step| step.series).to_owned())
}

/// What was written last, the oldest first.
#[derive(Debug, Default)]
pub(super) struct PreviousVersions {
    known: Mutex<VecDeque<(Key, Arc<KnownVersion>)>>,
}

impl PreviousVersions {
    fn known(&self) -> MutexGuard<'_, VecDeque<(Key, Arc<KnownVersion>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a new version of this file is likely to share.
    pub(super) fn before(&self, make: &NewNode) -> Option<Arc<KnownVersion>> {
        let key = key(make);
        self.known().iter().find(|(known, _)| *known == key).map(|(_, before)| before.clone())
    }

    /// Remembers what a session made a version.
    pub(super) fn wrote(&self, make: &NewNode, version: u64, pieces: &[ChunkRef], session: &WriteSession) {
        let key = key(make);
        self.known().retain(|(known, _)| *known != key);
        if !(WORTH..=CHUNKS).contains(&pieces.len()) {
            return;
        }
        let places: HashMap<ChunkId, usize> =
            pieces.iter().enumerate().map(|(at, piece)| (piece.chunk, at)).collect();
        let place = |(digest, chunk): (&Digest, &ChunkId)| Some((*digest, (*places.get(chunk)?, *chunk)));
        let chunks = session.with_numbers(|numbers| numbers.iter().filter_map(place).collect());
        let mut known = self.known();
        known.push_back((key, Arc::new(KnownVersion { version, pieces: pieces.len(), chunks })));
        let too_many = |known: &VecDeque<(Key, Arc<KnownVersion>)>| {
            known.len() > SERIES || known.iter().map(|(_, before)| before.pieces).sum::<usize>() > CHUNKS
        };
        while too_many(&known) {
            known.pop_front();
        }
    }
}
