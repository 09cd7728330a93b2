//! `delta.*`: beta has a capsule of a guest that compiles, and fetches the one ten seconds newer.
//!
//! Ours is all that crosses the link: memory, disk, device state, what describes them, both ways, headers
//! included. The peers have the raw images of memory and disk, as they were at the two capsules. `zstd
//! --patch-from` needs both versions in one place, so it is a bound for those who know everything, not a way
//! to send anything.

use super::sites::{NAME, Sites, check_whole};
use super::tools::Rsync;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, Machine};
use crate::run::{Context, patch};
use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};

const MEMORY: ByteSize = ByteSize(512 << 20);
/// Until the compiler is in full swing.
const WARM_UP: Duration = Duration::from_secs(20);
const APART: Duration = Duration::from_secs(10);
const MB: f64 = 1e6;

/// What it cost to bring one version.
struct Brought {
    bytes: f64,
    cpu: f64,
    ms: f64,
    patch: f64,
    memory_patch: f64,
    /// Of each block size.
    rsync: Vec<f64>,
}

/// All rows: they come of the same capsules.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let sites = Sites::start()?;
    let options = GuestOptions { buffer_mib: 1, work: Work::Compile, ..GuestOptions::default() };
    Machine::debian(MEMORY, options)?.run(sites.alpha(), NAME)?;
    sleep(WARM_UP);
    let versions = context.times(6, 2);
    keep_versions(sites.alpha(), versions)?;
    sites.alpha().discard(NAME)?;
    // None is rsync's own choice, the square root of the length.
    let blocks: &[Option<u32>] =
        if context.quick { &[Some(4096)] } else { &[None, Some(2048), Some(4096), Some(8192)] };
    let images = sites.disk().join("images");
    fs::create_dir(&images)?;
    let rsync = Rsync::serve(&sites, &images)?;
    export(sites.alpha(), &images, 0)?;
    sites.beta().run(&["pull", &located(0)])?;
    let mut brought = Vec::new();
    for version in 1..=versions {
        brought.push(bring(&sites, &rsync, &images, version, blocks)?);
    }
    Ok(rows(&brought, blocks))
}

fn rows(brought: &[Brought], blocks: &[Option<u32>]) -> Vec<Row> {
    let bytes = Samples::of(brought, |it| it.bytes / MB);
    let row = |name, case: &str| Row::new(name, case, "MB", &bytes);
    let of_block = |at: usize| Samples::of(brought, |it| it.rsync[at] / MB);
    let best = (0..blocks.len()).min_by(|a, b| of_block(*a).median().total_cmp(&of_block(*b).median()));
    let best = best.unwrap_or(0);
    let name = blocks[best].map_or("its own choice".to_owned(), |block| block.to_string());
    vec![
        row("delta.bytes", "all, both ways")
            .against("zstd -3 --patch-from, memory and disk", &Samples::of(brought, |it| it.patch / MB))
            .goal(Goal::PeerAtMost(1.0)),
        row("delta.bytes", "all, both ways, beside memory alone")
            .against("zstd -3 --patch-from, memory only", &Samples::of(brought, |it| it.memory_patch / MB)),
        row("delta.rsync", "all, both ways")
            .against(format!("rsync -z, memory and disk, blocks of {name}"), &of_block(best))
            .goal(Goal::PeerAtMost(0.33)),
        Row::new("delta.cpu", "both daemons", "s", &Samples::of(brought, |it| it.cpu))
            .goal(Goal::AtMost(0.5)),
        Row::new("delta.time", "1 Gbit/s", "ms", &Samples::of(brought, |it| it.ms)),
    ]
}

/// Capsules `version-0` to `version-COUNT`, ten seconds apart from beginning to beginning.
pub(super) fn keep_versions(host: &Daemon, count: usize) -> Result<()> {
    for version in 0..=count {
        let begun = Instant::now();
        host.run(&["checkpoint", NAME, "--tag", &tag(version)])?;
        if version < count {
            sleep((begun + APART).saturating_duration_since(Instant::now()));
        }
    }
    Ok(())
}

fn bring(
    sites: &Sites,
    rsync: &Rsync,
    images: &Path,
    version: usize,
    blocks: &[Option<u32>],
) -> Result<Brought> {
    let cpu = || anyhow::Ok([sites.alpha().cpu()?, sites.beta().cpu()?]);
    let used = cpu()?;
    let ((pulled, ms), bytes) = sites.counting(|| sites.beta().timed(&["pull", &located(version)]))?;
    let [alpha, beta] = cpu()?;
    let (alpha, beta) = (alpha - used[0], beta - used[1]);
    check_whole(&pulled, &tag(version))?;
    eprintln!(
        "    version {version}: {bytes} bytes on the link, CPU {alpha:.2} + {beta:.2} s: {}",
        pulled["result"]
    );
    let (before, after) = (folder(images, version - 1), export(sites.alpha(), images, version)?);
    let patched = |image: &str| patch::bytes(&before.join(image), &after.join(image));
    let (memory, disk) = (patched("memory")?, patched("disk0")?);
    let mut sent = Vec::new();
    for block in blocks {
        let name = version.to_string();
        let ((), bytes) = sites.counting(|| rsync.fetch(sites, &name, Some(&before), *block))?;
        sent.push(bytes as f64);
    }
    eprintln!("    patches: memory {memory}, disk {disk}; rsync {blocks:?}: {sent:?}");
    fs::remove_dir_all(before)?;
    Ok(Brought {
        bytes: bytes as f64,
        cpu: alpha + beta,
        ms,
        patch: (memory + disk) as f64,
        memory_patch: memory as f64,
        rsync: sent,
    })
}

/// Writes the raw images of a version to a folder of its own.
fn export(host: &Daemon, images: &Path, version: usize) -> Result<PathBuf> {
    let folder = folder(images, version);
    fs::create_dir(&folder)?;
    export_to(host, &tag(version), &folder)?;
    Ok(folder)
}

/// Writes the raw images of a capsule, memory and every disk, to a folder.
pub(super) fn export_to(host: &Daemon, capsule: &str, folder: &Path) -> Result<()> {
    let shown = host.json(&["show", capsule])?;
    for image in shown["images"].as_array().context("a capsule without images")? {
        let image = image["name"].as_str().context("an image without a name")?;
        let path = folder.join(image);
        let to = path.to_str().context("a path that is not UTF-8")?;
        host.run(&["export", capsule, to, "--format", "raw", "--image", image])?;
    }
    Ok(())
}

fn folder(images: &Path, version: usize) -> PathBuf {
    images.join(version.to_string())
}

pub(super) fn tag(version: usize) -> String {
    format!("version-{version}")
}

pub(super) fn located(version: usize) -> String {
    format!("alpha:{}", tag(version))
}
