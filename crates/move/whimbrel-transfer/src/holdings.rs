//! Holdings: which holder announced which capsules and images. Held in memory and bounded for each host;
//! hosts announce again when they reconnect.

use crate::protocol::{AnnounceRequest, HOLDINGS_MAX, Holding};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Mutex,
};
use whimbrel_core::{Digest, lock};

/// Most holdings of one host; further ones are ignored.
const HOLDINGS_PER_HOST_MAX: usize = 65_536;
/// Most hosts; there are as many as are trusted.
const HOSTS_MAX: usize = 4096;

/// Announced holdings of every host.
#[derive(Debug, Default)]
pub struct Holdings {
    hosts: Mutex<BTreeMap<String, HashMap<Digest, bool>>>,
}

impl Holdings {
    /// Records the announcement of `host`.
    pub fn record(&self, host: &str, said: &AnnounceRequest) {
        let mut hosts = lock(&self.hosts);
        if !hosts.contains_key(host) && hosts.len() >= HOSTS_MAX {
            return;
        }
        let held = hosts.entry(host.to_owned()).or_default();
        if said.replace {
            held.clear();
        }
        for Holding { digest, whole } in &said.holdings {
            if held.len() < HOLDINGS_PER_HOST_MAX || held.contains_key(digest) {
                held.insert(*digest, *whole);
            }
        }
    }

    /// Names of the hosts that hold `digest`, those with all of it first.
    pub fn holders_of(&self, digest: &Digest) -> Vec<String> {
        let hosts = lock(&self.hosts);
        let holders = |all: bool| {
            let hosts = hosts.iter();
            hosts.filter(move |(_, held)| held.get(digest) == Some(&all)).map(|(host, _)| host.clone())
        };
        holders(true).chain(holders(false)).collect()
    }

    /// Removes a host.
    pub fn remove(&self, host: &str) {
        lock(&self.hosts).remove(host);
    }
}

/// Splits the holdings of this host into messages, which replace its earlier announcements.
pub fn announcements(holdings: &[Holding]) -> Vec<AnnounceRequest> {
    let pieces = holdings.chunks(HOLDINGS_MAX).enumerate();
    let mut messages: Vec<AnnounceRequest> =
        pieces.map(|(i, piece)| AnnounceRequest { replace: i == 0, holdings: piece.to_vec() }).collect();
    if messages.is_empty() {
        messages.push(AnnounceRequest { replace: true, holdings: Vec::new() });
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_announcement_replaces_the_old_and_whole_holders_come_first() {
        let holdings = Holdings::default();
        let say = |host: &str, byte: u8, whole: bool| {
            let holding = Holding { digest: Digest([byte; 32]), whole };
            announcements(&[holding]).iter().for_each(|said| holdings.record(host, said));
        };
        say("alpha", 1, false);
        say("beta", 1, true);
        assert_eq!(holdings.holders_of(&Digest([1; 32])), ["beta", "alpha"]);
        say("alpha", 2, true);
        assert_eq!(holdings.holders_of(&Digest([1; 32])), ["beta"]);
        holdings.remove("beta");
        assert!(holdings.holders_of(&Digest([1; 32])).is_empty());
    }

    #[test]
    fn a_host_that_announces_without_end_is_not_kept_without_end() {
        let holdings = Holdings::default();
        for round in 0..60u32 {
            let digest = |i: u32| Digest::of(&(round * 10_000 + i).to_le_bytes());
            let many = (0..1800).map(|i| Holding { digest: digest(i), whole: true }).collect();
            holdings.record("greedy", &AnnounceRequest { replace: false, holdings: many });
        }
        assert_eq!(lock(&holdings.hosts)["greedy"].len(), HOLDINGS_PER_HOST_MAX);
    }
}
