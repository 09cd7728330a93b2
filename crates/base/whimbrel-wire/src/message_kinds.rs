//! Ranges of kinds: the high byte of a kind says which engine answers it, and which right a caller needs.

use serde::{Deserialize, Serialize};

/// First kinds of the ranges, 256 kinds each.
pub mod range {
    /// The connection itself: credit, keep-alive, goodbye.
    pub const WIRE: u16 = 0x0000;
    /// Migration.
    pub const MIGRATE: u16 = 0x0100;
    /// Sync between stores.
    pub const STORE: u16 = 0x0200;
    /// Protection by replicated checkpoints.
    pub const PROTECT: u16 = 0x0300;
    /// The checkpoint pool.
    pub const POOL: u16 = 0x0400;
    /// Wide-area sessions.
    pub const SESSION: u16 = 0x0500;
    /// Frames of machines that run away from home.
    pub const TUNNEL: u16 = 0x0600;
}

/// The frames of the connection itself.
pub(crate) mod wire {
    /// Header: two u64, bytes of bulk and of control credit given back.
    pub(crate) const GRANT: u16 = 0x0001;
    /// Header: a u64 the peer sends back.
    pub(crate) const PING: u16 = 0x0002;
    /// Header: the u64 of the ping.
    pub(crate) const PONG: u16 = 0x0003;
    /// Header: UTF-8, why; empty when nothing is wrong. The last frame of a side.
    pub(crate) const GOODBYE: u16 = 0x0004;
}

/// What a trusted peer may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// Move machines here.
    Migrate,
    /// Read and write capsules.
    Store,
    /// Replicate machines here.
    Protect,
    /// Use the checkpoint pool.
    Pool,
    /// Open sessions.
    Session,
    /// Be in the network of machines whose home is here.
    Tunnel,
}

impl Right {
    /// Every right, in the order of the ranges.
    pub const ALL: [Right; 6] =
        [Right::Migrate, Right::Store, Right::Protect, Right::Pool, Right::Session, Right::Tunnel];

    /// The first kind of the range this right opens.
    pub const fn range(self) -> u16 {
        match self {
            Right::Migrate => range::MIGRATE,
            Right::Store => range::STORE,
            Right::Protect => range::PROTECT,
            Right::Pool => range::POOL,
            Right::Session => range::SESSION,
            Right::Tunnel => range::TUNNEL,
        }
    }
}

/// A set of rights. Kinds outside every range (0x0700 and up) need none: they are for tests and experiments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rights(pub Vec<Right>);

impl Rights {
    /// Everything: what a peer gets unless its entry says less, and what an ssh login gives.
    pub fn all() -> Self {
        Self(Right::ALL.to_vec())
    }

    /// Whether a peer with these rights may send requests of `kind`.
    pub fn allow(&self, kind: u16) -> bool {
        Right::ALL
            .iter()
            .find(|right| right.range() == kind & 0xff00)
            .is_none_or(|need| self.0.contains(need))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_opens_its_own_range_and_no_other() {
        let rights = Rights(vec![Right::Store]);
        assert!(rights.allow(range::STORE + 7));
        for closed in [range::MIGRATE, range::PROTECT + 255, range::POOL, range::SESSION, range::TUNNEL + 1] {
            assert!(!rights.allow(closed), "{closed:#06x}");
            assert!(Rights::all().allow(closed));
        }
    }
}
