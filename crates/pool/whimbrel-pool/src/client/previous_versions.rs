//! Previous versions written by this client: the next of a file or series (`A.Ni.Tj`) shares their chunks.
//!
//! These chunks need no queries. This is only an optimisation: before a session uses a version, it asks the
//! manager which of its chunks still exist, and the session then protects these. The list is in memory and
//! bounded; the oldest entry is dropped first.

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

/// Most series, and most chunks of all of them: about 16 MiB.
const SERIES: usize = 64;
const CHUNKS: usize = 1 << 18;
/// Fewest chunks of a listed version; below, it would save only one query.
const CHUNKS_MIN: usize = 32;

#[derive(Debug)]
pub(super) struct KnownVersion {
    pub(super) version: u64,
    /// Number of chunks in its map, with repetitions.
    pub(super) pieces: usize,
    chunks: HashMap<Digest, (usize, ChunkId)>,
}

impl KnownVersion {
    /// The chunks that can be reused, given a bit for each position of the map.
    pub(super) fn reusable(&self, stands: &[bool]) -> HashMap<Digest, ChunkId> {
        let stands = |at: &usize| stands.get(*at) == Some(&true);
        let standing = self.chunks.iter().filter(|(_, (at, _))| stands(at));
        standing.map(|(digest, (_, chunk))| (*digest, *chunk)).collect()
    }
}

/// Folder and name of a file, or of a series without its timestep.
type Key = (NodeId, String);

fn key(make: &NewNode) -> Key {
    (make.parent, timestep(&make.name).map_or(&*make.name, |step| step.series).to_owned())
}

/// The versions written last, oldest first.
#[derive(Debug, Default)]
pub(super) struct PreviousVersions {
    known: Mutex<VecDeque<(Key, Arc<KnownVersion>)>>,
}

impl PreviousVersions {
    fn known(&self) -> MutexGuard<'_, VecDeque<(Key, Arc<KnownVersion>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The version with which a new version of this file probably shares chunks.
    pub(super) fn find(&self, make: &NewNode) -> Option<Arc<KnownVersion>> {
        let key = key(make);
        self.known().iter().find(|(known, _)| *known == key).map(|(_, before)| before.clone())
    }

    pub(super) fn record(&self, make: &NewNode, version: u64, pieces: &[ChunkRef], session: &WriteSession) {
        let key = key(make);
        self.known().retain(|(known, _)| *known != key);
        if !(CHUNKS_MIN..=CHUNKS).contains(&pieces.len()) {
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
