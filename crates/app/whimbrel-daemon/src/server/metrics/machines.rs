//! Metrics of each machine: state, processor time, memory, traffic, what it waits for. Names after KubeVirt's
//! `kubevirt_vmi_*` (<https://kubevirt.io/monitoring/metrics.html>).

use crate::daemon::Daemon;
use std::collections::BTreeMap;
use whimbrel_api::{MachineInfo, MachineState, OperationKind};
use whimbrel_core::{MachineName, PAGE_SIZE};
use whimbrel_metrics::{Page, ProcessUsage, usage_of};
use whimbrel_vm::Traffic;

whimbrel_metrics::metrics! {
    /// Metrics of machines.
    pub(super) MACHINE_METRICS:
    MACHINES = Gauge "whimbrel_machines" ["state"] "Machines of this host by state.";
    STATE = Gauge "whimbrel_machine_state" ["machine", "state"] "Always 1; the label has the present state.";
    VCPUS = Gauge "whimbrel_machine_vcpus" ["machine"] "Virtual CPUs.";
    CPU = Counter "whimbrel_machine_cpu_usage_seconds_total" ["machine"] "Processor time of the machine's QEMU.";
    MEMORY = Gauge "whimbrel_machine_memory_domain_bytes" ["machine"] "Memory that the machine was given.";
    RESIDENT = Gauge "whimbrel_machine_memory_resident_bytes" ["machine"] "Memory of the machine's QEMU on the host.";
    RECEIVED = Counter "whimbrel_machine_network_receive_bytes_total" ["machine", "interface"] "Bytes that the guest received.";
    RECEIVED_PACKETS = Counter "whimbrel_machine_network_receive_packets_total" ["machine", "interface"] "Frames that the guest received.";
    SENT = Counter "whimbrel_machine_network_transmit_bytes_total" ["machine", "interface"] "Bytes that the guest sent.";
    SENT_PACKETS = Counter "whimbrel_machine_network_transmit_packets_total" ["machine", "interface"] "Frames that the guest sent.";
    DROPPED = Counter "whimbrel_machine_network_packets_dropped_total" ["machine", "interface"] "Frames that were dropped in either direction.";
    READ = Counter "whimbrel_machine_storage_read_traffic_bytes_total" ["machine", "drive"] "Bytes that the guest read.";
    WRITTEN = Counter "whimbrel_machine_storage_write_traffic_bytes_total" ["machine", "drive"] "Bytes that the guest wrote.";
    ALLOCATED = Gauge "whimbrel_machine_storage_overlay_bytes" ["machine", "drive"] "Bytes that the machine has changed on a disk, when its state last changed.";
    MISSING = Gauge "whimbrel_machine_missing_pages" ["machine"] "Pages that a machine runs without and that are still elsewhere.";
    STALLED = Gauge "whimbrel_machine_stalled" ["machine"] "Whether missing pages cannot be fetched at the moment.";
    REMAINING = Gauge "whimbrel_machine_migration_data_remaining_bytes" ["machine"] "Bytes left of the present round of a migration under way, before they are encoded.";
    UPLOAD = Gauge "whimbrel_machine_upload_stalled" ["machine"] "Whether the upload of the machine's capsules fails at the moment.";
}

/// A machine, with what is known of its process.
struct Sample {
    info: MachineInfo,
    usage: Option<ProcessUsage>,
}

pub(super) fn write(page: &mut Page, host: &Daemon) {
    let mut infos = host.machines.infos();
    host.uploads.add_to(&mut infos);
    let samples: Vec<Sample> = infos
        .into_iter()
        .map(|info| {
            let usage = info.pid.and_then(usage_of);
            Sample { info, usage }
        })
        .collect();
    states(page, &samples);
    usage(page, &samples);
    let traffic: Vec<_> = host
        .machines
        .all()
        .iter()
        .map(|machine| (machine.name().clone(), machine.traffic().read()))
        .collect();
    network(page, &traffic);
    storage(page, &traffic, &samples);
    waiting(page, host, &samples);
}

fn states(page: &mut Page, samples: &[Sample]) {
    // States that an operator watches are there with 0, so that an alert has a series to look at.
    let mut counts: BTreeMap<&str, u64> = ["running", "crashed", "unreadable"].map(|of| (of, 0)).into();
    for sample in samples {
        *counts.entry(sample.info.state.name()).or_default() += 1;
    }
    let mut machines = page.family(&MACHINES);
    counts.iter().for_each(|(state, count)| machines.sample(&[state], *count as f64));
    let mut state = page.family(&STATE);
    samples.iter().for_each(|one| state.sample(&[one.info.name.as_str(), one.info.state.name()], 1.0));
}

fn usage(page: &mut Page, samples: &[Sample]) {
    let mut vcpus = page.family(&VCPUS);
    samples.iter().for_each(|one| vcpus.sample(&[one.info.name.as_str()], f64::from(one.info.cpus)));
    let mut memory = page.family(&MEMORY);
    samples.iter().for_each(|one| memory.sample(&[one.info.name.as_str()], one.info.memory.0 as f64));
    let living: Vec<(&str, ProcessUsage)> =
        samples.iter().filter_map(|one| Some((one.info.name.as_str(), one.usage?))).collect();
    let mut cpu = page.family(&CPU);
    living.iter().for_each(|(name, usage)| cpu.sample(&[name], usage.cpu_seconds));
    let mut resident = page.family(&RESIDENT);
    living.iter().for_each(|(name, usage)| resident.sample(&[name], usage.resident_bytes as f64));
}

fn network(page: &mut Page, traffic: &[(MachineName, Traffic)]) {
    let mut ports = Vec::new();
    for (machine, traffic) in traffic {
        for (index, counters) in traffic.ports.iter().enumerate() {
            ports.push((machine, format!("net{index}"), counters));
        }
    }
    type Number = fn(&whimbrel_net::PortCounters) -> u64;
    let metrics: [(_, Number); 5] = [
        (&RECEIVED, |port| port.inbound_bytes),
        (&RECEIVED_PACKETS, |port| port.inbound_frames),
        (&SENT, |port| port.outbound_bytes),
        (&SENT_PACKETS, |port| port.outbound_frames),
        (&DROPPED, |port| port.dropped_frames),
    ];
    for (metric, number) in metrics {
        let mut family = page.family(metric);
        for (machine, interface, counters) in &ports {
            family.sample(&[machine.as_str(), interface], number(counters) as f64);
        }
    }
}

fn storage(page: &mut Page, traffic: &[(MachineName, Traffic)], samples: &[Sample]) {
    let disks: Vec<_> =
        traffic.iter().flat_map(|(name, of)| of.disks.iter().map(move |disk| (name, disk))).collect();
    let mut family = page.family(&READ);
    disks.iter().for_each(|(name, disk)| family.sample(&[name.as_str(), &disk.disk], disk.read as f64));
    let mut family = page.family(&WRITTEN);
    disks.iter().for_each(|(name, disk)| family.sample(&[name.as_str(), &disk.disk], disk.written as f64));
    let mut family = page.family(&ALLOCATED);
    for sample in samples {
        for (index, disk) in sample.info.disks.iter().enumerate() {
            family.sample(&[sample.info.name.as_str(), &format!("disk{index}")], disk.owned.0 as f64);
        }
    }
}

fn waiting(page: &mut Page, host: &Daemon, samples: &[Sample]) {
    let missing = |state: &MachineState| match state {
        MachineState::Loading { resident_pages, total_pages, stalled, .. } => {
            Some((total_pages.saturating_sub(*resident_pages), stalled.is_some()))
        }
        MachineState::ServingPages { missing_pages, stalled, .. } => {
            Some((missing_pages.unwrap_or(0), stalled.is_some()))
        }
        // Present with 0, so that the series does not vanish while an alert looks at it.
        MachineState::Running => Some((0, false)),
        _ => None,
    };
    let waiting: Vec<(&str, u64, bool)> = samples
        .iter()
        .filter_map(|one| {
            missing(&one.info.state).map(|(left, stalled)| (one.info.name.as_str(), left, stalled))
        })
        .collect();
    let mut family = page.family(&MISSING);
    waiting.iter().for_each(|(name, left, _)| family.sample(&[name], *left as f64));
    let mut family = page.family(&STALLED);
    waiting.iter().for_each(|(name, _, stalled)| family.sample(&[name], f64::from(*stalled)));
    let mut family = page.family(&REMAINING);
    for operation in host.operations().running() {
        if let (OperationKind::Migrate, Some(pages)) = (operation.kind, operation.pages_left) {
            family.sample(&[&operation.subject], (pages * PAGE_SIZE as u64) as f64);
        }
    }
    let mut family = page.family(&UPLOAD);
    for sample in samples {
        if let Some(uploads) = &sample.info.uploads {
            family.sample(&[sample.info.name.as_str()], f64::from(uploads.stalled.is_some()));
        }
    }
}
