//! `migrate.disk.time`: a guest moves with a disk that it writes to, beside QEMU's pre-copy with the disk
//! mirrored over NBD.
//!
//! The disk has 2 GiB, of them 700 MB used, half of which is noise. The guest writes noise to it all the
//! time, and checks at the end what it wrote. Hosts of this bench share a file system, so the disk's file is
//! hidden from the target: else nothing of it would have to travel.

use super::Context;
use super::migrate::{linked, on_the_uplink};
use super::precopy;
use super::qemu_nbd::QemuNbd;
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{Daemon, GUEST, Hosts, Machine};
use anyhow::{Context as _, Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{CheckResult, GuestOptions, TestAgent, Work};
use whimbrel_testkit::lab::Lab;

const MBIT: u64 = 1000;
const MEMORY: ByteSize = ByteSize(512 << 20);
const DISK: ByteSize = ByteSize(2 << 30);
const USED: u64 = 700_000_000;
const PATIENCE: Duration = Duration::from_secs(60);
/// Blocks of 4 KiB that the guest writes between two syncs.
const WRITES: u64 = 256;
const PEER: &str = "QEMU pre-copy, mirror over NBD";

/// Time and bytes of one move.
struct Moved {
    ms: f64,
    bytes: f64,
}

pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let image = hosts.disk().join("used.raw");
    make_disk(&image, DISK, USED)?;
    let ours = || ours(&hosts, &image).context("whimbrel, with a disk");
    let peer = || theirs(&hosts, &image).context(PEER);
    let (ours, theirs) = in_turn(context.times(20, 1), ours, peer)?;
    let row = |name, unit, of: fn(&Moved) -> f64| {
        let case = "2 GB disk, 700 MB used, written to";
        Row::new(name, case, unit, &Samples::of(&ours, of)).against(PEER, &Samples::of(&theirs, of))
    };
    Ok(vec![
        row("migrate.disk.time", "s", |moved| moved.ms / 1e3).goal(Goal::PeerAtMost(0.6)),
        row("migrate.disk.bytes", "MB", |moved| moved.bytes / 1e6),
    ])
}

/// Every other 2 KiB of what is used is noise, as of files of which half shrinks to nothing.
pub(super) fn make_disk(path: &Path, size: ByteSize, used: u64) -> Result<()> {
    let file = File::create(path)?;
    file.set_len(size.0)?;
    let (mut state, mut offset) = (1u64, 64 << 20);
    let mut chunk = vec![0u8; 1 << 20];
    while offset < used + (64 << 20) {
        for piece in chunk.chunks_exact_mut(4096) {
            for byte in &mut piece[..2048] {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *byte = (state >> 56) as u8;
            }
            piece[2048..].fill((state >> 40) as u8 | 1);
        }
        file.write_all_at(&chunk, offset)?;
        offset += chunk.len() as u64;
    }
    Ok(())
}

fn options() -> GuestOptions {
    GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 16, work: Work::Idle }
}

fn ours(hosts: &Hosts, image: &Path) -> Result<Moved> {
    let (alpha, beta) = (hosts.get("alpha")?, hosts.get("beta")?);
    hide(beta, image)?;
    let mut machine = Machine::small(MEMORY, options());
    machine.disks = vec![image.to_owned()];
    machine.run(alpha, "web")?;
    let moved = while_it_writes(&hosts.lab, || {
        let said = alpha.json(&["migrate", "web", "beta"])?;
        eprintln!("    {}", said["result"]);
        Ok(())
    });
    if moved.is_err() {
        let _ = alpha.discard("web");
    }
    beta.discard("web")?;
    moved
}

fn theirs(hosts: &Hosts, image: &Path) -> Result<Moved> {
    let pair = PeerWithDisk::start(hosts, || GuestPlan::small(MEMORY, options()), image, MBIT)?;
    while_it_writes(&hosts.lab, || pair.migrate())
}

/// The peer's guest with a copy of a disk, and a QEMU with an empty one that waits for both.
pub(super) struct PeerWithDisk<'a> {
    lab: &'a Lab,
    // Before the servers of its disks.
    pair: precopy::Pair,
    _disks: [QemuNbd; 2],
    _folder: TempDir,
}

impl<'a> PeerWithDisk<'a> {
    /// Boots the guest of the plan from a copy of `image`.
    pub(super) fn start(
        hosts: &'a Hosts,
        plan: impl Fn() -> GuestPlan,
        image: &Path,
        mbit: u64,
    ) -> Result<Self> {
        let (folder, size) = (tempfile::tempdir_in(hosts.disk())?, std::fs::metadata(image)?.len());
        let disk = |name: &str| folder.path().join(name);
        copy_sparse(image, &disk("a.raw"))?;
        File::create(disk("b.raw"))?.set_len(size)?;
        let disks = ["a", "b"]
            .map(|name| QemuNbd::writable(&disk(&format!("{name}.raw")), &disk(&format!("{name}.sock"))));
        let [source, target] = disks;
        let disks = [source?, target?];
        let plans = disks
            .each_ref()
            .map(|server| GuestPlan { disks: vec![(server.socket().to_owned(), ByteSize(size))], ..plan() });
        let pair = precopy::Pair::start(&hosts.lab, plans.each_ref(), mbit)?;
        Ok(Self { lab: &hosts.lab, pair, _disks: disks, _folder: folder })
    }

    /// Moves it.
    pub(super) fn migrate(&self) -> Result<()> {
        self.pair.migrate_with_disk(self.lab)
    }
}

/// Hides a disk's file from a host, so that it has to travel.
pub(super) fn hide(host: &Daemon, image: &Path) -> Result<()> {
    let path = image.to_str().context("a path that is not UTF-8")?;
    let _ = host.inside("umount", &[path]);
    host.inside("mount", &["--bind", "/proc/version", path])
}

fn copy_sparse(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").arg("--sparse=always").args([from, to]).status()?;
    ensure!(status.success(), "cannot copy {}", from.display());
    Ok(())
}

/// Has a guest moved while it writes to its disk; what it wrote must be there afterwards.
fn while_it_writes(lab: &Lab, migrate: impl FnOnce() -> Result<()>) -> Result<Moved> {
    lab.host("client").ip("neigh flush all")?;
    let mut witness = witness(lab)?;
    witness.write(WRITES)?;
    let (stop, before, begun) = (AtomicBool::new(false), on_the_uplink(lab)?, Instant::now());
    let moved = thread::scope(|scope| {
        let writes = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                witness.write(WRITES)?;
            }
            witness.check().context("no answer after the move")
        });
        let outcome = migrate();
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        stop.store(true, Ordering::Relaxed);
        let checked = writes.join().ok().context("the writer failed")?;
        outcome?;
        let checked = checked?;
        ensure!(
            matches!(checked.disk, CheckResult::Good(_)),
            "the disk is not what was written: {checked:?}"
        );
        ensure!(matches!(checked.ram, CheckResult::Good(_)), "memory is not what it was: {checked:?}");
        Ok(ms)
    })?;
    Ok(Moved { ms: moved, bytes: (on_the_uplink(lab)? - before) as f64 })
}

fn witness(lab: &Lab) -> Result<TestAgent> {
    let address = format!("{GUEST}:7000").parse()?;
    let deadline = Instant::now() + PATIENCE;
    let stream = loop {
        match lab.host("client").connect(address, Duration::from_secs(2)) {
            Ok(stream) => break stream,
            Err(error) => ensure!(Instant::now() < deadline, "the guest does not answer: {error}"),
        }
        thread::sleep(Duration::from_millis(50));
    };
    let mut witness = TestAgent::connected(stream)?;
    witness.wait_ready(PATIENCE)?;
    Ok(witness)
}
