//! `update.packages`: packages are upgraded in a child capsule, and a host that has the parent fetches the
//! child (the paper's figure 5b).
//!
//! The child boots from the golden capsule, upgrades by `dpkg -i`, switches itself off, and its disks are
//! kept. The peers have the raw disk before and after; `packages` are the bytes of the package files, what
//! `apt-get` would fetch at each host.

use super::packages::{Packages, SMALL};
use super::sites::{Sites, check_whole};
use super::tools::{Casync, Rsync};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::Daemon;
use crate::run::{Context, patch};
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_testkit::guest::DebianGuest;

const GOLDEN: &str = "golden";
/// An upgrade of many packages without hardware virtualisation takes minutes.
const PATIENCE: Duration = Duration::from_secs(1800);
/// What the paper calls null: a capsule that was only started and switched off.
const NULL: &str = "null";
const MB: f64 = 1e6;

/// Bytes that an update costs.
struct Update {
    ours: u64,
    rsync: u64,
    patch: u64,
    casync: u64,
}

/// The rows: each update beside each peer.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let packages = Packages::get()?;
    let sites = Sites::start()?;
    let alpha = sites.alpha();
    make_golden(alpha, &packages)?;
    sites.beta().run(&["pull", &format!("alpha:{GOLDEN}-kept")])?;
    let images = sites.disk().join("images");
    export(alpha, GOLDEN, &images.join(GOLDEN))?;
    let rsync = Rsync::serve(&sites, &images)?;
    let small = SMALL.iter().map(|(set, _)| *set).take(context.times(5, 2));
    let large = if context.quick { "dozen" } else { "all" };
    let mut rows = Vec::new();
    for set in [NULL].into_iter().chain(small).chain([large]) {
        let (count, size) = packages.sets.get(set).copied().unwrap_or_default();
        let begun = Instant::now();
        upgrade(alpha, set)?;
        eprintln!(
            "    {set}: {count} packages of {size} bytes, upgraded in {:.0} s",
            begun.elapsed().as_secs_f64()
        );
        let update = measure(&sites, &rsync, &images, set)?;
        rows.extend(rows_of(set, count, size, &update));
    }
    Ok(rows)
}

fn rows_of(set: &str, count: usize, size: u64, update: &Update) -> Vec<Row> {
    let one = |bytes: u64| Samples::new(vec![bytes as f64 / MB]);
    let case = match set {
        NULL => "nothing updated (the paper: 0.2 MB)".to_owned(),
        "dozen" | "all" => format!("{count} packages"),
        _ => set.to_owned(),
    };
    let row = || Row::new("update.packages", case.clone(), "MB", &one(update.ours));
    let peer = |name: &str, bytes: u64| row().against(name, &one(bytes));
    let mut rows = Vec::new();
    if size > 0 {
        let paper = if size > 10_000_000 { "packages (the paper: 0.6 x)" } else { "packages" };
        let packages = peer(paper, size);
        rows.push(if size > 10_000_000 { packages.goal(Goal::PeerAtMost(0.6)) } else { packages });
    }
    rows.extend([
        peer("rsync -z of the disk, its own choice of blocks", update.rsync),
        peer("zstd -3 --patch-from of the disk", update.patch),
        peer("casync: new chunks and index", update.casync),
    ]);
    rows
}

/// The capsule of the golden disk, switched off as a machine would be that somebody looked after.
fn make_golden(host: &Daemon, packages: &Packages) -> Result<()> {
    let DebianGuest { kernel, initrd, .. } = DebianGuest::get()?;
    let files = [&packages.golden, &packages.disk, &kernel, &initrd].map(|path| path.to_string_lossy());
    let [golden, disk, kernel, initrd] = &files;
    let append = append(NULL);
    let words = ["run", GOLDEN, "--memory", "1G", "--disk", golden, "--disk", disk];
    let more = ["--kernel", kernel, "--initrd", initrd, "--append", &append];
    host.run(&[&words[..], &more[..]].concat())?;
    keep_when_off(host, GOLDEN)
}

/// A child of the golden capsule with this set upgraded.
fn upgrade(host: &Daemon, set: &str) -> Result<()> {
    host.run(&["derive", "golden-kept", set, "--append", &append(set)])?;
    keep_when_off(host, set)
}

fn append(set: &str) -> String {
    format!("console=ttyS0 quiet panic=-1 set={set}")
}

/// Waits until a machine has switched itself off, and keeps its disks under its name.
fn keep_when_off(host: &Daemon, name: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let machines = host.json(&["ps"])?;
        let machines = machines.as_array().context("`ps` without a list")?;
        let state = machines.iter().find(|it| it["name"] == *name).context("the machine is gone")?;
        match state["state"]["kind"].as_str() {
            Some("stopped") => break,
            Some("running" | "loading" | "starting") => {}
            other => ensure!(false, "the machine {name} is {other:?}"),
        }
        ensure!(Instant::now() < deadline, "{name} does not end: {state}");
        sleep(Duration::from_millis(200));
    }
    host.run(&["checkpoint", name, "--disks-only", "--tag", &format!("{name}-kept")])?;
    host.run(&["delete", name]).map(drop)
}

fn measure(sites: &Sites, rsync: &Rsync, images: &Path, set: &str) -> Result<Update> {
    let from = format!("alpha:{set}-kept");
    let (pulled, ours) = sites.counting(|| sites.beta().json(&["pull", &from]))?;
    check_whole(&pulled, set)?;
    let (old, new) = (images.join(GOLDEN), images.join(set));
    export(sites.alpha(), set, &new)?;
    ensure!(set == NULL || was_done(&new.join("disk0"))?, "the upgrade of {set} failed in the guest");
    let ((), rsync) = sites.counting(|| rsync.fetch(sites, set, Some(&old), None))?;
    let patch = patch::bytes(&old.join("disk0"), &new.join("disk0"))?;
    let casync = Casync::new(sites.disk())?;
    casync.keep(&old.join("disk0"))?;
    let casync = casync.keep(&new.join("disk0"))?;
    eprintln!("    ours {ours}, rsync {rsync}, patch {patch}, casync {casync}: {}", pulled["result"]);
    fs::remove_dir_all(new)?;
    Ok(Update { ours, rsync, patch, casync })
}

fn export(host: &Daemon, set: &str, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let path = folder.join("disk0");
    let to = path.to_str().context("a path that is not UTF-8")?;
    host.run(&["export", &format!("{set}-kept"), to, "--format", "raw", "--image", "disk0"]).map(drop)
}

/// Whether the guest wrote down that dpkg succeeded.
fn was_done(disk: &Path) -> Result<bool> {
    let output = Command::new("debugfs").args(["-R", "cat /update.done"]).arg(disk).output()?;
    Ok(output.stdout == b"0\n")
}
