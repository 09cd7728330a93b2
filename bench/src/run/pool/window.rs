//! CbCH chunking of the paper (IV.C), to compare with: a window of m bytes advances by p; a boundary is where
//! its hash has k zero bits.
//!
//! The paper does not name the hash. Ours is a rolling polynomial over the bytes if the window advances by
//! one byte (the paper's overlap, which reached 1.1 MB/s there), and xxh3 of the window otherwise.

use whimbrel_pool::chunk::Chunking;
use xxhash_rust::xxh3::xxh3_64;

/// A way to cut: the length of the chunk at the start of the data.
pub(super) type Cut = Box<dyn Fn(&[u8]) -> usize>;

/// The pool's own way.
pub(super) fn ours(way: Chunking) -> Cut {
    Box::new(move |data| way.cut(data))
}

/// The paper's way, in chunks of at most 4 MiB.
pub(super) fn paper(window: usize, bits: u8, advance: usize) -> Cut {
    Box::new(move |data| cut(&data[..data.len().min(4 << 20)], window, bits, advance))
}

/// Base of the polynomial: odd, with powers that spread over all bits.
const BASE: u64 = 0x9e37_79b9_7f4a_7c55;

fn cut(data: &[u8], window: usize, bits: u8, advance: usize) -> usize {
    if data.len() <= window {
        return data.len();
    }
    if advance == 1 {
        return roll(data, window, bits);
    }
    let mask = (1_u64 << bits) - 1;
    let ends = (window..=data.len()).step_by(advance);
    ends.into_iter().find(|end| xxh3_64(&data[end - window..*end]) & mask == 0).unwrap_or(data.len())
}

fn roll(data: &[u8], window: usize, bits: u8) -> usize {
    let add = |hash: u64, byte: u8| hash.wrapping_mul(BASE).wrapping_add(u64::from(byte) + 1);
    let gone = (0..window).fold(1_u64, |power, _| power.wrapping_mul(BASE));
    let mut hash = data[..window].iter().fold(0, |hash, byte| add(hash, *byte));
    // The upper bits of a polynomial hash depend on all bytes, the lower ones on the last few.
    let zero = 64 - u32::from(bits);
    for end in window..data.len() {
        if hash >> zero == 0 {
            return end;
        }
        hash = add(hash, data[end]).wrapping_sub(gone.wrapping_mul(u64::from(data[end - window]) + 1));
    }
    data.len()
}
