//! Capsules over slow links: what travels, and how long a person waits.
//!
//! All traffic, ours and that of peers, crosses one emulated link between two hosts (see [`sites`]), and bytes are those that
//! the link delivered, both ways, headers included. One file an experiment.

mod delta;
mod sites;
mod tools;

use crate::run::Experiment;

/// The experiments of the set `capsule`, in the order in which they are done.
pub(crate) const EXPERIMENTS: &[Experiment] = &[Experiment {
    rows: &["delta.bytes", "delta.rsync", "delta.cpu"],
    about: "fetch a capsule ten seconds newer than one that is here",
    run: delta::run,
}];
