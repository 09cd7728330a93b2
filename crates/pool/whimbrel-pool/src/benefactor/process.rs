//! The benefactor process: its folder, socket and trust list. `manager_reports` has its calls to the manager.

use super::{
    BenefactorService, Bucket, ChunkError, ChunkStore, ObjectTier, ScrubOptions, TierOptions, TierOwner,
    backups::HeldBackups,
    manager_reports::{HeartbeatService, ManagerReporter},
    pool_id_file,
};
use crate::{
    address::ManagerAddress,
    connections::{ConnectionCache, TlsDialer},
    member_listener::{ListenerError, MemberListener},
};
use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tokio::sync::watch;
use whimbrel_core::HostName;
use whimbrel_metrics::CallDurations;
use whimbrel_wire::Endpoint;

/// Options of a benefactor process.
#[derive(Debug, Clone)]
pub struct BenefactorOptions {
    /// Name for people.
    pub name: HostName,
    /// Folder of the chunks and the key.
    pub data: PathBuf,
    /// Bytes that it offers to the pool.
    pub capacity: u64,
    /// Bytes of its disk that must stay free.
    pub keep_free: u64,
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Address for clients. The default is `listen`; for a wildcard, the local address towards the manager.
    pub advertise: Option<String>,
    /// Managers; the first that answers is used.
    pub managers: Vec<ManagerAddress>,
    /// Time between inventories.
    pub inventory_every: Duration,
    /// Pace at which all chunks are read and checked.
    pub scrub: ScrubOptions,
    /// Object tier for full segments, if they are not only on the disk.
    pub tier: Option<TierOptions>,
}

/// Failure to open or run a benefactor.
#[derive(Debug, thiserror::Error)]
pub enum BenefactorError {
    /// The key, the trust list or the socket failed.
    #[error(transparent)]
    Listener(#[from] ListenerError),
    /// The chunk store failed.
    #[error("cannot open the chunks")]
    Chunks(#[from] ChunkError),
    /// The pool id cannot be read or stored.
    #[error("cannot {action} the id of the pool in {}", path.display())]
    Pool {
        /// The operation: `read` or `store`.
        action: &'static str,
        /// Folder of the file.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The socket is bound to a wildcard address and the address for clients is unknown.
    #[error("cannot determine the address of this benefactor for clients; set the address to advertise")]
    Advertise {
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The folder has data of another pool.
    #[error("the manager refuses this benefactor: {text}")]
    Refused {
        /// Reason given by the manager.
        text: String,
    },
}

pub(super) type Result<T> = std::result::Result<T, BenefactorError>;

/// A benefactor whose folder, chunk store and socket are open.
#[derive(Debug)]
pub struct Benefactor {
    options: BenefactorOptions,
    listener: MemberListener,
    store: Arc<ChunkStore>,
    address: String,
    calls: Arc<CallDurations>,
}

impl Benefactor {
    /// Opens the folder, the chunk store and the socket.
    pub async fn open(options: BenefactorOptions) -> Result<Self> {
        let front = MemberListener::open(&options.data, options.listen).await?.with_local_socket();
        let failed = |action| {
            let path = options.data.clone();
            move |source| BenefactorError::Pool { action, path, source }
        };
        let pool = pool_id_file::read(&options.data).map_err(failed("read"))?;
        let store = Arc::new(open_chunks(&options, front.identity.public_key(), pool).await?);
        if let (None, Some(found)) = (pool, store.tier_pool()) {
            // Another pool would ask for all chunks of the object store to be deleted.
            pool_id_file::save(&options.data, found).map_err(failed("store"))?;
        }
        let address = match &options.advertise {
            Some(address) => address.clone(),
            None => advertised_address(front.address, &options.managers)
                .map_err(|source| BenefactorError::Advertise { source })?
                .to_string(),
        };
        Ok(Self { options, listener: front, store, address, calls: Arc::default() })
    }

    /// The key that the manager must admit.
    pub fn key(&self) -> whimbrel_wire::PublicKey {
        self.listener.identity.public_key()
    }

    /// The chunk store of the benefactor.
    pub fn store(&self) -> &Arc<ChunkStore> {
        &self.store
    }

    /// Durations of the calls that were answered.
    pub fn calls(&self) -> &Arc<CallDurations> {
        &self.calls
    }

    /// Serves until the benefactor was drained, by `leave` or the manager; else returns only on failure.
    pub async fn run(self, leave: watch::Receiver<bool>) -> Result<()> {
        let Self { options, listener: front, store, address, calls } = self;
        let (identity, trust) = (front.identity.clone(), front.trust.clone());
        let dialer = TlsDialer::new(identity.clone(), options.name.clone(), ());
        let links = Arc::new(ConnectionCache::new(Arc::new(dialer)));
        let backups = HeldBackups::new(&options.data);
        let service = BenefactorService::new(store.clone(), links.clone(), calls)
            .with_backups(backups.clone())
            .with_local(front.local.clone());
        let endpoint =
            Endpoint::new(options.name.clone(), service.clone()).with_protocols([crate::protocol::PROTOCOL]);
        let (reports, asked) = HeartbeatService::new(
            service,
            backups,
            store.clone(),
            super::shards::PieceOrders::new(store.clone(), links),
        );
        let to_manager = TlsDialer::new(identity, options.name.clone(), reports);
        let managers = ConnectionCache::new(Arc::new(to_manager));
        let member = ManagerReporter { options, trust, store, address, managers };
        tokio::select! {
            served = front.serve(endpoint) => Ok(served?),
            left = member.run(leave, asked) => left,
        }
    }
}

/// Opens the chunk store on a thread that may block, because it lists the object store.
async fn open_chunks(
    options: &BenefactorOptions,
    key: whimbrel_wire::PublicKey,
    pool: Option<u64>,
) -> Result<ChunkStore> {
    let (options, runtime) = (options.clone(), tokio::runtime::Handle::current());
    let opened = tokio::task::spawn_blocking(move || {
        let chunks = options.data.join("chunks");
        let owner = TierOwner { key, pool, name: options.name };
        let tier = options.tier.map(|tier| {
            let (keep_local, take_over) = (tier.keep_local, tier.take_over);
            ObjectTier::claim(Bucket::new(tier, runtime)?, &chunks, owner, take_over, keep_local)
        });
        ChunkStore::open_with_tier(&chunks, options.capacity, options.keep_free, tier.transpose()?)
    });
    Ok(opened.await.unwrap_or(Err(ChunkError::Latched))?)
}

/// The address of this host for clients: `bound`, or for a wildcard the local address of the route to a
/// manager. Nothing is sent: connecting a UDP socket only looks up the route.
fn advertised_address(bound: SocketAddr, managers: &[ManagerAddress]) -> io::Result<SocketAddr> {
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
        let found =
            advertised_address("0.0.0.0:7501".parse().unwrap(), std::slice::from_ref(&manager)).unwrap();
        assert_eq!(found, "127.0.0.1:7501".parse().unwrap());
        let bound = "10.1.2.3:9".parse().unwrap();
        assert_eq!(advertised_address(bound, &[manager]).unwrap(), bound);
        assert!(advertised_address("0.0.0.0:7501".parse().unwrap(), &[]).is_err());
    }
}
