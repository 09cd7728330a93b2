//! Locks of programs on the mount, held at the server.

pub(in crate::client) mod held_locks;
pub(in crate::client) mod lock_calls;
mod pending_signal;
