//! Format of a [`PageAlignment`]: its bytes, and its text in a manifest. Layout: docs/formats/image.md.
//!
//! Canonical: each number has one encoding, and nothing may follow the last segment; encoding the decoded
//! value gives the same bytes. Decoding allocates only what [`PageAlignment`] allows, for any input.

use crate::{AlignmentChange, AlignmentError, PageAlignment, SECTOR};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, str::FromStr};
use whimbrel_core::varint::{self, VarintError};

/// Format version that this program writes and reads.
const VERSION: u8 = 1;
/// Number of phases that a page can have, in sectors.
const PHASES: u64 = crate::PAGE / SECTOR;

/// Bytes or text that are no valid alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AlignmentFormatError {
    /// Another version of the program wrote the alignment.
    #[error("page alignment version {found} is unknown; this version reads {VERSION}")]
    Version {
        /// Version that was found.
        found: u8,
    },
    /// The bytes are empty or end within a number.
    #[error("the page alignment ends too early")]
    Short,
    /// A number is too long, or not in its shortest encoding.
    #[error("a number of the page alignment is not in canonical form")]
    Number,
    /// The text is not an even number of lowercase hexadecimal digits.
    #[error("the text of the page alignment is not hexadecimal")]
    Text,
    /// The segments are no valid alignment.
    #[error("the page alignment is invalid")]
    Alignment {
        /// Invalid property of the segments.
        source: AlignmentError,
    },
}

impl PageAlignment {
    /// Canonical encoding of the alignment.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        varint::put(&mut bytes, self.size());
        let mut before = 0;
        for AlignmentChange { start, phase } in self.changes() {
            varint::put(&mut bytes, (start - before) / SECTOR * PHASES + phase / SECTOR);
            before = start;
        }
        bytes
    }

    /// Decodes an alignment and checks it.
    ///
    /// # Errors
    /// If `bytes` are no result of [`PageAlignment::encode`].
    pub fn decode(bytes: &[u8]) -> Result<Self, AlignmentFormatError> {
        let (version, mut rest) = bytes.split_first().ok_or(AlignmentFormatError::Short)?;
        if *version != VERSION {
            return Err(AlignmentFormatError::Version { found: *version });
        }
        let size = take_number(&mut rest)?;
        let (mut start, mut borders) = (0u64, Vec::new());
        while !rest.is_empty() {
            if borders.len() == crate::MAX_SEGMENTS {
                return Err(AlignmentFormatError::Alignment { source: AlignmentError::Segments });
            }
            let number = take_number(&mut rest)?;
            // Each is below 2^61 sectors, and `PageAlignment::new` would reject the first sum that is too
            // large.
            start = (number / PHASES).checked_mul(SECTOR).and_then(|delta| start.checked_add(delta)).ok_or(
                AlignmentFormatError::Alignment {
                    source: AlignmentError::Change { start: u64::MAX, phase: 0 },
                },
            )?;
            borders.push(AlignmentChange { start, phase: number % PHASES * SECTOR });
        }
        PageAlignment::new(size, borders).map_err(|source| AlignmentFormatError::Alignment { source })
    }
}

fn take_number(rest: &mut &[u8]) -> Result<u64, AlignmentFormatError> {
    varint::take(rest).map_err(|error| match error {
        VarintError::Short => AlignmentFormatError::Short,
        VarintError::Malformed => AlignmentFormatError::Number,
    })
}

impl fmt::Display for PageAlignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.encode().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for PageAlignment {
    type Err = AlignmentFormatError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digit = |digit: u8| match digit {
            b'0'..=b'9' => Ok(digit - b'0'),
            b'a'..=b'f' => Ok(digit - b'a' + 10),
            _ => Err(AlignmentFormatError::Text),
        };
        let (pairs, odd) = text.as_bytes().as_chunks::<2>();
        if !odd.is_empty() {
            return Err(AlignmentFormatError::Text);
        }
        let bytes: Result<Vec<u8>, _> =
            pairs.iter().map(|[high, low]| Ok(digit(*high)? << 4 | digit(*low)?)).collect();
        PageAlignment::decode(&bytes?)
    }
}

impl Serialize for PageAlignment {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if to.is_human_readable() { to.collect_str(self) } else { self.encode().serialize(to) }
    }
}

impl<'de> Deserialize<'de> for PageAlignment {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let cuts = if from.is_human_readable() {
            String::deserialize(from)?.parse()
        } else {
            PageAlignment::decode(&Vec::<u8>::deserialize(from)?)
        };
        cuts.map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alignment::tests::any_cuts;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn cuts_survive_bytes_and_text(cuts in any_cuts()) {
            prop_assert_eq!(PageAlignment::decode(&cuts.encode()), Ok(cuts.clone()));
            let json = serde_json::to_string(&cuts).unwrap();
            prop_assert_eq!(serde_json::from_str::<PageAlignment>(&json).unwrap(), cuts);
        }

        #[test]
        fn any_bytes_are_refused_or_have_one_spelling(mut bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some(first) = bytes.first_mut() { *first = VERSION; }
            if let Ok(cuts) = PageAlignment::decode(&bytes) { prop_assert_eq!(cuts.encode(), bytes); }
        }
    }

    #[test]
    fn the_bytes_of_cuts_are_pinned() {
        let borders =
            [AlignmentChange { start: 0, phase: 0 }, AlignmentChange { start: 63 * 512, phase: 3584 }];
        let cuts = PageAlignment::new(1 << 20, borders).unwrap();
        assert_eq!(cuts.to_string(), "0180804000ff03");
        assert_eq!("0180804000ff03".parse(), Ok(cuts));
    }

    #[test]
    fn what_is_not_canonical_is_refused_by_name() {
        let parse = |text: &str| text.parse::<PageAlignment>().unwrap_err();
        assert_eq!(parse(""), AlignmentFormatError::Short);
        assert_eq!(parse("02808040"), AlignmentFormatError::Version { found: 2 });
        assert_eq!(
            parse("01808040"),
            AlignmentFormatError::Alignment { source: AlignmentError::Change { start: 0, phase: 0 } }
        );
        assert_eq!(parse("0180804000ff"), AlignmentFormatError::Short);
        assert_eq!(parse("018080408000"), AlignmentFormatError::Number);
        assert_eq!(parse("0180804000FF03"), AlignmentFormatError::Text);
        assert_eq!(parse("018"), AlignmentFormatError::Text);
        assert_eq!(parse(&format!("0180804000{}", "ff".repeat(10))), AlignmentFormatError::Number);
        let far = format!("0180804000{}7f{}7f", "ff".repeat(8), "ff".repeat(8));
        assert!(matches!(parse(&far), AlignmentFormatError::Alignment { .. }));
        assert!(matches!(
            parse(&format!("01808040{}", "00".repeat(3000))),
            AlignmentFormatError::Alignment { .. }
        ));
    }
}
