//! Usage of a process as the kernel counts it: processor time, memory, descriptors (proc(5)).

use crate::Page;
use std::{fs, os::unix::fs::MetadataExt};

crate::metrics! {
    /// Metrics of every daemon, named as in Prometheus's own libraries.
    pub PROCESS:
    BUILD = Gauge "whimbrel_build_info" ["version"] "Always 1; the label has the version of the program.";
    CPU = Counter "process_cpu_seconds_total" [] "Processor time of the daemon.";
    RESIDENT = Gauge "process_resident_memory_bytes" [] "Memory of the daemon, with what it maps of guests.";
    OWN = Gauge "process_private_memory_bytes" [] "Memory that only the daemon has.";
    FILES = Gauge "process_open_fds" [] "Open descriptors of the daemon.";
    START = Gauge "process_start_time_seconds" [] "Start of the daemon, since 1970.";
}

/// Processor time and memory of a process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProcessUsage {
    /// Seconds of processor time, of all threads and in the kernel too.
    pub cpu_seconds: f64,
    /// Bytes of resident memory, of them those of files and shared memory.
    pub resident_bytes: u64,
    /// Bytes of these that are of files and shared memory.
    pub shared_bytes: u64,
    /// Seconds from the boot of the host to the start of the process.
    pub started_seconds: f64,
}

/// Usage of a process, if it lives. Two small reads.
pub fn usage_of(pid: u32) -> Option<ProcessUsage> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let pages = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    // The name stands in brackets and may have spaces and brackets itself; state is the first field after it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field)?.parse::<f64>().ok();
    let rate = rustix::param::clock_ticks_per_second() as f64;
    let mut pages = pages.split_whitespace().skip(1).map(|count| count.parse::<u64>().ok());
    let page = rustix::param::page_size() as u64;
    Some(ProcessUsage {
        cpu_seconds: (ticks(11)? + ticks(12)?) / rate,
        resident_bytes: pages.next()?? * page,
        shared_bytes: pages.next()?? * page,
        started_seconds: ticks(19)? / rate,
    })
}

/// Writes the metrics of this process.
pub fn own_process(page: &mut Page, version: &str) {
    page.family(&BUILD).sample(&[version], 1.0);
    let Some(usage) = usage_of(std::process::id()) else { return };
    page.single(&CPU, usage.cpu_seconds);
    page.single(&RESIDENT, usage.resident_bytes as f64);
    page.single(&OWN, usage.resident_bytes.saturating_sub(usage.shared_bytes) as f64);
    // Since Linux 6.2 the size of this directory is the number of its entries, so it need not be listed.
    let files = fs::metadata("/proc/self/fd").map_or(0, |directory| directory.size());
    page.single(&FILES, files as f64);
    if let Some(booted) = boot_time() {
        page.single(&START, booted + usage.started_seconds);
    }
}

/// Boot of the host in seconds since 1970.
fn boot_time() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    #[test]
    fn a_process_finds_itself() {
        let usage = usage_of(std::process::id()).unwrap();
        assert!(usage.resident_bytes > usage.shared_bytes, "{usage:?}");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        let age = now - boot_time().unwrap() - usage.started_seconds;
        assert!((-2.0..36_000.0).contains(&age), "{age}");
        let mut page = Page::new();
        own_process(&mut page, "1");
        let text = page.into_text();
        assert!(PROCESS.iter().all(|metric| text.contains(metric.name)), "{text}");
    }

    #[test]
    fn a_process_that_is_gone_has_no_usage() {
        assert_eq!(usage_of(u32::MAX), None);
    }
}
