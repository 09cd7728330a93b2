//! JSON files of a host: one object each, replaced as a whole, with a checksum of its text.
//!
//! The last member, `check`, is the digest of the text without it. So a changed byte is found that is JSON
//! all the same: a digit of an image's root, a letter of a host's name. Files of earlier versions, and those
//! that were written by hand, have no checksum and are read without one. A file that cannot be read is never
//! replaced by its owner: it stays as it is until a user restores it or moves it away.

use crate::atomic_file;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{fs, io, path::Path};
use whimbrel_core::Digest;

/// What is before and after the checksum in the text of an object.
const BEFORE: &str = ",\n  \"check\": \"";
const AFTER: &str = "\"\n}";
/// End of the text of an object without a checksum.
const END: &str = "\n}";

/// Replaces the file at `path`, durably.
pub fn replace(path: &Path, content: &impl Serialize) -> io::Result<()> {
    atomic_file::replace(path, encode(content)?.as_bytes())
}

/// Reads a file of the daemon.
pub fn read<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    decode(&fs::read(path)?)
}

/// Reads a file of the daemon that names its format.
pub fn read_format<T: DeserializeOwned>(path: &Path, format: u32) -> io::Result<T> {
    decode_format(&fs::read(path)?, format)
}

/// The text of an object, with its checksum.
pub fn encode(content: &impl Serialize) -> io::Result<String> {
    let text = serde_json::to_string_pretty(content)?;
    Ok(match text.strip_suffix(END) {
        Some(members) => format!("{members}{BEFORE}{}{AFTER}", Digest::of(text.as_bytes())),
        // An empty object: there is nothing to check.
        None => text,
    })
}

/// Decodes the text of an object that names its format, which is looked at first: a later format may lack
/// members of this one.
pub fn decode_format<T: DeserializeOwned>(text: &[u8], format: u32) -> io::Result<T> {
    #[derive(Deserialize)]
    struct Versioned {
        format: u32,
    }
    let Versioned { format: found } = serde_json::from_slice(text)?;
    if found != format {
        let reason = format!("its format {found} is not {format}, which this version reads");
        return Err(invalid(reason));
    }
    decode(text)
}

/// Decodes the text of an object, and compares its checksum if it has one.
pub fn decode<T: DeserializeOwned>(text: &[u8]) -> io::Result<T> {
    let text = std::str::from_utf8(text).map_err(|error| invalid(error.to_string()))?;
    let Some((members, check)) = text.strip_suffix(AFTER).and_then(|text| text.rsplit_once(BEFORE)) else {
        return Ok(serde_json::from_str(text)?);
    };
    let text = format!("{members}{END}");
    if Digest::of(text.as_bytes()).to_string() != check {
        return Err(invalid(
            "its content is not what its checksum says; if you changed it on purpose, remove the member `check`",
        ));
    }
    Ok(serde_json::from_str(&text)?)
}

fn invalid(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Note {
        format: u32,
        host: String,
        number: f64,
    }

    #[test]
    fn no_changed_byte_changes_what_is_read() {
        let note = Note { format: 1, host: "alpha".into(), number: 0.1 + 0.2 };
        let text = encode(&note).unwrap();
        assert_eq!(decode_format::<Note>(text.as_bytes(), 1).unwrap(), note);
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut bytes = text.clone().into_bytes();
                bytes[at] ^= 1 << bit;
                if let Ok(read) = decode_format::<Note>(&bytes, 1) {
                    assert_eq!(read, note, "byte {at}, bit {bit}");
                }
            }
        }
        assert!((0..text.len()).all(|len| decode::<Note>(&text.as_bytes()[..len]).is_err()));
    }

    #[test]
    fn files_without_a_checksum_are_read_and_later_formats_are_not() {
        let old = br#"{"format": 1, "host": "alpha", "number": 2.0}"#;
        assert_eq!(decode_format::<Note>(old, 1).unwrap().host, "alpha");
        let newer = decode_format::<Note>(br#"{"format": 2, "place": "alpha"}"#, 1).unwrap_err();
        assert!(newer.to_string().contains("format 2 is not 1"), "{newer}");
        let empty = encode(&std::collections::BTreeMap::<String, u32>::new()).unwrap();
        assert!(decode::<std::collections::BTreeMap<String, u32>>(empty.as_bytes()).unwrap().is_empty());
    }
}
