//! Capsules over slow links: what travels, and how long a person waits.
//!
//! All traffic, ours and that of peers, crosses one emulated link between two hosts (see [`sites`]), and
//! bytes are those that the link delivered, both ways, headers included. One file an experiment.

mod align;
mod arrive;
mod awaited;
mod delta;
mod desk;
mod faulting;
mod first;
mod lookup;
mod moving;
mod packages;
mod service;
mod sites;
mod snapshots;
mod tools;
mod update;

pub(crate) use desk::guest_root;
pub(crate) use faulting::run as postcopy_faults;
pub(crate) use tools::run as run_command;

use crate::run::Experiment;

/// The experiments of the set `capsule`, in the order in which they are done.
pub(crate) const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        rows: &["delta.bytes", "delta.rsync", "delta.cpu", "delta.time"],
        about: "fetch a capsule ten seconds newer than one that is here",
        run: delta::run,
    },
    Experiment { rows: &["first.bytes"], about: "fetch a guest whose golden disk is here", run: first::run },
    Experiment {
        rows: &["hashcache.lookup", "hashcache.size"],
        about: "look pages up in the hash cache",
        run: lookup::run,
    },
    Experiment {
        rows: &["align.found"],
        about: "find files again on disks that are aligned differently",
        run: align::run,
    },
    Experiment {
        rows: &["dsl.primed"],
        about: "resume over 384 kbit/s what the host had ten seconds before",
        run: arrive::primed,
    },
    Experiment {
        rows: &["dsl.unprimed"],
        about: "resume over 384 kbit/s what the host has never seen",
        run: arrive::unprimed,
    },
    Experiment { rows: &["lan.unprimed"], about: "resume 2 GiB over 100 Mbit/s", run: arrive::over_lan },
    Experiment {
        rows: &["update.packages"],
        about: "hand an upgrade of Debian packages to a host that has the parent",
        run: update::run,
    },
];

/// The set `paper`: what of the paper's experiments (sections 5.2 to 5.4) no row of the set `capsule` is
/// about.
pub(crate) const PAPER: &[Experiment] = &[
    Experiment {
        rows: &["service.start"],
        about: "start a service elsewhere: booted or resumed, primed or not (the paper's 5.3)",
        run: service::run,
    },
    Experiment {
        rows: &["snapshots.bytes"],
        about: "snapshots of somebody's work, a minute apart (the paper's 5.4)",
        run: snapshots::run,
    },
    Experiment {
        rows: &["moving.time", "moving.bytes"],
        about: "move machines at work by suspend and resume (the paper's 5.2)",
        run: moving::run,
    },
];
