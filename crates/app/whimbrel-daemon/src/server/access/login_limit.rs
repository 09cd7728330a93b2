//! Limit of failed logins for each address and local user. Pure: the caller has the clock.
//!
//! Tokens cannot be guessed; the limit bounds what a stranger costs and how much the audit log gets of it. An
//! IPv6 user has a whole /64, which counts as one address.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    time::{Duration, Instant},
};

/// Origin of a connection, before it is known by which right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// A user of this host.
    User(u32),
    /// An IPv4 address, or the first one of an IPv6 network.
    Address(IpAddr),
}

impl Source {
    pub(crate) fn of(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
            address => address,
        })
    }
}

/// Failed logins of one source within [`WINDOW`].
pub(crate) const FAILURES_MAX: u32 = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// Sources that are remembered; the oldest gives way.
const SOURCES_MAX: usize = 4096;

#[derive(Default)]
pub(crate) struct LoginLimit {
    /// Failures of a source, and when the first of them was.
    failures: HashMap<Source, (u32, Instant)>,
}

impl LoginLimit {
    pub(crate) fn may_try(&self, source: Source, now: Instant) -> bool {
        self.failures
            .get(&source)
            .is_none_or(|(count, since)| *count < FAILURES_MAX || now.duration_since(*since) >= WINDOW)
    }

    pub(crate) fn failed(&mut self, source: Source, now: Instant) {
        if self.failures.len() >= SOURCES_MAX {
            self.failures.retain(|_, (_, since)| now.duration_since(*since) < WINDOW);
        }
        if self.failures.len() >= SOURCES_MAX {
            let oldest = self.failures.iter().min_by_key(|(_, (_, since))| *since).map(|(source, _)| *source);
            oldest.map(|oldest| self.failures.remove(&oldest));
        }
        let entry = self.failures.entry(source).or_insert((0, now));
        if now.duration_since(entry.1) >= WINDOW {
            *entry = (0, now);
        }
        entry.0 += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_guesses_has_to_wait_and_others_do_not() {
        let (mut limit, start) = (LoginLimit::default(), Instant::now());
        let source = |text: &str| Source::of(text.parse().unwrap());
        let (bad, good) = (source("2001:db8::1"), Source::User(7));
        (0..FAILURES_MAX).for_each(|_| limit.failed(bad, start));
        assert!(!limit.may_try(source("2001:db8::2"), start), "of the same network");
        assert!(limit.may_try(source("2001:db8:0:1::1"), start) && limit.may_try(good, start));
        assert!(limit.may_try(bad, start + WINDOW));
        limit.failed(bad, start + WINDOW);
        assert!(limit.may_try(bad, start + WINDOW), "it begins anew");
    }

    #[test]
    fn many_addresses_take_bounded_memory() {
        let (mut limit, start) = (LoginLimit::default(), Instant::now());
        (0..2 * SOURCES_MAX as u32).for_each(|at| limit.failed(Source::User(at), start));
        assert_eq!(limit.failures.len(), SOURCES_MAX);
    }
}
