//! Whether a machine is still the one it was: what its witness says before a step against what it says
//! afterwards.

use whimbrel_testkit::guest::{CheckResult, Identity};

/// What was looked at, and whether it is as it must be.
#[derive(Debug, Clone)]
pub(crate) struct Proof(Vec<(&'static str, bool)>);

impl Proof {
    /// `after` must be a later moment of the same life as `before`, both from a full check.
    pub(crate) fn same_life(before: &Identity, after: &Identity) -> Self {
        let counter = after.counter >= before.counter && after.uptime >= before.uptime;
        Self(vec![
            ("nonce", after.nonce == before.nonce && after.boot == before.boot),
            ("counter", counter && before.steady && after.steady),
            ("ram", same(before.ram, after.ram)),
            ("disk", same(before.disk, after.disk)),
        ])
    }

    /// One more thing that was looked at.
    pub(crate) fn with(mut self, what: &'static str, holds: bool) -> Self {
        self.0.push((what, holds));
        self
    }

    /// All that `self` and `other` prove together.
    pub(crate) fn and(mut self, other: Self) -> Self {
        for (what, holds) in other.0 {
            match self.0.iter_mut().find(|(known, _)| *known == what) {
                Some((_, both)) => *both &= holds,
                None => self.0.push((what, holds)),
            }
        }
        self
    }

    /// What was looked at.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&'static str, bool)> {
        self.0.iter().copied()
    }

    /// What is not as it must be.
    pub(crate) fn broken(&self) -> Vec<&'static str> {
        self.parts().filter(|(_, holds)| !holds).map(|(what, _)| what).collect()
    }
}

/// Both were read in full, are what they should be, and are the same.
fn same(before: CheckResult, after: CheckResult) -> bool {
    matches!((before, after), (CheckResult::Good(before), CheckResult::Good(after)) if before == after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_reboot_a_lost_page_and_an_unread_disk_prove_nothing() {
        let before = Identity {
            nonce: 1,
            counter: 10,
            steady: true,
            ram: CheckResult::Good(2),
            disk: CheckResult::Good(3),
            uptime: Duration::from_secs(4),
            genid: None,
            boot: "a".to_owned(),
        };
        let broken = |after: Identity| Proof::same_life(&before, &after).broken();
        assert_eq!(broken(before.clone()), [""; 0]);
        assert_eq!(broken(Identity { nonce: 2, counter: 3, ..before.clone() }), ["nonce", "counter"]);
        assert_eq!(broken(Identity { ram: CheckResult::Bad, ..before.clone() }), ["ram"]);
        assert_eq!(broken(Identity { disk: CheckResult::None, ..before.clone() }), ["disk"]);
        let both = Proof(vec![("ram", true)]).and(Proof(vec![("ram", false), ("disk", true)]));
        assert_eq!(both.broken(), ["ram"]);
    }
}
