//! The client: a server's directory as files and directories of this host.
//!
//! | Room | What is in it |
//! |---|---|
//! | `connection` | the connection to the server, its rate |
//! | `namespace` | inodes, owners, cached directories, changes of names on their way to the server |
//! | `content` | reads, writes, holes, copies, and the requests that fetch what is missing |
//! | `prefetch` | hints, read history, readahead, prefetch of a tree and of sibling files |
//! | `dedup` | content found on this host or on the server instead of sent |
//! | `leases` | what may be relied on, until the server recalls it |
//! | `locks` | locks of programs, held at the server |
//! | `write_back` | unsent content on its way to the server, and conflicts |
//! | `frontend` | FUSE, NBD, the control socket |
//!
//! Methods block the calling thread. Requests to the server run concurrently.

pub(crate) mod connection;
pub(crate) mod content;
pub(crate) mod dedup;
pub(crate) mod frontend;
pub(crate) mod leases;
pub(crate) mod locks;
pub(crate) mod namespace;
mod policy;
pub(crate) mod prefetch;
mod session;
mod session_error;
pub(crate) mod write_back;

pub use crate::cache::{CacheDir, CacheKeyError};
pub use connection::server_connection::{ConnectionSettings, Connector};
pub use content::warm_files::{WarmError, WarmProgress};
pub use frontend::control_socket::{
    Control, ControlError, Request as ControlRequest, Response as ControlResponse, ask_status, send_request,
    send_request_with_progress, sockets,
};
pub use frontend::fuse_operations::FuseOperations;
pub use frontend::nbd_exports::ExportStatus;
pub use namespace::id_map::{IdKind, IdMap, IdMapError, IdPair};
pub use policy::{Glob, MountSettings, Policy, Rule};
pub use session::{Event, Session, SessionOptions, SessionStatus};
pub use session_error::SessionError;
pub use write_back::kept_copy::{Keep, KeepError, KeptCopy, kept_copies, total};
