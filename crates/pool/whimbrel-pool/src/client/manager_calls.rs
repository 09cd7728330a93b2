//! The pool handle: calls to the manager, which are retried while it is unreachable, and cached addresses.

use super::{
    PoolError, Result, Secret, previous_versions::PreviousVersions, read_file::ChunkCache,
    reader_session::ReaderSession,
};
use crate::{
    ManagerAddress,
    backup::{BackupError, BackupName},
    connections::{ConnectionCache, Dialer},
    domains::Domains,
    erasure::Coding,
    policy::Policy,
    protocol::{
        AbandonGroup, BackupReport, BeginGroup, BenefactorAddress, BenefactorId, Change, CommitGroup, Drain,
        DropVersion, EndJob, Expel, Forget, GetCoding, GetNode, GetPolicy, GroupInfo, HoldPin, LabelMember,
        List, ListBackups, ListGroups, ListMembers, ListPins, ListQuotas, ListScrubs, Lookup, MakeBackup,
        MakeNode, MemberLabels, MemberReport, NewGroup, NewNode, Node, NodeChange, NodeId, Pin, PinInfo,
        PoolStatus, Purge, Purged, QuotaInfo, QuotaSubject, ReleasePin, Remove, RemovedMember, Rename,
        ScrubReport, SetCoding, SetPolicy, SetQuota, VersionInfo, Versions,
    },
};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant},
};
use tokio::runtime::Handle;
use whimbrel_core::lock;
use whimbrel_wire::{Call, CallError, Code, Connection};

/// Time for which the failure domains are not asked for again.
const DOMAINS_TIME: Duration = Duration::from_secs(60);
/// Time between attempts to reach a manager.
const RETRY: Duration = Duration::from_millis(200);

/// Options of a pool handle.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// Managers; the first that answers is used.
    pub managers: Vec<ManagerAddress>,
    /// Time for which an unreachable manager is retried.
    pub manager_timeout: Duration,
    /// Timeout of a benefactor, after which it is not used.
    pub benefactor_timeout: Duration,
    /// Bytes of chunks cached for readers.
    pub cache: usize,
    /// Bytes fetched ahead of a sequential reader.
    pub read_ahead: usize,
    /// Secret for encryption. Without one, chunks are not encrypted and encrypted ones cannot be read.
    pub secret: Option<Arc<Secret>>,
}

impl PoolOptions {
    /// Default options with these managers.
    pub fn new(managers: Vec<ManagerAddress>) -> Self {
        Self {
            managers,
            manager_timeout: Duration::from_secs(30),
            benefactor_timeout: Duration::from_secs(10),
            cache: 128 << 20,
            read_ahead: 16 << 20,
            secret: None,
        }
    }
}

/// A pool handle; clones share connections and cache.
#[derive(Debug, Clone)]
pub struct Pool {
    pub(super) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) options: PoolOptions,
    pub(super) runtime: Handle,
    pub(super) links: ConnectionCache,
    pub(super) places: Mutex<HashMap<BenefactorId, BenefactorAddress>>,
    pub(super) cache: ChunkCache,
    pub(super) previous_versions: PreviousVersions,
    pub(super) reader_session: tokio::sync::Mutex<Weak<ReaderSession>>,
    id: tokio::sync::OnceCell<u64>,
    /// The failure domains, and when they were asked for.
    domains: tokio::sync::Mutex<Option<(Instant, Arc<Domains>)>>,
}

impl Pool {
    /// Creates a handle without connecting. Calls run on `runtime`.
    pub fn new(options: PoolOptions, dialer: Arc<dyn Dialer>, runtime: Handle) -> Self {
        let cache = ChunkCache::new(options.cache);
        let links = ConnectionCache::new(dialer);
        let (places, previous_versions, reader_session, id, domains) = Default::default();
        let inner =
            Inner { options, runtime, links, places, cache, previous_versions, reader_session, id, domains };
        Self { inner: Arc::new(inner) }
    }

    /// Whether written chunks are encrypted.
    pub fn encrypts(&self) -> bool {
        self.inner.options.secret.is_some()
    }

    /// Runs a call in a thread outside the runtime.
    pub fn block<T>(&self, call: impl Future<Output = T>) -> T {
        self.inner.runtime.block_on(call)
    }

    /// Calls the manager, and retries until it answers or the timeout is over.
    pub async fn call_manager<C: Call>(
        &self,
        header: &C::Header,
        payload: Bytes,
    ) -> Result<(C::Reply, Bytes)> {
        let began = Instant::now();
        loop {
            let failed = match self.manager().await {
                Ok(connection) => match connection.request::<C>(header, payload.clone()).await {
                    Err(CallError::Closed { source }) => {
                        PoolError::ManagerUnreachable { source: Arc::new(source) }
                    }
                    Err(CallError::Refused { source }) if source.retryable => PoolError::Refused { source },
                    other => return Ok(other?),
                },
                Err(error) => error,
            };
            if began.elapsed() >= self.inner.options.manager_timeout {
                return Err(failed);
            }
            tracing::debug!(error = %failed, "the manager is unreachable; retrying");
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn manager(&self) -> Result<Connection> {
        let none = || PoolError::Answer { what: "list of managers" };
        let mut failed = None;
        for manager in &self.inner.options.managers {
            match self.inner.links.connect(&manager.address, manager.key).await {
                Ok(connection) => return Ok(connection),
                Err(error) => failed = Some(error.into()),
            }
        }
        Err(failed.unwrap_or_else(none))
    }

    async fn listed<C: Call, T: DeserializeOwned>(&self, header: &C::Header) -> Result<(C::Reply, Vec<T>)> {
        let (reply, payload) = self.call_manager::<C>(header, Bytes::new()).await?;
        let list = postcard::from_bytes(&payload).map_err(|_| PoolError::Answer { what: "list" })?;
        Ok((reply, list))
    }

    async fn simple<C: Call>(&self, header: &C::Header) -> Result<C::Reply> {
        Ok(self.call_manager::<C>(header, Bytes::new()).await?.0)
    }

    /// Finds the node at a path from the root.
    pub async fn find(&self, path: &str) -> Result<Node> {
        let mut node = self.node(whimbrel_fuse::ROOT).await?;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            node = self.lookup(node.id, name).await?;
        }
        Ok(node)
    }

    /// Lists all children of a folder, by name.
    pub async fn list(&self, folder: NodeId) -> Result<Vec<Node>> {
        let mut all: Vec<Node> = Vec::new();
        loop {
            let after = all.last().map_or(String::new(), |node| node.name.clone());
            let (more, nodes) = self.listed::<List, Node>(&(folder, after)).await?;
            if nodes.is_empty() {
                return Ok(all);
            }
            all.extend(nodes);
            if !more {
                return Ok(all);
            }
        }
    }

    /// Lists the versions of a file, newest first.
    pub async fn versions(&self, node: NodeId) -> Result<Vec<VersionInfo>> {
        Ok(self.listed::<Versions, VersionInfo>(&node).await?.1)
    }

    /// Pins a version, by its number in the pool, for the returned time; repeated calls renew the pin.
    pub async fn hold(&self, version: u64, holder: &str) -> Result<Duration> {
        let seconds = self.simple::<HoldPin>(&(version, holder.to_owned())).await?;
        Ok(Duration::from_secs(seconds.into()))
    }

    /// Lists all pins, or only those of this host.
    pub async fn pins(&self, own: bool) -> Result<Vec<PinInfo>> {
        Ok(self.listed::<ListPins, PinInfo>(&own).await?.1)
    }

    /// Lists the groups in a folder, those that were begun first come first.
    pub async fn groups(&self, folder: NodeId) -> Result<Vec<GroupInfo>> {
        Ok(self.listed::<ListGroups, GroupInfo>(&folder).await?.1)
    }

    /// Applies policies now, or only lists what they would remove.
    pub async fn purge(&self, dry: bool) -> Result<Vec<Purged>> {
        Ok(self.listed::<Purge, Purged>(&dry).await?.1)
    }

    /// Reads a backup in the folder of the manager into a file.
    pub async fn read_backup(
        &self,
        name: BackupName,
        file: std::fs::File,
    ) -> std::result::Result<(), BackupError> {
        let connection = self.manager().await.map_err(|error| BackupError::Member {
            member: "the manager".to_owned(),
            text: error.to_string(),
        })?;
        crate::manager::read_backup(&connection, "the manager", name, file).await
    }

    /// The failure domains of the benefactors, asked for at most once a minute.
    pub(super) async fn domains(&self) -> Result<Arc<Domains>> {
        let mut known = self.inner.domains.lock().await;
        if let Some((asked, domains)) = &*known
            && asked.elapsed() < DOMAINS_TIME
        {
            return Ok(domains.clone());
        }
        let members = match self.members().await {
            // A manager of an earlier version, which knows no domains.
            Err(error) if error.code() == Some(Code::UNKNOWN_KIND) => Vec::new(),
            report => report?.members,
        };
        let counted = members.iter().filter(|member| member.counts);
        let domains = Arc::new(Domains::new(counted.map(|member| (member.id, &member.labels))));
        *known = Some((Instant::now(), domains.clone()));
        Ok(domains)
    }

    /// The id of the pool, which is asked for once.
    pub(crate) async fn id(&self) -> Result<u64> {
        let id = self.inner.id.get_or_try_init(async || Ok(self.status().await?.pool)).await;
        id.copied()
    }

    pub(super) fn record_addresses(&self, places: &[BenefactorAddress]) {
        let mut known = lock(&self.inner.places);
        places.iter().for_each(|place| drop(known.insert(place.id, place.clone())));
    }

    pub(super) fn place(&self, id: BenefactorId) -> Option<BenefactorAddress> {
        lock(&self.inner.places).get(&id).cloned()
    }
}

/// Defines calls of the manager: parameters, reply, and the message with its header.
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $kind:ty),*) -> $reply:ty = $call:ty[$header:expr];)*) => {
        impl Pool {
            $($(#[$doc])*
            pub async fn $name(&self, $($arg: $kind),*) -> Result<$reply> {
                self.simple::<$call>($header).await
            })*
        }
    };
}

calls! {
    /// Finds a child of a folder.
    lookup(parent: NodeId, name: &str) -> Node = Lookup[&(parent, name.to_owned())];
    /// Reads a node by its number.
    node(id: NodeId) -> Node = GetNode[&id];
    /// Creates a folder or an empty file.
    make(make: &NewNode) -> Node = MakeNode[make];
    /// Removes a file, or an empty folder.
    remove(parent: NodeId, name: &str, folder: bool) -> () = Remove[&(parent, name.to_owned(), folder)];
    /// Moves or renames a file or folder.
    rename(from: (NodeId, &str), to: (NodeId, &str), replace: bool) -> () = Rename[&(from.0, from.1.to_owned(), to.0, to.1.to_owned(), replace)];
    /// Changes attributes of a node.
    change(node: NodeId, change: NodeChange) -> Node = Change[&(node, change)];
    /// Removes a version that is not the current one.
    drop_version(node: NodeId, number: u32) -> () = DropVersion[&(node, number)];
    /// Pins a version for a user, or unpins it.
    pin(node: NodeId, number: u32, pinned: bool) -> () = Pin[&(node, number, pinned)];
    /// Removes a pin of this host; with `anybody`, a pin that any host holds under this name.
    release_pin(version: u64, holder: &str, anybody: bool) -> () = ReleasePin[&(version, holder.to_owned(), anybody)];
    /// The policy set on a file or folder, and the one that applies to it.
    policy(folder: NodeId) -> (Option<Policy>, Policy) = GetPolicy[&folder];
    /// Sets the policy of a file or folder; none inherits it.
    set_policy(folder: NodeId, policy: Option<Policy>) -> () = SetPolicy[&(folder, policy)];
    /// The coding set on a file or folder, and the one that applies to it.
    coding(node: NodeId) -> (Option<Coding>, Option<Coding>) = GetCoding[&node];
    /// Sets the coding of a file or folder; none inherits it.
    set_coding(node: NodeId, coding: Option<Coding>) -> () = SetCoding[&(node, coding)];
    /// Begins a group in a folder; the answer is the folder into which its files are written.
    begin_group(parent: NodeId, name: &str, group: NewGroup) -> Node = BeginGroup[&(parent, name.to_owned(), group)];
    /// Commits a group, so that all its files are visible; the answer is its folder.
    commit_group(parent: NodeId, name: &str) -> Node = CommitGroup[&(parent, name.to_owned())];
    /// Removes an open group with its files.
    abandon_group(parent: NodeId, name: &str) -> () = AbandonGroup[&(parent, name.to_owned())];
    /// Removes all groups of a job; how many went, and how many stay because of pins.
    end_job(job: &str) -> (u64, u64) = EndJob[&job.to_owned()];
    /// Sets the quota of a folder or a member in bytes; none removes it.
    set_quota(of: QuotaSubject, bytes: Option<u64>) -> () = SetQuota[&(of, bytes)];
    /// All quotas, and what counts against them.
    quotas() -> Vec<QuotaInfo> = ListQuotas[&()];
    /// Starts or cancels draining of the benefactor with this name.
    drain(benefactor: &str, leave: bool) -> () = Drain[&(benefactor.to_owned(), leave)];
    /// Makes a backup of the metadata now, and sends it to the places of backups.
    make_backup() -> BackupReport = MakeBackup[&()];
    /// The backups in the folder of the manager, oldest first, with their lengths.
    backups() -> Vec<(BackupName, u64)> = ListBackups[&()];
    /// Removes a member for good; with `force`, also if chunks have no other copy.
    expel(member: &str, force: bool) -> RemovedMember = Expel[&(member.to_owned(), force)];
    /// Removes a benefactor that does not return.
    forget(benefactor: &str, force: bool) -> RemovedMember = Forget[&(benefactor.to_owned(), force)];
    /// Sets the labels of a benefactor.
    label(benefactor: &str, labels: MemberLabels) -> () = LabelMember[&(benefactor.to_owned(), labels)];
    /// The labels of benefactors, and what concerns all of them.
    members() -> MemberReport = ListMembers[&()];
    /// The last reports of scrubs, by name of the benefactor.
    scrubs() -> Vec<(String, ScrubReport)> = ListScrubs[&()];
    /// Reads the status of the pool.
    status() -> PoolStatus = crate::protocol::GetStatus[&()];
}
