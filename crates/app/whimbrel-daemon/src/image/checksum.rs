//! Checksums of image files, as their sources list them: SHA-256 or SHA-512.

use aws_lc_rs::digest::{Context, SHA256, SHA512};
use std::{collections::BTreeMap, fmt};

/// Most files that a list of checksums may name.
const FILES_MAX: usize = 4096;

/// Checksum of a file, in small hexadecimal digits; 64 of them are SHA-256, 128 are SHA-512.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Checksum(String);

impl Checksum {
    /// Parses the digits; none if they are not of a known length.
    pub(super) fn parse(digits: &str) -> Option<Self> {
        let known = [64, 128].contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        known.then(|| Self(digits.to_ascii_lowercase()))
    }

    /// Digest of the kind of this checksum over nothing yet.
    pub(super) fn context(&self) -> Context {
        Context::new(if self.0.len() == 64 { &SHA256 } else { &SHA512 })
    }

    /// Checksum of all that a context was given.
    pub(super) fn of(context: Context) -> Self {
        let mut digits = String::new();
        for byte in context.finish().as_ref() {
            digits += &format!("{byte:02x}");
        }
        Self(digits)
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", if self.0.len() == 64 { "sha256" } else { "sha512" }, self.0)
    }
}

/// Parses a list as sha256sum(1) and sha512sum(1) write it: digits, two characters, and the name of a file in
/// the folder of the list. Other lines, and files in other folders, are left out.
pub(super) fn parse_list(text: &str) -> BTreeMap<String, Checksum> {
    let lines = text.lines().filter_map(|line| {
        let (digits, rest) = line.split_once(' ')?;
        let name = rest.strip_prefix(' ').or_else(|| rest.strip_prefix('*')).unwrap_or(rest);
        let name = name.strip_prefix("./").unwrap_or(name).trim_end();
        let plain = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
        Some((name.to_owned(), Checksum::parse(digits).filter(|_| plain)?))
    });
    lines.take(FILES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists_of_both_programs_are_read_and_names_elsewhere_are_left_out() {
        let (short, long) = ("aB".repeat(32), "01".repeat(64));
        let text = format!(
            "# a note\n{long}  disk.qcow2\n{short} *other.raw\n{short}  ../../etc/passwd\n{short}  .hidden\nxx  y\n\
             {short}  ./here.img\r\n"
        );
        let list = parse_list(&text);
        assert_eq!(list.keys().collect::<Vec<_>>(), ["disk.qcow2", "here.img", "other.raw"]);
        assert_eq!(list["other.raw"].to_string(), format!("sha256:{}", short.to_lowercase()));
        assert_eq!(list["disk.qcow2"].to_string(), format!("sha512:{long}"));
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_of_plain_names(text in "([0-9a-f]{62,66}[ *.]{1,3}[a-z./ ]{0,9}\n?){0,9}") {
            for name in parse_list(&text).keys() {
                prop_assert!(!name.contains('/') && !name.starts_with('.'), "{}", name);
            }
        }
    }
}
