//! The address of a witness: the third host, or the etcd, that decides when primary and standby lose contact.

use crate::HostName;
use std::{fmt, str::FromStr};

/// Prefix of etcd addresses.
const ETCD: &str = "etcd://";
/// Most members of an etcd that may be named; clusters have three or five.
const ENDPOINTS_MAX: usize = 9;
/// Longest host name of an etcd member: RFC 1035, section 2.3.4.
const NAME_MAX: usize = 253;

/// Error for a text that is not a witness address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} cannot be a witness: name a host, or an etcd as etcd://HOST:PORT[,HOST:PORT]")]
pub struct WitnessAddressError {
    /// The rejected text, at most 80 characters of it.
    pub text: String,
}

/// The witness of a protection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum WitnessAddress {
    /// A host that the others trust.
    Host(HostName),
    /// An etcd: `HOST:PORT` of its members, any of which can be asked.
    Etcd(Vec<String>),
}

impl WitnessAddress {
    /// The witness host, unless the witness is an etcd.
    pub fn host(&self) -> Option<&HostName> {
        match self {
            Self::Host(host) => Some(host),
            Self::Etcd(_) => None,
        }
    }
}

/// Accepts a name, an IPv4 address or an IPv6 address in brackets, then a port.
fn is_endpoint(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let is_host = match bracketed {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            (1..=NAME_MAX).contains(&host.len())
                && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
        }
    };
    is_host
        && port.bytes().all(|byte| byte.is_ascii_digit())
        && port.parse::<u16>().is_ok_and(|port| port > 0)
}

impl FromStr for WitnessAddress {
    type Err = WitnessAddressError;

    fn from_str(text: &str) -> Result<Self, WitnessAddressError> {
        let error = || WitnessAddressError { text: text.chars().take(80).collect() };
        let Some(endpoints) = text.strip_prefix(ETCD) else {
            return text.parse().map(Self::Host).map_err(|_| error());
        };
        let endpoints: Vec<&str> = endpoints.split(',').take(ENDPOINTS_MAX + 1).collect();
        match endpoints.len() <= ENDPOINTS_MAX && endpoints.iter().all(|one| is_endpoint(one)) {
            true => Ok(Self::Etcd(endpoints.into_iter().map(str::to_owned).collect())),
            false => Err(error()),
        }
    }
}

crate::serde_by_text!(WitnessAddress);

impl fmt::Display for WitnessAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(host) => host.fmt(f),
            Self::Etcd(endpoints) => write!(f, "{ETCD}{}", endpoints.join(",")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_witness_is_a_host_or_an_etcd_and_nothing_that_could_be_taken_for_either() {
        for good in ["gamma", "etcd://10.0.0.1:2379", "etcd://a.b:1,[::1]:2379,c:65535"] {
            assert_eq!(good.parse::<WitnessAddress>().unwrap().to_string(), good);
        }
        let etcd: WitnessAddress = "etcd://a:1,b:2".parse().unwrap();
        assert_eq!(etcd.host(), None);
        assert_eq!(etcd, WitnessAddress::Etcd(vec!["a:1".into(), "b:2".into()]));
        let many = format!("etcd://a:1{}", ",a:1".repeat(9));
        for bad in [
            "",
            "http://a:1",
            "etcd://",
            "etcd://a",
            "etcd://a:0",
            "etcd://a:1,",
            "etcd://a:+1",
            "etcd://a/b:1",
            &many,
        ] {
            assert!(bad.parse::<WitnessAddress>().is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<WitnessAddress>("\"etcd://a b:1\"").is_err());
    }
}
