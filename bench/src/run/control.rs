//! The control of `migrate.downtime.*`: a guest that goes nowhere. It stops, loses its translated code and
//! goes on at once, on one host.
//!
//! A guest without hardware virtualisation has its code translated anew wherever it comes to, whoever moves
//! it, and answers nobody while that lasts. What clients see of a move less what they see of this is the
//! move's own.
//!
//! QEMU throws its translations away when a guest stops for its debugger (`gdbstub.c`, `gdb_vm_state_change`,
//! RUN_STATE_DEBUG), some releases also when a breakpoint is set. So a debugger comes by, has the guest
//! execute one instruction, and leaves (QEMU documentation, "GDB usage"; GDB manual, "Remote Protocol"). QEMU
//! counts how often it did that; where a visit changes nothing, the experiment fails instead of comparing
//! with a mere stop.

use super::precopy::{Role, Side};
use crate::guest::GuestPlan;
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_testkit::lab::Lab;

const PATIENCE: Duration = Duration::from_secs(10);
/// Until a guest that goes on has lost its translations.
const FLUSH: Duration = Duration::from_secs(2);

/// A guest on `alpha`.
pub(super) struct Control {
    side: Side,
    debugger: PathBuf,
    _folder: tempfile::TempDir,
}

impl Control {
    /// Boots the guest of `plan`.
    pub(super) fn start(lab: &Lab, plan: &GuestPlan) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
        let side = Side::start(lab.host("alpha"), plan, &folder.path().join("a"), Role::Source)?;
        side.boot()?;
        let debugger = folder.path().join("debugger");
        let command = format!("gdbserver unix:{},server=on,wait=off", debugger.display());
        side.execute("human-monitor-command", json!({ "command-line": command }))?;
        let control = Self { side, debugger, _folder: folder };
        let before = control.flushes()?;
        control.interrupt()?;
        // A processor throws them away when it goes on, which may be after QEMU's answer.
        let deadline = Instant::now() + FLUSH;
        while control.flushes()? == before {
            ensure!(Instant::now() < deadline, "this QEMU keeps its translations when a debugger stops it");
            sleep(Duration::from_millis(20));
        }
        Ok(control)
    }

    /// How often QEMU has thrown its translations away.
    fn flushes(&self) -> Result<u64> {
        let said = self.side.execute("human-monitor-command", json!({ "command-line": "info jit" }))?;
        let said = said.as_str().unwrap_or_default();
        let count = said.lines().find_map(|line| line.strip_prefix("TB flush count"));
        count.and_then(|count| count.trim().parse().ok()).with_context(|| format!("no count in {said}"))
    }

    /// Stops the guest, has its translated code thrown away, and lets it go on. How long it stood still, in
    /// milliseconds.
    pub(super) fn interrupt(&self) -> Result<f64> {
        let begun = Instant::now();
        // The guest stops when a debugger connects.
        let mut debugger = Debugger::connect(&self.debugger)?;
        debugger.ask("s", "$T05")?;
        debugger.ask("D", "$OK#9a")?;
        let stood = begun.elapsed().as_secs_f64() * 1e3;
        let status = self.side.execute("query-status", json!({}))?;
        ensure!(status["running"] == true, "the guest does not go on: {status}");
        Ok(stood)
    }
}

/// A debugger that says two things.
struct Debugger(UnixStream);

impl Debugger {
    fn connect(path: &std::path::Path) -> Result<Self> {
        let stream = UnixStream::connect(path).context("QEMU lets no debugger in")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(stream))
    }

    /// Sends a packet and waits until `answered` has come.
    fn ask(&mut self, packet: &str, answered: &str) -> Result<()> {
        let sum = packet.bytes().fold(0_u8, u8::wrapping_add);
        write!(self.0, "${packet}#{sum:02x}")?;
        let mut answer = Vec::new();
        while !answer.ends_with(answered.as_bytes()) {
            let mut byte = [0];
            ensure!(answer.len() < 256, "{packet} is answered with {}", String::from_utf8_lossy(&answer));
            if self.0.read(&mut byte)? == 0 {
                bail!("QEMU hung up on {packet}");
            }
            answer.extend(byte);
        }
        self.0.write_all(b"+")?;
        Ok(())
    }
}
