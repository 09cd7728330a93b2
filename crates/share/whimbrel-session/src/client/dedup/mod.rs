//! Dedup: content that is on this side, or on the server, is not sent over the link.

pub(in crate::client) mod hit_estimate;
pub(in crate::client) mod read_dedup;
pub(in crate::client) mod shared_cache;
pub(in crate::client) mod write_dedup;
