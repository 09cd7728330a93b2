//! The sections of a piece: lengths first, then their bytes. See `docs/protocols/protect.md`.

/// Sections of a piece.
pub(super) const SECTIONS: usize = 11;

/// Which section is which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Section {
    /// Of each page its distance from the one before and how it travels.
    Pages = 0,
    /// Of each page in blocks, or named, the digest of all of it.
    Checks = 1,
    /// Of each page in blocks which of them are here.
    Masks = 2,
    /// Of each block, in the order of the pages, how it travels.
    Kinds = 3,
    /// Of each shared block how many blocks ago it was.
    Shared = 4,
    /// Blocks of few nonzero bytes.
    Sparse = 5,
    /// The four streams of blocks of similar words, with lengths of their own in front.
    Words = 6,
    /// Bytes of all other blocks, before they were compressed.
    RawLength = 7,
    /// All other blocks.
    Raw = 8,
    /// How they are compressed.
    RawCode = 9,
    /// Names of pages that the standby has.
    Names = 10,
}

/// All other blocks as they are.
pub(super) const RAW_PLAIN: u8 = 0;
/// As one zstd frame.
pub(super) const RAW_ZSTD: u8 = 1;
/// As one gzip member.
pub(super) const RAW_GZIP: u8 = 2;

/// Something about a piece is not as a sound primary would send it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a piece of an epoch is damaged: {what}")]
pub struct DamagedEpochPages {
    /// What was found.
    pub what: &'static str,
}

/// Puts sections one after the other.
pub(super) fn join(parts: [&[u8]; SECTIONS]) -> Vec<u8> {
    let mut out = Vec::with_capacity(SECTIONS * 4 + parts.iter().map(|part| part.len()).sum::<usize>());
    parts.iter().for_each(|part| out.extend((part.len() as u32).to_le_bytes()));
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}

/// Takes them apart again.
pub(super) fn split(bytes: &[u8]) -> Result<[&[u8]; SECTIONS], DamagedEpochPages> {
    split_n::<SECTIONS>(bytes)
}

/// Takes `N` parts apart, whose lengths stand in front.
pub(super) fn split_n<const N: usize>(bytes: &[u8]) -> Result<[&[u8]; N], DamagedEpochPages> {
    let cut = DamagedEpochPages { what: "it is cut off" };
    let (lengths, mut rest) = bytes.split_at_checked(N * 4).ok_or(cut)?;
    let mut parts = [&[][..]; N];
    for (part, length) in parts.iter_mut().zip(lengths.as_chunks::<4>().0) {
        (*part, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or(cut)?;
    }
    if rest.is_empty() { Ok(parts) } else { Err(DamagedEpochPages { what: "something follows it" }) }
}

/// Appends a number, seven bits a byte, the lowest first.
pub(super) fn push_number(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Reads a number from the beginning of `bytes`, and leaves the rest there.
pub(super) fn pull_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}
