//! Byte sizes as people write them: `512M`, `2GiB`, `65536`.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A number of bytes. Written and read with binary suffixes (`K`, `M`, `G`, `T`, optionally `iB` or `B`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

/// Error for a text that is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a size: write a whole number of bytes or add K, M, G or T (powers of 1024), like 512M"
)]
pub struct ParseSizeError {
    /// The rejected text, at most 80 characters of it.
    pub text: String,
}

impl FromStr for ByteSize {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = || ParseSizeError { text: text.chars().take(80).collect() };
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = text[..digits].parse().map_err(|_| fail())?;
        let shift = match text[digits..].trim().to_ascii_uppercase().as_str() {
            "" | "B" => 0,
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            "T" | "TB" | "TIB" => 40,
            _ => return Err(fail()),
        };
        number.checked_mul(1 << shift).map(Self).ok_or_else(fail)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        for unit in ["B", "KiB", "MiB", "GiB"] {
            if value < 1024.0 {
                let digits = if unit == "B" || value >= 100.0 || value.fract() == 0.0 { 0 } else { 1 };
                return f.pad(&format!("{value:.digits$} {unit}"));
            }
            value /= 1024.0;
        }
        f.pad(&format!("{value:.1} TiB"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_and_print() {
        assert_eq!("512M".parse(), Ok(ByteSize(512 << 20)));
        assert_eq!("2GiB".parse(), Ok(ByteSize(2 << 30)));
        assert_eq!("0".parse(), Ok(ByteSize(0)));
        for bad in ["", "M", "12X", "-1", "99999999999T", "1.5G", "é"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad}");
        }
        assert_eq!(ByteSize(512 << 20).to_string(), "512 MiB");
        assert_eq!(ByteSize(1536).to_string(), "1.5 KiB");
    }
}
