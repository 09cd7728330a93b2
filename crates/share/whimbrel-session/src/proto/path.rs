//! Names and paths beneath an export: bytes of any value but `/` and zero, never `.` or `..`.
//!
//! A value of [`RelPath`] is safe to pass to the system relative to the export: it is not absolute and has no
//! `..`. Symlinks are a separate matter: the server resolves paths without following any.

use serde::{Deserialize, Serialize};
use std::{ffi::OsStr, fmt, os::unix::ffi::OsStrExt};

/// Longest name in bytes (`NAME_MAX`).
pub const MAX_NAME: usize = 255;
/// Longest path in bytes: twice `PATH_MAX`, because programs may name a file from a directory far below the
/// root of the mount. Servers before version 4 accept 3,500.
pub const MAX_PATH: usize = 8192;

/// Reasons why bytes are not a name or path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// A name is empty, `.`, `..`, or contains a zero or a slash.
    #[error("not a name")]
    Name,
    /// A name or path is longer than the system allows.
    #[error("a name or path is too long")]
    TooLong,
}

/// One component of a path.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct Name(Box<[u8]>);

/// Path below the export; the empty path is the export itself.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct RelPath(Box<[u8]>);

impl Name {
    /// Checks the bytes of a name.
    pub fn new(bytes: &[u8]) -> Result<Self, PathError> {
        let special = matches!(bytes, b"" | b"." | b"..");
        if special || bytes.iter().any(|byte| matches!(byte, 0 | b'/')) {
            return Err(PathError::Name);
        }
        if bytes.len() > MAX_NAME {
            return Err(PathError::TooLong);
        }
        Ok(Self(bytes.into()))
    }

    /// The name for calls of the system.
    pub fn as_os(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }

    /// Bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl RelPath {
    /// The path of the export itself.
    pub fn root() -> Self {
        Self::default()
    }

    /// Checks the bytes of a path: components separated by single slashes.
    pub fn new(bytes: &[u8]) -> Result<Self, PathError> {
        if bytes.len() > MAX_PATH {
            return Err(PathError::TooLong);
        }
        if !bytes.is_empty() {
            bytes.split(|byte| *byte == b'/').try_for_each(|name| Name::new(name).map(drop))?;
        }
        Ok(Self(bytes.into()))
    }

    /// Appends one component.
    pub fn join(&self, name: &Name) -> Result<Self, PathError> {
        let mut bytes = self.0.to_vec();
        if !bytes.is_empty() {
            bytes.push(b'/');
        }
        bytes.extend_from_slice(&name.0);
        if bytes.len() > MAX_PATH { Err(PathError::TooLong) } else { Ok(Self(bytes.into())) }
    }

    /// Parent and last component; none for the export itself.
    pub fn split(&self) -> Option<(RelPath, Name)> {
        let cut = self.0.iter().rposition(|byte| *byte == b'/');
        let (parent, name) = match cut {
            Some(at) => (&self.0[..at], &self.0[at + 1..]),
            None => (&self.0[..0], &self.0[..]),
        };
        Name::new(name).ok().map(|name| (Self(parent.into()), name))
    }

    /// Whether the path is `other` or below it.
    pub fn is_within(&self, other: &RelPath) -> bool {
        let (own, other) = (&self.0, &other.0);
        other.is_empty() || own == other || (own.starts_with(other) && own.get(other.len()) == Some(&b'/'))
    }

    /// The path after `from` was renamed to `to`.
    pub fn moved(&self, from: &RelPath, to: &RelPath) -> Option<Self> {
        if !self.is_within(from) {
            return None;
        }
        Self::new(&[&to.0[..], &self.0[from.0.len()..]].concat()).ok()
    }

    /// The path for calls of the system.
    pub fn as_os(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }

    /// Bytes of the path.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether the path is the export itself.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }
}

macro_rules! bytes_on_the_wire {
    ($($type:ident)*) => {
        $(impl TryFrom<Vec<u8>> for $type {
            type Error = PathError;

            fn try_from(bytes: Vec<u8>) -> Result<Self, PathError> {
                Self::new(&bytes)
            }
        }

        impl From<$type> for Vec<u8> {
            fn from(value: $type) -> Self {
                value.0.into_vec()
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        })*
    };
}

bytes_on_the_wire!(Name RelPath);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_root() { f.write_str(".") } else { write!(f, "{}", self.0.escape_ascii()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_bytes_make_a_path_that_climbs(bytes in proptest::collection::vec(prop_oneof![Just(b'.'), Just(b'/'), any::<u8>()], 0..40)) {
            if let Ok(path) = RelPath::new(&bytes) {
                prop_assert!(!bytes.starts_with(b"/") && !bytes.contains(&0));
                prop_assert!(bytes.split(|byte| *byte == b'/').all(|name| name != b".." && name != b"."));
                if let Some((parent, name)) = path.split() {
                    prop_assert_eq!(parent.join(&name), Ok(path));
                }
            }
        }
    }

    #[test]
    fn a_neighbour_with_a_longer_name_is_not_moved_along() {
        let path = |text: &str| RelPath::new(text.as_bytes()).unwrap();
        assert_eq!(path("a/b/c").moved(&path("a/b"), &path("x")), Some(path("x/c")));
        assert_eq!(path("a/bc").moved(&path("a/b"), &path("x")), None);
        assert_eq!(path("a/b").moved(&path("a/b"), &path("x")), Some(path("x")));
    }

    #[test]
    fn a_name_from_the_wire_is_checked() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0b"] {
            let sent = postcard::to_stdvec(&bad.to_vec()).unwrap();
            assert!(postcard::from_bytes::<Name>(&sent).is_err(), "{bad:?}");
        }
        let odd = Name::new(b"\xff\n\\\x01").unwrap();
        let sent = postcard::to_stdvec(&odd).unwrap();
        assert_eq!(postcard::from_bytes::<Name>(&sent).unwrap(), odd);
    }
}
