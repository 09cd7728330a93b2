//! Prefetch: content and names that are requested before a program asks for them.

pub(in crate::client) mod hints;
pub(in crate::client) mod read_history;
pub(in crate::client) mod readahead;
pub(in crate::client) mod sibling_prefetch;
pub(in crate::client) mod tree_prefetch;
