//! Postcopy: the machine runs on the target before all of its pages are there.
//!
//! The handover is that of every migration, with one commit point. Pages that are not sent at the pause
//! ([`deferred_pages`]) stay on the source until the target reports that no page is missing
//! ([`page_server`]). The target fetches a page at once when it is touched, and the others in the background,
//! those around the last faults first ([`page_fetcher`], in the order of [`fetch_schedule`]). [`completion`]
//! decides when the source may free its pages.
//!
//! Connections, userfaultfd and overlays belong to the daemon, which passes them in as
//! [`page_fetcher::FetchConnection`] and [`page_fetcher::PageStore`].
//!
//! Invariants: the source frees its pages only after the target has reported that no page is missing, and the
//! target reports that only when everything is durable there. The target's page stores alone decide what is
//! missing, so whatever is lost is requested again. A page that arrives never overwrites one that is there. A
//! lost connection costs only time.

pub mod completion;
pub mod deferred_pages;
mod fetch_reply;
pub mod fetch_schedule;
mod fetch_window;
pub mod messages;
pub mod page_fetcher;
pub mod page_server;
mod page_set_codec;

pub use fetch_reply::FetchReplyError;
pub use page_fetcher::PageFetcher;
pub use page_server::{PageServer, PageServerError};
pub use page_set_codec::{PageSetCodecError, decode_sets, encode_sets};
