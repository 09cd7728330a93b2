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
use std::{collections::HashMap, io::IsTerminal, time::Duration};
use whimbrel_api::{HostInfo, MachineInfo, MachineUsage};
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel top
  whimbrel top --interval 500ms
  whimbrel top --count 1 --json";

/// Show CPU, memory, network and disk use of the machines until Ctrl-C
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
    machines: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    machine: MachineInfo,
    /// Totals since its processes were started; none of a machine that has none.
    usage: Option<MachineUsage>,
    /// None at the first look.
    rates: Option<Rates>,
}

/// Use since the look before.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Rates {
    /// Percent of one CPU.
    cpu_percent: f64,
    /// Bytes a second to and from networks.
    network: f64,
    /// Bytes a second to and from disks.
    disks: f64,
}

impl Rates {
    /// None if the processes are others than before, which begin to count anew.
    fn between(before: &MachineUsage, now: &MachineUsage) -> Option<Self> {
        let elapsed = now.at_ms.checked_sub(before.at_ms).filter(|ms| *ms > 0)? as f64;
        let cpu = now.cpu_ms.checked_sub(before.cpu_ms)? as f64;
        let network = (now.received + now.sent).checked_sub(before.received + before.sent)? as f64;
        let disks = (now.read + now.written).checked_sub(before.read + before.written)? as f64;
        let a_second = |bytes| 1000.0 * bytes / elapsed;
        Some(Self { cpu_percent: 100.0 * cpu / elapsed, network: a_second(network), disks: a_second(disks) })
    }
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let interval = self.interval.0.max(Duration::from_millis(100));
        let mut before = HashMap::new();
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

async fn poll(context: &Context, before: &mut HashMap<MachineName, MachineUsage>) -> Result<Look, CliError> {
    let host = context.client.host().await?;
    let machines = context.client.machines().await?;
    let usage = context.client.usage().await?;
    let mut usage: HashMap<_, _> = usage.into_iter().map(|one| (one.name.clone(), one)).collect();
    let row = |machine: MachineInfo| {
        let usage = usage.remove(&machine.name);
        let rates = usage.as_ref().and_then(|now| Rates::between(before.get(&machine.name)?, now));
        Row { machine, usage, rates }
    };
    let machines: Vec<Row> = machines.into_iter().map(row).collect();
    *before =
        machines.iter().filter_map(|row| Some((row.machine.name.clone(), row.usage.clone()?))).collect();
    Ok(Look { host, machines })
}

/// Update as text. On a terminal it replaces the previous one.
fn screen(look: &Look) -> String {
    let rate = |bytes: f64| format!("{}/s", ByteSize(bytes as u64));
    let rows = look.machines.iter().map(|Row { machine, usage, rates }| {
        [
            machine.name.to_string(),
            machine_text::state_of(machine),
            rates.map(|rates| format!("{:.0} %", rates.cpu_percent)).unwrap_or_default(),
            usage.as_ref().map(|usage| usage.resident.to_string()).unwrap_or_default(),
            machine.memory.to_string(),
            rates.map(|rates| rate(rates.network)).unwrap_or_default(),
            rates.map(|rates| rate(rates.disks)).unwrap_or_default(),
            protection_text::short(machine),
        ]
    });
    let titles = ["NAME", "STATE", "CPU", "RESIDENT", "MEMORY", "NETWORK", "DISKS", "PROTECTION"];
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

    fn usage(at_ms: u64, cpu_ms: u64, sent: u64) -> MachineUsage {
        let name = "web".parse().unwrap();
        let (resident, received, read, written) = (ByteSize(1), 3, 5, 7);
        MachineUsage { name, at_ms, cpu_ms, resident, received, sent, read, written }
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks_at_the_same_processes() {
        let rates = Rates::between(&usage(1000, 100, 0), &usage(3000, 1100, 4000)).unwrap();
        assert_eq!(rates, Rates { cpu_percent: 50.0, network: 2000.0, disks: 0.0 });
        assert_eq!(Rates::between(&usage(1000, 100, 0), &usage(3000, 99, 0)), None, "another process");
        assert_eq!(Rates::between(&usage(1000, 100, 0), &usage(1000, 100, 0)), None, "no time");
    }
}
