//! Store service: answers requests of other hosts about this host's store, and lists hosts to fetch from.

use super::reader_pins::ReaderPins;
use crate::server::peer_rpc::refused;
use crate::transfer::capsule_access::CapsuleAccessCache;
use crate::{
    core::{error::DaemonError, rights::Caller},
    daemon::Daemon,
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};
use whimbrel_core::{CapsuleId, HostName, error_chain, lock};
use whimbrel_transfer::{
    DemandFetcher, Holders, Link, LinkError, Server, WireLink,
    protocol::{
        RemotePull, RemotePullProgress, RemotePullReply, RemotePullRequest, RemotePullStatus, Retain,
    },
};
use whimbrel_wire::{Answer, Call, Peer, PeerIdentity, Refusal, Reply, Request};

/// How long a host that sent wrong data is avoided at least.
const AVOID_TIME: Duration = Duration::from_secs(600);

#[derive(Default)]
pub(crate) struct TransferState {
    pub(crate) access: CapsuleAccessCache,
    pub(super) reader_pins: ReaderPins,
    sources: Mutex<Option<CachedHolders>>,
    /// The fetcher that uses `sources`.
    pub(super) remote: Mutex<Option<Arc<DemandFetcher>>>,
    /// Pulls in progress that other hosts have requested.
    inbound_pulls: Mutex<BTreeMap<CapsuleId, RemotePullProgress>>,
    pull_ended: Condvar,
}

struct CachedHolders {
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
    /// Starts a pull, after waiting for one of the same capsule.
    pub(crate) fn start_pull(&self, capsule: CapsuleId) -> InboundPull<'_> {
        let taking = lock(&self.inbound_pulls);
        let waited = self.pull_ended.wait_while(taking, |taking| taking.contains_key(&capsule));
        waited.unwrap_or_else(PoisonError::into_inner).insert(capsule, RemotePullProgress::default());
        InboundPull { transfers: self, capsule }
    }
}

impl InboundPull<'_> {
    pub(crate) fn set_progress(&self, progress: RemotePullProgress) {
        lock(&self.transfers.inbound_pulls).insert(self.capsule, progress);
    }
}

impl Drop for InboundPull<'_> {
    fn drop(&mut self) {
        lock(&self.transfers.inbound_pulls).remove(&self.capsule);
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
        let mut kept = lock(&self.transfers.sources);
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

    /// One host as the first holder, and the other trusted ones for what it lacks or while it is away.
    pub(crate) fn source(&self, name: &HostName) -> Arc<Holders> {
        let trusted = self.trust.list().unwrap_or_default().into_iter().map(|peer| peer.name);
        let others = trusted.filter(|other| other != name).map(|other| self.peer_holder(&other));
        Arc::new(Holders::led_by(self.peer_holder(name), others.collect()))
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
            let ask = RemotePullRequest::of(request)?;
            let taken = host.handle_remote_pull(&asker.name, &ask).map_err(|error| refusal(&error))?;
            Reply::of::<RemotePull>(&RemotePullReply { bytes: taken.0, pages: taken.1 }, Bytes::new())
        }
        RemotePullStatus::KIND => {
            let capsule = request.decode::<RemotePullStatus>()?;
            let progress = lock(&host.transfers.inbound_pulls).get(&capsule).copied();
            Reply::of::<RemotePullStatus>(&progress, Bytes::new())
        }
        Retain::KIND => {
            let ask = request.decode::<Retain>()?;
            let pinned = host.transfers.reader_pins.update(&host.store, &asker.name, &ask, &access);
            pinned.map_err(|error| refused(&error_chain(&error)).retryable())?;
            Reply::of::<Retain>(&(), Bytes::new())
        }
        _ => Server::new(host.store.clone()).answer(&access, request),
    }
}

fn refusal(error: &DaemonError) -> Refusal {
    tracing::warn!(error = error as &dyn std::error::Error, "refused a request about capsules");
    refused(&error_chain(error))
}
