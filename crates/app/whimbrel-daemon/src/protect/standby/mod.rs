//! The standby side of a protection: hosted standbys and the epochs that they keep.

mod epoch_capsules;
pub(crate) mod hosted;
pub(crate) mod input_replay;
mod page_sharing;
