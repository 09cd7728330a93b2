//! The client: a server's directory as files and directories of this host.
//!
//! `link` keeps a connection and asks; `nodes` are the inodes, `owners` whose they are; `names` and `content`
//! are what programs do to them; `fetch`, `readahead` and `neighbours` bring content, `notes` and `learnt`
//! say what and how, `twins` knows what is here already and `compare` what is there, both as far as `odds`
//! find it worth asking; `queue` and `writeback` take changes of names and content back, `copies` are left to
//! the server; `face` is what the kernel sees, `disk` and `exports` what clients of NBD see, `control` what
//! `whimbrel session` talks to.
//!
//! Methods block the calling thread. What the server has to be asked for is asked for while others go on.

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
