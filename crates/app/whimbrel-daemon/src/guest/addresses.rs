//! Addresses of guests, as qemu-ga says them, for lists of machines.
//!
//! A thread asks the guests one after the other, so that a list never waits for a guest. One that does not
//! answer is asked less and less often. What a guest says is shown, and used for nothing else.

use crate::{daemon::Daemon, machine::entry::Machine};
use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use whimbrel_api::{MachineInfo, NicInfo};
use whimbrel_core::{MachineName, lock};
use whimbrel_qemu::GuestInterface;
use whimbrel_vm::process_report::{Interface, ProcessReport};

/// Time for a guest to answer.
const PATIENCE: Duration = Duration::from_millis(500);
/// Interval at which guests are looked for that are to be asked.
const LOOK: Duration = Duration::from_secs(2);
/// Interval at which a guest that answers is asked again.
const AGAIN: Duration = Duration::from_secs(20);
/// Shortest and longest time until a guest that did not answer is asked again.
const SILENT_MIN: Duration = Duration::from_secs(4);
const SILENT_MAX: Duration = Duration::from_secs(300);

/// Addresses that the guests of this host have said.
#[derive(Default)]
pub(crate) struct GuestAddresses(Mutex<BTreeMap<MachineName, Known>>);

struct Known {
    /// Process of the QEMU: another one is another life of the machine.
    pid: Option<u32>,
    interfaces: Vec<GuestInterface>,
    next: Instant,
    /// Time to wait after the next silence.
    silence: Duration,
}

impl GuestAddresses {
    /// Adds addresses to the ports of machines, by hardware address.
    pub(crate) fn add_to(&self, machines: &mut [MachineInfo]) {
        let known = lock(&self.0);
        for machine in machines {
            let Some(known) = known.get(&machine.name).filter(|known| known.pid == machine.pid) else {
                continue;
            };
            machine.nics.iter_mut().for_each(|nic| add(nic, &known.interfaces));
        }
    }

    /// Machines of which it is time to ask, and whose guests may answer.
    fn due(&self, machines: Vec<Arc<Machine>>, now: Instant) -> Vec<(Arc<Machine>, Option<u32>)> {
        let mut known = lock(&self.0);
        known.retain(|name, _| machines.iter().any(|machine| machine.name() == name));
        let asked = machines.into_iter().filter(|machine| machine.qemu_ga_at_hand().is_some());
        let with_pid = asked.map(|machine| {
            let pid = machine.info().pid;
            (machine, pid)
        });
        let is_due = |(machine, pid): &(Arc<Machine>, Option<u32>)| {
            known.get(machine.name()).is_none_or(|known| known.next <= now || known.pid != *pid)
        };
        with_pid.filter(is_due).collect()
    }

    /// Whether it is time that the machine's own process asks the guest.
    pub(crate) fn is_due_for_process(&self, machine: &Machine) -> bool {
        let (soon, pid) = (Instant::now() + LOOK, machine.info().pid);
        let known = lock(&self.0);
        known.get(machine.name()).is_none_or(|known| known.next <= soon || known.pid != pid)
    }

    /// Notes what the guest of a machine has told the machine's own process.
    pub(crate) fn note_reported(&self, machine: &Machine, report: &ProcessReport) {
        let interface = |(mac, addresses): &Interface| GuestInterface {
            name: String::new(),
            mac: Some(mac.clone()),
            addresses: addresses.clone(),
        };
        let interfaces = report.interfaces.as_ref().map(|all| all.iter().map(interface).collect());
        self.note(machine.name(), machine.info().pid, interfaces, Instant::now());
    }

    fn note(&self, name: &MachineName, pid: Option<u32>, answer: Option<Vec<GuestInterface>>, now: Instant) {
        let mut all = lock(&self.0);
        let before = all.remove(name).filter(|known| known.pid == pid);
        let silence = before.map_or(SILENT_MIN, |known| known.silence);
        let known = match answer {
            Some(interfaces) => Known { pid, interfaces, next: now + AGAIN, silence: SILENT_MIN },
            None => Known {
                pid,
                interfaces: Vec::new(),
                next: now + silence,
                silence: (silence * 2).min(SILENT_MAX),
            },
        };
        all.insert(name.clone(), known);
    }
}

fn add(nic: &mut NicInfo, interfaces: &[GuestInterface]) {
    let is_its =
        |found: &&GuestInterface| found.mac.as_ref().is_some_and(|mac| mac.eq_ignore_ascii_case(&nic.mac));
    let addresses = interfaces.iter().filter(is_its).flat_map(|found| &found.addresses);
    for address in addresses.filter(|address| is_of_a_network(**address)) {
        if !nic.addresses.contains(address) {
            nic.addresses.push(*address);
        }
    }
}

/// Addresses by which others find it: a link has its own in any case.
fn is_of_a_network(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            !address.is_loopback() && !address.is_link_local() && !address.is_unspecified()
        }
        IpAddr::V6(address) => {
            !address.is_loopback() && !address.is_unicast_link_local() && !address.is_unspecified()
        }
    }
}

impl Daemon {
    /// Asks guests for their addresses, as long as the daemon lives.
    pub(crate) fn start_asking_addresses(self: &Arc<Self>) {
        let daemon = Arc::downgrade(self);
        super::spawn("guest-addresses", move || {
            while let Some(daemon) = daemon.upgrade() {
                for (machine, pid) in daemon.addresses.due(daemon.machines.all(), Instant::now()) {
                    let Some(ga) = machine.qemu_ga_at_hand() else { continue };
                    let answer = ga.session(PATIENCE).and_then(|mut session| session.interfaces());
                    daemon.addresses.note(machine.name(), pid, answer.ok(), Instant::now());
                }
                if !daemon.sleep_unless_closing(LOOK) {
                    return;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(mac: &str, addresses: &[&str]) -> GuestInterface {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        GuestInterface { name: "eth0".into(), mac: Some(mac.into()), addresses }
    }

    #[test]
    fn a_port_gets_the_addresses_of_its_hardware_address_and_no_others() {
        let mac = "52:54:00:00:00:0a".to_owned();
        let mut nic = NicInfo { mac, bridge: None, addresses: vec!["10.0.0.2".parse().unwrap()] };
        let said = ["10.0.0.2", "fd00::2", "fe80::1", "127.0.0.1", "169.254.0.3"];
        add(
            &mut nic,
            &[interface("52:54:00:00:00:0A", &said), interface("52:54:00:00:00:0b", &["10.0.0.9"])],
        );
        assert_eq!(nic.addresses, ["10.0.0.2".parse::<IpAddr>().unwrap(), "fd00::2".parse().unwrap()]);
    }

    #[test]
    fn a_silent_guest_is_asked_less_and_less_often_and_another_life_anew() {
        let (addresses, web, now) = (GuestAddresses::default(), "web".parse().unwrap(), Instant::now());
        for _ in 0..20 {
            addresses.note(&web, Some(7), None, now);
        }
        let next = |addresses: &GuestAddresses| lock(&addresses.0)[&web].next - now;
        assert_eq!(next(&addresses), SILENT_MAX);
        addresses.note(&web, Some(8), None, now);
        assert_eq!(next(&addresses), SILENT_MIN);
        addresses.note(&web, Some(8), Some(Vec::new()), now);
        assert_eq!(next(&addresses), AGAIN);
    }
}
