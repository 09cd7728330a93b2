//! Inbound interfaces of the daemon: HTTP for users, calls of peers. Only these modules know all services.

pub(crate) mod access;
mod console;
mod display;
mod http;
pub(crate) mod listen;
pub(crate) mod metrics;
pub(crate) mod peer_rpc;
mod sessions;
mod streams;
mod strict_json;
pub(crate) mod web_page;
