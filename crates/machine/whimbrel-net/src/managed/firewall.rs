//! Rules of a managed network, as two tables of nftables: the way out (masquerading), published ports and
//! what may come in; and on the bridge, which addresses a machine may send from.
//!
//! Of a network that hosts share, each host is gateway and name server of its own machines, at the same
//! addresses. So nothing that a host says itself leaves it by the bridge's ports to other hosts, and nothing
//! that is for such a gateway comes in there.
//!
//! The tables are replaced as a whole, in one transaction of the kernel (nft(8), "Atomic"). Rules of others
//! stay untouched; what they drop stays dropped. A machine has no other hardware address than its own by its
//! [`crate::PortFilter`], so the bridge's rules can go by that.

use super::{ManagedNetwork, PortForward, ProgramError, addresses, program::run};
use std::fmt::Write;

/// Interfaces that are called like [`super::LINK`], as nft(8) writes it.
const LINKS: &str = "wms*";

/// Puts the rules of the network in force.
pub fn apply(network: &ManagedNetwork) -> Result<(), ProgramError> {
    run("nft", &["-f", "-"], &rules(network))
}

/// Removes the rules of a network, if there are any.
pub fn remove(name: &str) -> Result<(), ProgramError> {
    run("nft", &["-f", "-"], &removal(name))
}

fn removal(name: &str) -> String {
    let table = table(name);
    let tables = ["inet", "bridge"]
        .map(|family| format!("add table {family} {table}\ndelete table {family} {table}\n"));
    tables.concat()
}

fn table(name: &str) -> String {
    format!("whimbrel_{name}")
}

/// Input of nft that replaces the tables of the network.
fn rules(network: &ManagedNetwork) -> String {
    let table = table(&network.name);
    let bridge = format!("table bridge {table} {{\n{}{}}}\n", links(network), sources(network));
    removal(&network.name) + &routing(network) + &bridge
}

/// The table that lets machines out, and others in.
fn routing(network: &ManagedNetwork) -> String {
    let (name, table, subnet) = (&network.name, table(&network.name), network.subnet);
    let out = match network.isolated {
        true => format!("iifname \"{name}\" oifname != \"{name}\" drop"),
        false => format!("iifname \"{name}\" accept"),
    };
    let masquerade6 = network.subnet6.filter(|_| !network.isolated);
    let masquerade6 = masquerade6
        .map(|subnet6| format!("ip6 saddr {subnet6} oifname != \"{name}\" masquerade"))
        .unwrap_or_default();
    let forwards = network.ports.iter().fold(String::new(), |mut text, port| {
        let _ = writeln!(text, "        {}", forward(port));
        text
    });
    format!(
        "table inet {table} {{
    chain forward {{
        type filter hook forward priority filter; policy accept;
        # Nobody outside begins a connection to a machine, except to a published port.
        oifname \"{name}\" ct state established,related accept
        oifname \"{name}\" ct status dnat accept
        iifname != \"{name}\" oifname \"{name}\" drop
        {out}
    }}
    chain input {{
        type filter hook input priority filter; policy accept;
        # Only what answers the host's own connections by 127.0.0.1.
        iifname \"{name}\" ip daddr 127.0.0.0/8 ct state != established drop
    }}
    chain ports {{
{forwards}    }}
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        fib daddr type local jump ports
    }}
    chain output {{
        type nat hook output priority -100; policy accept;
        fib daddr type local jump ports
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        # A machine that uses a published port of its neighbour, and the host itself by 127.0.0.1.
        oifname \"{name}\" ct status dnat ip saddr {subnet} masquerade
        oifname \"{name}\" ip saddr 127.0.0.0/8 masquerade
        ip saddr {subnet} oifname != \"{name}\" masquerade
        {masquerade6}
    }}
}}
"
    )
}

/// Chains that keep the gateways of a shared network apart.
fn links(network: &ManagedNetwork) -> String {
    if !network.shared {
        return String::new();
    }
    let (gateway, address) = (addresses::bridge_mac(&network.name), network.gateway());
    format!(
        "    chain links {{
        type filter hook prerouting priority dstnat; policy accept;
        iifname != \"{LINKS}\" accept
        ether saddr {gateway} drop
        ether daddr {gateway} drop
        arp daddr ip {address} drop
        # DHCP, and the search of IPv6 routers.
        udp dport {{ 67, 68, 546, 547 }} drop
        icmpv6 type {{ nd-router-solicit, nd-router-advert }} drop
    }}
    chain own {{
        type filter hook output priority filter; policy accept;
        oifname \"{LINKS}\" drop
    }}
"
    )
}

/// Chains that drop what a machine sends from an address of another one: ARP and IPv4 that are not of its
/// lease, but for the search of one (RFC 2131, RFC 5227), and IPv6 of other networks.
fn sources(network: &ManagedNetwork) -> String {
    let filtered = || network.leases.iter().filter(|lease| lease.filtered);
    let machines: Vec<String> = filtered().map(|lease| lease.mac.to_string()).collect();
    if machines.is_empty() {
        return String::new();
    }
    let addresses: Vec<String> =
        filtered().map(|lease| format!("{} . {}", lease.mac, lease.address)).collect();
    let (machines, addresses) = (machines.join(", "), addresses.join(", "));
    let subnet6 = network.subnet6.map(|subnet| format!(", {subnet}")).unwrap_or_default();
    format!(
        "    set machines {{ type ether_addr; elements = {{ {machines} }} }}
    set addresses {{ type ether_addr . ipv4_addr; elements = {{ {addresses} }} }}
    chain prerouting {{
        type filter hook prerouting priority dstnat; policy accept;
        ether saddr @machines jump sources
    }}
    chain sources {{
        ether type {{ 8021q, 8021ad }} drop
        arp saddr ip 0.0.0.0 accept
        ether type arp arp saddr ether . arp saddr ip != @addresses drop
        ip saddr 0.0.0.0 udp dport 67 accept
        ether type ip ether saddr . ip saddr != @addresses drop
        ip6 saddr != {{ ::, fe80::/10{subnet6} }} drop
    }}
"
    )
}

fn forward(port: &PortForward) -> String {
    let listen = port.listen.map(|address| format!("ip daddr {address} ")).unwrap_or_default();
    let (protocol, from, to) = (port.protocol.as_str(), port.port, port.guest_port);
    format!("{listen}{protocol} dport {from} dnat ip to {}:{to}", port.address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::managed::Protocol;

    #[test]
    fn a_port_of_one_address_is_not_published_on_the_others() {
        let address = [10, 1, 2, 3].into();
        let port = PortForward { listen: None, protocol: Protocol::Tcp, port: 2222, address, guest_port: 22 };
        assert_eq!(forward(&port), "tcp dport 2222 dnat ip to 10.1.2.3:22");
        let one = PortForward { listen: Some([192, 0, 2, 1].into()), protocol: Protocol::Udp, ..port };
        assert_eq!(forward(&one), "ip daddr 192.0.2.1 udp dport 2222 dnat ip to 10.1.2.3:22");
    }
}
