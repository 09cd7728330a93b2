//! A benefactor as a process: listen, register again and again, ask what may go, leave politely.
//!
//! Registration is soft state: a benefactor that is silent is soon not written to, and after a while its chunks are copied
//! from elsewhere. A manager that is away is asked again until it is back; chunks are served meanwhile.

use super::{Behind, BenefactorService, ChunkError, ChunkStore, Tier, TierOptions, pool_file};
use crate::{
    address::ManagerAddress,
    front::{Front, FrontError},
    link::{Links, TlsDialer},
    protocol::{AskGarbage, Inventory, Register, Registered, Status, after, code, get_bits, put_aged},
};
use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::watch;
use whimbrel_core::{Digest, HostName};
use whimbrel_wire::{CallError, Connection, Endpoint, Rights, Trust, TrustedPeer};

/// Chunks of one inventory message.
const LISTED: usize = 20_000;
/// Between attempts to reach a manager.
const RETRY: Duration = Duration::from_millis(500);

/// How a benefactor runs.
#[derive(Debug, Clone)]
pub struct BenefactorOptions {
    /// Name for people.
    pub name: HostName,
    /// Folder of its chunks and its key.
    pub data: PathBuf,
    /// Bytes it gives.
    pub capacity: u64,
    /// Bytes of its disk that stay free.
    pub keep_free: u64,
    /// Where it listens.
    pub listen: SocketAddr,
    /// Where clients reach it; unless given, where it listens, or from where it reaches the manager if it listens everywhere.
    pub advertise: Option<String>,
    /// Its managers; the first that answers counts.
    pub managers: Vec<ManagerAddress>,
    /// Between inventories.
    pub inventory_every: Duration,
    /// Where full segments go, if not only to the disk.
    pub tier: Option<TierOptions>,
}

/// Why a benefactor ended.
#[derive(Debug, thiserror::Error)]
pub enum BenefactorError {
    /// Its key, its list of those who may come, or its socket.
    #[error(transparent)]
    Front(#[from] FrontError),
    /// Its chunks.
    #[error("cannot open the chunks")]
    Chunks(#[from] ChunkError),
    /// The number of its pool.
    #[error("cannot {action} the number of the pool in {}", path.display())]
    Pool {
        /// `read` or `keep`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It listens everywhere, and what others would reach it by is not known.
    #[error("cannot tell by which address others reach this benefactor; say what to advertise")]
    Advertise {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The folder has the data of another pool.
    #[error("the manager refuses this benefactor: {text}")]
    Refused {
        /// What it says.
        text: String,
    },
}

type Result<T> = std::result::Result<T, BenefactorError>;

/// The folders and key of a benefactor, opened.
#[derive(Debug)]
pub struct Benefactor {
    options: BenefactorOptions,
    front: Front,
    store: Arc<ChunkStore>,
    address: String,
}

impl Benefactor {
    /// Opens the folder and the socket.
    pub async fn open(options: BenefactorOptions) -> Result<Self> {
        let front = Front::open(&options.data, options.listen).await?;
        let store = Arc::new(open_chunks(&options).await?);
        let address = match &options.advertise {
            Some(address) => address.clone(),
            None => reached_by(front.address, &options.managers)
                .map_err(|source| BenefactorError::Advertise { source })?
                .to_string(),
        };
        Ok(Self { options, front, store, address })
    }

    /// The key that the manager must admit.
    pub fn key(&self) -> whimbrel_wire::PublicKey {
        self.front.identity.public_key()
    }

    /// Its chunks.
    pub fn store(&self) -> &Arc<ChunkStore> {
        &self.store
    }

    /// Serves until `leave` or the manager says drain and all is elsewhere, or for ever.
    pub async fn run(self, leave: watch::Receiver<bool>) -> Result<()> {
        let Self { options, front, store, address } = self;
        let (identity, trust) = (front.identity.clone(), front.trust.clone());
        let dialer = TlsDialer::new(identity.clone(), options.name.clone(), ());
        let links = Arc::new(Links::new(Arc::new(dialer)));
        let service = BenefactorService::new(store.clone(), links);
        let endpoint = Endpoint::new(options.name.clone(), service.clone());
        let to_manager = TlsDialer::new(identity, options.name.clone(), service);
        let managers = Links::new(Arc::new(to_manager));
        let member = Member { options, trust, store, address, managers, leave };
        tokio::select! {
            served = front.serve(endpoint) => Ok(served?),
            left = member.take_part() => left,
        }
    }
}

/// On a thread that may block: an object store is asked what it has.
async fn open_chunks(options: &BenefactorOptions) -> Result<ChunkStore> {
    let (options, runtime) = (options.clone(), tokio::runtime::Handle::current());
    let opened = tokio::task::spawn_blocking(move || {
        let tier = options.tier.map(|tier| {
            let keep_here = tier.keep_here;
            Ok::<_, ChunkError>(Behind { tier: Tier::new(tier, runtime)?, keep_here })
        });
        let chunks = options.data.join("chunks");
        ChunkStore::open_before(&chunks, options.capacity, options.keep_free, tier.transpose()?)
    });
    Ok(opened.await.unwrap_or(Err(ChunkError::Latched))?)
}

/// The side that talks to the manager.
struct Member {
    options: BenefactorOptions,
    trust: Arc<Trust>,
    store: Arc<ChunkStore>,
    address: String,
    managers: Links,
    leave: watch::Receiver<bool>,
}

impl Member {
    async fn take_part(mut self) -> Result<()> {
        let mut listed: Option<Instant> = None;
        loop {
            let said = match self.register().await {
                Ok(said) => said,
                Err(Some(refused)) => return Err(refused),
                Err(None) => {
                    self.pause(RETRY).await;
                    continue;
                }
            };
            self.keep_pool(said.pool)?;
            self.admit(&said);
            if said.may_leave {
                tracing::info!("everything is elsewhere; this benefactor leaves");
                return Ok(());
            }
            if self.options.tier.is_some() {
                self.offload().await;
            }
            if listed.is_none_or(|at| at.elapsed() >= self.options.inventory_every) {
                match self.take_inventory().await {
                    Ok(true) => listed = Some(Instant::now()),
                    Ok(false) => {}
                    Err(error) => tracing::warn!(%error, "the inventory was not taken"),
                }
            }
            self.pause(Duration::from_secs(said.interval.clamp(1, 600).into())).await;
        }
    }

    /// What is full goes to the object store, also while nobody writes.
    async fn offload(&self) {
        let store = self.store.clone();
        let offloaded = tokio::task::spawn_blocking(move || store.offload()).await;
        if let Ok(Err(error)) = offloaded {
            tracing::error!(error = &error as &dyn std::error::Error, "segments wait for the object store");
        }
    }

    /// A wish to leave is told at once.
    async fn pause(&mut self, time: Duration) {
        let waited = tokio::time::timeout(time, self.leave.changed()).await;
        if matches!(waited, Ok(Err(_))) {
            tokio::time::sleep(time).await;
        }
    }

    async fn register(&self) -> std::result::Result<Registered, Option<BenefactorError>> {
        let pool = self.pool().map_err(Some)?;
        let usage = self.store.usage();
        let status = Status {
            name: self.options.name.to_string(),
            address: self.address.clone(),
            pool: pool.unwrap_or(0),
            capacity: self.options.capacity,
            used: usage.used,
            free: usage.free,
            chunks: usage.chunks,
            draining: *self.leave.borrow(),
            owed: usage.owed,
        };
        let connection = self.manager().await.ok_or(None)?;
        match connection.request::<Register>(&status, bytes::Bytes::new()).await {
            Ok((said, _)) => Ok(said),
            Err(CallError::Refused { source }) if source.code == code::OTHER_POOL => {
                Err(Some(BenefactorError::Refused { text: source.text }))
            }
            Err(error) => {
                tracing::warn!(%error, "not registered");
                Err(None)
            }
        }
    }

    /// The first manager that can be reached.
    async fn manager(&self) -> Option<Connection> {
        for manager in &self.options.managers {
            match self.managers.to(&manager.address, manager.key).await {
                Ok(connection) => return Some(connection),
                Err(error) => {
                    tracing::debug!(%error, manager = %manager.address, "cannot reach a manager");
                }
            }
        }
        None
    }

    /// The pool that the data belongs to, once there was a first registration.
    fn pool(&self) -> Result<Option<u64>> {
        let path = || self.options.data.clone();
        pool_file::read(&self.options.data).map_err(|source| BenefactorError::Pool {
            action: "read",
            path: path(),
            source,
        })
    }

    fn keep_pool(&self, pool: u64) -> Result<()> {
        if self.pool()? == Some(pool) {
            return Ok(());
        }
        let path = || self.options.data.clone();
        pool_file::keep(&self.options.data, pool).map_err(|source| BenefactorError::Pool {
            action: "keep",
            path: path(),
            source,
        })
    }

    /// Whoever the manager admits may come here too.
    fn admit(&self, said: &Registered) {
        let Ok(known) = self.trust.list() else { return };
        for (name, key) in &said.admitted {
            let Ok(name) = name.parse::<HostName>() else { continue };
            if known.iter().any(|peer| peer.key == Some(*key) && peer.name == name) {
                continue;
            }
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
    }

    /// Lists all chunks to the manager, range by range, and deletes what it says may go.
    /// False if no manager can be reached: then it is tried again soon.
    async fn take_inventory(&self) -> std::result::Result<bool, CallError> {
        let mut from = Digest([0; 32]);
        loop {
            let listed = Instant::now();
            let chunks = self.store.list(&from, LISTED);
            let last = chunks.last().map(|(digest, _)| *digest).filter(|_| chunks.len() == LISTED);
            let to = last.unwrap_or(Digest([0xff; 32]));
            let header = Inventory { from: from.0, to: to.0, age: listed.elapsed().as_secs() as u32 };
            let Some(connection) = self.manager().await else { return Ok(false) };
            let (_, bits) = connection.request::<AskGarbage>(&header, put_aged(&chunks)).await?;
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
                    tracing::error!(%error, "garbage could not be removed");
                }
            }
            match last.and_then(after) {
                Some(next) => from = next,
                None => return Ok(true),
            }
        }
    }
}

/// The address of this machine that others reach, for a socket bound to `bound`: the one from which the manager is reached,
/// if the socket listens on all. Nothing is sent for that: a UDP socket only asks the routing table.
fn reached_by(bound: SocketAddr, managers: &[ManagerAddress]) -> io::Result<SocketAddr> {
    if !bound.ip().is_unspecified() {
        return Ok(bound);
    }
    let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for manager in managers {
        let from: SocketAddr = match bound {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let asked = UdpSocket::bind(from).and_then(|socket| {
            socket.connect(&*manager.address)?;
            socket.local_addr()
        });
        match asked {
            Ok(local) => return Ok((local.ip(), bound.port()).into()),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_wire::PublicKey;

    #[test]
    fn a_benefactor_that_listens_everywhere_does_not_tell_others_so() {
        let manager = ManagerAddress { address: "127.0.0.1:7500".into(), key: PublicKey([0; 32]) };
        let found = reached_by("0.0.0.0:7501".parse().unwrap(), std::slice::from_ref(&manager)).unwrap();
        assert_eq!(found, "127.0.0.1:7501".parse().unwrap());
        let bound = "10.1.2.3:9".parse().unwrap();
        assert_eq!(reached_by(bound, &[manager]).unwrap(), bound);
        assert!(reached_by("0.0.0.0:7501".parse().unwrap(), &[]).is_err());
    }
}
