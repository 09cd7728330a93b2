//! The client: a server's directory as files and directories of this host.
//!
//! `link` keeps a connection and asks; `nodes` are the inodes, `owners` whose they are; `names` and `content` are what programs do to them;
//! `fetch`, `readahead` and `neighbours` bring content, `notes` and `learnt` say what and how, `twins` knows what is here already
//! and `compare` what is there, both as far as `odds` find it worth asking; `queue` and `writeback` take changes of names and content back, `copies` are left to the server; `face` is what the kernel sees, `disk` and `exports`
//! what clients of NBD see, `control` what `whimbrel session` talks to.
//!
//! Methods block the calling thread. What the server has to be asked for is asked for while others go on.

mod batch;
mod changes;
mod compare;
mod content;
mod control;
mod copies;
mod disk;
mod exports;
mod face;
mod fetch;
mod fold;
mod holes;
mod keep;
mod learnt;
mod link;
mod names;
mod neighbours;
mod nodes;
mod notes;
mod odds;
mod owners;
mod policy;
mod queue;
mod rate;
mod readahead;
mod room;
mod session;
mod shared;
mod twins;
mod walk;
mod writeback;

pub use control::{
    Control, ControlError, Request as ControlRequest, Response as ControlResponse, ask, sockets,
};
pub use exports::ExportStatus;
pub use face::Face;
pub use link::{Connector, LinkSettings};
pub use owners::{Owners, OwnersError, Pair, Who};
pub use policy::{Glob, Policy, Rule, Settings};
pub use session::{Event, Session, SessionError, SessionOptions, SessionStatus};
