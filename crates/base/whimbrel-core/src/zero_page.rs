//! Zero page test. Most pages of an idle machine are zero, so it must run at memory bandwidth.

/// Whether every byte of `bytes` is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // ORing 128 bytes without a branch lets the compiler emit vector instructions. The exit between blocks
    // means that a used page costs one block.
    let mut blocks = bytes.chunks_exact(128);
    blocks.by_ref().all(|block| block.iter().fold(0, |or, byte| or | byte) == 0)
        && blocks.remainder().iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_set_bit_anywhere_is_seen() {
        for len in [0, 1, 127, 128, 129, 4096] {
            let mut page = vec![0; len];
            assert!(is_zero(&page));
            for at in 0..len {
                page[at] = 1;
                assert!(!is_zero(&page), "byte {at} of {len}");
                page[at] = 0;
            }
        }
    }
}
