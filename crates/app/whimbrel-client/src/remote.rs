//! Address of a host's API over TLS, and the token for it.

use std::{fmt, str::FromStr};
use whimbrel_wire::web_tls::Fingerprint;

/// Port of the API where the address names none.
pub const DEFAULT_PORT: u16 = 7443;

/// Address of an API: `https://HOST[:PORT]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiAddress {
    /// Name or address of the host.
    pub host: String,
    /// Port of its API.
    pub port: u16,
}

/// A text that is no address of an API.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an address is https://HOST or https://HOST:PORT")]
pub struct ApiAddressError;

impl FromStr for ApiAddress {
    type Err = ApiAddressError;

    fn from_str(text: &str) -> Result<Self, ApiAddressError> {
        let rest = text.strip_prefix("https://").ok_or(ApiAddressError)?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']').ok_or(ApiAddressError)?,
            None => rest.split_at(rest.find(':').unwrap_or(rest.len())),
        };
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().map_err(|_| ApiAddressError)?,
            None if port.is_empty() => DEFAULT_PORT,
            None => return Err(ApiAddressError),
        };
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        match !host.is_empty() && host.bytes().all(fits) {
            true => Ok(Self { host: host.to_owned(), port }),
            false => Err(ApiAddressError),
        }
    }
}

impl fmt::Display for ApiAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "https://[{}]:{}", self.host, self.port),
            false => write!(f, "https://{}:{}", self.host, self.port),
        }
    }
}

/// An API over TLS, with what it takes to be let in.
#[derive(Clone)]
pub struct RemoteHost {
    /// Where it listens.
    pub address: ApiAddress,
    /// Text of the token.
    pub token: String,
    /// Fingerprint of its certificate; none asks the authorities that this computer trusts.
    pub fingerprint: Option<Fingerprint>,
}

impl fmt::Debug for RemoteHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteHost({})", self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_url_without_a_path() {
        for (text, whole) in [
            ("https://alpha", "https://alpha:7443"),
            ("https://alpha.example.org:443/", "https://alpha.example.org:443"),
            ("https://[2001:db8::1]:9", "https://[2001:db8::1]:9"),
            ("https://10.0.0.1", "https://10.0.0.1:7443"),
        ] {
            let address: ApiAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), whole);
            assert_eq!(whole.parse(), Ok(address));
        }
        for bad in [
            "",
            "alpha",
            "http://alpha",
            "https://",
            "https://a:x",
            "https://a/b",
            "https://[::1",
            "https://a b",
        ] {
            assert_eq!(bad.parse::<ApiAddress>(), Err(ApiAddressError), "{bad}");
        }
    }
}
