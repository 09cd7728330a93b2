//! The set `protect`: what a hot standby costs while nothing fails, and what happens when something does.
//!
//! Three hosts on this machine: the guest's, its standby, a witness. The guest is the Debian guest with
//! packaged servers and a few programs of ours (see `guest`), 512 MiB, one processor. Epochs of 50 ms and
//! blocks of 64 bytes where nothing else is said.

mod clients;
mod guest;
mod kills;
mod link;
mod modes;
mod pause;
mod share;
mod site;
mod slowdown;
mod takeover;

pub(super) use guest::disk as server_disk;
pub(super) use kills::{ALL_VICTIMS, Kills, Switch, disturb};
pub(super) use site::{NAME, Site, figure};

use super::Experiment;

/// What a hot standby costs.
pub(super) const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        rows: &["pause.idle", "pause.apache", "pause.ep"],
        about: "how long each epoch stops the machine",
        run: pause::pauses,
    },
    Experiment {
        rows: &["output.late"],
        about: "how long after its cut the output of an epoch leaves",
        run: pause::output,
    },
    Experiment {
        rows: &["pause.kept", "pause.kept.p99"],
        about: "epochs that are kept as capsules against such that are not",
        run: pause::kept,
    },
    Experiment {
        rows: &["slowdown.compile", "slowdown.web", "slowdown.ep"],
        about: "work that gets done under protection, against unprotected",
        run: slowdown::run,
    },
];

/// Modes, steps, links, memory, takeovers and a thousand kills.
pub(super) const LONG: &[Experiment] = &[
    Experiment {
        rows: &["takeover.detected", "takeover"],
        about: "a host dies, and a client is answered by the other",
        run: takeover::run,
    },
    Experiment {
        rows: &["ping.25ms"],
        about: "a client's round trip to an idle guest at epochs of 25 ms",
        run: pause::ping,
    },
    Experiment {
        rows: &["modes.ping"],
        about: "a client's round trip to an idle guest in each mode",
        run: modes::ping,
    },
    Experiment {
        rows: &["modes.pause"],
        about: "how long a cut stops the machine in each mode, and how late output leaves",
        run: modes::pauses,
    },
    Experiment {
        rows: &["bytes.fgbi64"],
        about: "bytes of an epoch against its whole pages, step by step",
        run: pause::bytes,
    },
    Experiment {
        rows: &["bytes.steps"],
        about: "what is left of an epoch with blocks of 64, 128 and 256 bytes",
        run: pause::steps,
    },
    Experiment {
        rows: &["memory.64", "memory.256"],
        about: "memory of ours for a guest whose pages are all known",
        run: pause::memory,
    },
    Experiment {
        rows: &["link.bytes", "link.delay", "link.epoch"],
        about: "bytes, delay of output and length of epochs over 1 Gbit/s and 100 Mbit/s",
        run: link::run,
    },
    Experiment {
        rows: &["share.first"],
        about: "bytes of a second machine's first copy, from the same disk as the first one's",
        run: share::run,
    },
    Experiment {
        rows: &["lost", "split"],
        about: "hosts of a redis and a PostgreSQL die over and over while clients check their histories",
        run: kills::run,
    },
];
