//! API client: one method for each route, most of them from one table. `whimbrel-api` describes the calls;
//! all errors are [`ClientError`]s.

use crate::{ClientError, RemoteHost, connection::Call};
use bytes::Bytes;
use hyper::{
    Method, Response,
    body::{Body, Incoming},
    http::request::Builder,
};
use std::{
    error::Error,
    path::{Path, PathBuf},
};
use whimbrel_api::{
    routes::{self, *},
    *,
};
use whimbrel_core::{HostName, MachineName, RefName};

/// Client of a host daemon. Cheap to create: nothing is opened before the first call.
#[derive(Debug, Clone)]
pub struct Client {
    daemon: DaemonPlace,
}

/// Where the daemon listens.
#[derive(Debug, Clone)]
pub(crate) enum DaemonPlace {
    Socket(PathBuf),
    Remote(Box<RemoteHost>),
}

impl Client {
    /// Creates a client of the daemon that listens on `socket`. Its methods need a tokio runtime.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { daemon: DaemonPlace::Socket(socket.into()) }
    }

    /// Creates a client of the daemon of another computer, over TLS.
    pub fn over_tls(host: RemoteHost) -> Self {
        Self { daemon: DaemonPlace::Remote(Box::new(host)) }
    }

    /// Path of the daemon's socket, if it is a daemon of this computer.
    pub fn socket(&self) -> Option<&Path> {
        match &self.daemon {
            DaemonPlace::Socket(socket) => Some(socket),
            DaemonPlace::Remote(_) => None,
        }
    }

    /// Answer to a call of the API's document, by its method and path, in at most `limit` bytes.
    pub async fn call(
        &self,
        method: &str,
        path: &str,
        body: Option<&serde_json::Value>,
        limit: usize,
    ) -> Result<Bytes, ClientError> {
        let known = Method::from_bytes(method.as_bytes());
        let known = known.map_err(|error| ClientError::protocol(&format!("{method} {path}"), error))?;
        let call = Call::new(known, path);
        let call = if let Some(body) = body { call.json(body)? } else { call };
        call.read_bytes(&self.daemon, limit).await
    }

    /// Passes a request for a path of the API on as one of this client, and returns the reply of whatever
    /// status. The caller has left out the headers of its own connection (RFC 9110, 7.6.1).
    pub async fn pass_on<B>(&self, request: Builder, body: B) -> Result<Response<Incoming>, ClientError>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        self.daemon.pass_on(request, body).await
    }

    /// Address of the daemon, for people: that of its API or the path of its socket.
    pub fn address(&self) -> String {
        match &self.daemon {
            DaemonPlace::Socket(socket) => socket.display().to_string(),
            DaemonPlace::Remote(remote) => remote.address.to_string(),
        }
    }

    pub(crate) fn daemon(&self) -> &DaemonPlace {
        &self.daemon
    }

    /// Last bytes, at most `bytes`, that a machine printed on its serial port.
    pub async fn console_log(&self, name: &MachineName, bytes: u64) -> Result<Bytes, ClientError> {
        let limit = usize::try_from(bytes).unwrap_or(usize::MAX);
        Call::new(Method::GET, routes::console_log(name, bytes)).read_bytes(&self.daemon, limit).await
    }

    /// Graph of all capsules, or of one with its ancestors and descendants; parents first.
    pub async fn graph(&self, of: Option<&CapsuleRef>) -> Result<Vec<GraphNode>, ClientError> {
        let path = of.map_or_else(|| GRAPH.to_owned(), |of| routes::path(CAPSULE_GRAPH, of));
        Call::new(Method::GET, path).read(&self.daemon).await
    }
}

/// Defines a method for each call: HTTP method, name, parameters, body, reply and path.
macro_rules! calls {
    ($($(#[$doc:meta])* $method:ident $call:ident($($name:ident: $kind:ty),*) $([$body:ident: $request:ty])?
        -> $reply:ty: $path:expr;)*) => {
        impl Client {
            $($(#[$doc])*
            pub async fn $call(&self, $($name: $kind,)* $($body: $request)?) -> Result<$reply, ClientError> {
                let call = Call::new(Method::$method, $path);
                $(let call = call.json($body)?;)?
                call.read(&self.daemon).await
            })*
        }
    };
}

calls! {
    /// Information about the host.
    GET host() -> HostInfo: HOST;
    /// Machines of the host and of the hosts that it trusts.
    GET hosts() -> Vec<HostMachines>: HOSTS;
    /// All machines of the host.
    GET machines() -> Vec<MachineInfo>: MACHINES;
    /// Processor time, memory and traffic of all machines that have processes.
    GET usage() -> Vec<MachineUsage>: USAGE;
    /// Information about one machine.
    GET machine(name: &MachineName) -> MachineInfo: routes::path(MACHINE, name);
    /// Creates a machine and starts it.
    POST run() [request: &RunRequest] -> MachineInfo: MACHINES;
    /// Starts a stopped or crashed machine again, from its own disks.
    POST start_machine(name: &MachineName) -> MachineInfo: routes::path(MACHINE_START, name);
    /// Stops a machine and waits until it has stopped.
    POST stop(name: &MachineName) [request: &StopRequest] -> MachineInfo: routes::path(MACHINE_STOP, name);
    /// Pauses the CPUs of a machine.
    POST pause(name: &MachineName) -> MachineInfo: routes::path(MACHINE_PAUSE, name);
    /// Resumes the CPUs of a paused machine.
    POST unpause(name: &MachineName) -> MachineInfo: routes::path(MACHINE_UNPAUSE, name);
    /// Takes a running machine from the process that serves it, which may be of an earlier version.
    POST upgrade(name: &MachineName) -> MachineInfo: routes::path(MACHINE_UPGRADE, name);
    /// Changes settings of a machine on its host.
    POST change_settings(name: &MachineName) [request: &SettingsRequest] -> MachineInfo: routes::path(MACHINE_SETTINGS, name);
    /// Gives another name to a machine that is off or suspended.
    POST rename(name: &MachineName) [request: &RenameRequest] -> MachineInfo: routes::path(MACHINE_RENAME, name);
    /// Runs a program in the guest of a machine and waits for its end.
    POST exec(name: &MachineName) [request: &ExecRequest] -> ExecResult: routes::path(MACHINE_EXEC, name);
    /// Reads a part of a file in the guest of a machine.
    POST read_file(name: &MachineName) [request: &FileReadRequest] -> FileContent: routes::path(MACHINE_FILE_READ, name);
    /// Writes a part of a file in the guest of a machine.
    POST write_file(name: &MachineName) [request: &FileWriteRequest] -> (): routes::path(MACHINE_FILE_WRITE, name);
    /// Changes the memory size of a guest.
    POST balloon(name: &MachineName) [request: &BalloonRequest] -> MachineInfo: routes::path(MACHINE_BALLOON, name);
    /// Starts a checkpoint: a capsule of a machine that continues to run.
    POST checkpoint(name: &MachineName) [request: &CheckpointRequest] -> Operation: routes::path(MACHINE_CHECKPOINT, name);
    /// Starts to take a machine back to an earlier capsule.
    POST rewind(name: &MachineName) [request: &RewindRequest] -> Operation: routes::path(MACHINE_REWIND, name);
    /// Starts to suspend a machine: a capsule, then the machine is ended.
    POST suspend(name: &MachineName) [request: &SuspendRequest] -> Operation: routes::path(MACHINE_SUSPEND, name);
    /// Starts the migration of a machine to another host.
    POST migrate(name: &MachineName) [request: &MigrateRequest] -> Operation: routes::path(MACHINE_MIGRATE, name);
    /// Starts the protection of a machine by a standby on another host.
    POST protect(name: &MachineName) [request: &ProtectRequest] -> Operation: routes::path(MACHINE_PROTECT, name);
    /// Ends the protection of a machine.
    DELETE unprotect(name: &MachineName) -> MachineInfo: routes::path(MACHINE_PROTECT, name);
    /// Starts the switch of a machine to its standby.
    POST failover(name: &MachineName) [request: &FailoverRequest] -> Operation: routes::path(MACHINE_FAILOVER, name);
    /// Decides who has a machine that is between two hosts.
    POST resolve(name: &MachineName) [request: &ResolveRequest] -> (): routes::path(MACHINE_RESOLVE, name);
    /// Past migrations away from the host, newest first.
    GET migrations() -> Vec<MigrationRecord>: MIGRATIONS;
    /// Starts the migration of all machines of the host to other hosts.
    POST evacuate() [request: &EvacuateRequest] -> Operation: EVACUATE;
    /// Starts a machine from a capsule.
    POST resume() [request: &ResumeRequest] -> Operation: RESUME;
    /// Starts several clones of a capsule.
    POST clone_capsule() [request: &CloneRequest] -> Operation: CLONE;
    /// Finds the golden capsule that matches best.
    POST match_golden() [request: &MatchRequest] -> GoldenMatch: MATCH;
    /// Creates a machine that boots from the disks of a capsule.
    POST derive() [request: &DeriveRequest] -> MachineInfo: DERIVE;
    /// Detaches a capsule from its parents.
    POST promote() [request: &PromoteRequest] -> PromoteReport: PROMOTE;
    /// Machines and capsules that are based on old versions of a capsule.
    GET outdated(capsule: &CapsuleRef, onto: Option<&CapsuleRef>) -> OutdatedReport: routes::capsule_rebase(capsule, onto);
    /// Earlier capsules of a ref, newest first.
    GET ref_history(name: &RefName) -> Vec<RefVersion>: routes::path(REF_HISTORY, name);
    /// All capsules of the host, newest first.
    GET capsules() -> Vec<CapsuleInfo>: CAPSULES;
    /// Information about one capsule.
    GET capsule(capsule: &CapsuleRef) -> CapsuleInfo: routes::path(CAPSULE, capsule);
    /// Capsule and its ancestors, newest first.
    GET log(capsule: &CapsuleRef) -> Vec<CapsuleInfo>: routes::path(CAPSULE_LOG, capsule);
    /// Differences between two capsules.
    GET diff(a: &CapsuleRef, b: &CapsuleRef) -> CapsuleDiff: routes::capsule_diff(a, b);
    /// Sets a tag to a capsule.
    PUT tag(tag: &RefName) [request: &TagRequest] -> Tagged: routes::path(TAG, tag);
    /// Removes a ref, and returns the capsule that it named.
    DELETE remove(name: &RefName) -> PreviousCapsule: routes::path(CAPSULE, name);
    /// Starts garbage collection.
    POST gc() -> Operation: STORE_GC;
    /// Lists a bucket, after something was removed there if requested.
    POST bucket() [request: &BucketRequest] -> Operation: BUCKETS;
    /// Starts to read and check everything in the store.
    POST verify() -> Operation: STORE_VERIFY;
    /// Starts to fetch damaged and missing objects of capsules.
    POST repair() [request: &RepairRequest] -> Operation: STORE_REPAIR;
    /// How the store is encrypted.
    GET encryption() -> StoreEncryption: STORE_ENCRYPTION;
    /// Starts to encrypt what the store had before it was encrypted.
    POST seal() -> Operation: STORE_SEAL;
    /// Changes the master key of the store.
    PUT change_master_key() [request: &KeyChangeRequest] -> StoreEncryption: STORE_KEY;
    /// Starts to write a capsule or an image to a file of the host.
    POST export() [request: &ExportRequest] -> Operation: EXPORT;
    /// Starts to read a capsule or a disk from a file of the host.
    POST import() [request: &ImportRequest] -> Operation: IMPORT;
    /// Starts to fetch a capsule from another host.
    POST pull() [request: &PullRequest] -> Operation: PULL;
    /// Images of distributions that the sources of the host offer.
    GET images() -> ImageOffers: IMAGES;
    /// Starts to fetch an image of a distribution.
    POST pull_image() [request: &ImagePullRequest] -> Operation: IMAGES;
    /// Starts to send a machine or a capsule to another host.
    POST push() [request: &PushRequest] -> Operation: PUSH;
    /// Capsules that a trusted host offers.
    GET remote(host: &HostName) -> Vec<RemoteCapsule>: routes::path(REMOTE, host);
    /// CPU model that the host and others have in common.
    POST cpu_baseline() [request: &CpuBaselineRequest] -> CpuBaseline: CPU_BASELINE;
    /// Statistics of the hash cache.
    GET cache() -> CacheInfo: CACHE;
    /// Starts to index a file in the hash cache.
    POST cache_add() [request: &CacheAddRequest] -> Operation: CACHE;
    /// Managed networks of the host.
    GET networks() -> Vec<NetworkInfo>: NETWORKS;
    /// Creates a managed network.
    POST create_network() [request: &NetworkRequest] -> NetworkInfo: NETWORKS;
    /// One managed network; its published ports are tried.
    GET network(name: &str) -> NetworkInfo: routes::path(NETWORK, name);
    /// Shares a managed network with other hosts, or no longer.
    POST change_network_hosts(name: &str) [request: &NetworkHostsRequest] -> NetworkInfo: routes::path(NETWORK_HOSTS, name);
    /// Deletes a managed network.
    DELETE delete_network(name: &str) -> (): routes::path(NETWORK, name);
    /// Sessions that root has mounted on the host.
    GET sessions() -> Vec<SessionInfo>: SESSIONS;
    /// Pools that the host knows.
    GET pools() -> Vec<PoolInfo>: POOLS;
    /// Changes the published ports of a machine.
    POST change_ports(name: &MachineName) [request: &PortsRequest] -> Vec<PublishedPort>: routes::path(MACHINE_PORTS, name);
    /// Schedules of the host.
    GET schedules() -> Vec<ScheduleInfo>: SCHEDULES;
    /// Creates a schedule.
    POST create_schedule() [request: &ScheduleRequest] -> ScheduleInfo: SCHEDULES;
    /// One schedule, with its last runs.
    GET schedule(name: &MachineName) -> ScheduleInfo: routes::path(SCHEDULE, name);
    /// Deletes a schedule; its capsules stay.
    DELETE delete_schedule(name: &MachineName) -> (): routes::path(SCHEDULE, name);
    /// Runs a schedule and waits for the end.
    POST run_schedule(name: &MachineName) [request: &ScheduleRunRequest] -> ScheduleReport: routes::path(SCHEDULE_RUN, name);
    /// Hosts that the host trusts.
    GET trusted() -> Vec<TrustEntry>: TRUST;
    /// Adds a host to the trust list.
    POST trust() [entry: &TrustEntry] -> TrustEntry: TRUST;
    /// Sets the refs that a trusted host may use.
    PUT set_rights(name: &HostName) [rights: &RefRights] -> TrustEntry: routes::path(TRUST_ENTRY, name);
    /// Operations that are running or ended recently.
    GET operations() -> Vec<Operation>: OPERATIONS;
    /// State of one operation.
    GET operation(id: OperationId) -> Operation: routes::path(OPERATION, id);
    /// Requests the cancellation of an operation. It may still end otherwise; [`Client::watch_operation`]
    /// returns its end.
    DELETE cancel(id: OperationId) -> Operation: routes::path(OPERATION, id);
    /// Deletes a stopped or crashed machine and its disks.
    DELETE delete_machine(name: &MachineName) -> (): routes::path(MACHINE, name);
    /// Deletes what is left of a machine whose record cannot be read.
    DELETE delete_unreadable_machine(name: &MachineName) -> (): routes::unreadable_machine(name);
    /// Tokens of the host's API.
    GET tokens() -> Vec<TokenInfo>: TOKENS;
    /// Creates a token; its text is in no other answer.
    POST create_token() [request: &TokenRequest] -> NewToken: TOKENS;
    /// Revokes a token.
    DELETE revoke_token(name: &RefName) -> (): routes::path(TOKEN, name);
    /// Removes a host from the trust list.
    DELETE untrust(name: &HostName) -> (): routes::path(TRUST_ENTRY, name);
}
