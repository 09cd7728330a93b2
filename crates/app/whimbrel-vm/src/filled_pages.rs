//! Pages of lazy memory that were filled, in plain types: the next process opens the same content itself, and
//! learns which pages it must not fill again.

use serde::{Deserialize, Serialize};
use whimbrel_core::PageSet;
use whimbrel_memory::Attachment;

/// Pages that were filled, in plain types.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FilledPages {
    pages: u64,
    words: Vec<u64>,
}

impl FilledPages {
    /// Pages that were filled by the last pager of this memory; none if it never had one.
    pub(crate) fn of(memory: &Attachment) -> Option<Self> {
        memory.filled().map(|filled| Self { pages: filled.len(), words: filled.words().to_vec() })
    }

    /// Makes them the filled pages of the next pager of `memory`. False if they are those of another memory.
    pub(crate) fn apply(self, memory: &Attachment) -> bool {
        PageSet::from_words(self.pages, self.words).is_some_and(|filled| memory.set_filled(filled))
    }
}
