//! FastCDC chunking: a gear hash over bytes; boundaries are rarer before the average length than after it.
//!
//! W. Xia et al., "The Design of Fast Content-Defined Chunking" (TPDS 2020): normalised chunking of level 2,
//! two bytes a step. The table is our own and never changes; it is derived with BLAKE3 from the text below.
//! The mask selects upper bits, which depend on the last 64 bytes.

use std::sync::LazyLock;

/// A random number for every byte, and the same numbers shifted for the first byte of a step.
struct Table {
    plain: [u64; 256],
    shifted: [u64; 256],
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut plain = [0; 256];
    for (byte, number) in plain.iter_mut().enumerate() {
        let digest = whimbrel_core::Digest::of(format!("whimbrel gear table 1 {byte}").as_bytes());
        *number = digest.prefix();
    }
    Table { plain, shifted: plain.map(|number| number << 1) }
});

/// Mask of `bits` upper bits without the topmost, so that it can be shifted by one.
fn mask(bits: u32) -> u64 {
    ((1 << bits) - 1) << (63 - bits)
}

/// Length of the chunk at the start of `data`, which holds four times `average` bytes or all that is left.
pub(super) fn cut(data: &[u8], average: usize) -> usize {
    let (least, middle) = (average / 4, average.min(data.len()));
    if data.len() <= least {
        return data.len();
    }
    let bits = average.ilog2();
    let (hash, found) = scan(&data[least..middle.max(least)], 0, mask(bits + 2));
    if let Some(at) = found {
        return least + at;
    }
    // Steps are two bytes: an odd byte of the first part starts the second.
    let from = least + (middle.max(least) - least) / 2 * 2;
    let (_, found) = scan(&data[from..], hash, mask(bits - 2));
    found.map_or(data.len(), |at| from + at)
}

/// The hash and the length up to the boundary, if there is one.
fn scan(data: &[u8], mut hash: u64, mask: u64) -> (u64, Option<usize>) {
    let table = &*TABLE;
    let early = mask << 1;
    let (pairs, _) = data.as_chunks::<2>();
    for (at, [first, second]) in pairs.iter().enumerate() {
        hash = (hash << 2).wrapping_add(table.shifted[usize::from(*first)]);
        if hash & early == 0 {
            return (hash, Some(at * 2 + 1));
        }
        hash = hash.wrapping_add(table.plain[usize::from(*second)]);
        if hash & mask == 0 {
            return (hash, Some(at * 2 + 2));
        }
    }
    (hash, None)
}
