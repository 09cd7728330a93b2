//! Locations of sources and images: a folder or file of this host, or an address of HTTP or HTTPS.

use super::download::FetchError;
use hyper::Uri;
use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

/// Longest address or path.
const LENGTH_MAX: usize = 2048;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Location {
    File(PathBuf),
    Web(Uri),
}

impl Location {
    /// The location of `below` in this folder. `below` comes from a list of the source: a relative path
    /// without `..` and of characters that mean nothing else in an address.
    pub(super) fn join(&self, below: &str) -> Result<Self, FetchError> {
        let is_part = |part: &str| !part.is_empty() && part != "." && part != "..";
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~+,=@:/".contains(&byte);
        if below.len() > LENGTH_MAX || !below.split('/').all(is_part) || !below.bytes().all(plain) {
            return Err(FetchError::Address { text: below.chars().take(80).collect() });
        }
        match self {
            Self::File(folder) => Ok(Self::File(folder.join(below))),
            Self::Web(folder) => format!("{}/{below}", folder.to_string().trim_end_matches('/')).parse(),
        }
    }

    /// Whether what is read there is protected on its way.
    pub(super) fn is_secure(&self) -> bool {
        match self {
            Self::File(_) => true,
            Self::Web(address) => address.scheme_str() == Some("https"),
        }
    }

    /// The location that a server at this one refers to.
    pub(super) fn redirected(&self, to: &str) -> Result<Self, FetchError> {
        let refuse = || FetchError::Address { text: to.chars().take(80).collect() };
        let Self::Web(from) = self else { return Err(refuse()) };
        let (scheme, authority) =
            (from.scheme_str().unwrap_or("https"), from.authority().map_or("", |a| a.as_str()));
        let next: Self = match to {
            _ if to.starts_with("http://") || to.starts_with("https://") => to.parse()?,
            _ if to.starts_with('/') && !to.starts_with("//") => {
                format!("{scheme}://{authority}{to}").parse()?
            }
            _ => return Err(refuse()),
        };
        match &next {
            // What was fetched over TLS stays so: a list of checksums is trusted for where it came from.
            Self::Web(next) if scheme == "https" && next.scheme_str() != Some("https") => Err(refuse()),
            Self::Web(_) => Ok(next),
            Self::File(_) => Err(refuse()),
        }
    }
}

impl FromStr for Location {
    type Err = FetchError;

    fn from_str(text: &str) -> Result<Self, FetchError> {
        let refuse = || FetchError::Address { text: text.chars().take(80).collect() };
        if text.len() > LENGTH_MAX {
            return Err(refuse());
        }
        if Path::new(text).is_absolute() {
            return Ok(Self::File(text.into()));
        }
        let address: Uri = text.parse().map_err(|_| refuse())?;
        let known = matches!(address.scheme_str(), Some("http" | "https"));
        let named = address.authority().is_some_and(|place| !place.as_str().contains('@'));
        if known && named { Ok(Self::Web(address)) } else { Err(refuse()) }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Web(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_only_what_is_below_its_folder() {
        for base in ["https://images.test/cloud/", "https://images.test/cloud", "/srv/cloud"] {
            let base: Location = base.parse().unwrap();
            let below = base.join("bookworm/latest/a.qcow2").unwrap().to_string();
            assert!(below.ends_with("/cloud/bookworm/latest/a.qcow2"), "{below}");
            for bad in ["", "/etc/passwd", "../a", "a/../../b", "a//b", "a?b", "a#b", "a b", "a%2e", "a\r\nb"]
            {
                assert!(base.join(bad).is_err(), "{bad:?}");
            }
        }
    }

    #[test]
    fn a_redirection_never_leaves_tls_and_never_becomes_a_file() {
        let from: Location = "https://images.test/a/b".parse().unwrap();
        let to = |text: &str| from.redirected(text).map(|to| to.to_string()).ok();
        assert_eq!(to("/c").as_deref(), Some("https://images.test/c"));
        assert_eq!(to("https://mirror.test/c").as_deref(), Some("https://mirror.test/c"));
        for bad in ["http://mirror.test/c", "//mirror.test/c", "file:///etc/shadow", "c", "ftp://x/y"] {
            assert_eq!(to(bad), None, "{bad}");
        }
    }

    #[test]
    fn addresses_with_passwords_or_of_other_protocols_are_refused() {
        for bad in ["", "relative/path", "ftp://a/b", "https://", "http://me:secret@a/b"] {
            assert!(bad.parse::<Location>().is_err(), "{bad:?}");
        }
    }
}
