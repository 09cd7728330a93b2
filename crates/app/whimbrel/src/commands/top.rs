//! `whimbrel top`: shows again and again what each machine uses.

use crate::{
    argument_types::DurationArg,
    context::Context,
    error::CliError,
    machine_text,
    output::{write, write_as_is},
    protection_text,
    table::{count, span, table},
};
use serde::Serialize;
use std::{
    collections::HashMap,
    fs,
    io::IsTerminal,
    time::{Duration, Instant},
};
use whimbrel_api::{HostInfo, MachineInfo};
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel top
  whimbrel top --interval 500ms
  whimbrel top --count 1 --json";

/// Show CPU, memory and disk use of the machines until Ctrl-C
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Time between two updates
    #[arg(long, value_name = "DURATION", default_value = "2s")]
    interval: DurationArg,
    /// Print N updates and exit
    #[arg(long, value_name = "N")]
    count: Option<u64>,
}

/// Clears a terminal.
const CLEAR: &[u8] = b"\x1b[H\x1b[2J";

/// Use of all machines at one moment. With `--json` each is one line.
#[derive(Debug, Serialize)]
struct Look {
    host: HostInfo,
    machines: Vec<Usage>,
}

#[derive(Debug, Serialize)]
struct Usage {
    machine: MachineInfo,
    /// Percent of one CPU since the last update; none at the first one.
    cpu_percent: Option<f64>,
    /// Resident memory of the QEMU process.
    resident_bytes: Option<u64>,
}

/// CPU time that each machine had used at the last update.
#[derive(Debug, Default)]
struct Before(HashMap<MachineName, (Instant, Duration)>);

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let interval = self.interval.0.max(Duration::from_millis(100));
        let mut before = Before::default();
        let mut looks = 0;
        loop {
            let look = poll(context, &mut before).await?;
            if context.output.json {
                let line =
                    serde_json::to_string(&look).map_err(|e| CliError::io("write the result")(e.into()))?;
                write((line + "\n").as_bytes())?;
            } else {
                if std::io::stdout().is_terminal() {
                    write_as_is(CLEAR)?;
                }
                write(screen(&look).as_bytes())?;
            }
            looks += 1;
            if self.count.is_some_and(|count| looks >= count) {
                return Ok(());
            }
            tokio::time::sleep(interval).await;
        }
    }
}

async fn poll(context: &Context, before: &mut Before) -> Result<Look, CliError> {
    let host = context.client.host().await?;
    let machines = context.client.machines().await?;
    let machines = machines.into_iter().map(|machine| before.usage(machine)).collect();
    Ok(Look { host, machines })
}

impl Before {
    fn usage(&mut self, machine: MachineInfo) -> Usage {
        let now = Instant::now();
        let cpu = sum(&machine, cpu_time);
        let last = cpu.and_then(|cpu| self.0.insert(machine.name.clone(), (now, cpu)));
        let cpu_percent = cpu.zip(last).map(|(cpu, (then, last))| {
            let elapsed = now.duration_since(then).as_secs_f64().max(1e-3);
            100.0 * cpu.saturating_sub(last).as_secs_f64() / elapsed
        });
        Usage { cpu_percent, resident_bytes: sum(&machine, resident), machine }
    }
}

/// Sum over QEMU and the process of its own that serves the machine, as far as they live.
fn sum<T: std::iter::Sum>(machine: &MachineInfo, of: fn(u32) -> Option<T>) -> Option<T> {
    let qemu = machine.pid.and_then(of)?;
    let process = machine.process.as_ref().and_then(|process| of(process.pid));
    Some([Some(qemu), process].into_iter().flatten().sum())
}

/// User and system time of a process (proc_pid_stat(5), fields 14 and 15, counted after the name in
/// brackets).
fn cpu_time(pid: u32) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

/// Resident memory of a process in bytes (proc_pid_statm(5), field 2).
fn resident(pid: u32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Update as text. On a terminal it replaces the previous one.
fn screen(look: &Look) -> String {
    let rows = look.machines.iter().map(|usage| {
        [
            usage.machine.name.to_string(),
            machine_text::state_of(&usage.machine),
            usage.cpu_percent.map(|cpu| format!("{cpu:.0} %")).unwrap_or_default(),
            usage.resident_bytes.map(|bytes| ByteSize(bytes).to_string()).unwrap_or_default(),
            usage.machine.memory.to_string(),
            ByteSize(usage.machine.disks.iter().map(|disk| disk.owned.0).sum()).to_string(),
            protection_text::short(&usage.machine),
        ]
    });
    let titles = ["NAME", "STATE", "CPU", "RESIDENT", "MEMORY", "WRITTEN", "PROTECTION"];
    let table = table(titles, rows, "no machines");
    let host = &look.host;
    let up = span(Duration::from_secs(host.uptime_s));
    let store = format!(
        "{} in {}, {} free",
        count(host.store.capsules, "capsule"),
        host.store.stored,
        host.store.free
    );
    let machines = count(look.machines.len() as u64, "machine");
    format!("{} up {up}, {machines}, {store}\n\n{table}", host.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_used_time_and_memory() {
        let pid = std::process::id();
        assert!(cpu_time(pid).is_some());
        assert!(resident(pid).unwrap() > 1 << 16);
        assert_eq!((cpu_time(u32::MAX), resident(u32::MAX)), (None, None));
    }
}
