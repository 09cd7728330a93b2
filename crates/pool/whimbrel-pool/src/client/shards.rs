//! Reading chunks that are kept in pieces: as many pieces as the chunk has of data, from any benefactors.
//!
//! Those of data come first, because they need no computation. A piece that cannot be read is replaced by
//! the next; a damaged or missing one is reported and made again. What comes out is compared with the
//! digest of the chunk, so nobody is believed about pieces.

use super::{Pool, PoolError, Result};
use crate::{
    benefactor::open_frame,
    erasure,
    protocol::{
        ChunkId, CodedChunk, CodedPiece, Fault, GetChunk, LocatePieces, MAX_BATCH, code, put_numbers,
    },
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
    ) -> Result<Option<Vec<u8>>> {
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
                reads.spawn(async move { pool.fetch_piece(&piece).await });
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
        Ok(Some(bytes))
    }

    /// Reads one piece from a benefactor that has it; the error of the last one if none gives it.
    async fn fetch_piece(&self, piece: &CodedPiece) -> std::result::Result<Vec<u8>, Option<PoolError>> {
        let mut because = None;
        for id in &piece.places {
            let Some(place) = self.place(*id) else { continue };
            let wrong = match self.call_benefactor::<GetChunk>(&place, &piece.digest, Bytes::new()).await {
                Ok((_, frame)) => match open_frame(&piece.digest, &frame) {
                    Ok(bytes) => return Ok(bytes),
                    Err(_) => true,
                },
                Err(error) => {
                    let code = error.code();
                    because = Some(error);
                    match code {
                        Some(code::DAMAGED) => true,
                        Some(Code::NOT_FOUND) => false,
                        // The benefactor was not reached, so its piece may be intact.
                        _ => continue,
                    }
                }
            };
            self.report_fault(Fault { chunk: piece.chunk, benefactor: *id, wrong });
        }
        Err(because)
    }
}
