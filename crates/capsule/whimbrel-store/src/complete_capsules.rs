//! Capsules known to be whole, so that using one again does not look at every page of it.
//!
//! Only a collection takes objects away, and each that may do so raises the generation first, alone behind
//! the gate. So a capsule that was whole in this generation is whole as long as it lasts. Lost with the
//! process: then it is looked at again.

use crate::{error::Result, gc_lease::Condemned, reachability, store::Store};
use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
};
use whimbrel_core::CapsuleId;

/// More are not remembered; they are looked at again.
const KNOWN_MAX: usize = 100_000;

/// Capsules that were found whole in one generation of collection.
#[derive(Debug, Default)]
pub(crate) struct CompleteCapsules(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    generation: u64,
    capsules: HashSet<CapsuleId>,
}

impl CompleteCapsules {
    fn knows(&self, generation: u64, id: &CapsuleId) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.generation == generation && known.capsules.contains(id)
    }

    fn remember(&self, generation: u64, id: CapsuleId) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.generation != generation || known.capsules.len() >= KNOWN_MAX {
            *known = Known { generation, capsules: HashSet::new() };
        }
        known.capsules.insert(id);
    }
}

impl Store {
    /// Fails unless everything that capsule `id` names is here. The caller holds the gate.
    pub(crate) fn require_whole(&self, id: &CapsuleId) -> Result<()> {
        let generation = Condemned::read(&*self.inner.files)?.generation;
        if !self.inner.wholes.knows(generation, id) {
            // Another process may have collected what the index as we read it still has.
            self.inner.objects.catalog.refresh()?;
            reachability::check_capsule(self, id)?;
            self.inner.wholes.remember(generation, *id);
        }
        Ok(())
    }

    /// Remembers a capsule that was just found to be whole. The caller has held the gate since.
    pub(crate) fn found_whole(&self, id: &CapsuleId) -> Result<()> {
        let generation = Condemned::read(&*self.inner.files)?.generation;
        self.inner.wholes.remember(generation, *id);
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
