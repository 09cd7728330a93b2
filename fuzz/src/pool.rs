//! Pools: maps of versions, lists of chunks from the wire, frames of chunks, policies.

use whimbrel_core::Digest;
use whimbrel_image::pack_frame::{Encoder, Kind};
use whimbrel_pool::{
    backup,
    benefactor::open_frame,
    chunk_map::{self, ChunkRef},
    protocol::{
        LocatedChunk, MAX_CHUNK, WrittenChunk, get_aged, get_located, get_written, put_aged, put_located,
        put_written,
    },
};

/// The first byte says which parser; the rest is for it.
pub fn pool(data: &[u8]) {
    let Some((which, rest)) = data.split_first() else { return };
    match which % 6 {
        0 => {
            let Ok(pieces) = chunk_map::decode(rest) else { return };
            assert_eq!(
                chunk_map::decode(&chunk_map::encode(&pieces)),
                Ok(pieces),
                "a map survives being written"
            );
        }
        1 => {
            let Some(chunks) = get_written(rest) else { return };
            assert!(chunks.iter().all(|chunk| chunk.length as usize <= MAX_CHUNK));
            assert_eq!(get_written(&put_written(&chunks)), Some(chunks));
        }
        2 => {
            let Some(chunks) = get_located(rest) else { return };
            assert_eq!(get_located(&put_located(&chunks)), Some(chunks));
        }
        3 => {
            let Some(chunks) = get_aged(rest) else { return };
            assert_eq!(put_aged(&chunks), rest);
        }
        4 => {
            // Whatever it is: bounded, and refused unless it is whole.
            let _ = backup::verify(rest, None);
        }
        _ => {
            let Some((digest, frame)) = rest.split_first_chunk::<32>() else { return };
            let digest = Digest(*digest);
            let Ok(raw) = open_frame(&digest, frame) else { return };
            assert!(raw.len() <= MAX_CHUNK && Digest::of(&raw) == digest, "what is opened is what was named");
        }
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let digest = Digest::of(b"chunk");
    let pieces = [
        ChunkRef { chunk: 7, length: 4096, encrypted: false, digest: None },
        ChunkRef { chunk: 8, length: 100_000, encrypted: true, digest: None },
        ChunkRef { chunk: 3, length: 1, encrypted: false, digest: None },
    ];
    let written = WrittenChunk { digest, length: 5, stored: 40, places: vec![1, 2] };
    let mut frame = digest.0.to_vec();
    frame.extend(Encoder::new(1).encode(Kind::Blob, b"chunk", &[5]).unwrap_or_default());
    let all = [
        chunk_map::encode(&pieces),
        put_written(&[written]).to_vec(),
        put_located(&[LocatedChunk { digest, places: vec![3] }]).to_vec(),
        put_aged(&[(digest, 60)]).to_vec(),
        empty_backup(),
        frame,
    ];
    all.into_iter().enumerate().map(|(which, bytes)| [vec![which as u8], bytes].concat()).collect()
}

/// A backup without records.
fn empty_backup() -> Vec<u8> {
    let mut bytes = b"WHPB\x01".to_vec();
    bytes.resize(28, 0);
    let digest = Digest::of(&bytes);
    [bytes, digest.0.to_vec()].concat()
}
