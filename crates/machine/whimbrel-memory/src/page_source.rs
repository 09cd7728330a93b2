//! Page source: provides the content of absent pages.

use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::PageError;

/// Content of a machine's memory in another place: an image in a store, another host. Immutable.
///
/// Several threads call it at once; a `read` may take as long as a network does.
pub trait PageSource: Send + Sync {
    /// Length in pages.
    fn page_count(&self) -> u64;

    /// Pages that are not all zero. A superset is fine.
    fn present(&self) -> &PageSet;

    /// Copies the pages of `run` into `out`, which has `run.bytes()` bytes. Zero pages are zeros.
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError>;

    /// Pages that are cheap to fetch together with `page`, such as those in its stored frame. The run
    /// contains `page`; the part past the end or further than 256 pages away is ignored.
    fn preferred_run(&self, page: u64) -> PageRun {
        PageRun::new(page, 1)
    }
}
