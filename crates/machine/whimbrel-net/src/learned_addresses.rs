//! Learned addresses of a machine, from the frames that it sends. Pure, bounded.
//!
//! Learns the source of every frame, and the IP addresses that the machine claims by ARP or neighbour
//! discovery. The sources of IP packets are ignored: a machine that routes sends packets of others, and
//! announcing those would redirect their traffic to it.

use crate::frame_parser::{AddressClaim, claim};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// Most stations of a machine: it has one, or a few more if it bridges inside.
const STATIONS_MAX: usize = 64;
/// Most addresses of each kind for a station.
const ADDRESSES_MAX: usize = 16;

/// Hardware address of a station.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Broadcast address, for all stations.
    pub const BROADCAST: Mac = Mac([0xff; 6]);

    /// Whether it can be the address of one station.
    pub(crate) fn is_station(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Hardware address of a machine and its IP addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Station {
    /// Hardware address of the station.
    pub mac: Mac,
    /// IPv4 addresses, the last claimed at the end.
    pub ipv4: Vec<Ipv4Addr>,
    /// IPv6 addresses, the last claimed at the end.
    pub ipv6: Vec<Ipv6Addr>,
}

/// Addresses of a machine. They are sent with it, so that the target host can announce them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    stations: Vec<Station>,
}

impl Addresses {
    /// Known stations, in the order in which they were learned.
    pub fn stations(&self) -> &[Station] {
        &self.stations
    }

    /// Learns from a frame that the machine sent.
    pub fn record(&mut self, frame: &[u8]) {
        if let Some(AddressClaim { mac, address }) = claim(frame) {
            self.insert(mac, address);
        }
    }

    /// Adds another table, which comes from another host and is checked like a frame.
    pub fn merge(&mut self, other: &Addresses) {
        for station in &other.stations {
            self.insert(station.mac, None);
            station.ipv4.iter().for_each(|address| self.insert(station.mac, Some(IpAddr::V4(*address))));
            station.ipv6.iter().for_each(|address| self.insert(station.mac, Some(IpAddr::V6(*address))));
        }
    }

    pub(crate) fn insert(&mut self, mac: Mac, address: Option<IpAddr>) {
        if !mac.is_station() {
            return;
        }
        let Some(index) = self.index_of(mac) else { return };
        let station = &mut self.stations[index];
        match address {
            Some(IpAddr::V4(address)) if can_be_claimed_v4(address) => add_latest(&mut station.ipv4, address),
            Some(IpAddr::V6(address)) if can_be_claimed_v6(address) => add_latest(&mut station.ipv6, address),
            _ => {}
        }
    }

    /// Index of `mac`, which is added if there is space: the first stations seen are the machine's own.
    fn index_of(&mut self, mac: Mac) -> Option<usize> {
        if let Some(index) = self.stations.iter().position(|station| station.mac == mac) {
            return Some(index);
        }
        (self.stations.len() < STATIONS_MAX).then(|| {
            self.stations.push(Station { mac, ipv4: Vec::new(), ipv6: Vec::new() });
            self.stations.len() - 1
        })
    }
}

/// Adds an address, or moves it to the end; a full list drops the one claimed least recently.
fn add_latest<A: PartialEq>(known: &mut Vec<A>, address: A) {
    if known.last() == Some(&address) {
        return;
    }
    known.retain(|other| *other != address);
    if known.len() == ADDRESSES_MAX {
        known.remove(0);
    }
    known.push(address);
}

fn can_be_claimed_v4(address: Ipv4Addr) -> bool {
    !(address.is_unspecified() || address.is_multicast() || address.is_broadcast() || address.is_loopback())
}

fn can_be_claimed_v6(address: Ipv6Addr) -> bool {
    !(address.is_unspecified() || address.is_multicast() || address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_invents_addresses_fills_no_memory() {
        let mut addresses = Addresses::default();
        for number in 0..100_000u32 {
            let [_, a, b, c] = number.to_be_bytes();
            let mac = Mac([2, 0, 0, 0, 0, (number % 300) as u8]);
            addresses.insert(mac, Some(IpAddr::V4(Ipv4Addr::new(10, a, b, c))));
        }
        assert_eq!(addresses.stations().len(), STATIONS_MAX);
        assert!(addresses.stations().iter().all(|station| station.ipv4.len() <= ADDRESSES_MAX));
    }

    #[test]
    fn a_table_that_travelled_is_not_trusted() {
        let station = Station { mac: Mac::BROADCAST, ipv4: vec![Ipv4Addr::LOCALHOST], ipv6: Vec::new() };
        let good =
            Station { mac: Mac([2; 6]), ipv4: vec![Ipv4Addr::BROADCAST], ipv6: vec![Ipv6Addr::LOCALHOST] };
        let mut addresses = Addresses::default();
        addresses.merge(&Addresses { stations: vec![station, good] });
        let expected = Station { mac: Mac([2; 6]), ipv4: Vec::new(), ipv6: Vec::new() };
        assert_eq!(addresses.stations(), [expected]);
    }
}
