//! The requests that a peer may send, and what each of them needs.
//!
//! One enum has every kind; [`HostRequest::need`] is the table, whose `match` is exhaustive, so a new kind
//! does not build before it has an entry there. [`authorize`] finds the object that a request names and asks
//! [`may`]. Requests for content of capsules are judged again for each object, in
//! `transfer/capsule_access.rs`.

use crate::{
    core::{
        refs,
        rights::{Access, Action, Caller, Object, may},
    },
    evacuate::{EvacuateHost, QueryCapacity},
    guest::SetGuestPermissions,
    migrate::cpu_baseline::QueryCpu,
    network::tunnel,
    peers::{connections::RequestClass, hosts::QueryMachines},
    transfer::handoff::{ClaimMachine, GrantMachine, PrepareHandoff},
};
use whimbrel_core::{MachineName, RefName};
use whimbrel_migrate::{
    postcopy::messages,
    protocol::{self, Offer, TunnelId},
};
use whimbrel_protect::protocol::{self as protect, StartRequest};
use whimbrel_transfer::protocol::{
    BlobRange, HasObjects, LeafPages, ListRefs, Objects, REMOTE_PULL_REFS_MAX, RemotePull, RemotePullStatus,
    Retain,
};
use whimbrel_wire::{Call, Code, Refusal, Request, Right};

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $kind:expr,)*) => {
        /// A kind of request between hosts.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub(crate) enum HostRequest {
            $($(#[$doc])* $name = $kind,)*
        }

        impl HostRequest {
            /// Every kind that this host answers.
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

kinds! {
    Offer = protocol::OFFER,
    BootFile = protocol::BOOT_FILE,
    Pages = protocol::PAGES,
    Finish = protocol::FINISH,
    Commit = protocol::COMMIT,
    CommitOrReturn = protocol::COMMIT_OR_RETURN,
    Abort = protocol::ABORT,
    MissingPages = messages::MISSING_PAGES,
    QueryPages = protocol::QUERY_PAGES,
    EarlyState = protocol::EARLY_STATE,
    BootFilePages = protocol::BOOT_FILE_PAGES,
    LateFrames = protocol::LATE_FRAMES,
    OfferFetch = messages::OFFER_FETCH,
    Fetch = messages::FETCH,
    Complete = messages::COMPLETE,
    PrepareHandoff = PrepareHandoff::KIND,
    GrantMachine = GrantMachine::KIND,
    ClaimMachine = ClaimMachine::KIND,
    QueryCapacity = QueryCapacity::KIND,
    SetGuestPermissions = SetGuestPermissions::KIND,
    EvacuateHost = EvacuateHost::KIND,
    QueryCpu = QueryCpu::KIND,
    QueryMachines = QueryMachines::KIND,
    ListRefs = ListRefs::KIND,
    HasObjects = HasObjects::KIND,
    Objects = Objects::KIND,
    BlobRange = BlobRange::KIND,
    LeafPages = LeafPages::KIND,
    RemotePull = RemotePull::KIND,
    RemotePullStatus = RemotePullStatus::KIND,
    Retain = Retain::KIND,
    StartProtection = protect::START,
    ProtectionBlob = protect::BLOB,
    CompareDigests = protect::COMPARE_DIGESTS,
    EpochPages = protect::EPOCH_PAGES,
    EpochEnd = protect::EPOCH_END,
    Heartbeat = protect::HEARTBEAT,
    EndProtection = protect::END,
    Yield = protect::YIELD,
    Witness = protect::WITNESS,
    Inputs = protect::INPUTS,
    OpenTunnel = tunnel::protocol::OPEN,
    TunnelFrames = tunnel::protocol::FRAMES,
    CloseTunnel = tunnel::protocol::CLOSE,
    JoinNetwork = tunnel::protocol::JOIN,
    NetworkAddresses = tunnel::protocol::ADDRESSES,
}

/// The object of a request, and where it is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// No object, or one that only those can name who were told its random id when it was permitted.
    Host,
    /// The machine of an offer.
    OfferedMachine,
    /// The machine whose protection starts.
    ProtectedMachine,
    /// The machine of a handoff.
    HandoffMachine,
    /// The machine of a tunnel that is not open yet; an open one has a random id.
    TunnelMachine,
    /// The refs that a pull sets.
    PulledRefs,
    /// Capsules and their objects, each of which is judged when it is found.
    Capsules,
    /// Machines of this host, each of which is judged when it is about to move or to be listed.
    Machines,
}

/// What a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) action: Action,
    pub(crate) subject: Subject,
}

const fn need(rights: &'static [Right], access: Access, subject: Subject) -> Need {
    Need { action: Action { rights, access }, subject }
}

const MIGRATE: &[Right] = &[Right::Migrate];
const GUEST: &[Right] = &[Right::Migrate, Right::Guest];
const STORE: &[Right] = &[Right::Store];
const HANDOFF: &[Right] = &[Right::Migrate, Right::Store];
const PROTECT: &[Right] = &[Right::Protect];
const TUNNEL: &[Right] = &[Right::Tunnel];

impl HostRequest {
    /// The request of this kind, if it is one between hosts.
    pub(crate) fn of(kind: u16) -> Option<Self> {
        Self::ALL.iter().find(|request| **request as u16 == kind).copied()
    }

    /// The places in which requests of this kind are carried out.
    pub(crate) fn class(self) -> RequestClass {
        match self {
            Self::Heartbeat | Self::Witness => RequestClass::Lease,
            _ => RequestClass::Common,
        }
    }

    /// What requests of this kind need.
    pub(crate) const fn need(self) -> Need {
        match self {
            Self::Offer => need(MIGRATE, Access::Write, Subject::OfferedMachine),
            Self::BootFile
            | Self::Pages
            | Self::Finish
            | Self::Commit
            | Self::CommitOrReturn
            | Self::Abort
            | Self::MissingPages
            | Self::QueryPages
            | Self::EarlyState
            | Self::BootFilePages
            | Self::LateFrames
            | Self::OfferFetch
            | Self::QueryCapacity
            | Self::QueryCpu => need(MIGRATE, Access::Use, Subject::Host),
            // The owner of this host decides what its guests may request.
            Self::SetGuestPermissions => need(GUEST, Access::Use, Subject::Host),
            // The machine was sent there by this host, and the pages follow it.
            Self::Fetch | Self::Complete => need(&[], Access::Use, Subject::Host),
            Self::PrepareHandoff | Self::GrantMachine | Self::ClaimMachine => {
                need(HANDOFF, Access::Write, Subject::HandoffMachine)
            }
            Self::EvacuateHost => need(MIGRATE, Access::Use, Subject::Machines),
            Self::ListRefs | Self::HasObjects | Self::Objects | Self::BlobRange | Self::LeafPages => {
                need(STORE, Access::Read, Subject::Capsules)
            }
            Self::QueryMachines => need(STORE, Access::Read, Subject::Machines),
            Self::Retain => need(STORE, Access::Read, Subject::Capsules),
            Self::RemotePull => need(STORE, Access::Write, Subject::PulledRefs),
            Self::RemotePullStatus => need(STORE, Access::Use, Subject::Host),
            Self::StartProtection => need(PROTECT, Access::Write, Subject::ProtectedMachine),
            Self::ProtectionBlob
            | Self::CompareDigests
            | Self::EpochPages
            | Self::EpochEnd
            | Self::Heartbeat
            | Self::EndProtection
            | Self::Yield
            | Self::Witness
            | Self::Inputs => need(PROTECT, Access::Use, Subject::Host),
            Self::OpenTunnel => need(TUNNEL, Access::Write, Subject::TunnelMachine),
            // The network's record says with which hosts it is shared.
            Self::JoinNetwork => need(TUNNEL, Access::Use, Subject::Host),
            // Sent to both ends of a tunnel or link that one of them had the right to open.
            Self::TunnelFrames | Self::NetworkAddresses => need(&[], Access::Use, Subject::Host),
            Self::CloseTunnel => need(TUNNEL, Access::Use, Subject::Host),
        }
    }
}

/// Judges a request of `caller`. `is_tunnel` tells whether a tunnel has its home end here.
pub(crate) fn authorize(
    caller: &Caller,
    kind: HostRequest,
    request: &Request,
    is_tunnel: impl Fn(TunnelId) -> bool,
) -> Result<(), Refusal> {
    let Need { action, subject } = kind.need();
    let of_machine = |name: MachineName| Ok(may(caller, action, Object::Ref(&refs::machine_ref(&name)))?);
    match subject {
        Subject::Host | Subject::Capsules | Subject::Machines => Ok(may(caller, action, Object::Host)?),
        Subject::OfferedMachine => of_machine(header::<Offer>(request)?.name),
        Subject::ProtectedMachine => of_machine(header::<StartRequest>(request)?.offer.name),
        // The three calls have the same header.
        Subject::HandoffMachine => of_machine(request.decode::<ClaimMachine>()?.machine),
        Subject::TunnelMachine => {
            let open = request.decode::<tunnel::protocol::OpenCall>()?;
            match is_tunnel(open.id) {
                true => Ok(may(caller, Action { access: Access::Use, ..action }, Object::Host)?),
                false => of_machine(open.name),
            }
        }
        Subject::PulledRefs => pulled_refs(caller, action, &request.decode::<RemotePull>()?.refs),
    }
}

/// A pull that sets no ref still fills the disk, so it needs some ref that the caller may write.
fn pulled_refs(caller: &Caller, action: Action, refs: &[RefName]) -> Result<(), Refusal> {
    if refs.len() > REMOTE_PULL_REFS_MAX {
        return Err(Refusal::new(Code::BAD_HEADER, "too many refs for one capsule"));
    }
    may(caller, action, Object::AnyRef)?;
    Ok(refs.iter().try_for_each(|name| may(caller, action, Object::Ref(name)))?)
}

fn header<T: serde::de::DeserializeOwned>(request: &Request) -> Result<T, Refusal> {
    postcard::from_bytes(&request.header).map_err(|error| Refusal::new(Code::BAD_HEADER, error.to_string()))
}

#[cfg(test)]
#[path = "request_table_tests.rs"]
mod tests;
