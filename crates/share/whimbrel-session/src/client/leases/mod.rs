//! Leases: what is known here stays valid until the server recalls it.

mod freshness;
pub(in crate::client) mod lease_keeper;
pub(in crate::client) mod lease_state;
pub(in crate::client) mod recall_log;
pub(in crate::client) mod recalls;
pub(in crate::client) mod reread;
