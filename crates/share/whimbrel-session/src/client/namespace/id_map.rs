//! Id map: pairs users and groups of this host with those of the server. Pure: numbers in, numbers out.
//!
//! The server's user is the owner of the session. Other users appear as nobody, and no file can be given to
//! them, unless they are paired. A number is in one pair at most, so mapping is reversible.

use std::{fmt, str::FromStr};

/// The id of `nobody`, by the kernel's custom.
const NOBODY: u32 = 65_534;

/// Kind of an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdKind {
    /// A user id.
    User,
    /// A group id.
    Group,
}

/// One user or group with its number on both sides: `user:1000=501`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdPair {
    /// User or group.
    pub kind: IdKind,
    /// The number on the server.
    pub server_id: u32,
    /// The number on this host.
    pub local_id: u32,
}

/// Pairs that contradict each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{first} and {second} contradict each other")]
pub struct IdMapError {
    /// The pair that was given first.
    pub first: IdPair,
    /// The pair that contradicts it.
    pub second: IdPair,
}

/// Ownership of a session's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdMap {
    /// Numbers mean the same on both sides.
    Same,
    /// The server's user is this user and group here; others are paired or nobody.
    Mapped {
        /// User and group that stand for the server's user here.
        own: (u32, u32),
        /// Pairs for other users and groups.
        pairs: Vec<IdPair>,
    },
}

impl FromStr for IdPair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (who, numbers) = text.split_once(':')?;
            let who = match who {
                "user" => IdKind::User,
                "group" => IdKind::Group,
                _ => return None,
            };
            let (there, here) = numbers.split_once('=')?;
            // The last number means "do not change" to chown(2).
            let number = |text: &str| text.parse().ok().filter(|number| *number != u32::MAX);
            Some(Self { kind: who, server_id: number(there)?, local_id: number(here)? })
        };
        parse().ok_or_else(|| format!("{text:?} is not a pair: write user:THERE=HERE or group:THERE=HERE"))
    }
}

impl fmt::Display for IdPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = if self.kind == IdKind::User { "user" } else { "group" };
        write!(f, "{who}:{}={}", self.server_id, self.local_id)
    }
}

impl Default for IdMap {
    /// Maps the server's user to the user of this process.
    fn default() -> Self {
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Self::Mapped { own, pairs: Vec::new() }
    }
}

impl IdMap {
    /// Maps the server's user to the user of this process, and others by `pairs`.
    pub fn with_pairs(pairs: Vec<IdPair>) -> Result<Self, IdMapError> {
        for (number, first) in pairs.iter().enumerate() {
            let clashes = |pair: &&IdPair| {
                pair.kind == first.kind
                    && (pair.server_id == first.server_id || pair.local_id == first.local_id)
            };
            if let Some(second) = pairs[number + 1..].iter().find(clashes) {
                return Err(IdMapError { first: *first, second: *second });
            }
        }
        Ok(match Self::default() {
            Self::Mapped { own, .. } => Self::Mapped { own, pairs },
            Self::Same => Self::Same,
        })
    }

    /// Owner and group on this host. `server` is the server's user and group.
    pub(in crate::client) fn to_local(&self, (uid, gid): (u32, u32), server: (u32, u32)) -> (u32, u32) {
        let Self::Mapped { own, pairs } = self else { return (uid, gid) };
        let find = |who, number, (server, own)| {
            let paired = pairs.iter().find(|pair| pair.kind == who && pair.server_id == number);
            paired.map_or(if number == server { own } else { NOBODY }, |pair| pair.local_id)
        };
        (find(IdKind::User, uid, (server.0, own.0)), find(IdKind::Group, gid, (server.1, own.1)))
    }

    /// The server's number of a local user or group; none if it has none.
    pub(in crate::client) fn to_server(&self, who: IdKind, number: u32, server: (u32, u32)) -> Option<u32> {
        let Self::Mapped { own, pairs } = self else { return Some(number) };
        let (server, own) = if who == IdKind::User { (server.0, own.0) } else { (server.1, own.1) };
        let paired = pairs.iter().find(|pair| pair.kind == who && pair.local_id == number);
        paired.map(|pair| pair.server_id).or((number == own).then_some(server))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_paired_is_found_both_ways_and_nobody_else_is() {
        let pairs = ["user:1000=501", "group:100=20"].map(|text| text.parse().unwrap());
        let owners = IdMap::Mapped { own: (7, 8), pairs: pairs.to_vec() };
        let server = (300, 301);
        assert_eq!(owners.to_local((300, 301), server), (7, 8));
        assert_eq!(owners.to_local((1000, 100), server), (501, 20));
        assert_eq!(owners.to_local((100, 1000), server), (NOBODY, NOBODY));
        let there = |who, number| owners.to_server(who, number, server);
        assert_eq!([there(IdKind::User, 7), there(IdKind::Group, 8)], [Some(300), Some(301)]);
        assert_eq!([there(IdKind::User, 501), there(IdKind::Group, 20)], [Some(1000), Some(100)]);
        assert_eq!([there(IdKind::User, 20), there(IdKind::Group, NOBODY)], [None, None]);
        assert_eq!(IdMap::Same.to_local((5, 6), server), (5, 6));
    }

    #[test]
    fn what_pairs_nobody_or_somebody_twice_is_refused() {
        for text in ["", "user:1", "user:1=", "guest:1=2", "user:-1=2", "group:1=4294967295", "user:1=2=3"] {
            assert!(text.parse::<IdPair>().is_err(), "{text}");
        }
        let pair = |text: &str| text.parse::<IdPair>().unwrap();
        IdMap::with_pairs(vec![pair("user:1=2"), pair("user:2=1"), pair("group:1=2")]).unwrap();
        for second in ["user:1=3", "user:3=2"] {
            assert!(
                IdMap::with_pairs(vec![pair("user:1=2"), pair("group:9=9"), pair(second)]).is_err(),
                "{second}"
            );
        }
        assert_eq!(pair("group:3=4").to_string(), "group:3=4");
    }
}
