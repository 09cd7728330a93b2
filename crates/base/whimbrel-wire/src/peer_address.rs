//! The address of a peer and its transport: `host:port` is TLS, `ssh:DESTINATION` is the user's ssh.
//!
//! Pure text. A text that ssh would read as an option, or that has blanks, is not an address.

use std::{fmt, str::FromStr};

const SSH: &str = "ssh:";
/// A DNS name has at most 253 bytes; this leaves room for user, port and brackets.
const MAX_LENGTH: usize = 320;

/// The address of a peer, with its transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerAddress {
    /// TLS over TCP, as `host:port`.
    Tcp(String),
    /// ssh, with a destination as ssh reads it: `user@host`, `ssh://user@host:port` or a configured name.
    Ssh(String),
}

/// Error for a text that is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a host address: use HOST:PORT, ssh:DESTINATION or ssh://USER@HOST:PORT")]
pub struct ParseAddressError {
    /// The rejected text, at most 80 characters of it.
    pub text: String,
}

impl PeerAddress {
    /// The address with the ssh destination `destination`.
    pub fn ssh(destination: &str) -> Result<Self, ParseAddressError> {
        let host = destination.strip_prefix("ssh://").unwrap_or(destination);
        if is_argument(host) { Ok(Self::Ssh(destination.to_owned())) } else { Err(no_address(destination)) }
    }
}

/// Whether a program would read `text` as one argument that is not an option.
fn is_argument(text: &str) -> bool {
    (1..=MAX_LENGTH).contains(&text.len())
        && !text.starts_with('-')
        && !text.contains(|letter: char| letter.is_whitespace() || letter.is_control())
}

fn no_address(text: &str) -> ParseAddressError {
    ParseAddressError { text: text.chars().take(80).collect() }
}

impl FromStr for PeerAddress {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix(SSH) {
            Some(rest) if rest.starts_with("//") => Self::ssh(text),
            Some(destination) => Self::ssh(destination),
            None if is_argument(text) => Ok(Self::Tcp(text.to_owned())),
            None => Err(no_address(text)),
        }
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ssh(destination) if !destination.starts_with("ssh://") => write!(f, "{SSH}{destination}"),
            Self::Ssh(text) | Self::Tcp(text) => f.write_str(text),
        }
    }
}

whimbrel_core::serde_by_text!(PeerAddress);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_carrier_is_told_by_its_form() {
        let ssh = |destination: &str| PeerAddress::Ssh(destination.to_owned());
        assert_eq!("10.0.0.1:7400".parse(), Ok(PeerAddress::Tcp("10.0.0.1:7400".to_owned())));
        assert_eq!("ssh:root@beta".parse(), Ok(ssh("root@beta")));
        assert_eq!("ssh://root@beta:2222".parse(), Ok(ssh("ssh://root@beta:2222")));
        assert_eq!(PeerAddress::ssh("ssh://beta"), Ok(ssh("ssh://beta")));
    }

    #[test]
    fn an_option_or_several_words_are_no_address() {
        for text in
            ["", "ssh:", "ssh://", "ssh:-oProxyCommand=x", "ssh://-oProxyCommand=x", "-x", "ssh:a b", "a\n"]
        {
            assert!(text.parse::<PeerAddress>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_the_same(text in "(ssh:(//)?)?[a-z@:.-]{0,12}") {
            if let Ok(address) = text.parse::<PeerAddress>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }
    }
}
