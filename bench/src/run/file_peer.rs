//! `file.peer`: a Debian guest of 2 GiB that compiles is suspended and resumed on one host, beside QEMU 10's
//! own migration to a file, `mapped-ram` with `multifd` (QEMU, docs/devel/migration/mapped-ram.rst).
//!
//! Time is from the request to suspend until the guest, in a new process, answers; the file of the peer is
//! synced, as our store is. Bytes are what the host keeps of the suspended guest beside the disk that it
//! began with. Each guest is freshly booted. Of ours, the store has the disk before, as that of a machine
//! that was launched from an image: it is imported, and a checkpoint is taken as the guest starts. What that
//! one adds of memory counts.

use super::Context;
use super::qemu_nbd::QemuNbd;
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{Hosts, Machine, allocated, console};
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use whimbrel_core::ByteSize;
use whimbrel_qemu::{LaunchSpec, Qmp, RamBacking, Sharing};
use whimbrel_testkit::guest::{DebianGuest, GuestOptions, TestAgent, Work, debian_root};

const MEMORY: ByteSize = ByteSize(2 << 30);
/// Until the compiler is in full swing.
const WARM_UP: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(120);
/// How often QEMU is asked whether it is done.
const ASK: Duration = Duration::from_millis(5);
/// Threads that write the file.
const CHANNELS: u32 = 2;
/// No limit, which QEMU has as 128 MiB a second.
const BANDWIDTH: u64 = 100 << 30;
const NAME: &str = "builder";

struct Kept {
    seconds: f64,
    bytes: f64,
}

/// Both rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let root = debian_root("qemu-10", "trixie", &["qemu-system-x86"]).context("a Debian with QEMU 10")?;
    let (ours, theirs) = in_turn(context.times(5, 1), ours, || theirs(&root))?;
    let row = |case: &str, unit, of: fn(&Kept) -> f64, most| {
        let case = format!("{case}, 2 GiB, Debian that compiles");
        let row = Row::new("file.peer", case, unit, &Samples::of(&ours, of));
        row.against("QEMU 10, mapped-ram", &Samples::of(&theirs, of)).goal(Goal::PeerAtMost(most))
    };
    Ok(vec![
        row("time until it answers", "s", |kept| kept.seconds, 0.5),
        row("bytes kept", "MB", |kept| kept.bytes / 1e6, 0.7),
    ])
}

fn options() -> GuestOptions {
    GuestOptions { buffer_mib: 1, work: Work::Compile, ..GuestOptions::default() }
}

fn ours() -> Result<Kept> {
    let hosts = Hosts::start(&["alpha"])?;
    let (alpha, machine) = (hosts.get("alpha")?, Machine::debian(MEMORY, options())?);
    let disk = machine.disks[0].to_str().context("a path that is not UTF-8")?;
    alpha.run(&["import", "--format", "disk", disk, "base"])?;
    let store = alpha.data().join("store");
    let before = allocated(&store)?;
    machine.start(alpha, NAME, &[])?;
    alpha.run(&["checkpoint", NAME])?;
    console(alpha, NAME)?.wait_ready(PATIENCE)?;
    sleep(WARM_UP);
    let begun = Instant::now();
    alpha.run(&["suspend", NAME])?;
    let bytes = (allocated(&store)? - before) as f64;
    alpha.run(&["resume", NAME])?;
    console(alpha, NAME)?.wait_ready(PATIENCE)?;
    let seconds = begun.elapsed().as_secs_f64();
    alpha.discard(NAME)?;
    Ok(Kept { seconds, bytes })
}

fn theirs(root: &Path) -> Result<Kept> {
    let folder = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
    let files = crate::harness::scratch("file-peer")?;
    let guest = DebianGuest::get()?;
    let disk = files.path().join("disk.raw");
    fs::copy(&guest.disk, &disk)?;
    let socket = folder.path().join("disk");
    let server = QemuNbd::writable(&disk, &socket)?;
    let plan = GuestPlan::debian(&guest, MEMORY, options(), server.socket())?;
    let source = Newer::start(root, &plan, &folder, "a", false)?;
    source.execute("cont", json!({}))?;
    source.agent()?.wait_ready(PATIENCE)?;
    sleep(WARM_UP);

    let state = files.path().join("state");
    let place = json!({ "uri": format!("file:{}", state.display()) });
    let begun = Instant::now();
    source.execute("stop", json!({}))?;
    source.execute("migrate", place.clone())?;
    source.wait_for("completed")?;
    drop(source);
    File::open(&state)?.sync_all()?;
    let bytes = (state.metadata()?.blocks() * 512) as f64;
    let target = Newer::start(root, &plan, &folder, "b", true)?;
    target.execute("migrate-incoming", place)?;
    target.wait_for("completed")?;
    target.execute("cont", json!({}))?;
    target.agent()?.wait_ready(PATIENCE)?;
    Ok(Kept { seconds: begun.elapsed().as_secs_f64(), bytes })
}

/// A QEMU of that Debian. Ended with the value.
struct Newer {
    child: Child,
    qmp: Qmp,
    serial: PathBuf,
}

impl Newer {
    /// Starts it with the command line of the product; it waits for `cont`, or for a state.
    fn start(root: &Path, plan: &GuestPlan, folder: &TempDir, name: &str, incoming: bool) -> Result<Self> {
        let folder = folder.path().join(name);
        fs::create_dir(&folder)?;
        let ram = RamBacking { path: folder.join("ram"), sharing: Sharing::Private };
        let spec = LaunchSpec {
            kernel: Some(plan.kernel.clone()),
            initrd: Some(plan.initrd.clone()),
            disks: plan.disks.iter().map(|(socket, _)| socket.clone()).collect(),
            incoming,
            ..LaunchSpec::new(plan.config()?, &folder, ram)
        };
        let below = |path: &str| root.join(path);
        // The loader of that Debian finds its libraries, so that QEMU needs no root of its own.
        let mut command = Command::new(below("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(below("usr/lib/x86_64-linux-gnu"));
        command.arg(below("usr/bin/qemu-system-x86_64"));
        command.env("QEMU_MODULE_DIR", below("usr/lib/x86_64-linux-gnu/qemu"));
        for firmware in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(below(firmware));
        }
        command.args(spec.argv()?).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(folder.join("qemu.log"))?);
        let mut child = command.spawn().context("QEMU 10")?;
        let deadline = Instant::now() + PATIENCE;
        let qmp = loop {
            match Qmp::connect(&spec.qmp_socket()) {
                Ok(qmp) => break qmp,
                Err(error) if child.try_wait()?.is_some() || Instant::now() > deadline => {
                    let said = fs::read_to_string(folder.join("qemu.log")).unwrap_or_default();
                    bail!("QEMU 10 does not start: {error}: {said}");
                }
                Err(_) => sleep(ASK),
            }
        };
        let newer = Self { child, qmp, serial: spec.serial_socket() };
        let on = |name: &str| json!({ "capability": name, "state": true });
        let both = json!({ "capabilities": [on("mapped-ram"), on("multifd")] });
        newer.execute("migrate-set-capabilities", both)?;
        let limits = json!({ "multifd-channels": CHANNELS, "max-bandwidth": BANDWIDTH });
        newer.execute("migrate-set-parameters", limits)?;
        Ok(newer)
    }

    fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp.execute(command, arguments).with_context(|| format!("QEMU refuses {command}"))
    }

    fn agent(&self) -> Result<TestAgent> {
        Ok(TestAgent::over_console(UnixStream::connect(&self.serial)?)?)
    }

    fn wait_for(&self, wanted: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.execute("query-migrate", json!({}))?;
            match state["status"].as_str() {
                Some(now) if now == wanted => return Ok(()),
                Some("failed" | "cancelled") => bail!("QEMU's migration failed: {state}"),
                _ => ensure!(Instant::now() < deadline, "QEMU's migration does not end: {state}"),
            }
            sleep(ASK);
        }
    }
}

impl Drop for Newer {
    fn drop(&mut self) {
        // Both fail only if it has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
