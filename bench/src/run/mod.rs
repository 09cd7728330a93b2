//! The experiments. One file a family, one function a row or a few rows that need the same preparation.
//!
//! To add one: a function from [`Context`] to rows, and a line in [`EXPERIMENTS`].

mod checkpoint;
mod clients;
mod clone;
mod disk_time;
mod downtime;
mod images;
mod keeper;
mod migrate;
mod move_cost;
mod moved_server;
mod moved_stores;
mod muncher;
mod nbd;
mod ours;
pub(crate) mod patch;
mod peers;
mod pool;
mod precopy;
mod protect;
mod qemu_nbd;
mod rates;
mod resume;
mod scan;
mod session;
mod store;
mod stores;
mod throughput;
mod to_and_fro;
mod web_mix;
mod wws_error;

use crate::capsule;
use crate::harness::Row;
use anyhow::{Result, bail};
use std::path::PathBuf;

/// What an experiment is told.
pub(crate) struct Context {
    /// Fewer repetitions, smaller inputs.
    pub(crate) quick: bool,
    /// Repetitions of each case whatever a row would do itself.
    pub(crate) times: Option<usize>,
    /// Two images to keep instead of made ones, the second a later version of the first.
    pub(crate) images: Option<(PathBuf, PathBuf)>,
}

impl Context {
    /// How often to measure.
    pub(crate) fn times(&self, full: usize, quick: usize) -> usize {
        self.times.unwrap_or(if self.quick { quick } else { full })
    }
}

/// One experiment.
pub(crate) struct Experiment {
    /// The rows it makes, `family.row`: one, or those that come of the same preparation.
    pub(crate) rows: &'static [&'static str],
    /// One line for people.
    pub(crate) about: &'static str,
    pub(crate) run: fn(&Context) -> Result<Vec<Row>>,
}

/// Every experiment, in the order in which `run` does them.
const EXPERIMENTS: &[Experiment] = &[
    Experiment { rows: &["scan.idle"], about: "find the written pages of an idle guest", run: scan::idle },
    Experiment { rows: &["scan.busy"], about: "find the written pages of a busy guest", run: scan::busy },
    Experiment {
        rows: &["store.ingest", "store.restore"],
        about: "a GiB of memory into the store, and back",
        run: throughput::run,
    },
    Experiment {
        rows: &["store.peers"],
        about: "two versions of an image: bytes kept and time",
        run: store::peers,
    },
    Experiment { rows: &["nbd.randread"], about: "read single pages of a disk we serve", run: nbd::randread },
    Experiment {
        rows: &["nbd.seqwrite"],
        about: "write a disk we serve from end to end",
        run: nbd::seqwrite,
    },
    Experiment {
        rows: &["checkpoint.pause", "checkpoint.time", "checkpoint.bytes"],
        about: "keep a Debian guest that compiles, again and again",
        run: checkpoint::run,
    },
    Experiment {
        rows: &["resume.cold", "resume.warm"],
        about: "let a kept guest run again, its memory on demand",
        run: resume::run,
    },
    Experiment {
        rows: &["clone.time", "clone.memory"],
        about: "eight clones of a running guest",
        run: clone::run,
    },
    Experiment {
        rows: &["migrate.downtime", "migrate.bytes", "migrate.time"],
        about: "move a guest that writes over a Gbit/s",
        run: migrate::busy,
    },
    Experiment {
        rows: &[
            "migrate.downtime",
            "migrate.bytes",
            "migrate.bytes.empty",
            "migrate.bytes.primed",
            "migrate.time",
            "migrate.time.1g",
            "migrate.cost.cpu",
            "migrate.cost.memory",
        ],
        about: "move an idle guest over a Gbit/s",
        run: migrate::idle,
    },
    Experiment {
        rows: &["migrate.downtime.idle", "migrate.downtime.parts"],
        about: "how long a client hears nothing of a guest that moves, and what that time goes to",
        run: downtime::idle,
    },
    Experiment {
        rows: &["migrate.downtime.web", "migrate.downtime.p99"],
        about: "the same of a web server with a hundred clients",
        run: downtime::web,
    },
    Experiment {
        rows: &["migrate.downtime.udp"],
        about: "the same of a game with six players",
        run: downtime::game,
    },
    Experiment {
        rows: &["migrate.web.dip"],
        about: "how much less the clients of a web server get during a slow first round",
        run: to_and_fro::dip,
    },
    Experiment {
        rows: &["migrate.thousand"],
        about: "a web server that goes to and fro: what its clients lose",
        run: to_and_fro::thousand,
    },
    Experiment {
        rows: &["migrate.muncher.downtime", "migrate.muncher.time"],
        about: "move a guest that writes half of its memory flat out",
        run: muncher::run,
    },
    Experiment {
        rows: &["migrate.peers.downtime", "migrate.peers.time"],
        about: "move a guest beside QEMU's post-copy and auto-converge",
        run: peers::run,
    },
    Experiment {
        rows: &["migrate.rates"],
        about: "move a guest over five links beside QEMU's pre-copy, post-copy and auto-converge",
        run: rates::run,
    },
    Experiment {
        rows: &["migrate.wws.error"],
        about: "predict the downtime of moves, and move",
        run: wws_error::run,
    },
    Experiment {
        rows: &["migrate.disk.time", "migrate.disk.bytes"],
        about: "move a running guest with a disk that it writes to",
        run: disk_time::run,
    },
    Experiment {
        rows: &["migrate.postgres"],
        about: "move a PostgreSQL with its disk, under pgbench and clients who check their history",
        run: moved_stores::postgres,
    },
    Experiment {
        rows: &["migrate.redis"],
        about: "move a redis with its disk, under clients who check their history",
        run: moved_stores::redis,
    },
    Experiment {
        rows: &["migrate.mix"],
        about: "move a web server with pages that are made anew, with its disk",
        run: web_mix::run,
    },
    Experiment {
        rows: &["migrate.time.256m", "migrate.growth"],
        about: "move a running guest over 256 Mbit/s, and a large one",
        run: migrate::slower_and_larger,
    },
    Experiment {
        rows: &["session.open-dir"],
        about: "list a large directory of a server 32 ms away",
        run: session::open_dir,
    },
    Experiment {
        rows: &["session.documents"],
        about: "document runs in a directory of a server 32 ms away, beside a local disk",
        run: session::document_runs,
    },
    Experiment {
        rows: &["session.read"],
        about: "read a file of a server 32 ms away, and again from the cache",
        run: session::whole_file,
    },
    Experiment {
        rows: &["session.save"],
        about: "write a file of a server 32 ms away anew with little changed, beside sshfs, rclone and rsync",
        run: session::save,
    },
    Experiment {
        rows: &["session.copy"],
        about: "copy a file on the mount of a server 32 ms away, beside sshfs and rclone",
        run: session::copy,
    },
    Experiment {
        rows: &["session.build"],
        about: "build a C library on a mount 32 ms away, cache cold and warm",
        run: session::builds,
    },
    Experiment {
        rows: &["session.io"],
        about: "write a trace and compute on it on a mount 32 ms away",
        run: session::io_runs,
    },
    Experiment {
        rows: &["session.guest"],
        about: "documents and a trace in a guest whose disk lies on a mount, or is an NBD export of one",
        run: session::guests,
    },
    Experiment {
        rows: &["session.posix"],
        about: "wrong bytes of fio, random operations, git and a compiler on a mount",
        run: session::posix,
    },
    Experiment {
        rows: &["session.faults"],
        about: "synced writes that are lost when client, server or link die",
        run: session::faults,
    },
    Experiment {
        rows: &["session.peers"],
        about: "sshfs, rclone, nbdkit and NFSv4 over the same link",
        run: session::peers,
    },
    Experiment {
        rows: &[
            "session.clone.first",
            "session.clone.next",
            "session.clone.lan",
            "session.clone.sequence",
            "session.clone.eight",
        ],
        about: "clone a golden machine of a server 32 ms away until the clone answers",
        run: session::clones,
    },
    Experiment {
        rows: &["session.clone.images", "session.clone.images.lan"],
        about: "clone different golden machines one after the other, and by way of a host on the LAN",
        run: session::clone_images,
    },
    Experiment {
        rows: &["session.clone.scp"],
        about: "copy a golden machine whole by scp",
        run: session::scp,
    },
];

/// All experiments, by the set that they belong to.
pub(crate) const SETS: [(&str, &[Experiment]); 5] = [
    ("run", EXPERIMENTS),
    ("pool", pool::EXPERIMENTS),
    ("protect", protect::EXPERIMENTS),
    ("capsule", capsule::EXPERIMENTS),
    ("paper", capsule::PAPER),
];

/// The experiments that `name` means: a set by its name, one by a row of its, a family by what stands before
/// the dot.
pub(crate) fn select(name: &str) -> Result<Vec<&'static Experiment>> {
    let is_meant = |row: &&str| *row == name || row.split_once('.').is_some_and(|(family, _)| family == name);
    let chosen: Vec<_> = SETS
        .iter()
        .flat_map(|(set, experiments)| experiments.iter().map(move |experiment| (*set, experiment)))
        .filter(|(set, experiment)| *set == name || experiment.rows.iter().any(is_meant))
        .map(|(_, experiment)| experiment)
        .collect();
    if chosen.is_empty() {
        bail!("no experiment {name:?}; `list` shows them");
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_a_row_a_family_or_all() {
        assert_eq!(select("scan.idle").unwrap().len(), 1);
        assert_eq!(select("scan").unwrap().len(), 2);
        assert_eq!(select("checkpoint").unwrap().len(), 1);
        assert_eq!(select("checkpoint.bytes").unwrap().len(), 1);
        assert_eq!(select("run").unwrap().len(), EXPERIMENTS.len());
        assert_eq!(select("capsule").unwrap().len(), capsule::EXPERIMENTS.len());
        assert!(select("sca").is_err());
    }
}
