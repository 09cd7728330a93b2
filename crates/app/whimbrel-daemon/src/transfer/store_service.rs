//! Store service: answers requests of other hosts about this host's store, and lists hosts to fetch from.

use crate::server::peer_rpc::refused;
use crate::transfer::capsule_access::CapsuleAccessCache;
use crate::{
    core::{error::DaemonError, rights::Caller},
    daemon::Daemon,
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};
use whimbrel_core::{CapsuleId, Digest, HostName, error_chain};
use whimbrel_transfer::{
    Access, DemandFetcher, Holders, Holdings, Link, LinkError, Server, WireLink,
    protocol::{Announce, FindHolders, RemotePull, RemotePullProgress, RemotePullReply, RemotePullStatus},
};
use whimbrel_wire::{Answer, Call, Peer, PeerIdentity, Refusal, Reply, Request};

/// How long a host that sent wrong data is avoided at least.
const AVOID_TIME: Duration = Duration::from_secs(600);

/// State of transfers between hosts.
#[derive(Default)]
pub(crate) struct TransferState {
    /// Capsules and images that other hosts have announced.
    pub(crate) holdings: Holdings,
    pub(crate) access: CapsuleAccessCache,
    sources: Mutex<Option<CachedHolders>>,
    /// The fetcher that uses `sources`.
    pub(super) remote: Mutex<Option<Arc<DemandFetcher>>>,
    /// Pulls in progress that other hosts have requested.
    inbound_pulls: Mutex<BTreeMap<CapsuleId, RemotePullProgress>>,
    pull_ended: Condvar,
}

/// The list of hosts to fetch from.
struct CachedHolders {
    /// The trusted hosts of which the list was made.
    trusted: Vec<HostName>,
    sources: Arc<Holders>,
    since: Instant,
}

/// A pull in progress; ends when dropped.
pub(crate) struct InboundPull<'a> {
    transfers: &'a TransferState,
    capsule: CapsuleId,
}

impl TransferState {
    fn inbound_pulls(&self) -> MutexGuard<'_, BTreeMap<CapsuleId, RemotePullProgress>> {
        self.inbound_pulls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a pull, after waiting for one of the same capsule.
    pub(crate) fn start_pull(&self, capsule: CapsuleId) -> InboundPull<'_> {
        let taking = self.inbound_pulls();
        let waited = self.pull_ended.wait_while(taking, |taking| taking.contains_key(&capsule));
        waited.unwrap_or_else(PoisonError::into_inner).insert(capsule, RemotePullProgress::default());
        InboundPull { transfers: self, capsule }
    }
}

impl InboundPull<'_> {
    pub(crate) fn set_progress(&self, progress: RemotePullProgress) {
        self.transfers.inbound_pulls().insert(self.capsule, progress);
    }
}

impl Drop for InboundPull<'_> {
    fn drop(&mut self) {
        self.transfers.inbound_pulls().remove(&self.capsule);
        self.transfers.pull_ended.notify_all();
    }
}

/// Another host as a holder of objects.
struct PeerHolder {
    host: Weak<Daemon>,
    name: HostName,
}

impl whimbrel_transfer::Holder for PeerHolder {
    fn name(&self) -> &str {
        self.name.as_str()
    }

    fn connect(&self) -> Result<Arc<dyn Link>, LinkError> {
        let host = self.host.upgrade().ok_or_else(|| LinkError::lost("the daemon is shutting down"))?;
        let connection =
            host.peer_connection(&self.name).map_err(|error| LinkError::lost(error_chain(&error)))?;
        Ok(Arc::new(WireLink(connection)))
    }

    fn round_trip(&self) -> Option<Duration> {
        self.host.upgrade()?.connections.round_trip(&self.name)
    }
}

impl Daemon {
    fn peer_holder(&self, name: &HostName) -> Box<dyn whimbrel_transfer::Holder> {
        Box::new(PeerHolder { host: self.me.clone(), name: name.clone() })
    }

    /// All trusted hosts as holders. All fetches share one list, so that it knows the health of each host.
    pub(crate) fn sources(&self) -> Arc<Holders> {
        let trusted: Vec<HostName> =
            self.trust.list().unwrap_or_default().into_iter().map(|peer| peer.name).collect();
        let mut kept = self.transfers.sources.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(asked)
                if asked.trusted == trusted
                    && (asked.sources.blamed().is_empty() || asked.since.elapsed() < AVOID_TIME) =>
            {
                asked.sources.clone()
            }
            _ => {
                let peers = trusted.iter().map(|name| self.peer_holder(name)).collect();
                let sources = Arc::new(Holders::new(peers));
                *kept = Some(CachedHolders { trusted, sources: sources.clone(), since: Instant::now() });
                sources
            }
        }
    }

    /// One host as the only holder.
    pub(crate) fn source(&self, name: &HostName) -> Arc<Holders> {
        Arc::new(Holders::new(vec![self.peer_holder(name)]))
    }
}

/// The identity of a requesting host, which outlives its call.
#[derive(Clone)]
pub(crate) struct Requester {
    pub(crate) name: HostName,
    pub(crate) identity: PeerIdentity,
}

impl Requester {
    pub(crate) fn of(peer: &Peer) -> Self {
        Self { name: peer.name.clone(), identity: peer.identity.clone() }
    }
}

/// Answers a request of the store's message range. Blocks.
pub(crate) fn answer(host: &Arc<Daemon>, asker: &Requester, caller: &Caller, request: &Request) -> Answer {
    let access = host.capsule_access(caller);
    match request.kind {
        RemotePull::KIND => {
            let ask = request.decode::<RemotePull>()?;
            let taken = host.handle_remote_pull(&asker.name, &ask).map_err(|error| refusal(&error))?;
            Reply::of::<RemotePull>(&RemotePullReply { bytes: taken.0, pages: taken.1 }, Bytes::new())
        }
        RemotePullStatus::KIND => {
            let capsule = request.decode::<RemotePullStatus>()?;
            let progress = host.transfers.inbound_pulls().get(&capsule).copied();
            Reply::of::<RemotePullStatus>(&progress, Bytes::new())
        }
        Announce::KIND => {
            host.transfers.holdings.record(asker.name.as_str(), &request.decode::<Announce>()?);
            Reply::of::<Announce>(&(), Bytes::new())
        }
        FindHolders::KIND => {
            let digests = request.decode::<FindHolders>()?;
            let may = |digest: &Digest| access.allowed(&CapsuleId(*digest)) || access.may_have(digest);
            let who = digests.iter().map(|digest| match may(digest) {
                true => host.transfers.holdings.holders_of(digest),
                false => Vec::new(),
            });
            let who = who.collect();
            Reply::of::<FindHolders>(&who, Bytes::new())
        }
        _ => Server::new(host.store.clone()).answer(&access, request),
    }
}

fn refusal(error: &DaemonError) -> Refusal {
    tracing::warn!(error = error as &dyn std::error::Error, "refused a request about capsules");
    refused(&error_chain(error))
}
