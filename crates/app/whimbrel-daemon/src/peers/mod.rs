//! peers.

pub(crate) mod connections;
pub(crate) mod link;
pub(crate) mod ssh;
