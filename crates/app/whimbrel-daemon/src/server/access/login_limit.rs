//! Limit of failed logins for each address. Pure: the caller has the clock.
//!
//! Tokens cannot be guessed; the limit bounds what a stranger costs and how much the audit log gets of it. An
//! IPv6 user has a whole /64, which counts as one address.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    time::{Duration, Instant},
};

/// Failed logins of one address within [`WINDOW`].
pub(crate) const FAILURES_MAX: u32 = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// Addresses that are remembered; the oldest gives way.
const ADDRESSES_MAX: usize = 4096;

#[derive(Default)]
pub(crate) struct LoginLimit {
    /// Failures of an address, and when the first of them was.
    failures: HashMap<IpAddr, (u32, Instant)>,
}

impl LoginLimit {
    pub(crate) fn may_try(&self, address: IpAddr, now: Instant) -> bool {
        self.failures
            .get(&network(address))
            .is_none_or(|(count, since)| *count < FAILURES_MAX || now.duration_since(*since) >= WINDOW)
    }

    pub(crate) fn failed(&mut self, address: IpAddr, now: Instant) {
        if self.failures.len() >= ADDRESSES_MAX {
            self.failures.retain(|_, (_, since)| now.duration_since(*since) < WINDOW);
        }
        if self.failures.len() >= ADDRESSES_MAX {
            let oldest =
                self.failures.iter().min_by_key(|(_, (_, since))| *since).map(|(address, _)| *address);
            oldest.map(|oldest| self.failures.remove(&oldest));
        }
        let entry = self.failures.entry(network(address)).or_insert((0, now));
        if now.duration_since(entry.1) >= WINDOW {
            *entry = (0, now);
        }
        entry.0 += 1;
    }
}

/// What counts as one address.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_guesses_has_to_wait_and_others_do_not() {
        let (mut limit, start) = (LoginLimit::default(), Instant::now());
        let (bad, good): (IpAddr, IpAddr) = ("2001:db8::1".parse().unwrap(), "10.0.0.1".parse().unwrap());
        (0..FAILURES_MAX).for_each(|_| limit.failed(bad, start));
        assert!(!limit.may_try("2001:db8::2".parse().unwrap(), start), "of the same network");
        assert!(limit.may_try("2001:db8:0:1::1".parse().unwrap(), start) && limit.may_try(good, start));
        assert!(limit.may_try(bad, start + WINDOW));
        limit.failed(bad, start + WINDOW);
        assert!(limit.may_try(bad, start + WINDOW), "it begins anew");
    }

    #[test]
    fn many_addresses_take_bounded_memory() {
        let (mut limit, start) = (LoginLimit::default(), Instant::now());
        (0..2 * ADDRESSES_MAX as u32).for_each(|at| limit.failed(IpAddr::from(at.to_be_bytes()), start));
        assert_eq!(limit.failures.len(), ADDRESSES_MAX);
    }
}
