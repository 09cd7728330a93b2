//! Key of an encrypted file.

use crate::{Digest, serde_by_text};
use std::{fmt, str::FromStr};

/// Key of an encrypted file: 32 random bytes, written as 64 hexadecimal digits. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct FileKey(pub [u8; 32]);

/// Error for a text that is no key of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the key of a file is 64 hexadecimal digits")]
pub struct FileKeyError;

impl FromStr for FileKey {
    type Err = FileKeyError;

    fn from_str(text: &str) -> Result<Self, FileKeyError> {
        text.trim().parse().map(|Digest(bytes)| Self(bytes)).map_err(|_| FileKeyError)
    }
}

impl fmt::Display for FileKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Digest(self.0).fmt(f)
    }
}

impl fmt::Debug for FileKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FileKey(…)")
    }
}

serde_by_text!(FileKey);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_comes_back_and_no_log_shows_it() {
        let key = FileKey([0xab; 32]);
        assert_eq!(format!(" {key}\n").parse(), Ok(key.clone()));
        assert!(!format!("{key:?}").contains("ab"));
        assert_eq!("ab".repeat(31).parse::<FileKey>(), Err(FileKeyError));
    }
}
