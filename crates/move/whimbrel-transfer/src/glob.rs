//! Ref patterns: `*` stands for any characters, `?` for one. Linear in practice, never exponential.

/// Whether `text` matches `pattern`.
pub(crate) fn fits(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where to resume if the rest does not match: after the last star, one character further in the text.
    let mut back = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                back = Some((p + 1, t + 1));
                p += 1;
            }
            Some(byte) if *byte == b'?' || *byte == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match back {
                Some((after, from)) => {
                    (p, t) = (after, from);
                    back = Some((after, from + 1));
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn stars_and_question_marks() {
        let good = [
            ("*", ""),
            ("*", "a"),
            ("web-?", "web-1"),
            ("*-db*", "my-db-2"),
            ("a*b*c", "aXbYbc"),
            ("a", "a"),
        ];
        let bad = [("", "a"), ("web-?", "web-"), ("a*b", "abc"), ("?", ""), ("b", "a")];
        good.iter().for_each(|(pattern, text)| assert!(fits(pattern, text), "{pattern} {text}"));
        bad.iter().for_each(|(pattern, text)| assert!(!fits(pattern, text), "{pattern} {text}"));
        assert!(!fits(&"*a".repeat(100), &"a".repeat(99)));
    }
}
