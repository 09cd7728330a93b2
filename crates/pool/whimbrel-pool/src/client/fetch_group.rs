//! Chunks that are fetched before a reader waits for them: several with one request.
//!
//! The chunks of a range are grouped by the benefactor that each is read from, about a MiB a request. A
//! reader that needs one meanwhile waits for the group. What a group does not bring is fetched alone, with
//! all its copies, and a benefactor of an earlier version answers single requests only.

use super::{Pool, read_file::Cell};
use crate::{
    benefactor::open_shared,
    chunk_map::ChunkRef,
    protocol::{BenefactorId, ChunkId, GetChunks, MAX_BATCH, put_digests},
};
use bytes::Bytes;
use std::collections::BTreeMap;
use tokio::sync::oneshot;
use whimbrel_core::{Digest, lock};

/// Bytes of chunks in one request, before compression.
const GROUP: u64 = 1 << 20;

/// A chunk that a reader may wait for.
struct Wanted {
    piece: ChunkRef,
    digest: Digest,
    bytes: oneshot::Sender<Bytes>,
}

impl Pool {
    /// Fetches those of the chunks that nobody has asked for yet.
    pub(super) fn fetch_ahead(&self, pieces: &[ChunkRef]) {
        let mut wanted = Vec::new();
        for piece in pieces {
            let (cell, known) = self.inner.cache.cell(piece);
            if !known {
                let (bytes, arrived) = oneshot::channel();
                wanted.push((*piece, bytes));
                self.inner.runtime.spawn(fill(self.clone(), cell, *piece, arrived));
            }
        }
        if !wanted.is_empty() {
            let pool = self.clone();
            self.inner.runtime.spawn(async move { pool.fetch_groups(wanted).await });
        }
    }

    async fn fetch_groups(&self, wanted: Vec<(ChunkRef, oneshot::Sender<Bytes>)>) {
        let chunks: Vec<_> = wanted.iter().map(|(piece, _)| piece.chunk).collect();
        // What is not located here is located when it is fetched alone, which reports the error.
        if self.locate(&chunks, false).await.is_err() {
            return;
        }
        let in_pieces: Vec<_> = {
            let located = &lock(&self.inner.cache.state).located;
            let has_no_copy =
                |chunk: &ChunkId| located.get(chunk).is_some_and(|found| found.places.is_empty());
            chunks.into_iter().filter(has_no_copy).collect()
        };
        // Each is fetched alone then.
        if self.locate_pieces(&in_pieces, false).await.is_err() {
            return;
        }
        let mut groups: BTreeMap<BenefactorId, Vec<Wanted>> = BTreeMap::new();
        for (piece, bytes) in wanted {
            let located = lock(&self.inner.cache.state).located.get(&piece.chunk).cloned();
            let Some(located) = located.filter(|located| !located.places.is_empty()) else { continue };
            if piece.digest.is_none_or(|sealed| sealed == located.digest) {
                let at = located.places[piece.chunk as usize % located.places.len()];
                groups.entry(at).or_default().push(Wanted { piece, digest: located.digest, bytes });
            }
        }
        for (at, wanted) in groups {
            for group in split(wanted) {
                let pool = self.clone();
                self.inner.runtime.spawn(async move { pool.fetch_group(at, group).await });
            }
        }
    }

    /// Fetches a group, as far as it is intact and the benefactor answers.
    async fn fetch_group(&self, at: BenefactorId, mut group: Vec<Wanted>) {
        let Some(place) = self.place(at) else { return };
        while !group.is_empty() {
            let digests = put_digests(group.iter().map(|wanted| &wanted.digest));
            let Ok((lengths, mut frames)) = self.call_benefactor::<GetChunks>(&place, &(), digests).await
            else {
                return;
            };
            let total: usize = lengths.iter().map(|length| *length as usize).sum();
            if lengths.is_empty() || lengths.len() > group.len() || total != frames.len() {
                return;
            }
            let rest = group.split_off(lengths.len());
            for (wanted, length) in group.into_iter().zip(lengths) {
                let frame: Bytes = frames.split_to(length as usize);
                // A wrong one is reported when it is fetched alone.
                if let Ok(bytes) = open_shared(&wanted.digest, &frame) {
                    let _ = wanted.bytes.send(bytes);
                }
            }
            group = rest;
        }
    }
}

/// Fills the cell of a chunk when its group has arrived, else by fetching it alone.
async fn fill(pool: Pool, cell: Cell, piece: ChunkRef, arrived: oneshot::Receiver<Bytes>) {
    let fetch = async || match arrived.await {
        Ok(bytes) => pool.decrypt(&piece, bytes),
        Err(_) => pool.fetch(&piece).await,
    };
    // A reader that needs the chunk fetches it again and gets the error.
    let _ = cell.get_or_try_init(fetch).await;
}

/// Splits chunks of one benefactor into requests.
fn split(wanted: Vec<Wanted>) -> Vec<Vec<Wanted>> {
    let (mut groups, mut bytes) = (Vec::<Vec<Wanted>>::new(), 0);
    for one in wanted {
        let length = u64::from(one.piece.length);
        match groups.last_mut().filter(|group| bytes + length <= GROUP && group.len() < MAX_BATCH) {
            Some(group) => group.push(one),
            None => {
                bytes = 0;
                groups.push(vec![one]);
            }
        }
        bytes += length;
    }
    groups
}
