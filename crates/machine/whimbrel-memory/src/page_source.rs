//! Where pages that are not here yet come from.

use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::PageError;

/// The content of a machine's memory, elsewhere: an image in a store, another host. Immutable.
///
/// Called from several threads at once; a `read` may take as long as a network does.
pub trait PageSource: Send + Sync {
    /// Length in pages.
    fn page_count(&self) -> u64;

    /// Pages that are not all zero. A superset is fine.
    fn present(&self) -> &PageSet;

    /// Copies the pages of `run` into `out`, which is exactly `run.bytes()` long. Zero pages are zeros.
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError>;

    /// What is cheap to fetch together with `page`: the frame it is stored in, say. It contains `page`; what
    /// lies past the end or further than 256 pages away is not used.
    fn preferred_run(&self, page: u64) -> PageRun {
        PageRun::new(page, 1)
    }
}
