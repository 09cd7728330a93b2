//! Connections to peers, over TLS or ssh.

pub(crate) mod connections;
pub(crate) mod hosts;
pub(crate) mod link;
pub(crate) mod ssh;
