//! Paths of the API, and functions that fill in their parameters for a client.
//!
//! The constants are templates in the form that axum and OpenAPI use (`{name}`). The text of all parameters
//! is safe in a URL (letters, digits, `-_.`).

use crate::CapsuleRef;
use std::fmt::Display;
use whimbrel_core::MachineName;

/// Defines the paths; [`mod@crate::openapi`] says what each method does with them.
macro_rules! paths {
    ($($name:ident = $path:literal;)*) => {
        $(#[doc = concat!("The path `", $path, "`.")]
        pub const $name: &str = $path;)*
    };
}

paths! {
    HOST = "/v1/host";
    HOSTS = "/v1/hosts";
    USAGE = "/v1/usage";
    MACHINES = "/v1/machines";
    MACHINE = "/v1/machines/{name}";
    MACHINE_START = "/v1/machines/{name}/start";
    MACHINE_STOP = "/v1/machines/{name}/stop";
    MACHINE_PAUSE = "/v1/machines/{name}/pause";
    MACHINE_UNPAUSE = "/v1/machines/{name}/unpause";
    MACHINE_UPGRADE = "/v1/machines/{name}/upgrade";
    MACHINE_BALLOON = "/v1/machines/{name}/balloon";
    MACHINE_CHECKPOINT = "/v1/machines/{name}/checkpoint";
    MACHINE_SUSPEND = "/v1/machines/{name}/suspend";
    MACHINE_REWIND = "/v1/machines/{name}/rewind";
    MACHINE_MIGRATE = "/v1/machines/{name}/migrate";
    MACHINE_RESOLVE = "/v1/machines/{name}/resolve";
    MACHINE_PROTECT = "/v1/machines/{name}/protect";
    MACHINE_FAILOVER = "/v1/machines/{name}/failover";
    MACHINE_PORTS = "/v1/machines/{name}/ports";
    MACHINE_SETTINGS = "/v1/machines/{name}/settings";
    MACHINE_RENAME = "/v1/machines/{name}/rename";
    MACHINE_EXEC = "/v1/machines/{name}/exec";
    MACHINE_FILE_READ = "/v1/machines/{name}/files/read";
    MACHINE_FILE_WRITE = "/v1/machines/{name}/files/write";
    MACHINE_WWS = "/v1/machines/{name}/wws";
    EVACUATE = "/v1/evacuate";
    MACHINE_CONSOLE = "/v1/machines/{name}/console";
    MACHINE_CONSOLE_LOG = "/v1/machines/{name}/console/log";
    MACHINE_DISPLAY = "/v1/machines/{name}/display";
    MIGRATIONS = "/v1/migrations";
    RESUME = "/v1/resume";
    CLONE = "/v1/clone";
    MATCH = "/v1/match";
    DERIVE = "/v1/derive";
    PROMOTE = "/v1/promote";
    GRAPH = "/v1/graph";
    CAPSULE_GRAPH = "/v1/capsules/{capsule}/graph";
    CAPSULE_REBASE = "/v1/capsules/{capsule}/rebase";
    REF_HISTORY = "/v1/refs/{name}/history";
    CAPSULES = "/v1/capsules";
    CAPSULE = "/v1/capsules/{capsule}";
    CAPSULE_LOG = "/v1/capsules/{capsule}/log";
    CAPSULE_DIFF = "/v1/capsules/{capsule}/diff/{other}";
    TAG = "/v1/tags/{tag}";
    STORE_GC = "/v1/store/gc";
    BUCKETS = "/v1/buckets";
    STORE_VERIFY = "/v1/store/verify";
    STORE_REPAIR = "/v1/store/repair";
    STORE_ENCRYPTION = "/v1/store/encryption";
    STORE_SEAL = "/v1/store/seal";
    STORE_KEY = "/v1/store/key";
    EXPORT = "/v1/export";
    IMPORT = "/v1/import";
    PULL = "/v1/pull";
    IMAGES = "/v1/images";
    PUSH = "/v1/push";
    REMOTE = "/v1/remote/{host}";
    CPU_BASELINE = "/v1/cpu/baseline";
    CACHE = "/v1/cache";
    NETWORKS = "/v1/networks";
    NETWORK = "/v1/networks/{name}";
    NETWORK_HOSTS = "/v1/networks/{name}/hosts";
    SESSIONS = "/v1/sessions";
    POOLS = "/v1/pools";
    TRUST = "/v1/trust";
    TRUST_ENTRY = "/v1/trust/{name}";
    TOKENS = "/v1/tokens";
    TOKEN = "/v1/tokens/{name}";
    WIRE = "/v1/wire";
    CALLER = "/v1/caller";
    SCHEDULES = "/v1/schedules";
    SCHEDULE = "/v1/schedules/{name}";
    SCHEDULE_RUN = "/v1/schedules/{name}/run";
    EVENTS = "/v1/events";
    OPERATIONS = "/v1/operations";
    OPERATION = "/v1/operations/{id}";
    OPERATION_EVENTS = "/v1/operations/{id}/events";
    // Without a version: Prometheus asks there unless it is told otherwise.
    METRICS = "/metrics";
    OPENAPI = "/v1/openapi.json";
}

/// Query parameter of [`CAPSULE_REBASE`]: the new version.
pub const REBASE_ONTO: &str = "onto";
/// Query parameter of [`MACHINE`] to delete one whose record cannot be read.
pub const DELETE_UNREADABLE: &str = "unreadable";
/// Value of the `Upgrade` header that opens a console (RFC 9110, 7.8).
pub const CONSOLE_PROTOCOL: &str = "whimbrel-console";
/// Value of the `Upgrade` header that opens a screen: the stream is RFB (RFC 6143), without a password.
pub const DISPLAY_PROTOCOL: &str = "whimbrel-display";
/// Begin of the WebSocket subprotocol with which a browser shows its token: its scripts cannot set headers
/// of a WebSocket. The answer chooses [`CONSOLE_PROTOCOL`] or [`DISPLAY_PROTOCOL`], which has to be offered
/// beside it.
pub const BEARER_SUBPROTOCOL: &str = "bearer.";
/// Value of the `Upgrade` header that opens the protocol between hosts.
pub const WIRE_PROTOCOL: &str = "whimbrel-wire";
/// Content type of [`MACHINE_WWS`]: docs/formats/dirty-trace.md.
pub const WWS_TRACE: &str = "application/vnd.whimbrel.wws-trace";
/// Content type of [`OPERATION_EVENTS`]: one JSON object per line.
pub const NDJSON: &str = "application/x-ndjson";
/// Query parameter of [`MACHINE_CONSOLE_LOG`]: how many bytes at most.
pub const CONSOLE_LOG_BYTES: &str = "bytes";
/// Query parameter of [`MACHINE_CONSOLE_LOG`]: whether to go on with what the machine prints from now on.
pub const CONSOLE_LOG_FOLLOW: &str = "follow";
/// Query parameter of [`EVENTS`]: the number of the last event that the caller knows.
pub const EVENTS_SINCE: &str = "since";
/// Query parameter of [`EVENTS`]: whether to go on with events to come [default: true].
pub const EVENTS_FOLLOW: &str = "follow";
/// Content type of [`EVENTS`]: server-sent events (HTML standard, 9.2).
pub const EVENT_STREAM: &str = "text/event-stream";

/// Fills in the first parameter of a template.
pub fn path(template: &str, value: impl Display) -> String {
    let (before, rest) = template.split_once('{').unwrap_or((template, "}"));
    let (_, after) = rest.split_once('}').unwrap_or(("", ""));
    format!("{before}{value}{after}")
}

/// [`MACHINE`] to delete one whose record cannot be read.
pub fn unreadable_machine(name: &MachineName) -> String {
    format!("{}?{DELETE_UNREADABLE}=true", path(MACHINE, name))
}

/// [`MACHINE_CONSOLE_LOG`] for at most `bytes`.
pub fn console_log(name: &MachineName, bytes: u64) -> String {
    format!("{}?{CONSOLE_LOG_BYTES}={bytes}", path(MACHINE_CONSOLE_LOG, name))
}

/// [`MACHINE_CONSOLE_LOG`] that goes on while the machine runs.
pub fn console_log_followed(name: &MachineName) -> String {
    format!("{}?{CONSOLE_LOG_FOLLOW}=true", path(MACHINE_CONSOLE_LOG, name))
}

/// [`EVENTS`] after the one with this number; with none, all that the host still knows.
pub fn events_since(number: Option<u64>, follow: bool) -> String {
    let since = number.map(|number| format!("&{EVENTS_SINCE}={number}")).unwrap_or_default();
    format!("{EVENTS}?{EVENTS_FOLLOW}={follow}{since}")
}

/// [`CAPSULE_REBASE`] for a capsule, with the new version if it is given.
pub fn capsule_rebase(old: &CapsuleRef, onto: Option<&CapsuleRef>) -> String {
    let query = onto.map(|onto| format!("?{REBASE_ONTO}={onto}")).unwrap_or_default();
    path(CAPSULE_REBASE, old) + &query
}

/// [`CAPSULE_DIFF`] for two capsules.
pub fn capsule_diff(a: &CapsuleRef, b: &CapsuleRef) -> String {
    path(&path(CAPSULE_DIFF, a), b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OperationId;

    #[test]
    fn filled_paths_have_no_braces_left() {
        let (name, a) = ("web-1".parse().unwrap(), "before".parse().unwrap());
        assert_eq!(path(MACHINE_STOP, &name), "/v1/machines/web-1/stop");
        assert_eq!(console_log(&name, 10), "/v1/machines/web-1/console/log?bytes=10");
        assert_eq!(capsule_diff(&a, &"after".parse().unwrap()), "/v1/capsules/before/diff/after");
        assert_eq!(capsule_rebase(&a, None), "/v1/capsules/before/rebase");
        assert_eq!(capsule_rebase(&a, Some(&a)), "/v1/capsules/before/rebase?onto=before");
        assert_eq!(path(REF_HISTORY, "golden"), "/v1/refs/golden/history");
        assert_eq!(path(OPERATION_EVENTS, OperationId(3)), "/v1/operations/3/events");
        assert_eq!(path(TRUST_ENTRY, "beta"), "/v1/trust/beta");
    }
}
