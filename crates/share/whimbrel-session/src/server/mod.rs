//! The server: named directories, handed out to those who may have a session.
//!
//! It keeps nothing that cannot be lost: files are named by path and identity in every request, so a server
//! that was started anew goes on where the last one was, with a new key. What it holds (open files, listings)
//! is bounded.
//!
//! Every path is resolved beneath the session's directory by the kernel (`openat2`), following no symlink at
//! all; only regular files are opened. The server's user decides by the system's permissions what can be read
//! and written.

mod dispatcher;
mod exports;
mod fencing;
mod file_copy;
mod listing;
mod name_changes;
mod open_files;
mod sessions;
mod tree_listing;
mod write_intent;

pub use dispatcher::Server;
pub use exports::{Export, ExportError};
pub use sessions::Limits;

use crate::proto::code;
use rustix::io::Errno;
use whimbrel_wire::{Code, Refusal};

/// For `map_err`: what the system said while we tried to `action`.
fn refuse(action: &'static str) -> impl Fn(Errno) -> Refusal {
    move |errno| {
        let number = u16::try_from(errno.raw_os_error()).unwrap_or(5);
        Refusal::new(Code(code::ERRNO + number), format!("cannot {action}: {errno}"))
    }
}

fn stale() -> Refusal {
    Refusal::new(code::STALE, "the file is another one by now")
}
