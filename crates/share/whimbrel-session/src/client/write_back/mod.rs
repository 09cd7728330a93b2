//! Write-back: unsent content goes to the server later; conflicts are saved beside it.

pub(in crate::client) mod conflicts;
pub(in crate::client) mod file_write_back;
pub(in crate::client) mod kept_copy;
pub(in crate::client) mod unsynced;
pub(in crate::client) mod write_queue;
