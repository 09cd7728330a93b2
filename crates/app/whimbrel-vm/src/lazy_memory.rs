//! Memory that is filled on demand, and passes to another process while pages are missing: the next process
//! opens the same content itself, and learns which pages were filled already.

use crate::PartError;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use whimbrel_core::{CapsuleId, Digest, PageSet};
use whimbrel_memory::{Attachment, PageSource, Pager};

/// Content of memory that is filled on demand, in words that another process understands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySource {
    /// Capsule that has the image.
    pub capsule: Option<CapsuleId>,
    /// Root of the image; none for an empty one.
    pub root: Option<Digest>,
    /// Pages of the image.
    pub pages: u64,
}

/// Opens the content of memory in this process, and pins what it reads.
pub type OpenMemory<'a> =
    &'a dyn Fn(&MemorySource) -> Result<Arc<dyn PageSource>, Box<dyn std::error::Error + Send + Sync>>;

/// Memory that is filled on demand, and who fills it.
pub struct LazyMemory {
    source: MemorySource,
    pages: Arc<dyn PageSource>,
    pager: Option<Pager>,
}

whimbrel_core::opaque_debug!(LazyMemory);

/// Pages that were filled, in plain types.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FilledPages {
    pages: u64,
    words: Vec<u64>,
}

impl LazyMemory {
    /// Fills the pages of `memory` from now on.
    pub fn start(
        memory: &Attachment,
        source: MemorySource,
        pages: Arc<dyn PageSource>,
    ) -> Result<Self, PartError> {
        let mut lazy = Self::passed(source, pages);
        lazy.serve(memory)?;
        Ok(lazy)
    }

    /// Memory of another process, which nobody here fills yet.
    pub(crate) fn passed(source: MemorySource, pages: Arc<dyn PageSource>) -> Self {
        Self { source, pages, pager: None }
    }

    pub(crate) fn source(&self) -> MemorySource {
        self.source.clone()
    }

    /// Fills pages, if it does not yet.
    pub(crate) fn serve(&mut self, memory: &Attachment) -> Result<(), PartError> {
        if self.pager.is_none() {
            self.pager = Some(Pager::start(memory, self.pages.clone())?);
        }
        Ok(())
    }

    /// Stops filling pages. Whoever touches a missing one waits for the next pager.
    pub(crate) fn suspend(&mut self) {
        self.pager = None;
    }
}

impl FilledPages {
    /// Pages that were filled by the last pager of this memory.
    pub(crate) fn of(memory: &Attachment) -> Option<Self> {
        memory.filled().map(|filled| Self { pages: filled.len(), words: filled.words().to_vec() })
    }

    /// Makes them the filled pages of the next pager of `memory`. False if they are those of another memory.
    pub(crate) fn apply(self, memory: &Attachment) -> bool {
        PageSet::from_words(self.pages, self.words).is_some_and(|filled| memory.set_filled(filled))
    }
}
