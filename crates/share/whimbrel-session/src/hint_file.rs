//! Hint file: a small file beside a file that lists its zero blocks and says whether to fetch it whole.
//!
//! The format is in `docs/formats/session-hint.md`. Pure except for [`Hint::of_file`], which reads a file. A
//! hint comes from the server, so it is bounded and checked: one invalid line makes all of it void. Its zero
//! ranges apply to one version of the file only.

use crate::proto::{Name, PAGE, Time};
use std::{
    fmt::Write as _,
    fs::File,
    io::{self, Read as _},
    ops::Range,
    os::unix::fs::MetadataExt,
    path::Path,
};

/// First line of a hint file.
const HEAD: &str = "whimbrel note 1";
/// Longest hint file in bytes.
pub(crate) const MAX_LEN: u64 = 256 << 10;
/// Most ranges of zeros.
const MAX_RUNS: usize = 4096;
/// Shortest range worth a line: a block of the cache is requested as a whole.
const MIN_RUN: u64 = 64 << 10;
/// Bytes read at once.
const READ_SIZE: usize = 1 << 20;

/// Content of a hint file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hint {
    /// Whether to fetch the file whole or block by block.
    pub fetch_whole: Option<bool>,
    /// Size and last change of the file described; the ranges apply to no other version.
    pub version: Option<(u64, Time)>,
    /// Ranges of zeros in bytes, in order.
    pub zeros: Vec<Range<u64>>,
}

/// Reasons why a hint file is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HintError {
    /// The file is too long, or not text.
    #[error("it is too long or not UTF-8 text")]
    Text,
    /// A line is malformed or contradicts an earlier one.
    #[error("line {line} is invalid")]
    Line {
        /// Number of the line, from 1.
        line: usize,
    },
}

/// Name of the hint file of `file`; none if it would be too long.
pub fn name_of(file: &Name) -> Option<Name> {
    Name::new(&[b".", file.as_bytes(), b".whimbrel"].concat()).ok()
}

impl Hint {
    /// Parses a hint file.
    pub fn parse(bytes: &[u8]) -> Result<Self, HintError> {
        if bytes.len() as u64 > MAX_LEN {
            return Err(HintError::Text);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| HintError::Text)?;
        let mut note = Self::default();
        for (number, line) in text.lines().enumerate() {
            let fits = if number == 0 { (line == HEAD).then_some(()) } else { note.parse_line(line) };
            fits.ok_or(HintError::Line { line: number + 1 })?;
        }
        if text.is_empty() { Err(HintError::Line { line: 1 }) } else { Ok(note) }
    }

    fn parse_line(&mut self, line: &str) -> Option<()> {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["whole" | "blocks"] if self.fetch_whole.is_none() => self.fetch_whole = Some(line == "whole"),
            ["of", size, seconds, nanos] if self.version.is_none() => {
                let nanos = nanos.parse().ok().filter(|nanos| *nanos < 1_000_000_000)?;
                self.version = Some((size.parse().ok()?, Time { seconds: seconds.parse().ok()?, nanos }));
            }
            ["zeros", from, to] => {
                let (from, to): (u64, u64) = (from.parse().ok()?, to.parse().ok()?);
                let (size, _) = self.version?;
                let after = self.zeros.last().map_or(0, |last| last.end);
                if from < after || from >= to || to > size || self.zeros.len() >= MAX_RUNS {
                    return None;
                }
                self.zeros.push(from..to);
            }
            _ => return None,
        }
        Some(())
    }

    /// Whether all of these bytes are zeros, if the file is the version described.
    pub fn is_zero(&self, bytes: &Range<u64>) -> bool {
        let after = self.zeros.partition_point(|run| run.end <= bytes.start);
        self.zeros.get(after).is_some_and(|run| run.start <= bytes.start && bytes.end <= run.end)
    }

    /// Makes a hint by reading the file.
    pub fn of_file(path: &Path, whole: Option<bool>) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let before = file.metadata()?;
        let mut zeros: Vec<Range<u64>> = Vec::new();
        let (mut at, mut piece) = (0, vec![0; READ_SIZE]);
        loop {
            let read = fill(&mut file, &mut piece)?;
            for page in piece[..read].chunks(PAGE) {
                let end = at + page.len() as u64;
                match zeros.last_mut() {
                    _ if !crate::proto::is_zero(page) => {}
                    Some(run) if run.end == at => run.end = end,
                    _ => zeros.push(at..end),
                }
                at = end;
            }
            if read < READ_SIZE {
                break;
            }
        }
        let after = file.metadata()?;
        let same = |a: &std::fs::Metadata| (a.len(), a.mtime(), a.mtime_nsec());
        if same(&before) != same(&after) || at != after.len() {
            return Err(io::Error::other("the file was changed while it was read"));
        }
        zeros.retain(|run| run.end - run.start >= MIN_RUN);
        if zeros.len() > MAX_RUNS {
            // Retain the longest ones, in order.
            zeros.sort_unstable_by_key(|run| std::cmp::Reverse(run.end - run.start));
            zeros.truncate(MAX_RUNS);
            zeros.sort_unstable_by_key(|run| run.start);
        }
        let changed = Time { seconds: after.mtime(), nanos: after.mtime_nsec() as u32 };
        Ok(Self { fetch_whole: whole, version: Some((at, changed)), zeros })
    }

    /// The text as it is stored.
    pub fn to_text(&self) -> String {
        let mut text = format!("{HEAD}\n");
        // Writing to a string does not fail.
        if let Some(whole) = self.fetch_whole {
            let _ = writeln!(text, "{}", if whole { "whole" } else { "blocks" });
        }
        if let Some((size, changed)) = self.version {
            let _ = writeln!(text, "of {size} {} {}", changed.seconds, changed.nanos);
        }
        for run in &self.zeros {
            let _ = writeln!(text, "zeros {} {}", run.start, run.end);
        }
        text
    }
}

fn fill(file: &mut File, out: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < out.len() {
        match file.read(&mut out[read..])? {
            0 => break,
            more => read += more,
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_file_is_looked_through_and_what_is_said_of_it_survives_being_stored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let mut bytes = vec![0; 3 << 20];
        bytes[1 << 20] = 1;
        bytes[(2 << 20) - 1] = 1;
        std::fs::write(&path, &bytes).unwrap();
        let note = Hint::of_file(&path, Some(true)).unwrap();
        let page = PAGE as u64;
        let expected = [0..1 << 20, (1 << 20) + page..(2 << 20) - page, 2 << 20..3 << 20];
        assert_eq!(note.zeros, expected);
        assert!(note.is_zero(&(0..page)) && note.is_zero(&(2 << 20..3 << 20)));
        assert!(!note.is_zero(&((1 << 20) - page..(1 << 20) + page)) && !note.is_zero(&(3 << 20..4 << 20)));
        assert_eq!(Hint::parse(note.to_text().as_bytes()), Ok(note));
    }

    #[test]
    fn what_is_not_understood_makes_a_note_void() {
        let of = "whimbrel note 1\nof 100000 5 0\n";
        for (text, line) in [
            (String::new(), 1),
            ("whimbrel note 2\n".to_owned(), 1),
            ("whimbrel note 1\nwhole\nblocks\n".to_owned(), 3),
            ("whimbrel note 1\nzeros 0 4096\n".to_owned(), 2),
            (format!("{of}zeros 0 100001\n"), 3),
            (format!("{of}zeros 10 10\n"), 3),
            (format!("{of}zeros 0 9000\nzeros 8000 9999\n"), 4),
            (format!("{of}zeros 0  9000\n"), 3),
            ("whimbrel note 1\nof 1 1 1000000000\n".to_owned(), 2),
            ("whimbrel note 1\n\n".to_owned(), 2),
        ] {
            assert_eq!(Hint::parse(text.as_bytes()), Err(HintError::Line { line }), "{text:?}");
        }
        assert_eq!(Hint::parse(&[0xff]), Err(HintError::Text));
        assert_eq!(Hint::parse(&vec![b' '; MAX_LEN as usize + 1]), Err(HintError::Text));
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_no_panic(tail in "(whole|blocks|of|zeros)?( [0-9]{1,20}){0,3}\n?", more in any::<Vec<u8>>()) {
            let mut bytes = format!("{HEAD}\nof 4096 1 1\n{tail}").into_bytes();
            if let Ok(note) = Hint::parse(&bytes) {
                prop_assert_eq!(Hint::parse(note.to_text().as_bytes()), Ok(note));
            }
            bytes.extend(more);
            let _ = Hint::parse(&bytes);
        }
    }
}
