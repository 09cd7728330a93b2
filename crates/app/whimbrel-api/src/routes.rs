//! Paths of the API, and functions that fill in their parameters for a client.
//!
//! The constants are templates in the form that axum and OpenAPI use (`{name}`). The text of all parameters
//! is safe in a URL (letters, digits, `-_.`).

use crate::{CapsuleRef, OperationId};
use whimbrel_core::{HostName, MachineName, RefName};

/// `GET`: description of the host.
pub const HOST: &str = "/v1/host";
/// `GET`: all machines; `POST`: create one.
pub const MACHINES: &str = "/v1/machines";
/// `GET`: one machine; `DELETE`: delete one that does not run.
pub const MACHINE: &str = "/v1/machines/{name}";
/// `POST`: start a stopped or crashed machine.
pub const MACHINE_START: &str = "/v1/machines/{name}/start";
/// `POST`: stop a machine.
pub const MACHINE_STOP: &str = "/v1/machines/{name}/stop";
/// `POST`: pause the CPUs of a machine.
pub const MACHINE_PAUSE: &str = "/v1/machines/{name}/pause";
/// `POST`: continue a paused machine.
pub const MACHINE_UNPAUSE: &str = "/v1/machines/{name}/unpause";
/// `POST`: change the memory size of a guest.
pub const MACHINE_BALLOON: &str = "/v1/machines/{name}/balloon";
/// `POST`: take a capsule of a machine that keeps running.
pub const MACHINE_CHECKPOINT: &str = "/v1/machines/{name}/checkpoint";
/// `POST`: take a capsule and end the machine.
pub const MACHINE_SUSPEND: &str = "/v1/machines/{name}/suspend";
/// `POST`: migrate a machine.
pub const MACHINE_MIGRATE: &str = "/v1/machines/{name}/migrate";
/// `POST`: decide who has a machine that is between two hosts.
pub const MACHINE_RESOLVE: &str = "/v1/machines/{name}/resolve";
/// `POST`: protect a machine; `DELETE`: end the protection.
pub const MACHINE_PROTECT: &str = "/v1/machines/{name}/protect";
/// `POST`: switch a machine over to its standby.
pub const MACHINE_FAILOVER: &str = "/v1/machines/{name}/failover";
/// `POST`: sample the dirty pages of a machine, as a trace that is sent while it grows.
pub const MACHINE_WWS: &str = "/v1/machines/{name}/wws";
/// `POST`: migrate all machines of a host to other hosts.
pub const EVACUATE: &str = "/v1/evacuate";
/// `GET`: becomes a raw byte stream to and from the serial port of a machine.
pub const MACHINE_CONSOLE: &str = "/v1/machines/{name}/console";
/// `GET`: end of the console log of a machine.
pub const MACHINE_CONSOLE_LOG: &str = "/v1/machines/{name}/console/log";
/// `GET`: past migrations from this host.
pub const MIGRATIONS: &str = "/v1/migrations";
/// `POST`: create a machine from a capsule.
pub const RESUME: &str = "/v1/resume";
/// `POST`: create several machines from a capsule.
pub const CLONE: &str = "/v1/clone";
/// `POST`: find the golden capsule that fits best.
pub const MATCH: &str = "/v1/match";
/// `POST`: create a machine that boots from the disks of a capsule.
pub const DERIVE: &str = "/v1/derive";
/// `POST`: detach a capsule from its parents.
pub const PROMOTE: &str = "/v1/promote";
/// `GET`: all capsules as a tree.
pub const GRAPH: &str = "/v1/graph";
/// `GET`: a capsule, its ancestors and its descendants as a tree.
pub const CAPSULE_GRAPH: &str = "/v1/capsules/{capsule}/graph";
/// `GET`: machines and capsules that are based on old versions of a capsule.
pub const CAPSULE_REBASE: &str = "/v1/capsules/{capsule}/rebase";
/// Query parameter of [`CAPSULE_REBASE`]: the new version.
pub const REBASE_ONTO: &str = "onto";
/// `GET`: earlier capsules of a ref.
pub const REF_HISTORY: &str = "/v1/refs/{name}/history";
/// `GET`: all capsules.
pub const CAPSULES: &str = "/v1/capsules";
/// `GET`: one capsule; `DELETE`: the ref that names it.
pub const CAPSULE: &str = "/v1/capsules/{capsule}";
/// `GET`: a capsule and its ancestors.
pub const CAPSULE_LOG: &str = "/v1/capsules/{capsule}/log";
/// `GET`: differences between two capsules.
pub const CAPSULE_DIFF: &str = "/v1/capsules/{capsule}/diff/{other}";
/// `PUT`: give a capsule a tag.
pub const TAG: &str = "/v1/tags/{tag}";
/// `POST`: delete objects that no ref needs.
pub const STORE_GC: &str = "/v1/store/gc";
/// `POST`: read and check everything.
pub const STORE_VERIFY: &str = "/v1/store/verify";
/// `POST`: write a capsule or an image to a file.
pub const EXPORT: &str = "/v1/export";
/// `POST`: read a capsule or a disk from a file.
pub const IMPORT: &str = "/v1/import";
/// `POST`: fetch a capsule.
pub const PULL: &str = "/v1/pull";
/// `POST`: send a machine or a capsule to another host or to a pool.
pub const PUSH: &str = "/v1/push";
/// `GET`: capsules that a trusted host offers.
pub const REMOTE: &str = "/v1/remote/{host}";
/// `GET`: state of the hash cache; `POST`: index one more file.
pub const CACHE: &str = "/v1/cache";
/// `GET`: trusted hosts; `POST`: trust one more.
pub const TRUST: &str = "/v1/trust";
/// `PUT`: set which refs a host may use; `DELETE`: remove a trusted host.
pub const TRUST_ENTRY: &str = "/v1/trust/{name}";
/// `GET`: becomes the byte stream of the protocol between hosts, for `whimbrel dial-stdio`.
pub const WIRE: &str = "/v1/wire";
/// `GET`: operations that run or have ended recently.
pub const OPERATIONS: &str = "/v1/operations";
/// `GET`: one operation; `DELETE`: cancel it.
pub const OPERATION: &str = "/v1/operations/{id}";
/// `GET`: states of one operation, as a stream until it has ended.
pub const OPERATION_EVENTS: &str = "/v1/operations/{id}/events";
/// `GET`: this API as an OpenAPI document.
pub const OPENAPI: &str = "/v1/openapi.json";

/// Value of the `Upgrade` header that opens a console (RFC 9110, 7.8).
pub const CONSOLE_PROTOCOL: &str = "whimbrel-console";
/// Value of the `Upgrade` header that opens the protocol between hosts.
pub const WIRE_PROTOCOL: &str = "whimbrel-wire";
/// Content type of [`MACHINE_WWS`]: docs/formats/dirty-trace.md.
pub const WWS_TRACE: &str = "application/vnd.whimbrel.wws-trace";
/// Content type of [`OPERATION_EVENTS`]: one JSON object per line.
pub const NDJSON: &str = "application/x-ndjson";
/// Query parameter of [`MACHINE_CONSOLE_LOG`]: how many bytes at most.
pub const CONSOLE_LOG_BYTES: &str = "bytes";

/// Replaces the parameter of `template` by `value`.
fn fill(template: &str, value: &str) -> String {
    let (before, rest) = template.split_once('{').unwrap_or((template, "}"));
    let (_, after) = rest.split_once('}').unwrap_or(("", ""));
    format!("{before}{value}{after}")
}

/// Path of the machine `name`, from one of the `MACHINE…` templates.
pub fn machine(template: &str, name: &MachineName) -> String {
    fill(template, name.as_str())
}

/// [`MACHINE_CONSOLE_LOG`] for at most `bytes`.
pub fn console_log(name: &MachineName, bytes: u64) -> String {
    format!("{}?{CONSOLE_LOG_BYTES}={bytes}", machine(MACHINE_CONSOLE_LOG, name))
}

/// [`CAPSULE`], [`CAPSULE_LOG`] or [`CAPSULE_GRAPH`] for one capsule.
pub fn capsule(template: &str, capsule: &CapsuleRef) -> String {
    fill(template, &capsule.to_string())
}

/// [`CAPSULE_REBASE`] for a capsule, with the new version if it is given.
pub fn capsule_rebase(old: &CapsuleRef, onto: Option<&CapsuleRef>) -> String {
    let query = onto.map(|onto| format!("?{REBASE_ONTO}={onto}")).unwrap_or_default();
    capsule(CAPSULE_REBASE, old) + &query
}

/// [`REF_HISTORY`] for one ref.
pub fn ref_history(name: &RefName) -> String {
    fill(REF_HISTORY, name.as_str())
}

/// [`CAPSULE_DIFF`] for two capsules.
pub fn capsule_diff(a: &CapsuleRef, b: &CapsuleRef) -> String {
    fill(&capsule(CAPSULE_DIFF, a), &b.to_string())
}

/// [`CAPSULE`] for a ref to remove.
pub fn reference(name: &RefName) -> String {
    fill(CAPSULE, name.as_str())
}

/// [`TAG`] for one tag.
pub fn tag(tag: &RefName) -> String {
    fill(TAG, tag.as_str())
}

/// [`TRUST_ENTRY`] for one host.
pub fn trust_entry(host: &HostName) -> String {
    fill(TRUST_ENTRY, host.as_str())
}

/// [`REMOTE`] for one host.
pub fn remote(host: &HostName) -> String {
    fill(REMOTE, host.as_str())
}

/// [`OPERATION`] or [`OPERATION_EVENTS`] for one operation.
pub fn operation(template: &str, id: OperationId) -> String {
    fill(template, &id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_paths_have_no_braces_left() {
        let (name, a) = ("web-1".parse().unwrap(), "before".parse().unwrap());
        assert_eq!(machine(MACHINE_STOP, &name), "/v1/machines/web-1/stop");
        assert_eq!(console_log(&name, 10), "/v1/machines/web-1/console/log?bytes=10");
        assert_eq!(capsule_diff(&a, &"after".parse().unwrap()), "/v1/capsules/before/diff/after");
        assert_eq!(capsule_rebase(&a, None), "/v1/capsules/before/rebase");
        assert_eq!(capsule_rebase(&a, Some(&a)), "/v1/capsules/before/rebase?onto=before");
        assert_eq!(ref_history(&"golden".parse().unwrap()), "/v1/refs/golden/history");
        assert_eq!(operation(OPERATION_EVENTS, OperationId(3)), "/v1/operations/3/events");
        assert_eq!(trust_entry(&"beta".parse().unwrap()), "/v1/trust/beta");
    }
}
