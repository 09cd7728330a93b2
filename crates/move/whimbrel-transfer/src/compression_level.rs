//! Compression level: one number in a request, and the codec settings that the answering side derives from
//! it.
//!
//! From -7 to 19 it is a zstd level. Above 19, pages and blobs without an older version are coded with LZMA,
//! which took 5 to 7 % less than zstd at 17 to 19 on memory of a compiling guest, in the same time or less.
//! Deltas stay with zstd, which accepts the older version as a prefix.

/// LZMA at preset 4: some 3 MB of pages a second and core.
pub(crate) const DENSER: i8 = 21;
/// LZMA at preset 6, for links of a few megabits at most.
pub(crate) const DENSEST: i8 = 23;

const ZSTD_MIN: i8 = -7;
const ZSTD_MAX: i8 = 19;
/// Offset of the LZMA presets.
const LZMA: i8 = 17;

/// Requested level, limited to what it may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompressionLevel {
    /// Level of zstd.
    Zstd(i32),
    /// Preset of LZMA.
    Lzma(u32),
}

impl From<i8> for CompressionLevel {
    fn from(asked: i8) -> Self {
        match asked.clamp(ZSTD_MIN, DENSEST) {
            zstd @ ..=ZSTD_MAX => Self::Zstd(zstd.into()),
            lzma => Self::Lzma((lzma - LZMA).unsigned_abs().into()),
        }
    }
}

impl CompressionLevel {
    /// zstd level for data that LZMA cannot code.
    pub(crate) fn zstd(self) -> i32 {
        match self {
            Self::Zstd(level) => level,
            Self::Lzma(_) => ZSTD_MAX.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_asked_for_costs_no_more_than_the_densest() {
        assert_eq!(CompressionLevel::from(i8::MIN), CompressionLevel::Zstd(-7));
        assert_eq!(CompressionLevel::from(19), CompressionLevel::Zstd(19));
        assert_eq!(CompressionLevel::from(20), CompressionLevel::Lzma(3));
        assert_eq!(CompressionLevel::from(DENSER), CompressionLevel::Lzma(4));
        assert_eq!(CompressionLevel::from(i8::MAX), CompressionLevel::Lzma(6));
    }
}
