//! Tests of the request table: every kind of request, by every kind of caller, against what the documents
//! say.

use super::*;
use crate::core::rights::lists;
use bytes::Bytes;
use std::{path::Path, sync::Arc};
use whimbrel_core::{ByteSize, CapsuleId, Digest, HostName, MachineConfig};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::{
    codec::{BlockSize, CodecOptions},
    protocol::{ProtectionId, StartRequest},
};
use whimbrel_transfer::protocol::RemotePullRequest;
use whimbrel_wire::{PeerIdentity, PublicKey, Rights, Trust, TrustedPeer};

/// What docs/protocols/wire.md says that a kind needs: rights, and access to the machine or ref `web`.
fn documented(kind: u16) -> (&'static [Right], Access) {
    match kind {
        0x0100 => (&[Right::Migrate], Access::Write),
        0x0101..=0x010b | 0x0110 | 0x0160 | 0x0162 | 0x0163 => (&[Right::Migrate], Access::Use),
        0x0111 | 0x0112 | 0x0601 | 0x0604 => (&[], Access::Use),
        0x0140..=0x0142 => (&[Right::Migrate, Right::Store], Access::Write),
        0x0161 => (&[Right::Migrate, Right::Guest], Access::Use),
        // Each object is judged: `transfer/capsule_access.rs`, `peers/hosts.rs`.
        0x0164 | 0x0200..=0x0204 | 0x0206 | 0x0209 => (&[Right::Store], Access::Use),
        0x0205 => (&[Right::Store], Access::Write),
        0x0300 => (&[Right::Protect], Access::Write),
        0x0301..=0x0309 => (&[Right::Protect], Access::Use),
        0x0600 => (&[Right::Tunnel], Access::Write),
        0x0602 | 0x0603 => (&[Right::Tunnel], Access::Use),
        _ => panic!("{kind:#06x} is not documented"),
    }
}

fn offer() -> Offer {
    let config = MachineConfig::minimal(ByteSize(1 << 20));
    Offer::of(HandoverId([1; 16]), "web".parse().unwrap(), config)
}

fn pull(refs: &[&str]) -> Request {
    let refs = refs.iter().map(|name| name.parse().unwrap()).collect();
    let ask = RemotePullRequest { capsule: CapsuleId(Digest([1; 32])), refs, bases: Vec::new() };
    Request::of::<RemotePull>(&ask, Bytes::new()).unwrap()
}

/// A request of this kind about the machine, or the ref, `web`.
fn request(kind: HostRequest) -> Request {
    let raw = |header: Vec<u8>| Request::new(kind as u16, header.into(), Bytes::new());
    match kind.need().subject {
        Subject::OfferedMachine => raw(postcard::to_stdvec(&offer()).unwrap()),
        Subject::ProtectedMachine => {
            let start = StartRequest {
                id: ProtectionId([1; 16]),
                offer: offer(),
                coding: CodecOptions::fine(BlockSize::B64),
                lease_ms: 1000,
                witness: None,
                then: None,
                keep: None,
                heir: None,
            };
            raw(postcard::to_stdvec(&start).unwrap())
        }
        Subject::HandoffMachine => {
            let subject = crate::transfer::handoff::HandoffSubject {
                machine: "web".parse().unwrap(),
                capsule: CapsuleId(Digest([1; 32])),
            };
            raw(postcard::to_stdvec(&subject).unwrap())
        }
        Subject::TunnelMachine => {
            let open =
                tunnel::protocol::Open { id: TunnelId([1; 16]), name: "web".parse().unwrap(), capsule: None };
            raw(postcard::to_stdvec(&open).unwrap())
        }
        Subject::PulledRefs => pull(&["web", "machine.web"]),
        Subject::Host | Subject::Capsules | Subject::Machines => raw(Vec::new()),
    }
}

/// How the peer and this host are connected. Who made the connection changes nothing: the transport of either
/// side gives the same identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    TlsAccepted,
    TlsDialled,
    SshDialled,
    /// The peer's ssh, and the API socket here.
    SshAccepted,
}

impl Way {
    const ALL: [Self; 4] = [Self::TlsAccepted, Self::TlsDialled, Self::SshDialled, Self::SshAccepted];

    fn identity(self) -> PeerIdentity {
        match self {
            Self::TlsAccepted | Self::TlsDialled => PeerIdentity::Key(PublicKey([1; 32])),
            Self::SshDialled => PeerIdentity::Ssh("root@beta".to_owned()),
            Self::SshAccepted => PeerIdentity::Stdio,
        }
    }
}

/// What happens to the entry while the connection is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Kept,
    Removed,
    Damaged,
}

const NAME: &str = "beta";
const LISTS: [(Option<&str>, Option<&str>); 6] = [
    (None, None),
    (Some("web"), None),
    (None, Some("web")),
    (Some("other*"), Some("other*")),
    (Some("*"), Some("")),
    (Some(""), Some("*")),
];

fn rights_of_every_kind() -> Vec<Rights> {
    let all: Vec<Right> = Right::ALL.into_iter().chain([Right::Guest]).collect();
    let without = |right: &Right| Rights(all.iter().filter(|other| *other != right).copied().collect());
    [Rights(all.clone()), Rights::all(), Rights(Vec::new())]
        .into_iter()
        .chain(all.iter().map(without))
        .collect()
}

fn entry(rights: &Rights, (read, write): (Option<&str>, Option<&str>)) -> TrustedPeer {
    let list = |text: Option<&str>| {
        text.map(|text| text.split(',').filter(|part| !part.is_empty()).map(str::to_owned).collect())
    };
    let (read, write) = lists(list(read), list(write)).unwrap();
    TrustedPeer {
        name: NAME.parse().unwrap(),
        key: Some(PublicKey([1; 32])),
        address: Some("ssh:root@beta".parse().unwrap()),
        rights: rights.clone(),
        read,
        write,
    }
}

/// Whether a request must be permitted, said in another way than [`may`] does.
fn is_expected(kind: HostRequest, way: Way, now: Meanwhile, entry: &TrustedPeer) -> bool {
    match now {
        Meanwhile::Damaged => return false,
        // Without an entry, who may open the socket is root here.
        Meanwhile::Removed => return way == Way::SshAccepted,
        Meanwhile::Kept => {}
    }
    let (rights, access) = documented(kind as u16);
    let listed = |list: &Option<whimbrel_wire::RefPatterns>| {
        list.as_ref().is_some_and(|list| ["web", "*"].contains(&list.to_string().as_str()))
    };
    let limited = entry.read.is_some() || entry.write.is_some();
    let object = match access {
        Access::Use => true,
        Access::Read => !limited || listed(&entry.read),
        Access::Write => !limited || listed(&entry.write),
    };
    object && rights.iter().all(|right| entry.rights.0.contains(right))
}

fn change(trust: &Trust, dir: &Path, now: Meanwhile) {
    match now {
        Meanwhile::Kept => {}
        Meanwhile::Removed => drop(trust.remove(&NAME.parse().unwrap()).unwrap()),
        Meanwhile::Damaged => std::fs::write(dir.join("trust.toml"), "peer = 3").unwrap(),
    }
}

/// Every kind, every right, every form of lists, every way to be connected, and an entry that stays, goes or
/// becomes unreadable while the connection is open.
#[test]
fn every_request_is_judged_by_the_entry_of_this_moment_whoever_dialled() {
    let mut judged = 0;
    for now in [Meanwhile::Kept, Meanwhile::Removed, Meanwhile::Damaged] {
        for (rights, lists) in rights_of_every_kind().iter().flat_map(|r| LISTS.map(|lists| (r, lists))) {
            let dir = tempfile::tempdir().unwrap();
            let trust = Trust::load(dir.path()).unwrap();
            let entry = entry(rights, lists);
            trust.add(entry.clone()).unwrap();
            let find = |way: Way| Caller::find(&trust, &way.identity(), &NAME.parse().unwrap());
            assert!(Way::ALL.into_iter().all(|way| matches!(find(way), Caller::Peer(_))));
            change(&trust, dir.path(), now);
            for (way, kind) in
                Way::ALL.into_iter().flat_map(|way| HostRequest::ALL.iter().map(move |k| (way, *k)))
            {
                let allowed = authorize(&find(way), kind, &request(kind), |_| false).is_ok();
                let expected = is_expected(kind, way, now, &entry);
                assert_eq!(allowed, expected, "{kind:?} {way:?} {now:?} {entry:?}");
                judged += 1;
            }
        }
    }
    println!("{judged} requests judged");
    assert!(judged > 20_000, "{judged}");
}

#[test]
fn a_host_without_an_entry_may_nothing_but_over_the_socket_of_root() {
    let dir = tempfile::tempdir().unwrap();
    let trust = Trust::load(dir.path()).unwrap();
    let name: HostName = "nobody".parse().unwrap();
    for kind in HostRequest::ALL {
        for way in Way::ALL {
            let caller = Caller::find(&trust, &way.identity(), &name);
            let allowed = authorize(&caller, *kind, &request(*kind), |_| false).is_ok();
            assert_eq!(allowed, way == Way::SshAccepted, "{kind:?} {way:?}");
        }
    }
}

#[test]
fn to_take_a_machine_away_needs_the_right_to_write_it() {
    let reader = Caller::Peer(Arc::new(entry(&Rights::all(), (Some("web"), None))));
    let writer = Caller::Peer(Arc::new(entry(&Rights::all(), (None, Some("web")))));
    let claim = request(HostRequest::ClaimMachine);
    let refused = authorize(&reader, HostRequest::ClaimMachine, &claim, |_| false).unwrap_err();
    assert_eq!(refused.code, Code::FORBIDDEN);
    assert!(refused.text.contains("beta may not write web here"), "{refused}");
    assert!(authorize(&writer, HostRequest::ClaimMachine, &claim, |_| false).is_ok());
}

#[test]
fn a_pull_without_refs_is_for_those_who_may_write_some_and_not_for_many_refs() {
    let judge = |lists, refs: &[&str]| {
        let caller = Caller::Peer(Arc::new(entry(&Rights::all(), lists)));
        authorize(&caller, HostRequest::RemotePull, &pull(refs), |_| false).is_ok()
    };
    assert!(!judge((Some("*"), None), &[]), "without any right to write, nothing fills the disk");
    assert!(judge((None, Some("backup*")), &[]) && judge((None, None), &[]));
    assert!(judge((None, Some("backup*")), &["backup-1"]));
    assert!(!judge((None, Some("backup*")), &["backup-1", "web"]), "every ref counts");
    let many: Vec<String> = (0..=REMOTE_PULL_REFS_MAX).map(|number| format!("backup-{number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(judge((None, None), &many[1..]) && !judge((None, None), &many));
}

#[test]
fn a_tunnel_that_is_open_is_reopened_by_its_id_and_a_new_one_needs_the_machine() {
    let reader = Caller::Peer(Arc::new(entry(&Rights::all(), (Some("*"), None))));
    let open = request(HostRequest::OpenTunnel);
    assert!(authorize(&reader, HostRequest::OpenTunnel, &open, |id| id == TunnelId([1; 16])).is_ok());
    assert!(authorize(&reader, HostRequest::OpenTunnel, &open, |id| id == TunnelId([2; 16])).is_err());
}

#[test]
fn a_header_that_does_not_decode_is_refused_before_anything_is_done() {
    for kind in HostRequest::ALL {
        let Need { subject, .. } = kind.need();
        if matches!(subject, Subject::Host | Subject::Capsules | Subject::Machines) {
            continue;
        }
        let garbage = Request::new(*kind as u16, Bytes::from_static(&[0xff; 3]), Bytes::new());
        let caller = Caller::Peer(Arc::new(entry(&Rights::all(), (None, None))));
        assert_eq!(
            authorize(&caller, *kind, &garbage, |_| true).unwrap_err().code,
            Code::BAD_HEADER,
            "{kind:?}"
        );
    }
}

#[test]
fn every_kind_is_found_by_its_number_and_no_number_twice() {
    let mut numbers: Vec<u16> = HostRequest::ALL.iter().map(|kind| *kind as u16).collect();
    assert!(HostRequest::ALL.iter().all(|kind| HostRequest::of(*kind as u16) == Some(*kind)));
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), HostRequest::ALL.len());
    assert_eq!(HostRequest::of(0x0700), None);
}
