//! The messages of post-copy. docs/protocols/migrate.md tells when each is sent.

use crate::protocol::HandoverId;
use serde::{Deserialize, Serialize};
use whimbrel_core::PageRun;

/// Pages that the source keeps; header [`MissingPages`], payload as in `sets.rs`. Between the last pages and
/// `FINISH`, in order.
pub const MISSING_PAGES: u16 = 0x0106;
/// From the source: the target may fetch over this connection; header [`OfferFetch`], reply
/// [`OfferFetchReply`].
pub const OFFER_FETCH: u16 = 0x0110;
/// From the target: send these pages; header [`Fetch`], reply header [`Fetched`] and payload as in
/// `frame.rs`.
pub const FETCH: u16 = 0x0111;
/// From the target: it lacks nothing; header [`HandoverId`].
pub const COMPLETE: u16 = 0x0112;

/// Most pages in one fetch, and most runs.
pub const FETCH_PAGES_MAX: u64 = 256;

/// A part of what the source keeps of one array; parts add up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingPages {
    /// This attempt.
    pub handover: HandoverId,
    /// Which array, as an index into the offer's arrays.
    pub array: u32,
    /// Whether these are pages that were written lately: worth asking for first.
    pub hot: bool,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FetchPriority {
    /// Pages that somebody waits for.
    Urgent,
    /// All others.
    Bulk,
}

/// Offers a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferFetch {
    /// Whose pages.
    pub handover: HandoverId,
    /// What for.
    pub lane: FetchPriority,
}

/// What the target says to that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OfferFetchReply {
    /// It will ask.
    Waiting,
    /// It lacks nothing of this handover's machine.
    Whole,
}

/// Asks for pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// Whose.
    pub handover: HandoverId,
    /// Which array.
    pub array: u32,
    /// Which pages, at most [`FETCH_PAGES_MAX`].
    pub runs: Vec<PageRun>,
    /// How the target fares, for whoever looks at the source.
    pub stand: FetchProgress,
}

/// How a target fares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FetchProgress {
    /// Pages that it lacks.
    pub missing: u64,
    /// Pages that were waited for.
    pub faults: u64,
    /// For how long altogether, in microseconds.
    pub waited_us: u64,
    /// The longest of these waits.
    pub longest_us: u64,
}

/// Pages that were asked for, in the order in which they were.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// Those of them that are zero, and not in the payload.
    pub zero: Vec<PageRun>,
}
