//! API client: one method for each route. `whimbrel-api` describes the calls; all errors are
//! [`ClientError`]s.

use crate::{ClientError, connection::Call};
use bytes::Bytes;
use hyper::Method;
use serde::{Serialize, de::DeserializeOwned};
use std::path::{Path, PathBuf};
use whimbrel_api::*;
use whimbrel_core::{HostName, MachineName, RefName};

/// Client of a host daemon on a Unix socket. Cheap to create: nothing is opened before the first call.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// Creates a client of the daemon that listens on `socket`. Its methods need a tokio runtime.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// Path of the daemon's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    async fn get<T: DeserializeOwned>(&self, path: impl Into<String>) -> Result<T, ClientError> {
        Call::new(Method::GET, path).read(&self.socket).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: impl Into<String>,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let call = Call::new(method, path);
        let body = serde_json::to_vec(body).map_err(|error| ClientError::protocol(&call.label(), error))?;
        call.json(body).read(&self.socket).await
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: impl Into<String>,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.send(Method::POST, path, body).await
    }

    async fn start<T: DeserializeOwned>(&self, path: impl Into<String>) -> Result<T, ClientError> {
        Call::new(Method::POST, path).read(&self.socket).await
    }

    async fn delete(&self, path: String) -> Result<(), ClientError> {
        Call::new(Method::DELETE, path).send(&self.socket).await.map(drop)
    }

    /// Information about the host.
    pub async fn host(&self) -> Result<HostInfo, ClientError> {
        self.get(routes::HOST).await
    }

    /// All machines of the host.
    pub async fn machines(&self) -> Result<Vec<MachineInfo>, ClientError> {
        self.get(routes::MACHINES).await
    }

    /// Information about one machine.
    pub async fn machine(&self, name: &MachineName) -> Result<MachineInfo, ClientError> {
        self.get(routes::machine(routes::MACHINE, name)).await
    }

    /// Creates a machine and starts it.
    pub async fn run(&self, request: &RunRequest) -> Result<MachineInfo, ClientError> {
        self.post(routes::MACHINES, request).await
    }

    /// Starts a stopped or crashed machine again, from its own disks.
    pub async fn start_machine(&self, name: &MachineName) -> Result<MachineInfo, ClientError> {
        self.start(routes::machine(routes::MACHINE_START, name)).await
    }

    /// Stops a machine and waits until it has stopped.
    pub async fn stop(&self, name: &MachineName, request: &StopRequest) -> Result<MachineInfo, ClientError> {
        self.post(routes::machine(routes::MACHINE_STOP, name), request).await
    }

    /// Deletes a stopped or crashed machine and its disks.
    pub async fn delete_machine(&self, name: &MachineName) -> Result<(), ClientError> {
        self.delete(routes::machine(routes::MACHINE, name)).await
    }

    /// Pauses the CPUs of a machine.
    pub async fn pause(&self, name: &MachineName) -> Result<MachineInfo, ClientError> {
        self.start(routes::machine(routes::MACHINE_PAUSE, name)).await
    }

    /// Resumes the CPUs of a paused machine.
    pub async fn unpause(&self, name: &MachineName) -> Result<MachineInfo, ClientError> {
        self.start(routes::machine(routes::MACHINE_UNPAUSE, name)).await
    }

    /// Changes the memory size of a guest.
    pub async fn balloon(
        &self,
        name: &MachineName,
        request: &BalloonRequest,
    ) -> Result<MachineInfo, ClientError> {
        self.post(routes::machine(routes::MACHINE_BALLOON, name), request).await
    }

    /// Starts a checkpoint: a capsule of a machine that continues to run.
    pub async fn checkpoint(
        &self,
        name: &MachineName,
        request: &CheckpointRequest,
    ) -> Result<Operation, ClientError> {
        self.post(routes::machine(routes::MACHINE_CHECKPOINT, name), request).await
    }

    /// Starts to suspend a machine: a capsule, then the machine is ended.
    pub async fn suspend(
        &self,
        name: &MachineName,
        request: &SuspendRequest,
    ) -> Result<Operation, ClientError> {
        self.post(routes::machine(routes::MACHINE_SUSPEND, name), request).await
    }

    /// Starts the migration of a machine to another host.
    pub async fn migrate(
        &self,
        name: &MachineName,
        request: &MigrateRequest,
    ) -> Result<Operation, ClientError> {
        self.post(routes::machine(routes::MACHINE_MIGRATE, name), request).await
    }

    /// Starts the protection of a machine by a standby on another host.
    pub async fn protect(
        &self,
        name: &MachineName,
        request: &ProtectRequest,
    ) -> Result<Operation, ClientError> {
        self.post(routes::machine(routes::MACHINE_PROTECT, name), request).await
    }

    /// Ends the protection of a machine.
    pub async fn unprotect(&self, name: &MachineName) -> Result<MachineInfo, ClientError> {
        Call::new(Method::DELETE, routes::machine(routes::MACHINE_PROTECT, name)).read(&self.socket).await
    }

    /// Starts the switch of a machine to its standby.
    pub async fn failover(
        &self,
        name: &MachineName,
        request: &FailoverRequest,
    ) -> Result<Operation, ClientError> {
        self.post(routes::machine(routes::MACHINE_FAILOVER, name), request).await
    }

    /// Decides who has a machine that is between two hosts.
    pub async fn resolve(&self, name: &MachineName, request: &ResolveRequest) -> Result<(), ClientError> {
        let call = Call::new(Method::POST, routes::machine(routes::MACHINE_RESOLVE, name));
        let body =
            serde_json::to_vec(request).map_err(|error| ClientError::protocol(&call.label(), error))?;
        call.json(body).send(&self.socket).await.map(drop)
    }

    /// Past migrations away from the host, newest first.
    pub async fn migrations(&self) -> Result<Vec<MigrationRecord>, ClientError> {
        self.get(routes::MIGRATIONS).await
    }

    /// Starts the migration of all machines of the host to other hosts.
    pub async fn evacuate(&self, request: &EvacuateRequest) -> Result<Operation, ClientError> {
        self.post(routes::EVACUATE, request).await
    }

    /// Last bytes, at most `bytes`, that a machine printed on its serial port.
    pub async fn console_log(&self, name: &MachineName, bytes: u64) -> Result<Bytes, ClientError> {
        let limit = usize::try_from(bytes).unwrap_or(usize::MAX);
        Call::new(Method::GET, routes::console_log(name, bytes)).read_bytes(&self.socket, limit).await
    }

    /// Starts a machine from a capsule.
    pub async fn resume(&self, request: &ResumeRequest) -> Result<Operation, ClientError> {
        self.post(routes::RESUME, request).await
    }

    /// Starts several clones of a capsule.
    pub async fn clone_capsule(&self, request: &CloneRequest) -> Result<Operation, ClientError> {
        self.post(routes::CLONE, request).await
    }

    /// Finds the golden capsule that matches best.
    pub async fn match_golden(&self, request: &MatchRequest) -> Result<GoldenMatch, ClientError> {
        self.post(routes::MATCH, request).await
    }

    /// Creates a machine that boots from the disks of a capsule.
    pub async fn derive(&self, request: &DeriveRequest) -> Result<MachineInfo, ClientError> {
        self.post(routes::DERIVE, request).await
    }

    /// Detaches a capsule from its parents.
    pub async fn promote(&self, request: &PromoteRequest) -> Result<PromoteReport, ClientError> {
        self.post(routes::PROMOTE, request).await
    }

    /// Graph of all capsules, or of one with its ancestors and descendants; parents first.
    pub async fn graph(&self, capsule: Option<&CapsuleRef>) -> Result<Vec<GraphNode>, ClientError> {
        match capsule {
            Some(capsule) => self.get(routes::capsule(routes::CAPSULE_GRAPH, capsule)).await,
            None => self.get(routes::GRAPH).await,
        }
    }

    /// Machines and capsules that are based on old versions of a capsule.
    pub async fn outdated(
        &self,
        capsule: &CapsuleRef,
        onto: Option<&CapsuleRef>,
    ) -> Result<OutdatedReport, ClientError> {
        self.get(routes::capsule_rebase(capsule, onto)).await
    }

    /// Earlier capsules of a ref, newest first.
    pub async fn ref_history(&self, name: &RefName) -> Result<Vec<RefVersion>, ClientError> {
        self.get(routes::ref_history(name)).await
    }

    /// All capsules of the host, newest first.
    pub async fn capsules(&self) -> Result<Vec<CapsuleInfo>, ClientError> {
        self.get(routes::CAPSULES).await
    }

    /// Information about one capsule.
    pub async fn capsule(&self, capsule: &CapsuleRef) -> Result<CapsuleInfo, ClientError> {
        self.get(routes::capsule(routes::CAPSULE, capsule)).await
    }

    /// Capsule and its ancestors, newest first.
    pub async fn log(&self, capsule: &CapsuleRef) -> Result<Vec<CapsuleInfo>, ClientError> {
        self.get(routes::capsule(routes::CAPSULE_LOG, capsule)).await
    }

    /// Differences between two capsules.
    pub async fn diff(&self, a: &CapsuleRef, b: &CapsuleRef) -> Result<CapsuleDiff, ClientError> {
        self.get(routes::capsule_diff(a, b)).await
    }

    /// Sets a tag to a capsule.
    pub async fn tag(&self, tag: &RefName, request: &TagRequest) -> Result<Tagged, ClientError> {
        self.send(Method::PUT, routes::tag(tag), request).await
    }

    /// Removes a ref, and returns the capsule that it named.
    pub async fn remove(&self, name: &RefName) -> Result<PreviousCapsule, ClientError> {
        Call::new(Method::DELETE, routes::reference(name)).read(&self.socket).await
    }

    /// Starts garbage collection.
    pub async fn gc(&self) -> Result<Operation, ClientError> {
        self.start(routes::STORE_GC).await
    }

    /// Starts to read and check everything in the store.
    pub async fn verify(&self) -> Result<Operation, ClientError> {
        self.start(routes::STORE_VERIFY).await
    }

    /// Starts to write a capsule or an image to a file of the host.
    pub async fn export(&self, request: &ExportRequest) -> Result<Operation, ClientError> {
        self.post(routes::EXPORT, request).await
    }

    /// Starts to read a capsule or a disk from a file of the host.
    pub async fn import(&self, request: &ImportRequest) -> Result<Operation, ClientError> {
        self.post(routes::IMPORT, request).await
    }

    /// Starts to fetch a capsule from another host.
    pub async fn pull(&self, request: &PullRequest) -> Result<Operation, ClientError> {
        self.post(routes::PULL, request).await
    }

    /// Starts to send a machine or a capsule to another host.
    pub async fn push(&self, request: &PushRequest) -> Result<Operation, ClientError> {
        self.post(routes::PUSH, request).await
    }

    /// Capsules that a trusted host offers.
    pub async fn remote(&self, host: &HostName) -> Result<Vec<RemoteCapsule>, ClientError> {
        self.get(routes::remote(host)).await
    }

    /// Statistics of the hash cache.
    pub async fn cache(&self) -> Result<CacheInfo, ClientError> {
        self.get(routes::CACHE).await
    }

    /// Starts to index a file in the hash cache.
    pub async fn cache_add(&self, request: &CacheAddRequest) -> Result<Operation, ClientError> {
        self.post(routes::CACHE, request).await
    }

    /// Hosts that the host trusts.
    pub async fn trusted(&self) -> Result<Vec<TrustEntry>, ClientError> {
        self.get(routes::TRUST).await
    }

    /// Adds a host to the trust list.
    pub async fn trust(&self, entry: &TrustEntry) -> Result<TrustEntry, ClientError> {
        self.post(routes::TRUST, entry).await
    }

    /// Sets the refs that a trusted host may use.
    pub async fn set_rights(&self, name: &HostName, rights: &RefRights) -> Result<TrustEntry, ClientError> {
        self.send(Method::PUT, routes::trust_entry(name), rights).await
    }

    /// Removes a host from the trust list.
    pub async fn untrust(&self, name: &HostName) -> Result<(), ClientError> {
        self.delete(routes::trust_entry(name)).await
    }

    /// Operations that are running or ended recently.
    pub async fn operations(&self) -> Result<Vec<Operation>, ClientError> {
        self.get(routes::OPERATIONS).await
    }

    /// State of one operation.
    pub async fn operation(&self, id: OperationId) -> Result<Operation, ClientError> {
        self.get(routes::operation(routes::OPERATION, id)).await
    }

    /// Requests the cancellation of an operation. It may still end otherwise; [`Client::watch_operation`]
    /// returns its end.
    pub async fn cancel(&self, id: OperationId) -> Result<Operation, ClientError> {
        Call::new(Method::DELETE, routes::operation(routes::OPERATION, id)).read(&self.socket).await
    }
}
