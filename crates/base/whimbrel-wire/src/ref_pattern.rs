//! Ref patterns: which refs of this host a trusted host may read or write. Pure.
//!
//! `*` matches any number of characters, `?` matches one, everything else itself. A pattern that no ref can
//! match, such as one with a slash or a blank, is refused when it is parsed, because it would only mislead in
//! a list of rights.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use whimbrel_core::glob;

/// Longest pattern in bytes; no ref name is longer.
const MAX_PATTERN: usize = 64;
const MAX_PATTERNS: usize = 64;

/// Error for a text that is not a pattern, or for a list that is too long.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// A pattern that cannot match any ref name.
    #[error(
        "{text:?} cannot match any ref: use 1 to {MAX_PATTERN} letters, digits, '-', '_', '.', '*' and '?', like 'golden*'"
    )]
    Unmatchable {
        /// The rejected text, at most 80 characters of it.
        text: String,
    },
    /// A list with too many patterns.
    #[error("{found} patterns in one list, the limit is {MAX_PATTERNS}")]
    TooMany {
        /// Number of patterns in the list.
        found: usize,
    },
}

/// A pattern over ref names, with `*` and `?`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RefPattern(String);

impl RefPattern {
    /// The pattern as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the pattern matches all of `name`, in at most pattern length times name length steps.
    pub fn matches(&self, name: &str) -> bool {
        glob::matches(self.0.as_bytes(), name.as_bytes())
    }
}

impl FromStr for RefPattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.*?".contains(&byte);
        if (1..=MAX_PATTERN).contains(&text.len()) && text.bytes().all(fits) {
            Ok(Self(text.to_owned()))
        } else {
            Err(PatternError::Unmatchable { text: text.chars().take(80).collect() })
        }
    }
}

whimbrel_core::serde_by_text!(RefPattern);

impl fmt::Display for RefPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// A list of patterns; a name matches the list if it matches one of them. The empty list matches nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<RefPattern>", into = "Vec<RefPattern>")]
pub struct RefPatterns(Vec<RefPattern>);

impl RefPatterns {
    /// Whether one of the patterns matches all of `name`.
    pub fn matches(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| pattern.matches(name))
    }

    /// The patterns in order.
    pub fn as_slice(&self) -> &[RefPattern] {
        &self.0
    }
}

impl TryFrom<Vec<RefPattern>> for RefPatterns {
    type Error = PatternError;

    fn try_from(patterns: Vec<RefPattern>) -> Result<Self, PatternError> {
        match patterns.len() {
            found if found > MAX_PATTERNS => Err(PatternError::TooMany { found }),
            _ => Ok(Self(patterns)),
        }
    }
}

impl From<RefPatterns> for Vec<RefPattern> {
    fn from(patterns: RefPatterns) -> Self {
        patterns.0
    }
}

impl FromStr for RefPatterns {
    type Err = PatternError;

    /// Parses patterns separated by commas; an empty text is the empty list.
    fn from_str(text: &str) -> Result<Self, PatternError> {
        let parts = text.split(',').map(str::trim).filter(|_| !text.trim().is_empty());
        parts.map(str::parse).collect::<Result<Vec<_>, _>>()?.try_into()
    }
}

impl fmt::Display for RefPatterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.iter().map(RefPattern::as_str).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pattern(text: &str) -> RefPattern {
        text.parse().unwrap()
    }

    #[test]
    fn a_pattern_matches_whole_names_only() {
        assert!(pattern("web").matches("web") && !pattern("web").matches("web-1"));
        assert!(pattern("golden*").matches("golden") && pattern("golden*").matches("golden.v2"));
        assert!(pattern("*-v?").matches("web-v1") && !pattern("*-v?").matches("web-v10"));
        assert!(!pattern("golden.*").matches("golden") && pattern("*").matches(""));
    }

    #[test]
    fn what_can_never_match_is_refused() {
        for bad in ["", "golden/*", "a b", "é", "[ab]", &"a".repeat(65)] {
            assert!(bad.parse::<RefPattern>().is_err(), "{bad:?}");
        }
        assert!("web,golden/*".parse::<RefPatterns>().is_err());
        let too_many = RefPatterns::try_from(vec![pattern("a"); 65]);
        assert_eq!(too_many, Err(PatternError::TooMany { found: 65 }));
    }

    #[test]
    fn a_list_is_what_commas_part() {
        let list: RefPatterns = "web, golden*".parse().unwrap();
        assert!(list.matches("web") && list.matches("golden-2") && !list.matches("db"));
        assert_eq!(list.to_string(), "web,golden*");
        let none: RefPatterns = "".parse().unwrap();
        assert!(!none.matches("web") && none.as_slice().is_empty());
        assert!("web,,db".parse::<RefPatterns>().is_err());
    }

    #[test]
    fn a_hostile_pattern_costs_no_more_than_its_length_times_that_of_the_name() {
        let hostile = pattern(&("*a".repeat(31) + "*b"));
        assert!(!hostile.matches(&"a".repeat(63)));
    }

    proptest! {
        #[test]
        fn every_name_matches_itself_and_the_star(name in "[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}") {
            prop_assert!(pattern(&name).matches(&name) && pattern("*").matches(&name));
        }

        #[test]
        fn garbage_is_a_typed_error(text in ".{0,100}") {
            if let Ok(list) = text.parse::<RefPatterns>() { prop_assert!(list.as_slice().len() <= 64); }
        }
    }
}
