//! Request handler: combines all parts of the test agent.

use crate::{
    disk::Disk,
    genid,
    life::{CheckResult, Life},
    load::{Load, Running},
    memory,
    request::{Request, Verb},
    stall::StallMeter,
    tpm,
};
use rustix::system::RebootCommand;
use std::{
    fs,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

pub(crate) struct TestAgent {
    life: Life,
    disk: Arc<Mutex<Disk>>,
    load: Mutex<Option<Running>>,
    stall: Mutex<Option<StallMeter>>,
}

impl TestAgent {
    /// Starts the test agent; takes as long as filling a buffer of `buffer_mib` MiB.
    pub(crate) fn start(buffer_mib: usize, tick: u64) -> Self {
        let life = Life::start(buffer_mib, tick);
        Self { life, disk: Arc::default(), load: Mutex::default(), stall: Mutex::default() }
    }

    /// Stops the current load and starts another one, if given.
    pub(crate) fn set_load(&self, load: Option<Load>) {
        *lock(&self.load) = load.map(Load::start);
    }

    /// Executes a request; the answer is one line without its line feed.
    pub(crate) fn answer(&self, request: &Request<'_>) -> String {
        let token = request.token;
        let text = match &request.verb {
            None => "error=unknown-request".to_owned(),
            Some(Verb::Ping) => "pong".to_owned(),
            Some(Verb::State) => self.state("-", "-"),
            Some(Verb::Check) => self.check(),
            Some(Verb::Write(count)) => match lock(&self.disk).write(self.life.nonce, *count) {
                Ok(()) => self.state("-", "-"),
                Err(error) => format!("error={}", one_word(&error.to_string())),
            },
            Some(Verb::Stall) => {
                let start = || StallMeter::start(self.disk.clone(), self.life.nonce);
                match lock(&self.stall).get_or_insert_with(start).longest() {
                    Ok(longest) => format!("longest_us={}", longest.as_micros()),
                    Err(error) => format!("error={}", one_word(&error)),
                }
            }
            Some(Verb::Dirty(load)) => {
                self.set_load(Some(*load));
                self.state("-", "-")
            }
            Some(Verb::Calm) => {
                self.set_load(None);
                self.state("-", "-")
            }
            Some(Verb::Cache) => match memory::fill_cache() {
                Ok(()) => memory::describe(),
                Err(error) => format!("error={}", one_word(&error.to_string())),
            },
            Some(Verb::Memory) => memory::describe(),
            Some(Verb::Clock) => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                format!("unix_us={}", since.as_micros())
            }
            Some(Verb::Tpm(value)) => match value.map_or(Ok(()), tpm::set).and_then(|()| tpm::describe()) {
                Ok(text) => text,
                Err(error) => format!("error={}", one_word(&error.to_string())),
            },
            Some(Verb::Reboot) => end(RebootCommand::Restart),
            Some(Verb::Poweroff) => end(RebootCommand::PowerOff),
        };
        format!("whimbrel! {token} {text}")
    }

    fn check(&self) -> String {
        let disk = match lock(&self.disk).check(self.life.nonce) {
            Ok(None) => "none".to_owned(),
            Ok(Some(verdict)) => show(&verdict),
            Err(_) => format!("{:016x}:unreadable", 0),
        };
        self.state(&show(&self.life.check_buffer()), &disk)
    }

    fn state(&self, ram: &str, disk: &str) -> String {
        let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
        let uptime = uptime.split(' ').next().unwrap_or("0");
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().replace('-', "");
        let genid = genid::read().map_or("none".to_owned(), |id| format!("{id:032x}"));
        // Numbers that grow have one width: an answer that is made again after a takeover has the length of
        // the first one, so the connection goes on.
        let steady = if self.life.counter_is_steady() { "ok" } else { "bad" };
        format!(
            "nonce={:016x} counter={:010} steady={steady} ram={ram} disk={disk} uptime={uptime:0>12} genid={genid} boot={}",
            self.life.nonce,
            self.life.counter(),
            boot.trim(),
        )
    }
}

/// Driver of network devices: a link for every device, and a file `unbind` that takes one away.
const NETWORK_DRIVER: &str = "/sys/bus/virtio/drivers/virtio_net";

/// Syncs and ends this boot of the guest.
fn end(how: RebootCommand) -> String {
    rustix::fs::sync();
    remove_network();
    match rustix::system::reboot(how) {
        Ok(()) => "ending".to_owned(),
        Err(error) => format!("error={}", one_word(&error.to_string())),
    }
}

/// Takes the network devices away. Linux resets virtio devices before a reboot, and a timer of TCP that sends
/// after that never returns (Debian's 6.1.0-56, also under QEMU alone: `start_xmit` waits for a queue that is
/// marked as broken). Whoever boots again by a service manager has stopped the network before.
fn remove_network() {
    let devices = fs::read_dir(NETWORK_DRIVER).into_iter().flatten().flatten();
    let names = devices.map(|device| device.file_name()).filter_map(|name| name.into_string().ok());
    for name in names.filter(|name| name.starts_with("virtio")) {
        // A device that stays is what every guest had before.
        let _ = fs::write(format!("{NETWORK_DRIVER}/unbind"), name);
    }
}

fn show(verdict: &CheckResult) -> String {
    format!("{:016x}:{}", verdict.sum, if verdict.good { "ok" } else { "bad" })
}

fn one_word(text: &str) -> String {
    text.replace(char::is_whitespace, "-")
}

/// A thread that panicked left no partial state: every value is replaced at once or only grows.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
