//! `erasure`: how fast chunks are cut into pieces, and put together again when some are lost, by one core.

use super::{Context, noise};
use crate::harness::{Goal, Row, Samples};
use anyhow::{Result, ensure};
use std::time::Instant;
use whimbrel_core::Digest;
use whimbrel_pool::erasure::{PieceCounts, decode, encode};

/// Bytes of all chunks of a measurement.
const TOTAL: usize = 512 << 20;
/// A chunk of the paper's size. The goal is about these; smaller ones have the fixed cost of a decoder.
const LARGE: usize = 1 << 20;

/// Gigabytes a second: making the pieces, and decoding with as many of the data lost as may be.
fn rates(counts: PieceCounts, size: usize, times: usize) -> Result<[Samples; 2]> {
    let chunks: Vec<Vec<u8>> = (1..=8).map(|seed| noise(size, seed)).collect();
    let digests: Vec<Digest> = chunks.iter().map(|chunk| Digest::of(chunk)).collect();
    let pieces: Vec<Vec<Vec<u8>>> = chunks
        .iter()
        .zip(&digests)
        .map(|(chunk, digest)| encode(digest, chunk, counts))
        .collect::<Result<_, _>>()?;
    let (lost, rounds) = (usize::from(counts.parity), TOTAL / size / chunks.len());
    let rate = |begun: Instant| (rounds * chunks.len() * size) as f64 / 1e9 / begun.elapsed().as_secs_f64();
    let (mut made, mut read) = (Vec::new(), Vec::new());
    for _ in 0..times {
        let begun = Instant::now();
        for _ in 0..rounds {
            for (chunk, digest) in chunks.iter().zip(&digests) {
                ensure!(encode(digest, chunk, counts)?.len() > lost, "pieces are missing");
            }
        }
        made.push(rate(begun));
        let begun = Instant::now();
        for _ in 0..rounds {
            for ((chunk, digest), pieces) in chunks.iter().zip(&digests).zip(&pieces) {
                let found = decode(digest, &pieces[lost..])?;
                ensure!(found.len() == chunk.len() && found[..64] == chunk[..64], "another chunk came back");
            }
        }
        read.push(rate(begun));
    }
    Ok([Samples::new(made), Samples::new(read)])
}

/// Rates for pieces as people will choose them.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (data, parity, size) in [(4, 2, LARGE), (4, 2, 256 << 10), (8, 3, LARGE)] {
        let [made, read] = rates(PieceCounts { data, parity }, size, context.times(5, 3))?;
        let kib = size >> 10;
        let cases = [
            (format!("encode, {data}+{parity}, chunks of {kib} KiB, one core"), made),
            (format!("decode with {parity} lost, {data}+{parity}, chunks of {kib} KiB, one core"), read),
        ];
        for (case, samples) in cases {
            let row = Row::new("erasure", case, "GB/s", &samples);
            let wanted = (data, size) == (4, LARGE);
            rows.push(if wanted { row.goal(Goal::AtLeast(1.5)) } else { row });
        }
    }
    Ok(rows)
}
