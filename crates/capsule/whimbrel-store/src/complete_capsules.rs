//! Complete capsules: a cache of their ids, so that using one again does not check every page of it.
//!
//! Only garbage collection removes objects, and a collection that may do so first raises the generation under
//! the exclusive gate. So a capsule that was complete in this generation remains complete during it. The
//! cache is lost with the process; then capsules are checked again.

use crate::{error::Result, gc_lease::Condemned, reachability, store::Store};
use std::{collections::HashSet, sync::Mutex};
use whimbrel_core::{CapsuleId, lock};

/// Limit of the cache; capsules beyond it are checked again.
const KNOWN_MAX: usize = 100_000;

/// Capsules that were found complete in one generation of garbage collection.
#[derive(Debug, Default)]
pub(crate) struct CompleteCapsules(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    generation: u64,
    capsules: HashSet<CapsuleId>,
}

impl CompleteCapsules {
    fn knows(&self, generation: u64, id: &CapsuleId) -> bool {
        let known = lock(&self.0);
        known.generation == generation && known.capsules.contains(id)
    }

    fn remember(&self, generation: u64, id: CapsuleId) {
        let mut known = lock(&self.0);
        if known.generation != generation || known.capsules.len() >= KNOWN_MAX {
            *known = Known { generation, capsules: HashSet::new() };
        }
        known.capsules.insert(id);
    }
}

impl Store {
    /// Fails unless every object of capsule `id` is in the store. The caller has the gate.
    pub(crate) fn require_complete(&self, id: &CapsuleId) -> Result<()> {
        let generation = Condemned::read(&*self.inner.files)?.generation;
        if !self.inner.complete.knows(generation, id) {
            // Another process may have collected objects that the loaded index still lists.
            self.inner.objects.indexes.refresh()?;
            reachability::check_capsule(self, id)?;
            self.inner.complete.remember(generation, *id);
        }
        Ok(())
    }

    /// Caches a capsule that was just found complete. The caller has had the gate since.
    pub(crate) fn record_complete(&self, id: &CapsuleId) -> Result<()> {
        let generation = Condemned::read(&*self.inner.files)?.generation;
        self.inner.complete.remember(generation, *id);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collection_ends_what_was_known() {
        let (wholes, id) = (CompleteCapsules::default(), CapsuleId(whimbrel_core::Digest::of(b"one")));
        wholes.remember(4, id);
        assert!(wholes.knows(4, &id));
        assert!(!wholes.knows(5, &id) && !wholes.knows(3, &id));
        wholes.remember(5, CapsuleId(whimbrel_core::Digest::of(b"two")));
        assert!(!wholes.knows(5, &id), "what another generation knew is forgotten");
    }
}
