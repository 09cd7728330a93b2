//! The standby side of a protection: hosted standbys, epoch capsules and input replay.

mod epoch_capsules;
pub(crate) mod hosted;
pub(crate) mod input_replay;
mod page_sharing;
