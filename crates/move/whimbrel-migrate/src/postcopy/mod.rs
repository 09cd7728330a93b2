//! Post-copy: the machine runs on the target before all of it is there.
//!
//! The handover is that of every migration, with one commit point. What is not sent at the pause ([`leave`])
//! stays with the source, which keeps it until the target says that it lacks nothing ([`giving`]). The target
//! fetches a page when it is touched, over a connection of its own, and asks for the others in the
//! background, those around the last faults first ([`taking`], in the order of [`schedule`]). Who owes what
//! to whom, and when the source may forget, is [`phase`].
//!
//! What is not here: connections, userfaultfd, overlays: the host brings them as [`page_fetcher::Lane`] and
//! [`page_fetcher::Store`].
//!
//! Invariants: nothing but the target's word that it lacks nothing, said after it is durable there, lets the
//! source forget; what the target's stores say is missing is the only truth about what is missing, so
//! whatever is lost on the way is asked for again; a page that came never overwrites one that is there. A
//! lost link costs waiting and nothing else.

pub mod completion;
pub mod deferred_pages;
mod fetch_reply;
pub mod fetch_schedule;
pub mod messages;
pub mod page_fetcher;
pub mod page_server;
mod page_set_codec;

pub use fetch_reply::FetchReplyError;
pub use page_fetcher::PageFetcher;
pub use page_server::{PageServer, PageServerError};
pub use page_set_codec::{PageSetCodecError, decode_sets, encode_sets};
