//! Rights of other hosts on this one: who asks, what for, and whether they may.
//!
//! [`may`] is the only place that decides, and is pure. It is asked for every request of a peer, whoever made
//! the connection and over whatever transport, with the entry that the trust list has at that moment. Ref
//! patterns are on names: a machine's ref counts under the machine's name, so `web` is both the tag and the
//! newest capsule of that machine. Which request needs what is in `server/peer_rpc/request_table.rs`.

use crate::core::{error::DaemonError, history, refs};
use std::{fmt, sync::Arc};
use whimbrel_api::TrustEntry;
use whimbrel_core::{HostName, RefName};
use whimbrel_wire::{Code, PeerIdentity, RefPatterns, Refusal, Right, Trust, TrustedPeer};

/// The maker of a request, by the trust list at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// Somebody who may open the API socket, and is root here already.
    Owner,
    /// A host with an entry in the trust list.
    Peer(Arc<TrustedPeer>),
    /// A host without an entry, or a trust list that cannot be read.
    Stranger,
}

impl Caller {
    /// Looks up the peer of a connection. A client of the API socket is the owner, unless it calls itself by
    /// a name in the list: then that entry holds for it.
    pub fn find(trust: &Trust, identity: &PeerIdentity, name: &HostName) -> Self {
        let entry = match identity {
            PeerIdentity::Key(_) | PeerIdentity::Ssh(_) => trust.entry(identity),
            PeerIdentity::Stdio => trust.named(name),
        };
        match (entry, identity) {
            (Ok(Some(entry)), _) => Self::Peer(entry),
            (Ok(None), PeerIdentity::Stdio) => Self::Owner,
            (Ok(None) | Err(_), _) => Self::Stranger,
        }
    }

    /// Whether the caller may read every capsule of this host, so that nothing needs to be looked up.
    pub(crate) fn reads_everything(&self) -> bool {
        may(self, READ_CAPSULES, Object::Everything).is_ok()
    }
}

/// A way to use an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Neither tells content nor changes anything of this host's: status, or a message that belongs to
    /// something which was permitted when it began.
    Use,
    /// Learn which capsule a ref names, and fetch it.
    Read,
    /// Change or remove a ref, create a machine or take one away.
    Write,
}

/// A kind of act: the rights that it needs, and the access to its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Action {
    /// Rights of the trust entry; with none, being trusted is enough.
    pub rights: &'static [Right],
    /// How it uses the object.
    pub access: Access,
}

/// An object of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object<'a> {
    /// No ref, machine or capsule in particular.
    Host,
    /// A ref as the store calls it, and the machine or capsule that it names.
    Ref(&'a RefName),
    /// Some ref or other: the request names none, and one that may be used is enough.
    AnyRef,
    /// All capsules and files, because the request names content by its digest and no capsule.
    Everything,
}

/// A request was not permitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Forbidden {
    /// The trust list has no entry for the host.
    #[error("not allowed: this host has no entry for you: `whimbrel trust add` there makes one")]
    Untrusted,
    /// The entry lacks a right.
    #[error("not allowed: {peer} lacks the right {right:?} here: `rights` in trust.toml there gives it")]
    Right {
        /// Name of the host here.
        peer: HostName,
        /// The right that is missing.
        right: Right,
    },
    /// The ref patterns of the entry do not match.
    #[error(
        "not allowed: {peer} may not {access} {object} here: `whimbrel trust set {peer}` there changes that"
    )]
    Pattern {
        /// Name of the host here.
        peer: HostName,
        /// The access that was refused.
        access: Access,
        /// The object as users name it.
        object: String,
    },
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Use => "use",
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

impl From<Forbidden> for Refusal {
    fn from(forbidden: Forbidden) -> Self {
        Refusal::new(Code::FORBIDDEN, forbidden.to_string())
    }
}

/// Whether `caller` may do this with the object.
pub fn may(caller: &Caller, action: Action, object: Object<'_>) -> Result<(), Forbidden> {
    let entry = match caller {
        Caller::Owner => return Ok(()),
        Caller::Stranger => return Err(Forbidden::Untrusted),
        Caller::Peer(entry) => entry,
    };
    if let Some(right) = action.rights.iter().find(|right| !entry.rights.0.contains(right)) {
        return Err(Forbidden::Right { peer: entry.name.clone(), right: *right });
    }
    let patterns = match action.access {
        Access::Use => return Ok(()),
        _ if !entry.is_limited() => return Ok(()),
        Access::Read => entry.read.as_ref(),
        Access::Write => entry.write.as_ref(),
    };
    let fits = |name: &RefName| patterns.is_some_and(|patterns| patterns.matches(known_as(name)));
    let (granted, object) = match object {
        Object::Host => (true, String::new()),
        Object::Ref(name) => (fits(name), known_as(name).to_owned()),
        Object::AnyRef => {
            (patterns.is_some_and(|patterns| !patterns.as_slice().is_empty()), "anything".to_owned())
        }
        Object::Everything => (patterns.is_some_and(has_star), "everything".to_owned()),
    };
    match granted {
        true => Ok(()),
        false => Err(Forbidden::Pattern { peer: entry.name.clone(), access: action.access, object }),
    }
}

/// Whether one of the patterns matches every name.
fn has_star(patterns: &RefPatterns) -> bool {
    patterns.as_slice().iter().any(|pattern| pattern.as_str().bytes().all(|byte| byte == b'*'))
}

/// A ref as ref patterns match it: refs of machines, of epoch snapshots and of guests by the machine's name.
fn known_as(name: &RefName) -> &str {
    let machine = history::machine_in(name.as_str()).or_else(|| refs::guest_machine_in(name.as_str()));
    machine.unwrap_or_else(|| refs::known_as(name))
}

/// To learn which capsules a host has, and to fetch them.
pub(crate) const READ_CAPSULES: Action = Action { rights: &[Right::Store], access: Access::Read };

/// Whether `caller` may use this ref of the store.
pub(crate) fn may_use(caller: &Caller, access: Access, name: &RefName) -> bool {
    may(caller, Action { access, ..READ_CAPSULES }, Object::Ref(name)).is_ok()
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

    fn peer(read: Option<&str>, write: Option<&str>) -> Caller {
        let list = |text: &str| text.parse().unwrap();
        Caller::Peer(Arc::new(TrustedPeer {
            name: "beta".parse().unwrap(),
            key: Some(PublicKey([1; 32])),
            address: None,
            rights: Rights::all(),
            read: read.map(list),
            write: write.map(list),
        }))
    }

    fn name(text: &str) -> RefName {
        text.parse().unwrap()
    }

    #[test]
    fn a_machine_and_what_is_made_of_it_count_under_its_name() {
        let limited = peer(Some("web,golden*"), Some("backup-*"));
        let reads = |text: &str| may_use(&limited, Access::Read, &name(text));
        assert!(reads("machine.web") && reads("golden.2"));
        assert!(reads("kept.web.1763760000000") && reads("guest.web.mine"));
        assert!(!reads("machine.db") && !reads("kept.db.1763760000000") && !reads("guest.db.web"));
        assert!(!reads("backup-1"), "writing is not reading");
        assert!(may_use(&limited, Access::Write, &name("backup-1")));
        assert!(!may_use(&limited, Access::Write, &name("web")));
        let literally = peer(Some("machine*,guest*"), None);
        assert!(
            !may_use(&literally, Access::Read, &name("machine.web")),
            "the prefix is not part of the name"
        );
    }

    #[test]
    fn only_a_star_reads_everything() {
        let all = |caller: &Caller| caller.reads_everything();
        assert!(all(&Caller::Owner) && all(&peer(None, None)) && all(&peer(Some("web,**"), None)));
        assert!(
            !all(&Caller::Stranger)
                && !all(&peer(Some("?,*?,a*"), Some("*")))
                && !all(&peer(None, Some("*")))
        );
    }

    #[test]
    fn a_name_in_the_list_binds_a_client_of_the_socket_too() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::load(dir.path()).unwrap();
        let find = |name: &str| Caller::find(&trust, &PeerIdentity::Stdio, &name.parse().unwrap());
        assert_eq!(find("beta"), Caller::Owner);
        let Caller::Peer(entry) = peer(Some("web"), None) else { unreachable!() };
        trust.add(TrustedPeer::clone(&entry)).unwrap();
        assert_eq!((find("beta"), find("gamma")), (Caller::Peer(entry), Caller::Owner));
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
                let allowed = may_use(&limited, access, &name);
                prop_assert!(may_use(&peer(None, None), access, &name));
                prop_assert_eq!(allowed, may_use(&limited, access, &machine));
                let matches = list.as_deref().is_some_and(|list| list.parse::<RefPatterns>().unwrap().matches(&text));
                prop_assert_eq!(allowed, matches || (read.is_none() && write.is_none()));
            }
        }
    }
}
