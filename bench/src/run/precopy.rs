//! The peer of `migrate.*`: QEMU's own pre-copy, between two QEMUs with the command line that the product
//! uses.
//!
//! Two differences, both in its favour: memory is not shared with anybody, and the network port is a tap
//! device in the host's bridge without a process between. Its settings are the defaults, but for the
//! bandwidth, which is the link's.

use super::migrate::{Moved, watch};
use crate::guest::GuestPlan;
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::NicConfig;
use whimbrel_qemu::{LaunchSpec, Qmp, RamBacking, Sharing, probe};
use whimbrel_testkit::guest::TestAgent;
use whimbrel_testkit::lab::{Host, Lab, Process};

const BOOT_PATIENCE: Duration = Duration::from_secs(120);
const START_PATIENCE: Duration = Duration::from_secs(10);
const MIGRATE_PATIENCE: Duration = Duration::from_secs(120);
/// How often QEMU is asked whether it is done.
const ASK: Duration = Duration::from_millis(10);
const MAC: &str = "52:54:00:77:00:01";
/// Where the target waits for the state.
const PORT: u16 = 7500;
const TAP: &str = "guest0";
/// High, for a bridge takes the lowest address of its ports as its own: with a lower one the host itself
/// would change its address when the port comes and goes, and be lost to its neighbours for a while.
const TAP_MAC: &str = "fe:54:00:77:00:01";

/// One of the two QEMUs. Ended with the value.
pub(super) struct Side {
    qmp: Qmp,
    spec: LaunchSpec,
    _process: Process,
}

/// What a QEMU is started for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Source,
    Target,
}

/// Where the disk is mirrored to, and what the disk is called there.
const DISK_PORT: u16 = 7501;
const DISK_NODE: &str = "disk0";
const MIRROR: &str = "mirror";

/// Boots the guest of `plan` on `alpha` and moves it to `beta`, at no more than `mbit`.
pub(super) fn moved(lab: &Lab, plan: &GuestPlan, mbit: u64) -> Result<Moved> {
    let pair = Pair::start(lab, [plan, plan], mbit)?;
    watch(lab, || pair.migrate())
}

/// The same with `auto-converge`: QEMU throttles the guest's CPUs more and more while it dirties faster than
/// can be sent. The guest has `settle` before.
pub(super) fn moved_converging(lab: &Lab, plan: &GuestPlan, mbit: u64, settle: Duration) -> Result<Moved> {
    let pair = Pair::start(lab, [plan, plan], mbit)?;
    let on = json!({ "capabilities": [{ "capability": "auto-converge", "state": true }] });
    pair.source.execute("migrate-set-capabilities", on)?;
    sleep(settle);
    watch(lab, || pair.migrate())
}

/// The same with `postcopy-ram`: the guest runs on the target as soon as the migration has begun, and its
/// pages follow. Bytes and time are up to when all of them are there.
pub(super) fn moved_lazily(lab: &Lab, plan: &GuestPlan, mbit: u64, settle: Duration) -> Result<Moved> {
    let pair = Pair::start(lab, [plan, plan], mbit)?;
    let on = json!({ "capabilities": [{ "capability": "postcopy-ram", "state": true }] });
    pair.target.execute("migrate-set-capabilities", on.clone())?;
    pair.source.execute("migrate-set-capabilities", on)?;
    // Its own limit, without one unless it is told.
    let limit = json!({ "max-postcopy-bandwidth": mbit * 1_000_000 / 8 });
    pair.source.execute("migrate-set-parameters", limit)?;
    sleep(settle);
    watch(lab, || {
        pair.source.execute("migrate", json!({ "uri": pair.place }))?;
        pair.source.wait_for("active")?;
        pair.source.execute("migrate-start-postcopy", json!({}))?;
        pair.source.wait_for("completed")
    })
}

/// A guest on `alpha` and a QEMU on `beta` that waits for it.
pub(super) struct Pair {
    source: Side,
    target: Side,
    place: String,
    _folder: tempfile::TempDir,
}

impl Pair {
    /// Boots the guest of the first plan; the second is the same with what the target has for disks.
    pub(super) fn start(lab: &Lab, plans: [&GuestPlan; 2], mbit: u64) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
        let source = Side::start(lab.host("alpha"), plans[0], &folder.path().join("a"), Role::Source)?;
        let target = Side::start(lab.host("beta"), plans[1], &folder.path().join("b"), Role::Target)?;
        source.boot()?;
        let place = format!("tcp:{}:{PORT}", lab.host("beta").address());
        target.execute("migrate-incoming", json!({ "uri": place }))?;
        source.execute("migrate-set-parameters", json!({ "max-bandwidth": mbit * 1_000_000 / 8 }))?;
        Ok(Self { source, target, place, _folder: folder })
    }

    /// Moves the guest; the downtime that QEMU believes in, in milliseconds.
    pub(super) fn migrate(&self) -> Result<f64> {
        self.source.execute("migrate", json!({ "uri": self.place }))?;
        self.source.wait_for("completed")
    }

    /// Moves the guest with its disk as QEMU's documentation has it (live block operations, "drive-mirror and
    /// NBD"): mirrored until both are equal, the guest writing to both from the start (else a disk that is
    /// written flat out is never mirrored), then memory, then the mirror is ended before the target runs.
    pub(super) fn migrate_with_disk(&self, lab: &Lab) -> Result<()> {
        let (host, port) = (lab.host("beta").address().to_string(), DISK_PORT.to_string());
        let server = json!({ "type": "inet", "host": host, "port": port });
        let listen = json!({ "type": "inet", "data": { "host": host, "port": port } });
        self.target.execute("nbd-server-start", json!({ "addr": listen }))?;
        let export = json!({ "type": "nbd", "id": "export", "node-name": DISK_NODE, "name": DISK_NODE, "writable": true });
        self.target.execute("block-export-add", export)?;
        let there = json!({ "driver": "nbd", "node-name": "there", "server": server, "export": DISK_NODE });
        self.source.execute("blockdev-add", there)?;
        let mirror = json!({ "job-id": MIRROR, "device": DISK_NODE, "target": "there", "sync": "full", "copy-mode": "write-blocking" });
        self.source.execute("blockdev-mirror", mirror)?;
        self.source.wait_job(|job| job["ready"] == true)?;
        let capability =
            json!({ "capabilities": [{ "capability": "pause-before-switchover", "state": true }] });
        self.source.execute("migrate-set-capabilities", capability)?;
        self.source.execute("migrate", json!({ "uri": self.place }))?;
        self.source.wait_for("pre-switchover")?;
        self.source.execute("block-job-cancel", json!({ "device": MIRROR }))?;
        self.source.wait_job(Value::is_null)?;
        self.source.execute("migrate-continue", json!({ "state": "pre-switchover" }))?;
        self.source.wait_for("completed").map(drop)
    }
}

impl Side {
    /// Starts a QEMU that waits: for `cont`, or for a guest.
    pub(super) fn start(host: &Host, plan: &GuestPlan, folder: &Path, role: Role) -> Result<Self> {
        std::fs::create_dir(folder)?;
        let mut config = plan.config()?;
        config.nics.push(NicConfig { mac: MAC.to_owned(), bridge: None });
        let ram = RamBacking { path: folder.join("ram"), sharing: Sharing::Private };
        let spec = LaunchSpec {
            kernel: Some(plan.kernel.clone()),
            initrd: Some(plan.initrd.clone()),
            disks: plan.disks.iter().map(|(socket, _)| socket.clone()).collect(),
            incoming: role == Role::Target,
            ..LaunchSpec::new(config, folder, ram)
        };
        let log = File::create(folder.join("qemu.log"))?;
        let mut command = Command::new(&probe()?.path);
        command.args(arguments(&spec, role)?);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut process = host.command(command)?;
        let qmp = connect(&mut process, &spec)?;
        host.ip(&format!("link set {TAP} address {TAP_MAC} master br0 up"))?;
        host.wait_forwarding()?;
        Ok(Self { qmp, spec, _process: process })
    }

    /// Boots the guest and waits until its test agent is ready.
    pub(super) fn boot(&self) -> Result<()> {
        self.execute("cont", json!({}))?;
        let console = UnixStream::connect(self.spec.serial_socket())?;
        TestAgent::over_console(console)?.wait_ready(BOOT_PATIENCE)?;
        Ok(())
    }

    /// Has QEMU execute a command.
    pub(super) fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp.execute(command, arguments).with_context(|| format!("QEMU refuses {command}"))
    }

    /// Waits until what is told of the mirror satisfies; null if it is gone.
    fn wait_job(&self, satisfies: impl Fn(&Value) -> bool) -> Result<()> {
        let deadline = Instant::now() + MIGRATE_PATIENCE;
        loop {
            let jobs = self.execute("query-block-jobs", json!({}))?;
            let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["device"] == MIRROR));
            if satisfies(job.unwrap_or(&Value::Null)) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "QEMU's mirror does not come on: {jobs}");
            sleep(ASK);
        }
    }

    /// Waits until the migration is in this state; the downtime that QEMU believes in, in milliseconds, or
    /// none yet.
    fn wait_for(&self, state: &str) -> Result<f64> {
        let wanted = state;
        let deadline = Instant::now() + MIGRATE_PATIENCE;
        loop {
            let state = self.execute("query-migrate", json!({}))?;
            match state["status"].as_str() {
                Some(state_now) if state_now == wanted => {
                    return Ok(state["downtime"].as_f64().unwrap_or(0.0));
                }
                Some("failed" | "cancelled") => bail!("QEMU's migration failed: {state}"),
                _ => ensure!(Instant::now() < deadline, "QEMU's migration does not end: {state}"),
            }
            sleep(ASK);
        }
    }
}

/// The product's arguments with a tap as the network port; a target runs as soon as it has everything.
fn arguments(spec: &LaunchSpec, role: Role) -> Result<Vec<OsString>> {
    let mut arguments = spec.argv()?;
    let netdev = arguments.iter().position(|argument| argument == "-netdev").context("no network port")?;
    arguments[netdev + 1] = format!("tap,id=net0,ifname={TAP},script=no,downscript=no").into();
    if role == Role::Target {
        arguments.retain(|argument| argument != "-S");
    }
    Ok(arguments)
}

fn connect(process: &mut Process, spec: &LaunchSpec) -> Result<Qmp> {
    let deadline = Instant::now() + START_PATIENCE;
    loop {
        match Qmp::connect(&spec.qmp_socket()) {
            Ok(qmp) => return Ok(qmp),
            Err(error) => {
                let ended = process.try_wait()?.is_some() || Instant::now() > deadline;
                ensure!(!ended, "QEMU does not start: {error}, see its log in {}", spec.dir.display());
            }
        }
        sleep(ASK);
    }
}
