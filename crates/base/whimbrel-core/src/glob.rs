//! Patterns with `*` for any bytes and `?` for one.

/// Whether `pattern` matches the whole of `text`. Takes at most the product of their lengths.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut seen) = (0, 0);
    // The last star, and where its match ends so far.
    let mut star = None;
    while seen < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, seen));
                at += 1;
            }
            Some(wanted) if *wanted == b'?' || *wanted == text[seen] => {
                at += 1;
                seen += 1;
            }
            _ => {
                let Some((star_at, from)) = star else { return false };
                star = Some((star_at, from + 1));
                (at, seen) = (star_at + 1, from + 1);
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by_definition(pattern: &[u8], text: &[u8]) -> bool {
        match (pattern.split_first(), text.split_first()) {
            (None, None) => true,
            (Some((b'*', rest)), _) => {
                by_definition(rest, text) || (!text.is_empty() && by_definition(pattern, &text[1..]))
            }
            (Some((wanted, rest)), Some((found, more))) => {
                (*wanted == b'?' || wanted == found) && by_definition(rest, more)
            }
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn matching_is_as_defined(pattern in "[ab*?]{0,10}", text in "[ab]{0,12}") {
            let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
            prop_assert_eq!(matches(pattern, text), by_definition(pattern, text));
        }
    }

    #[test]
    fn a_hostile_pattern_ends() {
        assert!(!matches("*a".repeat(100).as_bytes(), "a".repeat(99).as_bytes()));
    }
}
