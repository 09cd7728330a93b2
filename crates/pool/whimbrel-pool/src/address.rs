//! The address of a manager: `host:port/KEY`, with the key as `whimbrel key` prints it.

use std::{fmt, str::FromStr};
use whimbrel_wire::PublicKey;

/// Address of a manager and the key that it must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagerAddress {
    /// Network address, `host:port`.
    pub address: String,
    /// The manager's public key.
    pub key: PublicKey,
}

/// Error for a text that is not the address of a manager.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a manager is HOST:PORT/KEY as it prints it when it starts, this is {text:?}")]
pub struct ManagerAddressError {
    /// The rejected text, at most 120 characters of it.
    pub text: String,
}

impl FromStr for ManagerAddress {
    type Err = ManagerAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || ManagerAddressError { text: text.chars().take(120).collect() };
        let (address, key) = text.rsplit_once('/').ok_or_else(bad)?;
        let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
        if host.is_empty() || port.parse::<u16>().is_err() || address.chars().any(char::is_whitespace) {
            return Err(bad());
        }
        Ok(Self { address: address.to_owned(), key: key.parse().map_err(|_| bad())? })
    }
}

impl fmt::Display for ManagerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.key)
    }
}

whimbrel_core::serde_by_text!(ManagerAddress);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_comes_back_and_half_of_one_is_refused() {
        let address = ManagerAddress { address: "10.0.0.1:7500".into(), key: PublicKey([7; 32]) };
        assert_eq!(address.to_string().parse(), Ok(address.clone()));
        let key = address.key.to_string();
        for bad in ["", "10.0.0.1:7500", "10.0.0.1/x", &format!("10.0.0.1/{key}"), &format!(":1/{key}")] {
            assert!(bad.parse::<ManagerAddress>().is_err(), "{bad}");
        }
    }
}
