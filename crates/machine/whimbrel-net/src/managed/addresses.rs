//! Addresses of managed networks: derived from names, so that hosts need not agree on them.
//!
//! Pure. Collisions are told, never resolved in silence: a subnet in use is refused by the caller, and a
//! machine whose place is taken gets the next free one.

use crate::Mac;
use ipnet::{Ipv4Net, Ipv6Net};
use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr},
};
use whimbrel_core::Digest;

/// A subnet for a network of that name: a /24 in 10.64.0.0/10, where few others choose theirs.
pub fn subnet_of(name: &str) -> Ipv4Net {
    let [_, _, second, third, ..] = digest("subnet", name);
    Ipv4Net::new_assert(Ipv4Addr::new(10, 64 | second & 63, third, 0), 24)
}

/// A /64 of unique local addresses (RFC 4193) for a network of that name.
pub fn subnet6_of(name: &str) -> Ipv6Net {
    let [_, a, b, c, d, e, ..] = digest("subnet6", name);
    let word = |high, low| u16::from_be_bytes([high, low]);
    Ipv6Net::new_assert(Ipv6Addr::new(word(0xfd, a), word(b, c), word(d, e), 0, 0, 0, 0, 0), 64)
}

/// Hardware address of the bridge of a network of that name; locally administered, unicast.
pub fn bridge_mac(name: &str) -> Mac {
    let [a, b, c, ..] = digest("bridge", name);
    Mac([0x52, 0x54, 0x01, a, b, c])
}

/// Address of the host in a subnet: the first one.
pub fn gateway(subnet: Ipv4Net) -> Ipv4Addr {
    subnet.hosts().next().unwrap_or(subnet.addr())
}

/// Address of the host in an IPv6 subnet.
pub fn gateway6(subnet: Ipv6Net) -> Ipv6Addr {
    Ipv6Addr::from_bits(subnet.network().to_bits() | 1)
}

/// A free address for `mac`: always the same one if it is free. None if the subnet is full.
pub fn choose(subnet: Ipv4Net, taken: &BTreeSet<Ipv4Addr>, mac: Mac) -> Option<Ipv4Addr> {
    let first = u32::from(gateway(subnet)).checked_add(1)?;
    let count = u32::from(subnet.broadcast()).checked_sub(first).filter(|count| *count > 0)?;
    let [a, b, c, d, ..] = *Digest::of(&mac.0).as_bytes();
    let begin = u32::from_be_bytes([a, b, c, d]) % count;
    let places = (0..count).map(|step| Ipv4Addr::from(first + (begin + step) % count));
    // A full large subnet is looked through once, in memory.
    places.into_iter().find(|address| !taken.contains(address))
}

fn digest(what: &str, name: &str) -> [u8; 32] {
    *Digest::of(format!("whimbrel network {what} {name}").as_bytes()).as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_a_name_are_private_and_the_same_everywhere() {
        for name in ["lan0", "web", "a"] {
            let (subnet, subnet6) = (subnet_of(name), subnet6_of(name));
            assert!(subnet.addr().is_private() && subnet == subnet_of(name), "{subnet}");
            assert!(subnet6.network().is_unique_local() && subnet6.prefix_len() == 64, "{subnet6}");
            assert_eq!(bridge_mac(name).0[0] & 3, 2, "locally administered, unicast");
        }
        assert_ne!(subnet_of("lan0"), subnet_of("lan1"));
    }

    #[test]
    fn a_machine_keeps_its_address_and_a_full_subnet_has_none() {
        let subnet: Ipv4Net = "10.1.2.0/29".parse().expect("a subnet");
        let mac = |last| Mac([0x52, 0x54, 0, 0, 0, last]);
        let mut taken = BTreeSet::new();
        let first = choose(subnet, &taken, mac(1)).expect("an address");
        assert_eq!(choose(subnet, &taken, mac(1)), Some(first));
        for last in 1..=5 {
            let address = choose(subnet, &taken, mac(last)).expect("an address");
            assert!(subnet.hosts().skip(1).any(|host| host == address), "{address} is no machine's");
            assert!(taken.insert(address), "{address} is given twice");
        }
        assert_eq!(choose(subnet, &taken, mac(6)), None);
    }
}
