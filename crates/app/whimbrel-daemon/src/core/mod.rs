//! Basis of all services of the daemon: directories, errors, operations, rights and the notifier.

pub(crate) mod background_thread;
pub(crate) mod boot_files;
pub(crate) mod directories;
pub(crate) mod error;
pub(crate) mod event_counts;
pub(crate) mod event_log;
pub(crate) mod free_memory;
pub(crate) mod history;
pub(crate) mod master_key;
pub(crate) mod notifier;
pub(crate) mod operations;
pub(crate) mod refs;
pub(crate) mod rights;
#[cfg(test)]
pub(crate) mod sample;
pub(crate) mod state;
pub(crate) mod trusted_hosts;
