//! The client: a server's directory as files and directories of this host.
//!
//! - `server_connection` keeps a connection and sends calls; `inodes` and `id_map` hold what is known of
//!   files and owners.
//! - `directory_cache`, `name_changes` and `file_content` are the operations on names and content.
//! - `fetcher`, `readahead`, `tree_prefetch` and `sibling_prefetch` fetch content and names; `hints`,
//!   `hole_query` and `read_history` advise them.
//! - `dedup` finds content on this host and `write_dedup` on the server, as far as `hit_estimate` finds it
//!   worthwhile.
//! - `change_queue` and `writeback` send changes of names and content; `server_copies` leaves copies to the
//!   server.
//! - `fuse_operations` serves the kernel, `block_device` and `nbd_exports` serve NBD clients, and
//!   `control_socket` serves `whimbrel session`.
//!
//! Methods block the calling thread. Requests to the server run concurrently.

mod block_device;
mod change_batch;
mod change_merge;
mod change_queue;
mod conflicts;
mod control_socket;
mod dedup;
mod directory_cache;
mod fetcher;
mod file_content;
mod free_space;
mod fuse_operations;
mod hints;
mod hit_estimate;
mod hole_query;
mod id_map;
mod inodes;
mod name_changes;
mod nbd_exports;
mod policy;
mod read_history;
mod readahead;
mod server_connection;
mod server_copies;
mod session;
mod shared_cache;
mod sibling_prefetch;
mod transfer_rate;
mod tree_prefetch;
mod write_dedup;
mod writeback;

pub use control_socket::{
    Control, ControlError, Request as ControlRequest, Response as ControlResponse, ask, sockets,
};
pub use fuse_operations::FuseOperations;
pub use id_map::{IdKind, IdMap, IdMapError, IdPair};
pub use nbd_exports::ExportStatus;
pub use policy::{Glob, MountSettings, Policy, Rule};
pub use server_connection::{Connector, LinkSettings};
pub use session::{Event, Session, SessionError, SessionOptions, SessionStatus};
