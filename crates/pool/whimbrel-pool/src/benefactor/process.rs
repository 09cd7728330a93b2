//! A benefactor as a process: its folder, its socket, those who may come. What it has to do with the manager
//! is in `member`.

use super::{
    BenefactorService, Bucket, ChunkError, ChunkStore, ObjectTier, TierOptions,
    manager_reports::{ManagerReporter, ReportService},
};
use crate::{
    address::ManagerAddress,
    connections::{Links, TlsDialer},
    member_listener::{FrontError, MemberListener},
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
use whimbrel_wire::Endpoint;

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
    /// Where clients reach it; unless given, where it listens, or from where it reaches the manager if it
    /// listens everywhere.
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

pub(super) type Result<T> = std::result::Result<T, BenefactorError>;

/// The folders and key of a benefactor, opened.
#[derive(Debug)]
pub struct Benefactor {
    options: BenefactorOptions,
    front: MemberListener,
    store: Arc<ChunkStore>,
    address: String,
}

impl Benefactor {
    /// Opens the folder and the socket.
    pub async fn open(options: BenefactorOptions) -> Result<Self> {
        let front = MemberListener::open(&options.data, options.listen).await?;
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
        let (reports, asked) = ReportService::new(service);
        let to_manager = TlsDialer::new(identity, options.name.clone(), reports);
        let managers = Links::new(Arc::new(to_manager));
        let member = ManagerReporter { options, trust, store, address, managers };
        tokio::select! {
            served = front.serve(endpoint) => Ok(served?),
            left = member.take_part(leave, asked) => left,
        }
    }
}

/// On a thread that may block: an object store is asked what it has.
async fn open_chunks(options: &BenefactorOptions) -> Result<ChunkStore> {
    let (options, runtime) = (options.clone(), tokio::runtime::Handle::current());
    let opened = tokio::task::spawn_blocking(move || {
        let tier = options.tier.map(|tier| {
            let keep_here = tier.keep_here;
            Ok::<_, ChunkError>(ObjectTier { tier: Bucket::new(tier, runtime)?, keep_here })
        });
        let chunks = options.data.join("chunks");
        ChunkStore::open_before(&chunks, options.capacity, options.keep_free, tier.transpose()?)
    });
    Ok(opened.await.unwrap_or(Err(ChunkError::Latched))?)
}

/// The address of this machine that others reach, for a socket bound to `bound`: the one from which the
/// manager is reached, if the socket listens on all. Nothing is sent for that: a UDP socket only asks the
/// routing table.
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
