//! Frontends: the kernel through FUSE, NBD clients, and the control socket.

pub(in crate::client) mod block_device;
pub(in crate::client) mod control_socket;
pub(in crate::client) mod fuse_operations;
pub(in crate::client) mod nbd_exports;
