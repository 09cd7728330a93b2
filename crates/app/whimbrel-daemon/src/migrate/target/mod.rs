//! The target side of a migration: the incoming machine, its baseline, and its missing pages.

mod background_sync;
pub(crate) mod baseline;
mod handed_off;
pub(crate) mod incoming;
pub(crate) mod left_over;
pub(crate) mod missing_pages;
mod reserved_space;
