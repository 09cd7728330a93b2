//! How hard an answer is compressed: one number of a request, and what the side that answers makes of it.
//!
//! From -7 to 19 it is a level of zstd. Above, pages and blobs by themselves are coded by LZMA, which took 5
//! to 7 % less than zstd at 17 to 19 on memory of a compiling guest, in the same time or less. What is coded
//! against older bytes stays with zstd, which takes those as they are.

/// LZMA at preset 4: some 3 MB of pages a second and core.
pub(crate) const DENSER: i8 = 21;
/// LZMA at preset 6, for lines of a few megabits at most.
pub(crate) const DENSEST: i8 = 23;

const ZSTD_MIN: i8 = -7;
const ZSTD_MAX: i8 = 19;
/// What is added to a preset of LZMA.
const LZMA: i8 = 17;

/// What was asked for, within what it may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompressionLevel {
    /// Of zstd.
    Zstd(i32),
    /// Of LZMA.
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
    /// The level of zstd for what LZMA is no use for.
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
