//! Headers and answers of the calls about chunks that are kept in pieces.

use super::{BenefactorAddress, BenefactorId, ChunkId};
use crate::erasure::PieceCounts;
use serde::{Deserialize, Serialize};
use whimbrel_core::Digest;

/// A piece of a chunk, which is a chunk itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodedPiece {
    /// Number of the piece in its chunk, from 0; the first are those of data.
    pub number: u8,
    /// Number of the piece as a chunk.
    pub chunk: ChunkId,
    /// Digest of the piece.
    pub digest: Digest,
    /// Benefactors that have it.
    pub places: Vec<BenefactorId>,
}

/// A chunk that is kept in pieces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodedChunk {
    /// Number of the chunk.
    pub chunk: ChunkId,
    /// How many pieces it has.
    pub counts: PieceCounts,
    /// All its pieces, in the order in which they should be read.
    pub pieces: Vec<CodedPiece>,
}

/// An order to cut chunks into pieces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingOrder {
    /// How many pieces each gets.
    pub counts: PieceCounts,
    /// Benefactor that gets the order and has copies of the chunks.
    pub at: BenefactorId,
    /// A benefactor for each piece. Piece i of the chunk at position j goes to number (i + j) of them,
    /// counted in a circle.
    pub targets: Vec<BenefactorAddress>,
}

/// A piece that was made and stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadePiece {
    /// Digest of the piece.
    pub digest: Digest,
    /// Length in bytes.
    pub length: u32,
    /// Length in bytes as stored.
    pub stored: u32,
}

/// An order to make a lost piece again and store it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebuildOrder {
    /// Digest of the chunk.
    pub chunk: Digest,
    /// How many pieces it has.
    pub counts: PieceCounts,
    /// Number of the lost piece.
    pub number: u8,
    /// Digest of the lost piece.
    pub piece: Digest,
    /// Benefactor that gets the order.
    pub at: BenefactorId,
    /// Other pieces, as many as the chunk has of data, each with a benefactor that has it.
    pub sources: Vec<(Digest, BenefactorAddress)>,
}
