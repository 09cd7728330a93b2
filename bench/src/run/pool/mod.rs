//! The checkpoint pool, beside what its paper measured and beside programs people use for the same.
//!
//! Where only our own work counts, manager and benefactors are in this process (`members`); where processes
//! are killed, limited or measured from outside, they are the program as people start it (`processes`).

mod bandwidth;
mod blast;
mod capsules;
mod claims;
mod commits;
mod cutting;
mod dcp;
mod erasure;
mod faults;
mod figures;
mod link;
mod manager_away;
mod members;
mod model;
mod moosefs;
mod peers;
mod postgres;
mod processes;
mod s3;
mod scale;
mod scrub;
mod sftp;
mod simulation;
mod tables;
mod tier;
mod window;

use super::{Context, Experiment, images};
use anyhow::Result;
use members::{Members, admit};
use processes::{Place, Processes};
use std::{fs::File, io::Write, path::Path, time::Instant};

/// What a pool does on one machine.
pub(crate) const EXPERIMENTS: &[Experiment] = &[
    Experiment { rows: &["fuse.null"], about: "write to a mount that keeps nothing", run: bandwidth::null },
    Experiment {
        rows: &["oab.default", "read.default", "oab.one", "read.one"],
        about: "a GiB into a pool of four and back",
        run: bandwidth::bandwidth,
    },
    Experiment {
        rows: &["fsch", "cbch"],
        about: "cut and hash an image, and what is found again",
        run: cutting::cutting,
    },
    Experiment {
        rows: &["peers"],
        about: "a series of images written, beside other places",
        run: peers::run,
    },
    Experiment {
        rows: &["commits"],
        about: "commits a second of 64 clients, by both databases",
        run: commits::commits,
    },
    Experiment {
        rows: &["erasure"],
        about: "chunks cut into pieces, and put together with some lost",
        run: erasure::run,
    },
    Experiment {
        rows: &["restart"],
        about: "a killed manager of ten million chunks, until it serves again",
        run: commits::restart,
    },
    Experiment {
        rows: &["manager.away"],
        about: "kill the manager that a writer uses, one of three",
        run: manager_away::run,
    },
    Experiment {
        rows: &["application.pause"],
        about: "how long a BLAST stands still for a checkpoint, in a pool and on the local disk",
        run: tables::application_pause,
    },
    Experiment {
        rows: &["dcp"],
        about: "how long a training of four processes waits for a checkpoint",
        run: dcp::run,
    },
    Experiment { rows: &["scrub"], about: "check all chunks of a benefactor", run: scrub::run },
    Experiment { rows: &["faults"], about: "kill members while files are written", run: faults::run },
    Experiment {
        rows: &["scale.files"],
        about: "a manager of 100,000 files and ten million chunks",
        run: scale::files,
    },
];

/// Experiments of the paper, faults, and many members.
pub(crate) const LONG: &[Experiment] = &[
    Experiment { rows: &["oab.1g"], about: "a GiB into two benefactors over 1 Gbit/s", run: link::run },
    Experiment { rows: &["saved"], about: "two versions of an image: bytes kept", run: cutting::saved },
    Experiment {
        rows: &["tier"],
        about: "checkpoints into a pool whose chunks lie in an S3 store",
        run: tier::run,
    },
    Experiment {
        rows: &["capsules"],
        about: "versions of a machine into a pool, and a machine that lives from it",
        run: capsules::run,
    },
    Experiment {
        rows: &["stripes"],
        about: "bandwidth by protocol and width of the stripe (figures 2, 3, 6)",
        run: figures::stripes,
    },
    Experiment {
        rows: &["buffers"],
        about: "bandwidth by the size of the window (figures 4, 5)",
        run: figures::buffers,
    },
    Experiment {
        rows: &["dedup"],
        about: "a series with and without what was there before (figure 7)",
        run: figures::dedup,
    },
    Experiment {
        rows: &["similarity"],
        about: "what checkpoints of a BLAST have in common (tables 3, 4)",
        run: tables::similarity,
    },
    Experiment {
        rows: &["application"],
        about: "a BLAST with checkpoints, on disk and in a pool (table 5)",
        run: tables::application,
    },
    Experiment {
        rows: &["model.error", "model.scale"],
        about: "hundreds of members in a model, checked against real ones (figure 8)",
        run: simulation::run,
    },
    Experiment { rows: &["scale.clients"], about: "seven clients, twenty benefactors", run: scale::clients },
];

const GIB: usize = 1 << 30;
/// What a program writes at once.
const BLOCK: usize = 1 << 20;

/// Bytes that do not compress and are not found twice.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    out
}

fn rate(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / 1e6 / begun.elapsed().as_secs_f64()
}

fn write(path: &Path, data: &[u8]) -> Result<f64> {
    let begun = Instant::now();
    let mut file = File::create(path)?;
    data.chunks(BLOCK).try_for_each(|block| file.write_all(block))?;
    // Close returns the error of the commit, which dropping would not.
    file.sync_all()?;
    drop(file);
    Ok(rate(data.len(), begun))
}
