//! Message kinds: the high byte of a kind names the engine that answers it and the right that a caller needs.

use serde::{Deserialize, Serialize};

/// First kinds of the ranges; each has 256 kinds.
pub mod range {
    /// The connection itself: credit, keep-alive, goodbye.
    pub const WIRE: u16 = 0x0000;
    /// Migration of machines.
    pub const MIGRATE: u16 = 0x0100;
    /// Transfer of capsules between stores.
    pub const STORE: u16 = 0x0200;
    /// Protection by replicated epochs.
    pub const PROTECT: u16 = 0x0300;
    /// The pool of spare disk.
    pub const POOL: u16 = 0x0400;
    /// Sessions on exports of another host.
    pub const SESSION: u16 = 0x0500;
    /// Tunnel: frames of machines that run away from home.
    pub const TUNNEL: u16 = 0x0600;
}

pub(crate) mod wire {
    /// Header: two u64, the bytes of bulk and of control credit that are returned.
    pub(crate) const GRANT: u16 = 0x0001;
    /// Header: a u64 that the peer sends back.
    pub(crate) const PING: u16 = 0x0002;
    /// Header: the u64 of the ping.
    pub(crate) const PONG: u16 = 0x0003;
    /// Header: the reason in UTF-8, empty after a normal end. The last wire frame of a side.
    pub(crate) const GOODBYE: u16 = 0x0004;
}

/// A kind of call that a trusted peer may make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// Migrate machines to this host.
    Migrate,
    /// Read and write capsules.
    Store,
    /// Use this host as a standby.
    Protect,
    /// Use the pool on this host.
    Pool,
    /// Open sessions on this host's exports.
    Session,
    /// Connect to the network of machines whose home is here.
    Tunnel,
    /// Say what the guests of machines that it migrates to this host may request here. No default.
    Guest,
}

impl Right {
    /// The rights that open a range, in the order of the ranges. An entry has them by default.
    pub const ALL: [Right; 6] =
        [Right::Migrate, Right::Store, Right::Protect, Right::Pool, Right::Session, Right::Tunnel];

    /// The first kind of the range that this right opens, or in which it counts.
    pub const fn range(self) -> u16 {
        match self {
            Right::Migrate | Right::Guest => range::MIGRATE,
            Right::Store => range::STORE,
            Right::Protect => range::PROTECT,
            Right::Pool => range::POOL,
            Right::Session => range::SESSION,
            Right::Tunnel => range::TUNNEL,
        }
    }
}

/// A set of rights. Kinds outside every range (0x0700 and up, for tests and experiments) need no right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rights(pub Vec<Right>);

impl Rights {
    /// The default for an entry of the trust list.
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
