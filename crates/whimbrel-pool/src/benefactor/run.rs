//! A benefactor as a process: listen, register again and again, ask what may go, leave politely.
//!
//! Registration is soft state: a benefactor that is silent is soon not written to, and after a while its chunks are copied
//! from elsewhere. A manager that is away is asked again until it is back; chunks are served meanwhile.

use super::{BenefactorService, ChunkError, ChunkStore};
use crate::{
    address::ManagerAddress,
    link::{Links, TlsDialer},
    protocol::{AskGarbage, Inventory, Register, Registered, Status, code, get_bits, put_aged},
};
use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{net::TcpListener, sync::watch};
use whimbrel_core::{Digest, HostName};
use whimbrel_wire::{
    CallError, ConnectError, Endpoint, Identity, IdentityError, Rights, Trust, TrustError, TrustedPeer,
    serve_tls,
};

/// Chunks of one inventory message.
const LISTED: usize = 20_000;
/// Between attempts to reach a manager.
const RETRY: Duration = Duration::from_millis(500);
const POOL_FILE: &str = "pool";

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
    /// Where clients reach it, if not there.
    pub advertise: Option<String>,
    /// Its managers; the first that answers counts.
    pub managers: Vec<ManagerAddress>,
    /// Between inventories.
    pub inventory_every: Duration,
}

/// Why a benefactor ended.
#[derive(Debug, thiserror::Error)]
pub enum BenefactorError {
    /// Its key.
    #[error("cannot use the identity")]
    Identity(#[from] IdentityError),
    /// Its list of those who may come.
    #[error("cannot keep whom to trust")]
    Trust(#[from] TrustError),
    /// Its chunks.
    #[error("cannot open the chunks")]
    Chunks(#[from] ChunkError),
    /// Its socket or a file.
    #[error("cannot {action}")]
    Io {
        /// What.
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It cannot listen.
    #[error("cannot serve")]
    Serve(#[from] ConnectError),
    /// The folder has the data of another pool.
    #[error("the manager refuses this benefactor: {text}")]
    Refused {
        /// What it says.
        text: String,
    },
}

type Result<T> = std::result::Result<T, BenefactorError>;

fn io_error(action: &'static str) -> impl FnOnce(io::Error) -> BenefactorError {
    move |source| BenefactorError::Io { action, source }
}

/// The folders and key of a benefactor, opened.
#[derive(Debug)]
pub struct Benefactor {
    options: BenefactorOptions,
    identity: Arc<Identity>,
    trust: Arc<Trust>,
    store: Arc<ChunkStore>,
    listener: TcpListener,
    address: String,
}

impl Benefactor {
    /// Opens the folder and the socket.
    pub async fn open(options: BenefactorOptions) -> Result<Self> {
        let identity = Arc::new(Identity::load_or_create(&options.data)?);
        let trust = Arc::new(Trust::load(&options.data)?);
        let chunks = options.data.join("chunks");
        let store = Arc::new(ChunkStore::open(&chunks, options.capacity, options.keep_free)?);
        let listener = TcpListener::bind(options.listen).await.map_err(io_error("listen"))?;
        let bound = listener.local_addr().map_err(io_error("listen"))?;
        let address = options.advertise.clone().unwrap_or_else(|| bound.to_string());
        Ok(Self { options, identity, trust, store, listener, address })
    }

    /// The key that the manager must admit.
    pub fn key(&self) -> whimbrel_wire::PublicKey {
        self.identity.public_key()
    }

    /// Its chunks.
    pub fn store(&self) -> &Arc<ChunkStore> {
        &self.store
    }

    /// Serves until `leave` says drain and the manager lets it go, or for ever.
    pub async fn run(self, leave: watch::Receiver<bool>) -> Result<()> {
        let Self { options, identity, trust, store, listener, address } = self;
        let dialer = TlsDialer::new(identity.clone(), options.name.clone(), ());
        let links = Arc::new(Links::new(Arc::new(dialer)));
        let service = BenefactorService::new(store.clone(), links);
        let endpoint = Endpoint::new(options.name.clone(), service.clone());
        let to_manager = TlsDialer::new(identity.clone(), options.name.clone(), service);
        let managers = Links::new(Arc::new(to_manager));
        let member = Member { options, trust: trust.clone(), store, address, managers, leave };
        tokio::select! {
            served = serve_tls(listener, &identity, trust, endpoint) => Ok(served?),
            left = member.take_part() => left,
        }
    }
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
        let mut first = true;
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
            if said.may_leave && *self.leave.borrow() {
                return Ok(());
            }
            if listed.is_none_or(|at| at.elapsed() >= self.options.inventory_every) {
                if let Err(error) = self.take_inventory(first).await {
                    tracing::warn!(%error, "the inventory was not taken");
                } else {
                    (listed, first) = (Some(Instant::now()), false);
                }
            }
            self.pause(Duration::from_secs(said.interval.clamp(1, 600).into())).await;
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
        let usage = self.store.usage();
        let status = Status {
            name: self.options.name.to_string(),
            address: self.address.clone(),
            pool: read_pool(&self.options.data),
            capacity: self.options.capacity,
            used: usage.used,
            free: usage.free,
            chunks: usage.chunks,
            draining: *self.leave.borrow(),
        };
        for manager in &self.options.managers {
            let connection = match self.managers.to(&manager.address, manager.key).await {
                Ok(connection) => connection,
                Err(error) => {
                    tracing::debug!(%error, manager = %manager.address, "cannot reach a manager");
                    continue;
                }
            };
            match connection.request::<Register>(&status, bytes::Bytes::new()).await {
                Ok((said, _)) => return Ok(said),
                Err(CallError::Refused { source }) if source.code == code::OTHER_POOL => {
                    return Err(Some(BenefactorError::Refused { text: source.text }));
                }
                Err(error) => tracing::warn!(%error, manager = %manager.address, "not registered"),
            }
        }
        Err(None)
    }

    fn keep_pool(&self, pool: u64) -> Result<()> {
        let path = self.options.data.join(POOL_FILE);
        if read_pool(&self.options.data) == pool {
            return Ok(());
        }
        fs::write(path, format!("{pool:016x}\n")).map_err(io_error("keep the number of the pool"))
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
    async fn take_inventory(&self, _first: bool) -> std::result::Result<(), CallError> {
        let Some(manager) = self.options.managers.first() else { return Ok(()) };
        let mut from = Digest([0; 32]);
        loop {
            let listed = Instant::now();
            let store = self.store.clone();
            let start = from;
            let chunks =
                tokio::task::spawn_blocking(move || store.list(&start, LISTED)).await.unwrap_or_default();
            let last = chunks.last().map(|(digest, _)| *digest).filter(|_| chunks.len() == LISTED);
            let to = last.unwrap_or(Digest([0xff; 32]));
            let header = Inventory { from: from.0, to: to.0, age: listed.elapsed().as_secs() as u32 };
            let connection = self.managers.to(&manager.address, manager.key).await;
            let Ok(connection) = connection else { return Ok(()) };
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
            match last {
                Some(last) => from = after(last),
                None => return Ok(()),
            }
        }
    }
}

/// The digest that follows.
fn after(digest: Digest) -> Digest {
    let mut bytes = digest.0;
    for byte in bytes.iter_mut().rev() {
        *byte = byte.wrapping_add(1);
        if *byte != 0 {
            break;
        }
    }
    Digest(bytes)
}

fn read_pool(data: &Path) -> u64 {
    let text = fs::read_to_string(data.join(POOL_FILE)).unwrap_or_default();
    u64::from_str_radix(text.trim(), 16).unwrap_or(0)
}
