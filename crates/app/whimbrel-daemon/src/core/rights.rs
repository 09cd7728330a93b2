//! Rights of trusted hosts on the capsules of this host: read or write, ref by ref.
//!
//! The trust list defines them; [`may`] decides, and is pure. A machine's ref counts under the machine's
//! name, so `web` is both the tag and the newest capsule of that machine. Rights are on names: a peer gets
//! objects of the capsules that it may read, and a limited peer learns no other names.

use crate::core::{error::DaemonError, history, refs};
use whimbrel_api::TrustEntry;
use whimbrel_core::RefName;
use whimbrel_wire::{PeerIdentity, RefPatterns, Right, Trust, TrustedPeer};

/// A use of a ref and of the capsule that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Learn which capsule the ref names, and fetch it.
    Read,
    /// Change or remove the ref.
    Write,
}

/// Whether `peer` may use the ref that the store calls `name` in this way.
pub fn may(peer: &TrustedPeer, access: Access, name: &RefName) -> bool {
    // Epoch snapshots count under the name of their machine too.
    let name = history::machine_in(name.as_str()).unwrap_or_else(|| refs::known_as(name));
    peer.rights.0.contains(&Right::Store)
        && match access {
            Access::Read => peer.reads(name),
            Access::Write => peer.writes(name),
        }
}

/// Like [`may`], for the peer of a connection. The trust list is read each time, so a right that was taken
/// away is gone at once; an unreadable list gives no rights. A client of ssh or of the API socket could do
/// all of this as root, and may.
pub fn peer_may(trust: &Trust, peer: &PeerIdentity, access: Access, name: &RefName) -> bool {
    match peer {
        PeerIdentity::Key(key) => {
            matches!(trust.find(key), Ok(Some(entry)) if may(&entry, access, name))
        }
        PeerIdentity::Ssh(_) | PeerIdentity::Stdio => true,
    }
}

/// Parses both lists of an entry.
pub(crate) fn lists(
    read: Option<Vec<String>>,
    write: Option<Vec<String>>,
) -> Result<(Option<RefPatterns>, Option<RefPatterns>), DaemonError> {
    let list = |texts: Option<Vec<String>>| {
        let list = texts
            .map(|texts| texts.iter().map(|text| text.parse()).collect::<Result<Vec<_>, _>>()?.try_into());
        list.transpose().map_err(|error: whimbrel_wire::PatternError| DaemonError::invalid(error.to_string()))
    };
    Ok((list(read)?, list(write)?))
}

pub(crate) fn entry(peer: &TrustedPeer) -> TrustEntry {
    let texts = |list: &RefPatterns| list.as_slice().iter().map(ToString::to_string).collect();
    TrustEntry {
        name: peer.name.clone(),
        key: peer.key.map(|key| key.to_string()),
        address: peer.address.as_ref().map(ToString::to_string),
        read: peer.read.as_ref().map(texts),
        write: peer.write.as_ref().map(texts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use whimbrel_wire::{PublicKey, Rights};

    fn peer(read: Option<&str>, write: Option<&str>) -> TrustedPeer {
        let list = |text: &str| text.parse().unwrap();
        TrustedPeer {
            name: "beta".parse().unwrap(),
            key: Some(PublicKey([1; 32])),
            address: None,
            rights: Rights::all(),
            read: read.map(list),
            write: write.map(list),
        }
    }

    fn name(text: &str) -> RefName {
        text.parse().unwrap()
    }

    #[test]
    fn an_entry_without_lists_may_all_and_without_the_right_nothing() {
        let all = peer(None, None);
        assert!(may(&all, Access::Read, &name("web")) && may(&all, Access::Write, &name("machine.web")));
        let none = TrustedPeer { rights: Rights(vec![Right::Migrate]), ..all };
        assert!(!may(&none, Access::Read, &name("web")) && !may(&none, Access::Write, &name("web")));
    }

    #[test]
    fn a_machine_counts_under_its_name() {
        let limited = peer(Some("web,golden*"), Some("backup-*"));
        assert!(may(&limited, Access::Read, &name("machine.web")));
        assert!(may(&limited, Access::Read, &name("golden.2")));
        assert!(may(&limited, Access::Read, &name("kept.web.1763760000000")));
        assert!(!may(&limited, Access::Read, &name("machine.db")));
        assert!(!may(&limited, Access::Read, &name("kept.db.1763760000000")));
        assert!(!may(&limited, Access::Read, &name("backup-1")), "writing is not reading");
        assert!(
            may(&limited, Access::Write, &name("backup-1")) && !may(&limited, Access::Write, &name("web"))
        );
        let literally = peer(Some("machine*"), None);
        assert!(!may(&literally, Access::Read, &name("machine.web")), "the prefix is not part of the name");
    }

    #[test]
    fn a_right_that_is_taken_away_is_gone_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::load(dir.path()).unwrap();
        let by_key = PeerIdentity::Key(PublicKey([1; 32]));
        let allowed = |identity: &PeerIdentity| peer_may(&trust, identity, Access::Read, &name("web"));
        assert!(!allowed(&by_key) && allowed(&PeerIdentity::Stdio));
        trust.add(peer(Some("web"), None)).unwrap();
        assert!(allowed(&by_key) && !allowed(&PeerIdentity::Key(PublicKey([2; 32]))));
        trust.limit(&"beta".parse().unwrap(), lists(Some(vec![]), None).unwrap()).unwrap();
        assert!(!allowed(&by_key));
        std::fs::write(dir.path().join("trust.toml"), "peer = 3").unwrap();
        assert!(!allowed(&by_key), "a damaged file gives no rights");
    }

    #[test]
    fn a_pattern_that_is_none_is_an_invalid_request() {
        let refused = lists(Some(vec!["golden/*".to_owned()]), None).unwrap_err();
        assert_eq!(refused.code(), whimbrel_api::ErrorCode::Invalid);
        assert!(refused.to_string().contains("golden"), "{refused}");
    }

    const PATTERNS: &str = "(\\*|[ab]\\*|[ab]{1,2})(,(\\*|[ab]\\*|[ab]{1,2})){0,2}";

    proptest! {
        /// A list never gives what another one takes, and a narrower entry never may what a wider one may
        /// not.
        #[test]
        fn lists_only_narrow(read in prop::option::of(PATTERNS), write in prop::option::of(PATTERNS), text in "[ab]{1,3}") {
            let (name, machine) = (name(&text), name(&format!("machine.{text}")));
            let limited = peer(read.as_deref(), write.as_deref());
            for (access, list) in [(Access::Read, &read), (Access::Write, &write)] {
                let allowed = may(&limited, access, &name);
                prop_assert!(may(&peer(None, None), access, &name));
                prop_assert_eq!(allowed, may(&limited, access, &machine));
                let matches = list.as_deref().is_some_and(|list| list.parse::<RefPatterns>().unwrap().matches(&text));
                prop_assert_eq!(allowed, matches || !limited.is_limited());
                let without = TrustedPeer { rights: Rights(vec![]), ..limited.clone() };
                prop_assert!(!may(&without, access, &name));
            }
        }
    }
}
