//! Heartbeats, at intervals and on request, inventories and leaving: calls of a benefactor to its manager.
//!
//! A heartbeat is soft state: soon nothing is written to a silent benefactor, and after a while its chunks
//! are re-replicated. An unreachable manager is retried until it returns; chunks are served meanwhile. The
//! reply to a heartbeat lists the admitted members. The manager requests a heartbeat before it sends a member
//! that this benefactor may not know. The next heartbeat answers all waiting requests, so at most one is
//! under way. Heartbeats do not wait for inventories or uploads.

use super::{
    BenefactorService, ChunkStore,
    backups::HeldBackups,
    pool_id_file,
    process::{BenefactorError, BenefactorOptions, Result},
    scrub_reports,
    service::blocking,
    shards::PieceOrders,
};
use crate::{
    connections::ConnectionCache,
    protocol::{
        BenefactorStatus, CodeChunks, CopyChunks, FindGarbage, Heartbeat, Inventory, PutBackup, RebuildPiece,
        Registered, RequestHeartbeat, RequestInventory, admission, code, get_bits, next_digest, put_aged,
    },
};
use bytes::Bytes;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::sleep,
};
use whimbrel_core::{Digest, HostName};
use whimbrel_wire::{
    Answer, BoxFuture, Call, CallError, Connection, Peer, Refusal, Reply, Request, Rights, Service, Trust,
    TrustedPeer,
};

const INVENTORY_CHUNKS: usize = 20_000;
/// Time between attempts to reach a manager.
const RETRY: Duration = Duration::from_millis(500);
/// Time between heartbeats to managers that are not the one that is used.
const REPORT_TO_ALL: Duration = Duration::from_secs(2);
/// Most waiting requests for a heartbeat.
const REQUESTS_MAX: usize = 256;

/// A request for a heartbeat, answered with the digest of the admitted members that are held.
type HeartbeatRequest = oneshot::Sender<Digest>;

/// A service for the manager: all calls of a benefactor, and requests for heartbeats.
pub(super) struct HeartbeatService {
    chunks: BenefactorService,
    requests: mpsc::Sender<HeartbeatRequest>,
    backups: HeldBackups,
    store: Arc<ChunkStore>,
    pieces: PieceOrders,
    /// Whether the manager requested an inventory.
    inventory: Arc<AtomicBool>,
}

/// What managers request of the reporter.
pub(super) struct ManagerRequests {
    heartbeats: mpsc::Receiver<HeartbeatRequest>,
    inventory: Arc<AtomicBool>,
}

impl HeartbeatService {
    pub(super) fn new(
        chunks: BenefactorService,
        backups: HeldBackups,
        store: Arc<ChunkStore>,
        pieces: PieceOrders,
    ) -> (Self, ManagerRequests) {
        let (requests, heartbeats) = mpsc::channel(REQUESTS_MAX);
        let inventory = Arc::<AtomicBool>::default();
        let asked = ManagerRequests { heartbeats, inventory: inventory.clone() };
        (Self { chunks, requests, backups, store, pieces, inventory }, asked)
    }

    async fn put_backup(&self, request: Request) -> Answer {
        let header = request.decode::<PutBackup>()?;
        let (backups, store) = (self.backups.clone(), self.store.clone());
        let put = move || backups.put(header, &request.payload, store.usage().free);
        blocking(put).await??;
        Reply::of::<PutBackup>(&(), Bytes::new())
    }

    /// The inventory follows the next heartbeat.
    fn request_inventory(&self, request: &Request) -> Answer {
        request.decode::<RequestInventory>()?;
        self.inventory.store(true, Ordering::Relaxed);
        Reply::of::<RequestInventory>(&(), Bytes::new())
    }

    async fn report(&self, request: Request) -> Answer {
        request.decode::<RequestHeartbeat>()?;
        let refused = |why: &str| Refusal::new(code::STORAGE, why.to_owned()).retryable();
        let (wish, met) = oneshot::channel();
        self.requests.try_send(wish).map_err(|_| refused("too many requests for a heartbeat are waiting"))?;
        let held = met.await.map_err(|_| refused("the heartbeat did not reach the manager"))?;
        Reply::of::<RequestHeartbeat>(&held, Bytes::new())
    }
}

impl Service for HeartbeatService {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        match request.kind {
            RequestHeartbeat::KIND => Box::pin(self.report(request)),
            PutBackup::KIND => Box::pin(self.put_backup(request)),
            CopyChunks::KIND => Box::pin(self.chunks.copy(request)),
            CodeChunks::KIND => Box::pin(self.pieces.code(request)),
            RebuildPiece::KIND => Box::pin(self.pieces.rebuild(request)),
            RequestInventory::KIND => Box::pin(async move { self.request_inventory(&request) }),
            _ => self.chunks.handle(peer, request),
        }
    }
}

/// The task that sends heartbeats and inventories to the manager.
pub(super) struct ManagerReporter {
    pub(super) options: BenefactorOptions,
    pub(super) trust: Arc<Trust>,
    pub(super) store: Arc<ChunkStore>,
    pub(super) address: String,
    pub(super) managers: ConnectionCache,
}

impl ManagerReporter {
    /// Runs until the benefactor may leave.
    pub(super) async fn run(self, leave: watch::Receiver<bool>, asked: ManagerRequests) -> Result<()> {
        let ManagerRequests { heartbeats: asked, inventory } = asked;
        let (reported, chores) = watch::channel(());
        tokio::select! {
            left = self.send_heartbeats(leave, asked, reported) => left,
            () = self.maintain(chores, &inventory) => Ok(()),
            never = self.report_to_all() => never,
            () = scrub_reports::run(&self) => Ok(()),
        }
    }

    /// Sends heartbeats to all managers beside the one that is used: any of them may do the chores, and then
    /// sends orders over the connection that this benefactor has opened. Their answers are not needed.
    async fn report_to_all(&self) -> Result<()> {
        loop {
            for manager in self.options.managers.iter().skip(1) {
                let Ok(connection) = self.managers.connect(&manager.address, manager.key).await else {
                    continue;
                };
                let status = self.status(false)?;
                if let Err(error) = connection.request::<Heartbeat>(&status, Bytes::new()).await {
                    tracing::debug!(%error, manager = %manager.address, "a heartbeat failed");
                }
            }
            sleep(REPORT_TO_ALL).await;
        }
    }

    async fn send_heartbeats(
        &self,
        mut leave: watch::Receiver<bool>,
        mut asked: mpsc::Receiver<HeartbeatRequest>,
        reported: watch::Sender<()>,
    ) -> Result<()> {
        let mut wishes = Vec::new();
        loop {
            let leaving = *leave.borrow_and_update();
            let time = match self.register(leaving).await {
                Ok(said) => {
                    self.save_pool_id(said.pool)?;
                    if let Some(held) = self.admit(&said) {
                        // The requester may have stopped waiting.
                        wishes.drain(..).for_each(|wish: HeartbeatRequest| {
                            let _ = wish.send(held);
                        });
                    }
                    reported.send_replace(());
                    if said.may_leave {
                        tracing::info!("all chunks are replicated elsewhere; this benefactor leaves");
                        return Ok(());
                    }
                    Duration::from_secs(said.interval.clamp(1, 600).into())
                }
                Err(Some(refused)) => return Err(refused),
                Err(None) => RETRY,
            };
            wishes = pause(time, &mut leave, &mut asked).await;
        }
    }

    /// Uploads full segments after each heartbeat, and sends an inventory when it is due.
    async fn maintain(&self, mut reported: watch::Receiver<()>, requested: &AtomicBool) {
        let mut listed: Option<Instant> = None;
        while reported.changed().await.is_ok() {
            if self.options.tier.is_some() {
                self.offload().await;
            }
            let requested = requested.swap(false, Ordering::Relaxed);
            if requested || listed.is_none_or(|at| at.elapsed() >= self.options.inventory_every) {
                match self.take_inventory().await {
                    Ok(true) => listed = Some(Instant::now()),
                    Ok(false) => listed = None,
                    Err(error) => tracing::warn!(%error, "the inventory failed"),
                }
            }
        }
    }

    /// Uploads full segments, even if nothing is being written.
    async fn offload(&self) {
        let (store, pool) = (self.store.clone(), self.pool().ok().flatten());
        let offloaded = tokio::task::spawn_blocking(move || {
            pool.map_or(Ok(()), |pool| store.bind_tier(pool))?;
            store.offload()
        });
        let offloaded = offloaded.await;
        if let Ok(Err(error)) = offloaded {
            tracing::error!(error = &error as &dyn std::error::Error, "cannot upload full segments");
        }
    }

    async fn register(&self, leaving: bool) -> std::result::Result<Registered, Option<BenefactorError>> {
        let status = self.status(leaving).map_err(Some)?;
        let connection = self.manager().await.ok_or(None)?;
        match connection.request::<Heartbeat>(&status, Bytes::new()).await {
            Ok((said, _)) => Ok(said),
            Err(CallError::Refused { source }) if source.code == code::OTHER_POOL => {
                Err(Some(BenefactorError::Refused { text: source.text }))
            }
            Err(error) => {
                tracing::warn!(%error, "the heartbeat failed");
                Err(None)
            }
        }
    }

    fn status(&self, leaving: bool) -> Result<BenefactorStatus> {
        let usage = self.store.usage();
        Ok(BenefactorStatus {
            name: self.options.name.to_string(),
            address: self.address.clone(),
            pool: self.pool()?.unwrap_or(0),
            capacity: self.options.capacity,
            used: usage.used,
            free: usage.free,
            chunks: usage.chunks,
            draining: leaving,
            owed: usage.bytes_to_free,
        })
    }

    /// Connects to the first manager that can be reached.
    pub(super) async fn manager(&self) -> Option<Connection> {
        for manager in &self.options.managers {
            match self.managers.connect(&manager.address, manager.key).await {
                Ok(connection) => return Some(connection),
                Err(error) => {
                    tracing::debug!(%error, manager = %manager.address, "cannot reach a manager");
                }
            }
        }
        None
    }

    /// The pool that the data belongs to; none before the first registration.
    fn pool(&self) -> Result<Option<u64>> {
        let path = || self.options.data.clone();
        pool_id_file::read(&self.options.data).map_err(|source| BenefactorError::Pool {
            action: "read",
            path: path(),
            source,
        })
    }

    fn save_pool_id(&self, pool: u64) -> Result<()> {
        if self.pool()? == Some(pool) {
            return Ok(());
        }
        let path = || self.options.data.clone();
        pool_id_file::save(&self.options.data, pool).map_err(|source| BenefactorError::Pool {
            action: "store",
            path: path(),
            source,
        })
    }

    /// Trusts exactly the admitted members; returns the digest of the list if all are in the trust list.
    fn admit(&self, said: &Registered) -> Option<Digest> {
        let known = self.trust.list().ok()?;
        let is = |peer: &TrustedPeer, name: &str, key| peer.key == Some(key) && peer.name.as_str() == name;
        for (name, key) in &said.admitted {
            if known.iter().any(|peer| is(peer, name, *key)) {
                continue;
            }
            let Ok(name) = name.parse::<HostName>() else { continue };
            for old in known.iter().filter(|peer| peer.name == name || peer.key == Some(*key)) {
                let _ = self.trust.remove(&old.name);
            }
            let rights = Rights(vec![whimbrel_wire::Right::Pool]);
            let peer = TrustedPeer { name, key: Some(*key), address: None, rights, read: None, write: None };
            if let Err(error) = self.trust.add(peer) {
                tracing::warn!(%error, "cannot admit a member");
            }
        }
        for gone in known.iter().filter(|peer| !said.admitted.iter().any(|(_, key)| peer.key == Some(*key))) {
            let _ = self.trust.remove(&gone.name);
        }
        let held = self.trust.list().ok()?;
        let all = said.admitted.iter().all(|(name, key)| held.iter().any(|peer| is(peer, name, *key)));
        all.then(|| admission(&said.admitted))
    }

    /// Lists all chunks to the manager, range by range, and deletes those that it releases. False if no
    /// manager can be reached, so that it is retried soon.
    async fn take_inventory(&self) -> std::result::Result<bool, CallError> {
        let mut from = Digest([0; 32]);
        loop {
            let listed = Instant::now();
            let chunks = self.store.list(&from, INVENTORY_CHUNKS);
            let last = chunks.last().map(|(digest, _)| *digest).filter(|_| chunks.len() == INVENTORY_CHUNKS);
            let to = last.unwrap_or(Digest([0xff; 32]));
            let header = Inventory { from: from.0, to: to.0, age: listed.elapsed().as_secs() as u32 };
            let Some(connection) = self.manager().await else { return Ok(false) };
            let (_, bits) = connection.request::<FindGarbage>(&header, put_aged(&chunks)).await?;
            let may_go = get_bits(&bits, chunks.len());
            let doomed: Vec<Digest> =
                chunks.iter().zip(may_go).filter(|(_, go)| *go).map(|((digest, _), _)| *digest).collect();
            if !doomed.is_empty() {
                let store = self.store.clone();
                let freed = tokio::task::spawn_blocking(move || {
                    store.delete(&doomed, listed);
                    store.compact()
                });
                if let Ok(Err(error)) = freed.await {
                    tracing::error!(%error, "garbage collection failed");
                }
            }
            match last.and_then(next_digest) {
                Some(next) => from = next,
                None => return Ok(true),
            }
        }
    }
}

/// Waits for the time, for a change of `leave`, or for requests for a heartbeat, which it returns.
async fn pause(
    time: Duration,
    leave: &mut watch::Receiver<bool>,
    asked: &mut mpsc::Receiver<HeartbeatRequest>,
) -> Vec<HeartbeatRequest> {
    let mut wishes = Vec::new();
    tokio::select! {
        () = sleep(time) => {}
        Ok(()) = leave.changed() => {}
        Some(wish) = asked.recv() => wishes.push(wish),
    }
    while let Ok(wish) = asked.try_recv() {
        wishes.push(wish);
    }
    wishes
}
