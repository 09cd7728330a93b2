//! One machine of this host: its lock, its record, its runtime directory, and the check that its QEMU is
//! alive.

pub(crate) mod cleanup;
pub(crate) mod commit_mark;
mod dirty_sampling;
pub(crate) mod entry;
pub(crate) mod folder;
pub(crate) mod prestarted_qemu;
pub(crate) mod record;
mod recovery;
pub(crate) mod registry;
pub(crate) mod reservations;
pub(crate) mod restart;
pub(crate) mod runtime_dir;
pub(crate) mod self_start;
pub(crate) mod settings;
pub(crate) mod start;
pub(crate) mod supervisor;
pub(crate) mod unreadable;
