//! Numbers that look random and are the same in every run and on every machine, so that a run that went wrong
//! can be repeated.
//!
//! Not for secrets, and no better than experiments need (Knuth's linear congruential generator, its upper
//! half).

/// A generator, begun with its seed.
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    /// One of the numbers below a limit; 0 if there is none.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }
}
