//! What every service of the daemon is built on: directories, errors, operations, rights and the wake-up of
//! threads.

pub(crate) mod directories;
pub(crate) mod error;
pub(crate) mod failpoint;
pub(crate) mod notifier;
pub(crate) mod operations;
pub(crate) mod refs;
pub(crate) mod rights;
