//! The service that answers the manager's calls in short functions; the work is in `meta` and `placement`.

use super::{
    admission::Admissions,
    backups::Backups,
    clock::Clock,
    erasure::CodingRounds,
    internal, invalid, placement,
    policies::PolicyRounds,
    quotas::{self, QuotaSums},
    roles::PoolRoles,
    spread::SpreadScan,
};
use crate::{
    chunk_map,
    meta::{BenefactorRow, Meta, PendingCommit, PoolTotals, Quarantine},
    protocol::*,
};
use bytes::Bytes;
use serde::Serialize;
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_core::lock;
use whimbrel_metrics::CallDurations;
use whimbrel_wire::{
    Answer, BoxFuture, Call, Connection, Peer, PeerIdentity, PublicKey, Refusal, Reply, Request, Service,
    Trust,
};

/// Nodes in one reply to a listing.
const LISTING: u32 = 1000;
/// Bytes of a chunk map in one reply.
const MAP_PIECE: usize = 4 << 20;
/// Chunks and versions of a large pool, whose totals are not counted at every request.
const LARGE: u64 = 1_000_000;
/// Most bytes granted to a write session at once.
const GRANT: u64 = 1 << 30;

/// Answers a call without a payload of its own: the request, the call, its header, and the reply.
macro_rules! reply {
    ($request:ident, $call:ident, $header:pat => $reply:expr) => {{
        let $header = $request.decode::<$call>()?;
        Reply::of::<$call>(&$reply.await?, Bytes::new())
    }};
}

/// The service of one pool; clones share its state.
#[derive(Debug, Clone)]
pub struct ManagerService {
    pub(super) shared: Arc<Shared>,
}

/// State that calls and maintenance share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) meta: Meta,
    pub(super) trust: Arc<Trust>,
    pub(super) roles: PoolRoles,
    pub(super) clock: Clock,
    pub(super) backups: Backups,
    /// End of the quarantine after a restore.
    pub(super) quarantine: i64,
    pub(super) lost_after: Duration,
    /// Seconds until a silent write session ends.
    pub(super) lease: u32,
    pub(super) interval: u32,
    pub(super) pin_timeout: Duration,
    pub(super) connections: Mutex<HashMap<PublicKey, Connection>>,
    pub(super) admissions: Mutex<Admissions>,
    /// Benefactors to which a copy failed, and when.
    pub(super) refusals: Mutex<HashMap<BenefactorId, Instant>>,
    /// Benefactors that were asked for an inventory after a restore.
    pub(super) inventories: Mutex<HashSet<PublicKey>>,
    /// Keys that were expelled.
    pub(super) expelled: Mutex<HashSet<PublicKey>>,
    pub(super) spread: tokio::sync::Mutex<SpreadScan>,
    pub(super) policy_rounds: Mutex<PolicyRounds>,
    pub(super) coding_rounds: Mutex<CodingRounds>,
    pub(super) quotas: tokio::sync::Mutex<QuotaSums>,
    /// Whether this manager does the chores.
    pub(super) leads: AtomicBool,
    /// Last reports of scrubs, by the keys of benefactors.
    pub(super) scrubs: Mutex<HashMap<PublicKey, ScrubReport>>,
    pub(super) repaired: AtomicU64,
    /// Chunks without a reachable copy, at the last round of repair.
    pub(super) lost: AtomicU64,
    /// Copies a second in the last round of repair, in thousandths.
    pub(super) repair_rate: AtomicU64,
    /// The last totals, the time when they were counted, and how long that took.
    pub(super) totals: tokio::sync::Mutex<Option<(PoolTotals, Instant, Duration)>>,
    pub(super) calls: CallDurations,
}

impl Shared {
    pub(super) fn connections(&self) -> MutexGuard<'_, HashMap<PublicKey, Connection>> {
        lock(&self.connections)
    }
}

pub(super) fn payload<T: Serialize>(value: &T) -> Result<Bytes, Refusal> {
    postcard::to_stdvec(value).map(Bytes::from).map_err(|_| internal("the answer cannot be encoded"))
}

impl ManagerService {
    /// Current time in milliseconds, for the database.
    pub(super) fn now(&self) -> i64 {
        self.shared.clock.now()
    }

    /// Whether the manager was restored lately, so that it may have forgotten chunks.
    pub(super) fn quarantine(&self) -> Quarantine {
        if self.now() < self.shared.quarantine { Quarantine::On } else { Quarantine::Off }
    }

    async fn register(&self, identity: &PeerIdentity, request: Request) -> Answer {
        let status = request.decode::<Heartbeat>()?;
        let PeerIdentity::Key(key) = identity else { return Err(invalid("a benefactor must have a key")) };
        let (meta, now) = (&self.shared.meta, self.now());
        let id = meta.register(key, &status, now).await?;
        let members = meta.members().await?;
        let mut may_leave = false;
        if status.draining || members.iter().any(|member| member.id == id && member.draining) {
            meta.start_drain(id, now).await?;
            let counted: Vec<BenefactorId> = members
                .iter()
                .filter(|m| {
                    m.id != id && placement::BenefactorState::of(m, now) == placement::BenefactorState::Online
                })
                .map(|m| m.id)
                .collect();
            may_leave = meta.leave(id, &counted).await?;
        }
        let peers = self.shared.trust.list().map_err(|error| internal(&error.to_string()))?;
        let admitted = peers.iter().filter_map(|peer| Some((peer.name.to_string(), peer.key?)));
        let admitted: Vec<_> = admitted.filter(|(_, key)| !self.is_expelled(key)).collect();
        self.request_inventory(*key);
        self.admissions().update(*key, &admitted);
        let pool = meta.pool_id().await?;
        let said = Registered { id, pool, interval: self.shared.interval, admitted, may_leave };
        Reply::of::<Heartbeat>(&said, Bytes::new())
    }

    /// Starts or cancels draining of a benefactor.
    async fn drain(&self, request: Request) -> Answer {
        let (name, leave) = request.decode::<Drain>()?;
        let (meta, members) = (&self.shared.meta, self.shared.meta.members().await?);
        let named: Vec<_> = members.iter().filter(|member| member.name == name).collect();
        let [member] = named[..] else {
            return Err(Refusal::new(
                code::NOT_FOUND,
                format!("{} benefactors have the name {name}", named.len()),
            ));
        };
        match leave {
            true => meta.start_drain(member.id, self.now()).await?,
            false => meta.stop_drain(member.id).await?,
        }
        Reply::of::<Drain>(&(), Bytes::new())
    }

    async fn find_garbage(&self, identity: &PeerIdentity, request: Request) -> Answer {
        let inventory = request.decode::<FindGarbage>()?;
        let listed = get_aged(&request.payload).ok_or_else(|| invalid("a truncated list"))?;
        let PeerIdentity::Key(key) = identity else { return Err(invalid("a benefactor must have a key")) };
        let members = self.shared.meta.members().await?;
        let member = members.iter().find(|member| member.key == *key);
        let member = member.ok_or_else(|| Refusal::new(code::NOT_FOUND, "benefactor not registered"))?;
        let (meta, now) = (&self.shared.meta, self.now());
        let (alive_since, domains) = (now - placement::OFFLINE_AFTER, self.domains(&members));
        meta.release_surplus(member.id, &inventory, alive_since, &domains).await?;
        let may_go = meta.collect_garbage(member.id, &inventory, &listed, now, self.quarantine()).await?;
        Reply::of::<FindGarbage>(&(), put_bits(&may_go))
    }

    async fn reserve(&self, identity: &PeerIdentity, request: Request) -> Answer {
        let asked = request.decode::<ReserveSpace>()?;
        if asked.avoid.len() > 1000 || asked.width > 64 {
            return Err(invalid("too many benefactors"));
        }
        let (meta, now) = (&self.shared.meta, self.now());
        if asked.session > 0 {
            meta.renew_session(asked.session, now).await?;
        }
        let (mut stripe, mut shares, mut bytes) = (Vec::<BenefactorAddress>::new(), Vec::new(), 0);
        if asked.bytes > 0 {
            let members = meta.members().await?;
            let chosen = placement::stripe(
                &members,
                usize::from(asked.width.max(1)),
                &asked.avoid,
                &self.domains(&members),
                now,
            );
            let chosen: Vec<&BenefactorRow> = members.iter().filter(|m| chosen.contains(&m.id)).collect();
            let room: u64 = chosen.iter().map(|member| placement::free(member)).sum();
            bytes = asked.bytes.min(GRANT);
            if room < bytes {
                return Err(Refusal::new(
                    code::FULL,
                    format!("{room} bytes are free, {bytes} were requested"),
                ));
            }
            let share = (bytes + asked.unused.min(GRANT)).div_ceil(chosen.len() as u64);
            shares = chosen.iter().map(|member| (member.id, share)).collect();
            stripe = chosen.into_iter().map(BenefactorAddress::from).collect();
        }
        let session = match asked.session {
            0 => meta.start_session(&shares, now).await?,
            old if shares.is_empty() => old,
            old => meta.reserve(old, &shares).await.map(|()| old)?,
        };
        self.request_admission(identity, stripe.iter().map(|place| place.key).collect()).await;
        let lease = self.shared.lease;
        Reply::of::<ReserveSpace>(&Reserved { session, lease, stripe, bytes }, Bytes::new())
    }

    async fn find_chunks(&self, request: Request) -> Answer {
        let (_, copies) = request.decode::<FindChunks>()?;
        let digests = get_digests(&request.payload).ok_or_else(|| invalid("a truncated list"))?;
        let now = self.now();
        let chunks = self
            .shared
            .meta
            .find_chunks(&digests, copies.max(1), now - placement::OFFLINE_AFTER, now)
            .await?;
        Reply::of::<FindChunks>(&(), put_numbers(chunks))
    }

    async fn find_reusable(&self, request: Request) -> Answer {
        let (version, copies) = request.decode::<FindReusable>()?;
        let standing = self
            .shared
            .meta
            .find_reusable(version, copies.max(1), self.now() - placement::OFFLINE_AFTER)
            .await?;
        Reply::of::<FindReusable>(&(), put_bits(&standing))
    }

    async fn commit(&self, identity: &PeerIdentity, request: Request) -> Answer {
        let commit = request.decode::<CommitFile>()?;
        let (pieces, seal) =
            chunk_map::decode_sealed(&request.payload).map_err(|error| invalid(&error.to_string()))?;
        let writer = quotas::key_of(identity);
        let hold = self.hold_quota(writer, &commit).await?;
        let (seal, now) = (seal.to_vec(), self.now());
        let done = self.shared.meta.commit_pending(PendingCommit { commit, pieces, seal, writer, now }).await;
        self.end_quota_hold(hold, done.is_ok()).await;
        Reply::of::<CommitFile>(&done?, Bytes::new())
    }

    async fn list(&self, request: Request) -> Answer {
        let (folder, after) = request.decode::<List>()?;
        let nodes = self.shared.meta.list(folder, &after, LISTING).await?;
        let more = nodes.len() == LISTING as usize;
        Reply::of::<List>(&more, payload(&nodes)?)
    }

    async fn map(&self, request: Request) -> Answer {
        let (version, offset) = request.decode::<ReadMap>()?;
        let map = Bytes::from(self.shared.meta.map(version).await?);
        let begin = usize::try_from(offset).unwrap_or(usize::MAX).min(map.len());
        let end = map.len().min(begin.saturating_add(MAP_PIECE));
        Reply::of::<ReadMap>(&(map.len() as u64), map.slice(begin..end))
    }

    /// State of the pool.
    pub async fn status(&self) -> Result<PoolStatus, Refusal> {
        let (meta, now) = (&self.shared.meta, self.now());
        let sums = self.totals().await?;
        let info = |member: BenefactorRow| BenefactorInfo {
            id: member.id,
            state: placement::BenefactorState::of(&member, now).name().to_owned(),
            name: member.name,
            address: member.address,
            capacity: member.capacity,
            used: member.used,
            free: member.free,
            chunks: member.chunks,
            faults: member.faults,
            silent: u64::try_from((now - member.seen) / 1000).unwrap_or(0),
        };
        let rate = self.shared.repair_rate.load(Ordering::Relaxed);
        Ok(PoolStatus {
            pool: meta.pool_id().await?,
            benefactors: meta.members().await?.into_iter().map(info).collect(),
            files: sums.files,
            versions: sums.versions,
            logical: sums.logical,
            unique: sums.unique,
            chunks: sums.chunks,
            repair: sums.repair,
            lost: self.shared.lost.load(Ordering::Relaxed),
            repaired: self.shared.repaired.load(Ordering::Relaxed),
            repair_eta: (sums.repair * 1000).checked_div(rate),
            sessions: sums.sessions,
            pinned: sums.pinned,
        })
    }

    /// Durations of the calls that were answered.
    pub fn calls(&self) -> &CallDurations {
        &self.shared.calls
    }

    /// Totals of the whole pool. For a large pool they are counted again once they are older than ten times
    /// the time of counting: mounts request them often, and counting ten million chunks takes long.
    async fn totals(&self) -> Result<PoolTotals, Refusal> {
        let mut known = self.shared.totals.lock().await;
        if let Some((sums, counted, took)) = *known
            && sums.chunks + sums.versions > LARGE
            && counted.elapsed() < took * 10
        {
            return Ok(sums);
        }
        let began = Instant::now();
        let sums = self.shared.meta.totals().await?;
        *known = Some((sums, Instant::now(), began.elapsed()));
        Ok(sums)
    }

    async fn answer(&self, identity: &PeerIdentity, request: Request) -> Answer {
        self.refuse_expelled(identity)?;
        self.shared.roles.check(identity, &request)?;
        let (meta, now) = (&self.shared.meta, self.now());
        match request.kind {
            Heartbeat::KIND => self.register(identity, request).await,
            FindGarbage::KIND => self.find_garbage(identity, request).await,
            ReportScrub::KIND => self.report_scrub(identity, request).await,
            ReportDamage::KIND => self.report_damage(identity, request).await,
            ListScrubs::KIND => self.list_scrubs().await,
            ReserveSpace::KIND => self.reserve(identity, request).await,
            FindChunks::KIND => self.find_chunks(request).await,
            FindReusable::KIND => self.find_reusable(request).await,
            RegisterChunks::KIND => self.register_chunks(request).await,
            OrderCopies::KIND => self.order_copies(request).await,
            CommitFile::KIND => self.commit(identity, request).await,
            List::KIND => self.list(request).await,
            ReadMap::KIND => self.map(request).await,
            Locate::KIND => self.locate(identity, request).await,
            GetStatus::KIND => reply!(request, GetStatus, () => self.status()),
            Drain::KIND => self.drain(request).await,
            Expel::KIND | Forget::KIND | LabelMember::KIND | ListMembers::KIND => {
                self.membership(request).await
            }
            MakeBackup::KIND | ListBackups::KIND | ReadBackup::KIND => self.backup_call(request).await,
            HoldPin::KIND | ReleasePin::KIND | ListPins::KIND => self.pins(identity, request).await,
            EndSession::KIND => reply!(request, EndSession, session => meta.end_session(session)),
            ReportFault::KIND => {
                let fault = request.decode::<ReportFault>()?;
                tracing::warn!(?fault, "a copy could not be read");
                Reply::of::<ReportFault>(&meta.record_fault(&fault, now).await?, Bytes::new())
            }
            Lookup::KIND | GetNode::KIND | MakeNode::KIND | Remove::KIND | Rename::KIND | Change::KIND => {
                self.name_call(request).await
            }
            Versions::KIND | DropVersion::KIND | Pin::KIND => self.version_call(request).await,
            GetPolicy::KIND => reply!(request, GetPolicy, node => meta.policy(node)),
            SetPolicy::KIND => {
                let (folder, policy) = request.decode::<SetPolicy>()?;
                let checked = policy.iter().try_for_each(|policy| policy.check());
                checked.map_err(|error| invalid(&error.to_string()))?;
                meta.set_policy(folder, policy.as_ref(), now).await?;
                self.policies_changed();
                Reply::of::<SetPolicy>(&(), Bytes::new())
            }
            GetCoding::KIND => reply!(request, GetCoding, node => meta.coding(node)),
            SetCoding::KIND => {
                let (node, coding) = request.decode::<SetCoding>()?;
                let checked = coding.iter().try_for_each(|coding| coding.pieces.check());
                checked.map_err(|error| invalid(&error.to_string()))?;
                meta.set_coding(node, coding.as_ref()).await?;
                self.coding_changed();
                Reply::of::<SetCoding>(&(), Bytes::new())
            }
            LocatePieces::KIND => self.locate_pieces(identity, request).await,
            SetQuota::KIND => self.set_quota(request).await,
            ListQuotas::KIND => self.list_quotas().await,
            BeginGroup::KIND | CommitGroup::KIND | AbandonGroup::KIND | ListGroups::KIND | EndJob::KIND => {
                self.group_call(request).await
            }
            Purge::KIND => {
                let purged = self.apply_policies(request.decode::<Purge>()?).await?;
                Reply::of::<Purge>(&(), payload(&purged)?)
            }
            other => Err(Refusal::unknown_kind(other)),
        }
    }

    /// Calls about names and attributes of files and folders.
    async fn name_call(&self, request: Request) -> Answer {
        let (meta, now) = (&self.shared.meta, self.now());
        match request.kind {
            Lookup::KIND => reply!(request, Lookup, (parent, name) => meta.lookup(parent, &name)),
            GetNode::KIND => reply!(request, GetNode, node => meta.node(node)),
            MakeNode::KIND => reply!(request, MakeNode, make => meta.make(&make, now)),
            Remove::KIND => {
                reply!(request, Remove, (parent, name, folder) => meta.remove(parent, &name, folder, now))
            }
            Rename::KIND => {
                let (from, name, to, new_name, replace) = request.decode::<Rename>()?;
                let hold = self.check_quota_of_move((from, &name), to).await?;
                let done = meta.rename((from, &name), (to, &new_name), replace, now).await;
                self.end_quota_hold(hold, done.is_ok()).await;
                done?;
                Reply::of::<Rename>(&(), Bytes::new())
            }
            Change::KIND => reply!(request, Change, (node, change) => meta.change(node, &change, now)),
            other => Err(Refusal::unknown_kind(other)),
        }
    }

    /// Calls about versions of a file.
    async fn version_call(&self, request: Request) -> Answer {
        let (meta, now) = (&self.shared.meta, self.now());
        match request.kind {
            Versions::KIND => {
                let versions = meta.versions(request.decode::<Versions>()?).await?;
                Reply::of::<Versions>(&(), payload(&versions)?)
            }
            DropVersion::KIND => {
                reply!(request, DropVersion, (node, number) => meta.drop_version(node, number, false, now))
            }
            Pin::KIND => {
                let answer = reply!(request, Pin, (node, number, pinned) => meta.pin(node, number, pinned));
                self.policies_changed();
                answer
            }
            other => Err(Refusal::unknown_kind(other)),
        }
    }
}

impl Service for ManagerService {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        // Runs in its own task, so that a transaction is completed when its caller goes away.
        let (service, identity) = (self.clone(), peer.identity.clone());
        Box::pin(async move {
            let answered = tokio::spawn(async move {
                let (begun, call) = (Instant::now(), call_name(request.kind));
                let answer = service.answer(&identity, request).await;
                let outcome = if answer.is_ok() { "done" } else { "refused" };
                service.shared.calls.observe(call, outcome, begun.elapsed());
                answer
            });
            answered.await.unwrap_or_else(|_| Err(internal("the request failed")))
        })
    }

    fn connected(&self, connection: Connection) {
        if let PeerIdentity::Key(key) = connection.peer().identity {
            let mut connections = self.shared.connections();
            connections.retain(|_, connection| connection.close_reason().is_none());
            connections.insert(key, connection);
        }
    }
}
