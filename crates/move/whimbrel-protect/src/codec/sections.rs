//! Sections of a batch of pages: first their lengths, then their bytes. See `docs/protocols/protect.md`.

/// Number of sections in a batch.
pub(super) const SECTIONS: usize = 11;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Section {
    /// For each page, its distance from the one before and its kind.
    Pages = 0,
    /// For each page sent in blocks or as a reference, its digest.
    Checks = 1,
    /// For each page sent in blocks, the mask of those blocks.
    Masks = 2,
    /// For each block, in the order of the pages, its kind.
    Kinds = 3,
    /// For each shared block, how many blocks ago it was.
    Shared = 4,
    /// Blocks of few nonzero bytes.
    Sparse = 5,
    /// The four streams of the dictionary code, preceded by their lengths.
    Words = 6,
    /// Bytes of all other blocks before compression.
    RawLength = 7,
    Raw = 8,
    RawCode = 9,
    References = 10,
}

/// Other blocks without compression.
pub(super) const RAW_PLAIN: u8 = 0;
/// Other blocks as one zstd frame.
pub(super) const RAW_ZSTD: u8 = 1;

/// A batch of pages that no correct primary would send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("pages of an epoch are damaged: {what}")]
pub struct DamagedEpochPages {
    /// Description of the damage.
    pub what: &'static str,
}

pub(super) fn join(parts: [&[u8]; SECTIONS]) -> Vec<u8> {
    let mut out = Vec::with_capacity(SECTIONS * 4 + parts.iter().map(|part| part.len()).sum::<usize>());
    parts.iter().for_each(|part| out.extend((part.len() as u32).to_le_bytes()));
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}

pub(super) fn split(bytes: &[u8]) -> Result<[&[u8]; SECTIONS], DamagedEpochPages> {
    split_n::<SECTIONS>(bytes)
}

/// Splits `bytes` into `N` parts, whose lengths come first.
pub(super) fn split_n<const N: usize>(bytes: &[u8]) -> Result<[&[u8]; N], DamagedEpochPages> {
    let cut = DamagedEpochPages { what: "the data is truncated" };
    let (lengths, mut rest) = bytes.split_at_checked(N * 4).ok_or(cut)?;
    let mut parts = [&[][..]; N];
    for (part, length) in parts.iter_mut().zip(lengths.as_chunks::<4>().0) {
        (*part, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or(cut)?;
    }
    if rest.is_empty() { Ok(parts) } else { Err(DamagedEpochPages { what: "extra bytes at the end" }) }
}
