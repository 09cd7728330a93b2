//! Reading chunks that are kept in pieces: as many pieces as the chunk has of data, from any benefactors.
//!
//! Those of data come first, because they need no computation. A piece that cannot be read is replaced by
//! the next; a damaged or missing one is reported and made again. What comes out is compared with the
//! digest of the chunk, so nobody is believed about pieces.

use super::{Pool, PoolError, Result};
use crate::{
    benefactor::open_frame,
    erasure,
    protocol::{ChunkId, CodedChunk, LocatePieces, MAX_BATCH, put_numbers},
};
use bytes::Bytes;
use tokio::task::JoinSet;
use whimbrel_core::{Digest, lock};
use whimbrel_wire::Code;

/// Most cached chunks with the places of their pieces; above, all are dropped.
const CODED: usize = 50_000;

impl Pool {
    /// Finds the pieces of chunks, of those that are unknown, or of all if `anew`.
    pub(super) async fn locate_pieces(&self, chunks: &[ChunkId], anew: bool) -> Result<()> {
        let unknown: Vec<ChunkId> = {
            let state = lock(&self.inner.cache.state);
            chunks.iter().copied().filter(|chunk| anew || !state.coded.contains_key(chunk)).collect()
        };
        for batch in unknown.chunks(MAX_BATCH) {
            let asked = self.call_manager::<LocatePieces>(&(), put_numbers(batch.iter().copied())).await;
            let (places, payload) = match asked {
                // A manager of an earlier version, which keeps no chunks in pieces.
                Err(error) if error.code() == Some(Code::UNKNOWN_KIND) => return Ok(()),
                asked => asked?,
            };
            self.record_addresses(&places);
            let found: Vec<CodedChunk> =
                postcard::from_bytes(&payload).map_err(|_| PoolError::Answer { what: "list of pieces" })?;
            let mut state = lock(&self.inner.cache.state);
            if state.coded.len() > CODED {
                state.coded.clear();
            }
            state.coded.extend(found.into_iter().map(|coded| (coded.chunk, coded)));
        }
        Ok(())
    }

    /// Reads a chunk from its pieces; none if it is not kept so.
    pub(super) async fn fetch_pieces(
        &self,
        chunk: ChunkId,
        digest: &Digest,
        anew: bool,
    ) -> Result<Option<Bytes>> {
        self.locate_pieces(&[chunk], anew).await?;
        let Some(coded) = lock(&self.inner.cache.state).coded.get(&chunk).cloned() else { return Ok(None) };
        let needed = usize::from(coded.counts.data);
        let (mut rest, mut reads, mut parts) = (coded.pieces.into_iter(), JoinSet::new(), Vec::new());
        let mut because = None;
        while parts.len() < needed {
            while parts.len() + reads.len() < needed
                && let Some(piece) = rest.next()
            {
                let pool = self.clone();
                reads.spawn(async move { pool.fetch_from(piece.chunk, &piece.digest, &piece.places).await });
            }
            match reads.join_next().await {
                Some(Ok(Ok(part))) => parts.push(part),
                Some(Ok(Err(error))) => because = error.or(because),
                Some(Err(_)) => {}
                None => {
                    return Err(PoolError::TooFewPieces {
                        chunk,
                        found: parts.len(),
                        needed,
                        because: because.map(std::sync::Arc::new),
                    });
                }
            }
        }
        let frame =
            erasure::decode(digest, &parts).map_err(|_| PoolError::Answer { what: "piece of a chunk" })?;
        let bytes = open_frame(digest, &frame).map_err(|_| PoolError::Answer { what: "piece of a chunk" })?;
        Ok(Some(bytes.into()))
    }
}
