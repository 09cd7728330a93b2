//! Managed networks: a bridge with addresses, name service, a way out and published ports, made of what Linux
//! and Debian have: a bridge of the kernel, dnsmasq and nftables.
//!
//! [`ManagedNetwork`] says what there is to be; [`bridge`], [`firewall`] and [`dhcp`] make it so, each as
//! often as one likes. The same name gives the same addresses and the same hardware address of the bridge on
//! every host, so a machine that moves finds its gateway where it was.

pub mod addresses;
pub mod bridge;
pub mod dhcp;
pub mod firewall;
mod program;

use crate::Mac;
use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;
use whimbrel_core::MachineName;

pub use program::ProgramError;

/// What a managed network is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagedNetwork {
    /// Name of the network and of its bridge.
    pub name: String,
    /// Addresses of the network. The first one is the host's.
    pub subnet: Ipv4Net,
    /// IPv6 addresses of the network, a /64; machines choose theirs (RFC 4862).
    pub subnet6: Option<Ipv6Net>,
    /// Whether machines reach nothing but each other and the host.
    pub isolated: bool,
    /// Addresses of machines.
    pub leases: Vec<StaticLease>,
    /// Ports of the host that lead to machines.
    pub ports: Vec<PortForward>,
    /// Whether other hosts share the network, by ports of the bridge that are called like [`LINK`].
    pub shared: bool,
    /// Machines of this network on other hosts, and their addresses.
    pub elsewhere: Vec<(MachineName, Ipv4Addr)>,
}

/// Name pattern of the bridge's ports that lead to other hosts; the kernel replaces `%d` by a number.
pub const LINK: &str = "wms%d";

/// The address of a machine in a managed network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticLease {
    /// Hardware address of the machine's port.
    pub mac: Mac,
    /// Name of the machine, which the network's name service knows.
    pub machine: MachineName,
    /// IPv4 address of the machine.
    pub address: Ipv4Addr,
    /// Whether the machine may send from this address only. A router or bridge may not be held to that.
    pub filtered: bool,
}

/// A port of the host that leads to a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortForward {
    /// Address of the host; none stands for all of them.
    pub listen: Option<Ipv4Addr>,
    /// Protocol of both ports.
    pub protocol: Protocol,
    /// Port of the host.
    pub port: u16,
    /// Address of the machine.
    pub address: Ipv4Addr,
    /// Port of the machine.
    pub guest_port: u16,
}

/// A transport protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Transmission control protocol.
    #[default]
    Tcp,
    /// User datagram protocol.
    Udp,
}

impl Protocol {
    /// Name of the protocol, as nftables writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl ManagedNetwork {
    /// Address of the host in the network, which is the machines' gateway and name server.
    pub fn gateway(&self) -> Ipv4Addr {
        addresses::gateway(self.subnet)
    }
}

/// Name of a machine as a label of the name service (RFC 1123, 2.1): in small letters, with `-` for what a
/// label cannot have.
pub fn host_label(machine: &MachineName) -> String {
    machine.as_str().to_ascii_lowercase().replace(['.', '_'], "-").trim_end_matches('-').to_owned()
}

/// Whether `name` can be that of a managed network: one of an interface (`IFNAMSIZ` of Linux: at most 15
/// bytes) that needs no quoting anywhere.
pub fn is_network_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (1..=15).contains(&name.len())
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_an_interface_or_a_rule_could_not_have_are_refused() {
        for good in ["lan0", "a", "my_net", "fifteen_letters"] {
            assert!(is_network_name(good), "{good}");
        }
        for bad in ["", "0lan", "Lan", "a-b", "a b", "a/b", "a;b", "sixteen_letters_", "\u{e9}"] {
            assert!(!is_network_name(bad), "{bad}");
        }
    }

    #[test]
    fn a_machine_with_an_odd_name_has_a_label_that_can_be_looked_up() {
        for (name, label) in [("web", "web"), ("Web.1", "web-1"), ("a_b", "a-b"), ("x.", "x")] {
            assert_eq!(host_label(&name.parse().expect("a name")), label);
        }
    }
}
