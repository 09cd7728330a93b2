//! Size of the store, for metrics: counting looks at every file, so the result is used for a while.

use crate::core::state::Core;
use std::{
    sync::Mutex,
    time::{Duration, Instant},
};
use whimbrel_core::lock;

/// Shortest time for which a count is used.
const FRESH: Duration = Duration::from_secs(10);
/// Counting takes at most this part of the time.
const SHARE: u32 = 50;

/// Counts of the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StoreCounts {
    pub(crate) bytes: u64,
    pub(crate) refs: u64,
}

/// The last counts, with the time until which they are used.
#[derive(Debug, Default)]
pub(crate) struct StoreSample(Mutex<Option<(StoreCounts, Instant)>>);

impl StoreSample {
    /// The last counts, or new ones if these are old.
    pub(crate) fn read(&self, core: &Core) -> StoreCounts {
        let mut known = lock(&self.0);
        let begun = Instant::now();
        if let Some((counts, until)) = *known
            && begun < until
        {
            return counts;
        }
        let refs = core.store.readable_refs().map_or(0, |(refs, _)| refs.len() as u64);
        let counts = StoreCounts { bytes: core.stored_bytes(), refs };
        *known = Some((counts, Instant::now() + FRESH.max(begun.elapsed() * SHARE)));
        counts
    }
}
