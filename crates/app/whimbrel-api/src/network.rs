//! Managed networks of a host: requests, and what there is.

use crate::openapi_names::Name;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr};
use utoipa::ToSchema;
use whimbrel_core::{HostName, MachineName};

/// A network to create.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkRequest {
    /// Name of the network and of its bridge: up to 15 small letters, digits and `_`, a letter first.
    pub name: String,
    /// IPv4 addresses, as `10.1.2.0/24` [default: a /24 that follows from the name].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet: Option<String>,
    /// IPv6 addresses, a /64 as `fd00:1:2:3::/64`, or `none` [default: a /64 that follows from the name].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet6: Option<String>,
    /// Whether machines reach nothing but each other and the host.
    #[serde(default)]
    pub isolated: bool,
}

/// A managed network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkInfo {
    /// Name of the network and of its bridge.
    pub name: String,
    /// IPv4 addresses of the network.
    pub subnet: String,
    /// Address of the host, which is gateway and name server.
    #[schema(value_type = String)]
    pub gateway: Ipv4Addr,
    /// IPv6 addresses; none if the network has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet6: Option<String>,
    /// Whether machines reach nothing but each other and the host.
    pub isolated: bool,
    /// Why the network does not work, if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Addresses of machines.
    pub machines: Vec<NetworkAddress>,
    /// Ports of the host that lead to machines.
    pub ports: Vec<PublishedPort>,
    /// Other hosts that share the network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<NetworkHost>,
}

/// Another host that shares a managed network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkHost {
    /// Name of the host.
    #[schema(value_type = Name)]
    pub host: HostName,
    /// Whether frames pass between the two hosts.
    pub joined: bool,
    /// Why not, as far as it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Addresses of its machines, as the host said them last.
    pub machines: Vec<NetworkAddress>,
}

/// Changes of the hosts that share a managed network.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkHostsRequest {
    /// Trusted hosts to share it with.
    #[serde(default)]
    #[schema(value_type = Vec<Name>)]
    pub share: Vec<HostName>,
    /// Hosts to share it with no longer.
    #[serde(default)]
    #[schema(value_type = Vec<Name>)]
    pub unshare: Vec<HostName>,
}

/// Address of a machine in a managed network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkAddress {
    /// Name of the machine.
    #[schema(value_type = Name)]
    pub machine: MachineName,
    /// Hardware address of its port.
    pub mac: String,
    /// IPv4 address that it gets by DHCP.
    #[schema(value_type = String)]
    pub address: Ipv4Addr,
}

/// Transport protocol of a published port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PortProtocol {
    /// Transmission control protocol.
    #[default]
    Tcp,
    /// User datagram protocol.
    Udp,
}

/// A port of the host that leads to a port of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PortRequest {
    /// Address of the host [default: all of its addresses].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub listen: Option<Ipv4Addr>,
    /// Port of the host.
    #[schema(maximum = 65535)]
    pub port: u16,
    /// Port of the machine.
    #[schema(maximum = 65535)]
    pub guest_port: u16,
    /// Protocol of both.
    #[serde(default)]
    pub protocol: PortProtocol,
}

/// Changes of a machine's published ports.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PortsRequest {
    /// Ports to publish.
    #[serde(default)]
    pub publish: Vec<PortRequest>,
    /// Ports of the host to publish no longer.
    #[serde(default)]
    pub unpublish: Vec<HostPort>,
}

/// A port of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostPort {
    /// Number of the port.
    #[schema(maximum = 65535)]
    pub port: u16,
    /// Protocol of the port.
    #[serde(default)]
    pub protocol: PortProtocol,
}

/// A published port as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PublishedPort {
    /// Name of the machine.
    #[schema(value_type = Name)]
    pub machine: MachineName,
    /// Address of the host; none stands for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub listen: Option<Ipv4Addr>,
    /// Port of the host.
    #[schema(maximum = 65535)]
    pub port: u16,
    /// Address of the machine.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// Port of the machine.
    #[schema(maximum = 65535)]
    pub guest_port: u16,
    /// Protocol of both.
    pub protocol: PortProtocol,
    /// Whether something in the machine took a connection just now; none where nobody tried, as for UDP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers: Option<bool>,
}
