//! The calls of the API, and what each of them needs.
//!
//! One table has every call: method, path, role, reach. The router is built from [`Endpoint`]s, so a call
//! without an entry here does not build.

use crate::server::access::may::{Action, Object};
use axum::routing::MethodFilter;
use whimbrel_api::{Role, routes::*};

/// What a call is about, beside the host as such.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The host itself, and no object on it.
    Host,
    /// Objects in its answer: those that the caller may not see are left out.
    Listed,
    /// Objects that the request names, each of which is judged (`objects`).
    Objects,
    /// Anything: callers with a scope are refused.
    Everything,
}

use Reach::{Everything, Host, Listed, Objects};

macro_rules! endpoints {
    ($($name:ident = $method:ident $path:ident: $role:ident $reach:ident, $text:literal;)*) => {
        /// A call of the API.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Endpoint {
            $($name,)*
        }

        impl Endpoint {
            /// Every call that the router has.
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)*];

            pub(crate) const fn path(self) -> &'static str {
                match self { $(Self::$name => $path,)* }
            }

            pub(crate) const fn method(self) -> MethodFilter {
                match self { $(Self::$name => MethodFilter::$method,)* }
            }

            /// The call as the API's document has it, like `GET /v1/host`.
            pub(crate) fn text(self) -> String {
                let method = match self { $(Self::$name => stringify!($method),)* };
                format!("{method} {}", self.path())
            }

            pub(crate) const fn action(self) -> Action {
                match self { $(Self::$name => Action { name: $text, role: Role::$role },)* }
            }

            pub(crate) const fn reach(self) -> Reach {
                match self { $(Self::$name => $reach,)* }
            }
        }
    };
}

#[rustfmt::skip]
endpoints! {
    HostInfo = GET HOST: Viewer Host, "host";
    Caller = GET CALLER: Viewer Host, "caller";
    OpenApi = GET OPENAPI: Viewer Host, "openapi";
    Machines = GET MACHINES: Viewer Listed, "ps";
    Usage = GET USAGE: Viewer Listed, "top";
    Machine = GET MACHINE: Viewer Objects, "show";
    ConsoleLog = GET MACHINE_CONSOLE_LOG: Viewer Objects, "console --log";
    Migrations = GET MIGRATIONS: Viewer Listed, "migrations";
    Capsules = GET CAPSULES: Viewer Listed, "ls";
    Capsule = GET CAPSULE: Viewer Objects, "show";
    CapsuleLog = GET CAPSULE_LOG: Viewer Objects, "log";
    CapsuleGraph = GET CAPSULE_GRAPH: Viewer Objects, "log --graph";
    Graph = GET GRAPH: Viewer Listed, "log --graph";
    RefHistory = GET REF_HISTORY: Viewer Objects, "log --history";
    Diff = GET CAPSULE_DIFF: Viewer Objects, "diff";
    Operations = GET OPERATIONS: Viewer Listed, "operations";
    Operation = GET OPERATION: Viewer Objects, "operation";
    Events = GET OPERATION_EVENTS: Viewer Objects, "events";
    Schedules = GET SCHEDULES: Viewer Listed, "schedule ls";
    Schedule = GET SCHEDULE: Viewer Objects, "schedule show";
    HostEvents = GET EVENTS: Viewer Listed, "events";
    Images = GET IMAGES: Viewer Host, "image ls --available";
    Networks = GET NETWORKS: Viewer Listed, "network ls";
    Network = GET NETWORK: Viewer Listed, "network show";
    // Files of whoever uses them.
    Sessions = GET SESSIONS: Viewer Everything, "session ls";
    Pools = GET POOLS: Viewer Everything, "pool status";
    // Figures of all machines.
    Metrics = GET METRICS: Viewer Everything, "metrics";
    // Answers about capsules of any name, here or on other hosts.
    Outdated = GET CAPSULE_REBASE: Viewer Everything, "outdated";
    Match = POST MATCH: Viewer Everything, "match";
    Remote = GET REMOTE: Viewer Everything, "ls --from";
    CpuBaseline = POST CPU_BASELINE: Viewer Everything, "cpu baseline";
    Cache = GET CACHE: Viewer Everything, "cache";
    Hosts = GET HOSTS: Viewer Everything, "ps --all-hosts";
    Trusted = GET TRUST: Viewer Everything, "trust ls";

    Run = POST MACHINES: Operator Objects, "run";
    Delete = DELETE MACHINE: Operator Objects, "delete";
    Start = POST MACHINE_START: Operator Objects, "start";
    Stop = POST MACHINE_STOP: Operator Objects, "stop";
    Pause = POST MACHINE_PAUSE: Operator Objects, "pause";
    Unpause = POST MACHINE_UNPAUSE: Operator Objects, "unpause";
    Upgrade = POST MACHINE_UPGRADE: Operator Objects, "upgrade";
    Settings = POST MACHINE_SETTINGS: Operator Objects, "set";
    Rename = POST MACHINE_RENAME: Operator Objects, "rename";
    Balloon = POST MACHINE_BALLOON: Operator Objects, "balloon";
    Console = GET MACHINE_CONSOLE: Operator Objects, "console";
    Display = GET MACHINE_DISPLAY: Operator Objects, "display";
    Exec = POST MACHINE_EXEC: Operator Objects, "exec";
    ReadFile = POST MACHINE_FILE_READ: Operator Objects, "cp";
    WriteFile = POST MACHINE_FILE_WRITE: Operator Objects, "cp";
    DirtyTrace = POST MACHINE_WWS: Operator Objects, "dirty-rate";
    Checkpoint = POST MACHINE_CHECKPOINT: Operator Objects, "checkpoint";
    Rewind = POST MACHINE_REWIND: Operator Objects, "rewind";
    Suspend = POST MACHINE_SUSPEND: Operator Objects, "suspend";
    Migrate = POST MACHINE_MIGRATE: Operator Objects, "migrate";
    Protect = POST MACHINE_PROTECT: Operator Objects, "protect";
    Unprotect = DELETE MACHINE_PROTECT: Operator Objects, "unprotect";
    Failover = POST MACHINE_FAILOVER: Operator Objects, "failover";
    Ports = POST MACHINE_PORTS: Operator Objects, "network publish";
    Resume = POST RESUME: Operator Objects, "resume";
    Clone = POST CLONE: Operator Objects, "clone";
    Derive = POST DERIVE: Operator Objects, "derive";
    Promote = POST PROMOTE: Operator Objects, "promote";
    Tag = PUT TAG: Operator Objects, "tag";
    Untag = DELETE CAPSULE: Operator Objects, "untag";
    Pull = POST PULL: Operator Objects, "pull";
    PullImage = POST IMAGES: Operator Objects, "image pull";
    Push = POST PUSH: Operator Objects, "push";
    CreateSchedule = POST SCHEDULES: Operator Objects, "schedule create";
    DeleteSchedule = DELETE SCHEDULE: Operator Objects, "schedule rm";
    RunSchedule = POST SCHEDULE_RUN: Operator Objects, "schedule run";
    Cancel = DELETE OPERATION: Operator Objects, "cancel";
    Evacuate = POST EVACUATE: Operator Everything, "evacuate";
    Gc = POST STORE_GC: Operator Everything, "gc";
    Bucket = POST BUCKETS: Operator Everything, "bucket";
    Verify = POST STORE_VERIFY: Operator Everything, "verify";
    Encryption = GET STORE_ENCRYPTION: Operator Everything, "encryption status";
    Seal = POST STORE_SEAL: Operator Everything, "encryption seal";
    Repair = POST STORE_REPAIR: Operator Everything, "repair";

    // A wrong decision makes two copies of a machine.
    Resolve = POST MACHINE_RESOLVE: Admin Objects, "resolve";
    // Calls that name files of the host.
    ChangeMasterKey = PUT STORE_KEY: Admin Everything, "encryption rotate";
    Export = POST EXPORT: Admin Objects, "export";
    Import = POST IMPORT: Admin Objects, "import";
    CacheAdd = POST CACHE: Admin Everything, "cache";
    Trust = POST TRUST: Admin Everything, "trust add";
    Limit = PUT TRUST_ENTRY: Admin Everything, "trust set";
    Distrust = DELETE TRUST_ENTRY: Admin Everything, "trust rm";
    CreateNetwork = POST NETWORKS: Admin Everything, "network create";
    NetworkHosts = POST NETWORK_HOSTS: Admin Everything, "network share";
    DeleteNetwork = DELETE NETWORK: Admin Everything, "network rm";
    Tokens = GET TOKENS: Admin Everything, "token ls";
    CreateToken = POST TOKENS: Admin Everything, "token create";
    RevokeToken = DELETE TOKEN: Admin Everything, "token revoke";
    // A host that comes this way may do everything, unless the trust list limits its name.
    Wire = GET WIRE: Admin Everything, "dial-stdio";
}

impl Endpoint {
    /// Whether a successful call is noted in the audit log.
    pub(crate) fn is_noted(self) -> bool {
        self.method() != MethodFilter::GET || matches!(self, Self::Console | Self::Display | Self::Wire)
    }

    /// What is judged of a call before its parameters are read.
    pub(crate) fn object(self) -> Object<'static> {
        match self.reach() {
            Reach::Everything => Object::Everything,
            Reach::Host | Reach::Listed | Reach::Objects => Object::Host,
        }
    }

    /// Whether its answer is a stream, which ends when the rights of its caller do.
    pub(crate) fn is_stream(self) -> bool {
        matches!(self, Self::Events | Self::HostEvents | Self::ConsoleLog | Self::DirtyTrace)
    }
}
