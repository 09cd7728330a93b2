//! A pool in this process: manager and benefactors with real sockets and TLS, their data on a tmpfs, so that
//! the disk of the machine is not what is measured.

use super::claims::Confirms;
use anyhow::{Result, ensure};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch};
use whimbrel_fuse::Mounted;
use whimbrel_pool::{
    ManagerAddress,
    benefactor::{Benefactor, BenefactorOptions, ScrubOptions},
    client::{Pool, PoolOptions, WriteOptions},
    connections::TlsDialer,
    manager::{Manager, ManagerOptions},
    mount::{PoolMount, mount},
};
use whimbrel_wire::{Identity, PublicKey, Rights, Trust, TrustedPeer};

/// A manager, benefactors, and a client that is admitted.
pub(super) struct Members {
    runtime: Runtime,
    dir: TempDir,
    address: ManagerAddress,
    _leave: Vec<watch::Sender<bool>>,
}

/// Has a member admitted by the manager of the folder `dir`.
pub(super) fn admit(dir: &Path, name: &str, key: PublicKey) -> Result<()> {
    let rights = Rights::all();
    let peer =
        TrustedPeer { name: name.parse()?, key: Some(key), address: None, rights, read: None, write: None };
    Ok(Trust::load(dir)?.add(peer)?)
}

impl Members {
    /// Starts all, and waits until the manager knows them.
    pub(super) fn start(benefactors: usize) -> Result<Self> {
        Self::start_at(benefactors, TempDir::new_in("/dev/shm")?, None)
    }

    /// Starts all below `dir`, the manager on a database that is not a file if one is named.
    pub(super) fn start_at(benefactors: usize, dir: TempDir, database: Option<String>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let data = dir.path().join("manager");
        Identity::load_or_create(&data)?;
        admit(&data, "client", Identity::load_or_create(&dir.path().join("client"))?.public_key())?;
        let mut options = ManagerOptions::new(data.clone(), "127.0.0.1:0".parse()?);
        options.interval = 1;
        options.database = database;
        let manager = runtime.block_on(Manager::open(options))?;
        let address = manager.address();
        runtime.spawn(manager.run());
        let mut leaves = Vec::new();
        for number in 0..benefactors {
            let name = format!("b{number}");
            let options = BenefactorOptions {
                name: name.parse()?,
                data: dir.path().join(&name),
                capacity: 8 << 30,
                keep_free: 0,
                listen: "127.0.0.1:0".parse()?,
                advertise: None,
                managers: vec![address.clone()],
                inventory_every: Duration::from_secs(3600),
                // What is measured is not to share the disk.
                scrub: ScrubOptions { rate: 0, ..ScrubOptions::default() },
                tier: None,
            };
            let benefactor = runtime.block_on(Benefactor::open(options))?;
            admit(&data, &name, benefactor.key())?;
            let (leave, leaving) = watch::channel(false);
            leaves.push(leave);
            runtime.spawn(benefactor.run(leaving));
        }
        let members = Self { runtime, dir, address, _leave: leaves };
        let pool = members.pool()?;
        let deadline = Instant::now() + Duration::from_secs(30);
        while pool.block(pool.status())?.benefactors.len() < benefactors {
            ensure!(Instant::now() < deadline, "the benefactors did not come");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(members)
    }

    /// A client with nothing cached.
    pub(super) fn pool(&self) -> Result<Pool> {
        let identity = Arc::new(Identity::load_or_create(&self.dir.path().join("client"))?);
        let dialer = TlsDialer::new(identity, "client".parse()?, Confirms);
        let options = PoolOptions::new(vec![self.address.clone()]);
        Ok(Pool::new(options, Arc::new(dialer), self.runtime.handle().clone()))
    }

    /// A mount of a client with nothing cached.
    pub(super) fn mount(&self, at: &Path) -> Result<Mounted> {
        let write = WriteOptions { spool: self.dir.path().to_owned(), ..WriteOptions::default() };
        let options = PoolMount { source: "pool:bench".into(), write, others: false, read_only: false };
        Ok(mount(self.pool()?, at, options)?)
    }
}
