//! Metrics of the daemon: the page that Prometheus reads, at `/metrics` of the API and of the plain listener.
//!
//! Everything is read from state that is there: no QEMU is asked, no machine lock is taken, nothing starts.
//! Labels are names of machines of this host, and constants of the program.

mod host;
mod machines;
mod protections;
mod store_sample;

pub(crate) use store_sample::StoreSample;

use crate::{daemon::Daemon, server::access::Access};
use whimbrel_metrics::{Metric, PROCESS, Page};

/// Every metric of the daemon of a host.
pub fn all() -> Vec<Metric> {
    [PROCESS, machines::MACHINE_METRICS, protections::PROTECTION_METRICS, host::HOST_METRICS].concat()
}

/// The page as of now. A few milliseconds for hundreds of machines.
pub(crate) fn page(host: &Daemon, access: &Access) -> String {
    let mut page = Page::new();
    whimbrel_metrics::own_process(&mut page, env!("CARGO_PKG_VERSION"));
    machines::write(&mut page, host);
    protections::write(&mut page, host);
    host::write(&mut page, host, access);
    page.into_text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::sample;
    use std::collections::BTreeSet;

    #[test]
    fn a_page_has_no_metric_twice_and_none_that_is_not_listed() {
        let (daemon, _folders) = sample::daemon();
        let access = Access::open(&daemon.directories, Vec::new()).unwrap();
        let text = page(&daemon, &access);
        let types: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let unique: BTreeSet<&str> = types.iter().copied().collect();
        assert_eq!(unique.len(), types.len(), "{text}");
        let listed: BTreeSet<String> =
            all().iter().map(|metric| format!("{} {}", metric.name, metric.kind.name())).collect();
        assert_eq!(listed.len(), all().len(), "a metric is listed twice");
        for found in types {
            assert!(listed.contains(found), "{found} is not listed");
        }
        assert!(text.contains("whimbrel_store_latched 0\n"), "{text}");
    }
}
