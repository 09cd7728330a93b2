//! Messages of qemu-ga: requests, and answers found in a stream that may begin anywhere. Pure.
//!
//! A message is one line of JSON. The byte 0xFF, which no JSON in UTF-8 has, ends whatever was before it: the
//! host sends it so that the guest forgets half a request, and the guest before its answer to
//! `guest-sync-delimited`, so that the host forgets what was meant for somebody else.

use super::QemuGaError;
use serde_json::{Value, json};

/// Byte that ends all earlier messages.
const SENTINEL: u8 = 0xff;
/// Longest refusal that is kept.
const WORDS_MAX: usize = 300;

/// Answer of qemu-ga.
#[derive(Debug, Clone, PartialEq)]
pub enum AgentAnswer {
    /// Result of the command.
    Return(Value),
    /// Why it was not carried out.
    Error(String),
}

/// The line of a request.
pub fn request(command: &str, arguments: &Value) -> Vec<u8> {
    let mut line = json!({"execute": command, "arguments": arguments}).to_string().into_bytes();
    line.push(b'\n');
    line
}

/// The bytes that make the guest answer with `id`, whatever it has read before.
pub fn sync_request(id: u64) -> Vec<u8> {
    let mut bytes = vec![SENTINEL];
    bytes.extend(request("guest-sync-delimited", &json!({"id": id})));
    bytes
}

impl AgentAnswer {
    /// Reads a line. A line that is no answer is none.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let mut value: Value = serde_json::from_slice(line).ok()?;
        let members = value.as_object_mut()?;
        if let Some(result) = members.remove("return") {
            return Some(Self::Return(result));
        }
        let error = members.get("error")?;
        Some(Self::Error(printable(error["desc"].as_str().unwrap_or("without a reason"), WORDS_MAX)))
    }

    /// Result of the command `command`, or its refusal.
    pub fn into_result(self, command: &'static str) -> Result<Value, QemuGaError> {
        match self {
            Self::Return(value) => Ok(value),
            Self::Error(words) => Err(QemuGaError::Refused { command, words }),
        }
    }
}

/// Text of a guest without control characters, in at most `max` bytes.
pub(super) fn printable(text: &str, max: usize) -> String {
    let mut kept = String::new();
    for letter in text.chars().filter(|letter| !letter.is_control()) {
        if kept.len() + letter.len_utf8() > max {
            break;
        }
        kept.push(letter);
    }
    kept
}

/// Finds the lines of answers in a stream.
#[derive(Debug, Default)]
pub struct AnswerDecoder {
    bytes: Vec<u8>,
    /// Bytes at the front that have no line end.
    searched: usize,
}

impl AnswerDecoder {
    /// Adds received bytes. Returns false, and keeps nothing, if a line would be longer than `limit`.
    #[must_use]
    pub fn push(&mut self, bytes: &[u8], limit: usize) -> bool {
        let new = match bytes.iter().rposition(|byte| *byte == SENTINEL) {
            Some(at) => {
                self.clear();
                &bytes[at + 1..]
            }
            None => bytes,
        };
        if self.bytes.len() + new.len() > limit {
            self.clear();
            return false;
        }
        self.bytes.extend_from_slice(new);
        true
    }

    /// Next complete line.
    pub fn next_line(&mut self) -> Option<Vec<u8>> {
        let found = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n');
        let Some(end) = found.map(|at| at + self.searched) else {
            self.searched = self.bytes.len();
            return None;
        };
        self.searched = 0;
        Some(self.bytes.drain(..=end).collect())
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    fn clear(&mut self) {
        (self.bytes, self.searched) = (Vec::new(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: usize = 1 << 16;

    fn lines(pieces: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut decoder = AnswerDecoder::default();
        let mut lines = Vec::new();
        for piece in pieces {
            assert!(decoder.push(piece, LIMIT));
            lines.extend(std::iter::from_fn(|| decoder.next_line()));
        }
        lines
    }

    #[test]
    fn what_was_meant_for_an_earlier_host_is_forgotten_at_the_sentinel() {
        let sync = b"{\"return\": 1}\n{\"ret\xff{\"return\": 7}\n";
        assert_eq!(lines(&[sync]), [b"{\"return\": 7}\n"]);
        let halves = lines(&[b"{\"return\": \"old", b"\xff{\"retu", b"rn\": 7}\n{\"return\": 8}\n"]);
        assert_eq!(halves, [&b"{\"return\": 7}\n"[..], &b"{\"return\": 8}\n"[..]]);
    }

    #[test]
    fn an_answer_without_an_end_is_refused_before_it_fills_the_memory() {
        let mut decoder = AnswerDecoder::default();
        assert!(decoder.push(&[b'x'; 100], 100) && !decoder.push(b"x", 100));
        assert!(decoder.is_empty() && decoder.next_line().is_none());
    }

    #[test]
    fn a_refusal_of_a_guest_is_text_and_short() {
        let words =
            format!("{{\"error\": {{\"class\": \"X\", \"desc\": \"\\u001b[2J{}\"}}}}", "ä".repeat(400));
        let Some(AgentAnswer::Error(words)) = AgentAnswer::parse(words.as_bytes()) else { panic!("{words}") };
        assert!(words.len() <= WORDS_MAX && !words.contains('\u{1b}'), "{words}");
        for none in ["", "7", "[]", "{}", "{\"event\": \"x\"}", "{\"return\": 1", &"[".repeat(10_000)] {
            assert_eq!(AgentAnswer::parse(none.as_bytes()), None, "{none}");
        }
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(stream in prop::collection::vec(any::<u8>(), 0..200), cut in 1usize..20) {
            let pieces: Vec<&[u8]> = stream.chunks(cut).collect();
            // Lines that were complete before a sentinel arrived are taken or forgotten; those after the last
            // sentinel are the same however they arrive.
            let after = stream.iter().rposition(|byte| *byte == SENTINEL).map_or(0, |at| at + 1);
            let expected = lines(&[&stream[after..]]);
            let found = lines(&pieces);
            prop_assert!(found.ends_with(&expected));
        }
    }
}
