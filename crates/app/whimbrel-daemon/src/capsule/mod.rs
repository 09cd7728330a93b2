//! Capsules of this host: checkpoints, resumes, clones, derived machines, and queries of the store.

mod appliance;
pub(crate) mod checkpoint;
mod clones;
pub(crate) mod derive;
pub(crate) mod disk_alignment;
mod disk_checkpoint;
pub(crate) mod disk_image;
mod encryption;
pub(crate) mod golden;
pub(crate) mod graph;
pub(crate) mod images;
pub(crate) mod maintenance;
mod outdated;
pub(crate) mod promote;
mod queries;
mod repair;
pub(crate) mod resume;
mod rewind;
