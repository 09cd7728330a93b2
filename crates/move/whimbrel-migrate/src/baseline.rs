//! What an array begins as on the target, when both hosts hold a version of it already.
//!
//! The source names capsules that it has whole and files that lie under its disks; the target says for each
//! array what it made of that ([`Baseline`]). From then on the array's pages are there as in that base, and
//! only what differs travels. What may differ, and how a page compares with the base, the host knows
//! ([`ArrayBaseline`]).

use crate::source::BoxError;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use whimbrel_core::{CapsuleId, PageRun, PageSet};

/// What an array of an arriving machine begins as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Baseline {
    /// Zeros.
    Zeros,
    /// The image of that name in a capsule that the source has named.
    Capsule(CapsuleId),
    /// The file that lies under the disk on the source too.
    File,
}

/// A base as the source has it.
pub struct ArrayBaseline {
    /// The pages that may differ from it.
    pub may_differ: MayDiffer,
    /// To compare pages with; none if it cannot be read here, and then all of the pages above travel.
    pub content: Option<Arc<dyn BaselineContent>>,
}

/// Pages of an array that may differ from its base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MayDiffer {
    /// These.
    These(PageSet),
    /// These, which the base has, and all that are not holes.
    TheseOrPopulated(PageSet),
}

/// The content of a base. Asked from several threads at once.
pub trait BaselineContent: Send + Sync {
    /// Reads pages of it.
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), BoxError>;

    /// Which of the pages of `run`, whose content now is `data`, are as in the base; one value a page.
    fn same(&self, run: PageRun, data: &[u8]) -> Result<Vec<bool>, BoxError>;
}
