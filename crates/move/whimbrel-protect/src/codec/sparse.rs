//! Sparse code of a block of mostly zeros: the count of nonzero bytes, then offset and value of each (the
//! paper's section 3.2, kind 1).
//!
//! An offset takes one byte in blocks of up to 256 bytes and two in a page. The code is used if it takes at
//! most a third of the block; the loop over the block counts the bytes anyway.

/// Bytes of an offset in a block of `block` bytes.
const fn offset_bytes(block: usize) -> usize {
    if block <= 256 { 1 } else { 2 }
}

/// Appends `block` to `out` if that saves space. Returns whether it did.
pub fn encode(block: &[u8], out: &mut Vec<u8>) -> bool {
    let entry = offset_bytes(block.len()) + 1;
    let most = block.len() / 3 / entry;
    let nonzero = block.iter().filter(|byte| **byte != 0).count();
    // The count takes two bytes.
    if nonzero > most {
        return false;
    }
    out.extend((nonzero as u16).to_le_bytes());
    for (offset, byte) in block.iter().enumerate().filter(|(_, byte)| **byte != 0) {
        out.extend(&(offset as u16).to_le_bytes()[..offset_bytes(block.len())]);
        out.push(*byte);
    }
    true
}

/// Decodes a block of `block.len()` bytes from the start of `bytes`. Returns the rest of `bytes`, none if it
/// is damaged.
pub fn decode<'a>(bytes: &'a [u8], block: &mut [u8]) -> Option<&'a [u8]> {
    let (count, mut rest) = bytes.split_first_chunk::<2>()?;
    block.fill(0);
    for _ in 0..u16::from_le_bytes(*count) {
        let (entry, after) = rest.split_at_checked(offset_bytes(block.len()) + 1)?;
        let (value, offset) = entry.split_last()?;
        let offset = offset.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte));
        *block.get_mut(offset)? = *value;
        rest = after;
    }
    Some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_block_of_few_values_comes_back_and_is_smaller(
            size in prop::sample::select(vec![64usize, 128, 256, 4096]),
            values in prop::collection::btree_map(any::<u16>(), 1..=255u8, 0..10), tail: Vec<u8>,
        ) {
            let mut block = vec![0; size];
            values.iter().for_each(|(at, value)| block[usize::from(*at) % size] = *value);
            let mut out = Vec::new();
            prop_assert!(encode(&block, &mut out));
            prop_assert!(out.len() <= size / 3 + 2);
            out.extend(&tail);
            let mut back = vec![9; size];
            prop_assert_eq!(decode(&out, &mut back), Some(&tail[..]));
            prop_assert_eq!(back, block);
        }

        #[test]
        fn garbage_is_refused_or_read_but_never_more_than_there_is(bytes: Vec<u8>) {
            let _ = decode(&bytes, &mut [0; 64]);
        }
    }

    #[test]
    fn a_full_block_is_left_to_others() {
        let mut out = Vec::new();
        assert!(!encode(&[1; 64], &mut out) && out.is_empty());
    }
}
