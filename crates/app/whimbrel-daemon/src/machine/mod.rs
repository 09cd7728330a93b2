//! One machine of this host: its lock, its record, its runtime directory, and the check that its QEMU is
//! alive.

pub(crate) mod balloon;
pub(crate) mod cleanup;
pub(crate) mod cloud_init;
pub(crate) mod commit_mark;
pub(crate) mod console;
mod creation;
mod dirty_sampling;
pub(crate) mod entry;
pub(crate) mod firmware;
pub(crate) mod folder;
pub(crate) mod hardware;
pub(crate) mod hotplug;
pub(crate) mod machine_process;
pub(crate) mod memory_room;
pub(crate) mod new_disks;
pub(crate) mod prestarted_qemu;
pub(crate) mod record;
mod recovery;
pub(crate) mod registry;
mod rename;
pub(crate) mod restart;
pub(crate) mod self_start;
mod serving_process;
pub(crate) mod settings;
pub(crate) mod start;
pub(crate) mod supervisor;
pub(crate) mod unreadable;
mod usage;
mod view;
mod waiting_process;
