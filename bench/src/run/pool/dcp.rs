//! `dcp`: how long a training of four processes waits for a checkpoint by PyTorch's distributed checkpoints.
//!
//! The training is a program in a Debian that has PyTorch (`dcp.py`). It saves asynchronously, by the package
//! `whimbrel`: what it waits for is the copy of its state. The same to the local disk is by PyTorch's own
//! writer, which is made to copy.

use super::{Context, Processes, processes::text};
use crate::{
    harness::{Goal, Row, Samples, scratch},
    hosts::program,
};
use anyhow::{Context as _, Result};
use serde::Deserialize;
use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};
use whimbrel_testkit::guest::debian_root;

/// Debian 13, whose PyTorch needs no graphics card.
const SUITE: &str = "trixie";
const PACKAGES: [&str; 5] =
    ["python3-torch", "python3-numpy", "python3-fsspec", "python3-httpx", "python3-typing-extensions"];
const TRAINING: &str = include_str!("dcp.py");
const RANKS: &str = "4";
/// Changes into the Debian, with the folder of the pool, the package and the program in it.
const ENTER: &str = r#"root=$1 data=$2 package=$3 program=$4; shift 4
mount --rbind /proc "$root/proc" && mount --rbind /dev "$root/dev" && mount --rbind "$data" "$root/mnt" &&
mount --bind "$package" "$root/opt" && mount --bind "$program" "$root/srv" && exec chroot "$root" env \
    PATH=/srv:/usr/bin:/bin HOME=/root XDG_CONFIG_HOME=/mnt/config WHIMBREL_POOL_MOUNT=/mnt/mnt \
    PYTHONPATH=/opt PYTHONDONTWRITEBYTECODE=1 python3 /mnt/dcp.py /mnt/local "$@""#;

/// Seconds of the saves of one way.
#[derive(Debug, Deserialize)]
struct Way {
    /// For which the first one blocked, which also gets the memory.
    first: f64,
    /// For which the others blocked.
    blocked: Vec<f64>,
    /// Until the others were complete.
    complete: Vec<f64>,
}

impl Way {
    fn blocked(&self) -> Samples {
        Samples::new(self.blocked.clone())
    }

    fn complete(&self) -> Samples {
        Samples::new(self.complete.clone())
    }
}

#[derive(Debug, Deserialize)]
struct Figures {
    pool: Way,
    pool_sync: Way,
    disk: Way,
    disk_sync: Way,
}

/// What the training is told, and what it says.
fn train(pool: &Processes, mib: usize, times: usize) -> Result<Figures> {
    let root = debian_root("torch", SUITE, &PACKAGES)?;
    let dir = pool.dir.path();
    fs::write(dir.join("dcp.py"), TRAINING)?;
    fs::create_dir(dir.join("local"))?;
    // Where the program looks for its key.
    fs::create_dir(dir.join("config"))?;
    symlink("../client", dir.join("config/whimbrel"))?;
    let program = program()?;
    let beside = program.parent().context("a program in no folder")?;
    let folders: [PathBuf; 4] = [root, dir.to_owned(), package(), beside.to_owned()];
    let mut words = ["--mount", "sh", "-c", ENTER, "sh"].map(str::to_owned).to_vec();
    words.extend(folders.iter().map(|folder| text(folder)));
    words.extend([RANKS.to_owned(), mib.to_string(), times.to_string()]);
    let output = pool.output("unshare", &words)?;
    let line = output.lines().find(|line| line.starts_with('{')).context("the training said nothing")?;
    Ok(serde_json::from_str(line)?)
}

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("clients").join("python/src")
}

/// The row, what the first save costs, and how long it takes until a checkpoint is complete.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let (mib, times) = (context.times(1024, 96), context.times(5, 3));
    let pool = Processes::start(4, scratch("dcp")?)?;
    let _mount = pool.mount("mnt")?;
    let ways = train(&pool, mib, times)?;
    let row = |what: &str, samples: &Samples| {
        Row::new("dcp", format!("{mib} MiB of {RANKS} processes, {what}"), "s", samples)
    };
    let one = |seconds| Samples::new(vec![seconds]);
    Ok(vec![
        row("async, until the training goes on", &ways.pool.blocked())
            .against("to the local disk", &ways.disk.blocked())
            .goal(Goal::AtMost(0.3)),
        row("the first one, which gets its memory", &one(ways.pool.first))
            .against("to the local disk", &one(ways.disk.first)),
        row("synchronous", &ways.pool_sync.blocked()).against("to the local disk", &ways.disk_sync.blocked()),
        row("async, until it is complete", &ways.pool.complete())
            .against("to the local disk", &ways.disk.complete()),
    ])
}
