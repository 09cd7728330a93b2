//! The witness: a client for hosts and etcd, and the service for other hosts.

pub(crate) mod client;
pub(crate) mod etcd;
pub(crate) mod service;
