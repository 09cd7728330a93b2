//! Messages of postcopy. docs/protocols/migrate.md describes when each is sent.

use crate::protocol::HandoverId;
use serde::{Deserialize, Serialize};
use whimbrel_core::PageRun;

/// Lists pages that stay on the source; header [`MissingPages`], payload as in `page_set_codec.rs`. Between
/// the last pages and `FINISH`, in order.
pub const MISSING_PAGES: u16 = 0x0106;
/// From the source: offers this connection for fetching; header [`OfferFetch`], reply [`OfferFetchReply`].
pub const OFFER_FETCH: u16 = 0x0110;
/// From the target: requests pages; header [`Fetch`], reply header [`Fetched`] and payload as in
/// `fetch_reply.rs`.
pub const FETCH: u16 = 0x0111;
/// From the target: reports that no page is missing; header [`HandoverId`].
pub const COMPLETE: u16 = 0x0112;

/// Most pages in one fetch, and most runs.
pub const FETCH_PAGES_MAX: u64 = 256;

/// Header of some missing pages of one array; the messages add up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingPages {
    /// Id of the handover.
    pub handover: HandoverId,
    /// Index of the array in the offer's arrays.
    pub array: u32,
    /// Whether these pages were written lately, and should be fetched first.
    pub hot: bool,
}

/// Priority of a fetch connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FetchPriority {
    /// Connection for pages that a reader waits for.
    Urgent,
    /// Connection for all other pages.
    Bulk,
}

/// Offer of a fetch connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferFetch {
    /// Id of the handover whose pages it serves.
    pub handover: HandoverId,
    /// Priority of the connection.
    pub lane: FetchPriority,
}

/// Reply of the target to an offered connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OfferFetchReply {
    /// The target will send requests.
    Waiting,
    /// The target has every page of this handover's machine.
    Whole,
}

/// Request for pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// Id of the handover.
    pub handover: HandoverId,
    /// Index of the array.
    pub array: u32,
    /// Requested pages, at most [`FETCH_PAGES_MAX`].
    pub runs: Vec<PageRun>,
    /// Progress of the target, for status displays on the source.
    pub stand: FetchProgress,
}

/// Progress of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FetchProgress {
    /// Number of missing pages.
    pub missing: u64,
    /// Number of page requests that a reader waited for.
    pub faults: u64,
    /// Total time of these waits, in microseconds.
    pub waited_us: u64,
    /// Longest of these waits, in microseconds.
    pub longest_us: u64,
}

/// Reply to a request for pages, in its order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// Zero pages among them, which are not in the payload.
    pub zero: Vec<PageRun>,
}
