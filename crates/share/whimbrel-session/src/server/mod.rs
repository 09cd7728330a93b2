//! The server: exports, served to peers that may have a session.
//!
//! It has no state that cannot be lost: every request names files by path and identity, so a restarted server
//! continues with new keys. The number of its open files and listings is bounded.
//!
//! The kernel resolves every path beneath the session's directory (`openat2`) and follows no symlink; only
//! regular files are opened. The system's permissions for the server's user decide what can be read and
//! written.

mod change_log;
mod dispatcher;
mod exports;
mod fanotify_events;
mod fencing;
mod file_copy;
mod file_handle;
mod largest_file;
#[cfg(test)]
mod lease_model;
mod lease_table;
mod leased_answers;
mod leases;
mod listing;
mod locks;
mod name_changes;
mod nodes;
mod open_files;
mod outside_changes;
mod quota;
mod sessions;
mod tree_listing;
mod write_intent;
mod xattrs;

pub use dispatcher::Server;
pub use exports::{Export, ExportAccess, ExportError};
pub use sessions::{Limits, SessionEvent, SessionOutcome};

use crate::proto::code;
use rustix::io::Errno;
use whimbrel_wire::{Code, Refusal};

/// Makes a refusal of a system error, for `map_err`; `action` failed.
fn refuse(action: &'static str) -> impl Fn(Errno) -> Refusal {
    move |errno| {
        let number = u16::try_from(errno.raw_os_error()).unwrap_or(5);
        Refusal::new(Code(code::ERRNO + number), format!("cannot {action}: {errno}"))
    }
}

fn stale() -> Refusal {
    Refusal::new(code::STALE, "the path does not lead to this file any more")
}
