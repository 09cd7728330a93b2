//! The inbound faces of the daemon: HTTP for users, calls of peers. Only these rooms know all services.

pub(crate) mod http;
pub(crate) mod peer_rpc;
