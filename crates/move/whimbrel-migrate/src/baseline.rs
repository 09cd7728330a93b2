//! Baseline of an incoming array: the content that it starts from, if both hosts have a version of it.
//!
//! The source names capsules that it has completely and files beneath its disks; the target replies with a
//! [`Baseline`] for each array. From then on the array's pages on the target are those of the baseline, and
//! only differing pages are sent. The daemon supplies the pages that may differ, and the baseline's content
//! ([`ArrayBaseline`]).

use crate::source::BoxError;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use whimbrel_core::{CapsuleId, PageRun, PageSet};

/// Content that an incoming array starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Baseline {
    /// Zeros in every page.
    Zeros,
    /// Image of the array's name in a capsule that the source has named.
    Capsule(CapsuleId),
    /// File beneath the disk on both hosts.
    File,
}

/// Baseline as the source has it.
pub struct ArrayBaseline {
    /// Pages that may differ from the baseline.
    pub may_differ: MayDiffer,
    /// Content to compare pages with; none if it cannot be read here, and then all pages that may differ are
    /// sent.
    pub content: Option<Arc<dyn BaselineContent>>,
}

/// Pages of an array that may differ from its baseline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MayDiffer {
    /// Exactly the given pages.
    These(PageSet),
    /// Given pages, which the baseline has, and all populated ones.
    TheseOrPopulated(PageSet),
}

/// Content of a baseline. Called by several threads at once.
pub trait BaselineContent: Send + Sync {
    /// Reads pages of the baseline.
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), BoxError>;

    /// Compares the pages of `run`, whose current content is `data`, with the baseline; one value a page.
    fn same(&self, run: PageRun, data: &[u8]) -> Result<Vec<bool>, BoxError>;
}
