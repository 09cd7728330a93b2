//! Control commands of a machine: run, pause, switch off, balloon, announce.

use super::Qemu;
use crate::{
    launch::Vmgenid,
    qmp::{MachineEvent, QmpError},
};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::mpsc::Receiver,
    time::Duration,
};
use whimbrel_core::ByteSize;
use whimbrel_machine::{Machine, MachineError, UnpauseReport};

/// Time in which QEMU must quit; it flushes its disks.
const QUIT_TIMEOUT: Duration = Duration::from_secs(30);
const BALLOON: &str = "/machine/peripheral/balloon0";

/// State of the machine according to QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Whether the virtual CPUs run.
    pub running: bool,
    /// QEMU's name of the state: `running`, `paused`, `inmigrate`, `shutdown`, `io-error`, …
    pub name: String,
}

/// Statistics of the balloon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalloonStats {
    /// Present memory size of the guest.
    pub actual: ByteSize,
    /// Figures of the guest in bytes or counts, by QEMU's names (`stat-free-memory`, …); empty until the
    /// guest first reports.
    pub guest: BTreeMap<String, u64>,
}

impl Qemu {
    fn run_command(&self, command: &str) -> Result<(), QmpError> {
        self.qmp.execute(command, json!({})).map(drop)
    }

    /// Subscribes to all events; see [`crate::Qmp::subscribe`].
    pub fn events(&self) -> Receiver<MachineEvent> {
        self.qmp.subscribe()
    }

    /// Queries the state of the machine.
    pub fn status(&self) -> Result<Status, QmpError> {
        let answer = self.qmp.execute("query-status", json!({}))?;
        let malformed = || QmpError::Malformed { command: "query-status".into() };
        Ok(Status {
            running: answer["running"].as_bool().ok_or_else(malformed)?,
            name: answer["status"].as_str().ok_or_else(malformed)?.to_owned(),
        })
    }

    /// Presses the power button. A guest that supports it switches itself off: [`MachineEvent::Shutdown`].
    pub fn powerdown(&self) -> Result<(), QmpError> {
        self.run_command("system_powerdown")
    }

    /// Resets the machine, which remains running or paused.
    pub fn reset(&self) -> Result<(), QmpError> {
        self.run_command("system_reset")
    }

    /// Ends QEMU after its disks are flushed; returns when the process has ended. The guest is not notified.
    pub fn quit(self) -> Result<(), QmpError> {
        match self.run_command("quit") {
            // QEMU may end before it answers.
            Ok(()) | Err(QmpError::Disconnected { .. }) => {}
            Err(error) => return Err(error),
        }
        if self.process.wait(QUIT_TIMEOUT) {
            return Ok(());
        }
        Err(QmpError::TimedOut { command: "quit".into(), after: QUIT_TIMEOUT })
    }

    /// Ends QEMU at once, as a crash would.
    pub fn kill(self) {
        self.process.kill();
        self.process.wait(QUIT_TIMEOUT);
    }

    /// Shrinks or grows guest memory to `size` by the balloon. The guest does so over time:
    /// [`MachineEvent::BalloonChanged`].
    pub fn balloon(&self, size: ByteSize) -> Result<(), QmpError> {
        self.qmp.execute("balloon", json!({"value": size.0})).map(drop)
    }

    /// Memory of the guest and its statistics. The guest reports every second from the first call on.
    pub fn balloon_stats(&self) -> Result<BalloonStats, QmpError> {
        self.poll_balloon_stats(1)?;
        self.last_balloon_stats()
    }

    /// Starts reports of the guest (`yes`), at once and then every second, or stops them. The report arrives
    /// when the guest gets to it: [`Qemu::last_balloon_stats`] returns the last one.
    pub fn set_balloon_reports(&self, yes: bool) -> Result<(), QmpError> {
        // A change of the interval from 0 starts with a report; any other waits for the interval (QEMU
        // `hw/virtio/virtio-balloon.c`, balloon_stats_set_poll_interval).
        self.poll_balloon_stats(0)?;
        if yes { self.poll_balloon_stats(1) } else { Ok(()) }
    }

    fn poll_balloon_stats(&self, seconds: u32) -> Result<(), QmpError> {
        let interval = json!({"path": BALLOON, "property": "guest-stats-polling-interval", "value": seconds});
        self.qmp.execute("qom-set", interval).map(drop)
    }

    /// Memory of the guest and its last report, without requesting another.
    pub fn last_balloon_stats(&self) -> Result<BalloonStats, QmpError> {
        let answer = self.qmp.execute("query-balloon", json!({}))?;
        let actual = answer["actual"].as_u64();
        let actual = actual.ok_or_else(|| QmpError::Malformed { command: "query-balloon".into() })?;
        let stats = self.qmp.execute("qom-get", json!({"path": BALLOON, "property": "guest-stats"}))?;
        let mut guest = BTreeMap::new();
        for (name, value) in stats["stats"].as_object().into_iter().flatten() {
            // Figures that the guest does not report are all ones.
            if let Some(value) = value.as_u64().filter(|value| *value != u64::MAX) {
                guest.insert(name.clone(), value);
            }
        }
        Ok(BalloonStats { actual: ByteSize(actual), guest })
    }

    /// Lets every network port announce itself to its switch, five times within a second.
    pub fn announce_self(&self) -> Result<(), QmpError> {
        let pace = json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
        self.qmp.execute("announce-self", pace).map(drop)
    }

    /// Ids of the virtual CPU threads, each once: with TCG one thread may run all CPUs.
    pub fn cpu_threads(&self) -> Result<Vec<u32>, QmpError> {
        let answer = self.qmp.execute("query-cpus-fast", json!({}))?;
        let malformed = || QmpError::Malformed { command: "query-cpus-fast".into() };
        let id = |cpu: &Value| cpu["thread-id"].as_u64().and_then(|id| u32::try_from(id).ok());
        let cpus = answer.as_array().ok_or_else(malformed)?.iter();
        let ids = cpus.map(|cpu| id(cpu).ok_or_else(malformed)).collect::<Result<BTreeSet<_>, _>>()?;
        Ok(ids.into_iter().collect())
    }

    /// Generation id that the guest sees.
    pub fn vmgenid(&self) -> Result<Vmgenid, QmpError> {
        let answer = self.qmp.execute("query-vm-generation-id", json!({}))?;
        let guid = answer["guid"].as_str().and_then(|text| text.parse().ok());
        guid.ok_or_else(|| QmpError::Malformed { command: "query-vm-generation-id".into() })
    }

    /// Runs a command of QEMU's human monitor, whose output format is not stable.
    pub(super) fn monitor(&self, line: &str) -> Result<String, QmpError> {
        match self.qmp.execute("human-monitor-command", json!({"command-line": line}))? {
            Value::String(text) => Ok(text),
            _ => Err(QmpError::Malformed { command: line.to_owned() }),
        }
    }
}

impl Machine for Qemu {
    fn early_device_state(&mut self) -> Option<Vec<u8>> {
        self.head().map(|head| head.as_bytes().to_vec())
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        self.run_command("stop").map_err(|error| MachineError::new("pause", error))
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        self.run_command("cont").map_err(|error| MachineError::new("resume", error))
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        let state =
            self.save_device_state().map_err(|error| MachineError::new("save the devices of", error))?;
        Ok(crate::state::compose(state.head, &state.devices))
    }

    fn about_to_pause_for_state(&mut self) {
        self.begin_pause();
    }

    fn pause_for_state(&mut self) -> Result<(), MachineError> {
        self.pause_and_save()
    }

    fn unpause_with_state(&mut self) -> UnpauseReport {
        self.unpause_saved()
    }
}
