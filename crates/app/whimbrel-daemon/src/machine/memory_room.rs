//! Room for machines in the memory of this host: reserved before a machine starts, and made by ending what
//! the host can do without.

use crate::{core::error::DaemonError, daemon::Daemon};
use std::time::Duration;
use whimbrel_api::HostMemory;
use whimbrel_core::ByteSize;
use whimbrel_vm::{Reservation, Reservations};

/// How long to wait for ended machines to free their memory, which happens at gigabytes a second.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);

impl Daemon {
    /// Reserves memory for a machine that is about to start here.
    pub(crate) fn reserve_memory(&self, size: ByteSize) -> Result<Reservation, DaemonError> {
        let folder = self.directories.runtime_dirs();
        let reserve = || {
            let reserved = self.memory.reserve(size.0);
            reserved.map_err(|source| DaemonError::io("examine", &folder, source))
        };
        let reserved = match reserve()? {
            Err(_) if self.make_room() => reserve()?,
            reserved => reserved,
        };
        let full =
            |spare| DaemonError::NoRoom { host: self.name.clone(), needed: size, spare: ByteSize(spare) };
        reserved.map_err(full)
    }

    /// Ends prestarted QEMUs, and waits until machines that have left have freed their resources. Returns
    /// whether there were any.
    pub(crate) fn make_room(&self) -> bool {
        let ended = self.prestarted.end_all();
        self.cleanup.wait(CLEANUP_TIMEOUT) || ended
    }
}

/// Memory of this host, if the system tells what is free.
pub(crate) fn host_memory(reservations: &Reservations) -> Option<HostMemory> {
    let all = rustix::system::sysinfo();
    let total = ByteSize(all.totalram * u64::from(all.mem_unit));
    Some(HostMemory { total, spare: ByteSize(reservations.spare().ok()?) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::sample;

    #[test]
    fn a_full_host_ends_what_it_can_do_without_and_then_says_what_is_left() {
        let (host, _folders) = sample::daemon();
        let all = host.memory.spare().unwrap();
        let most = host.reserve_memory(ByteSize(all / 4 * 3)).unwrap();
        let refused = host.reserve_memory(ByteSize(all / 2)).unwrap_err();
        assert_eq!(refused.code(), whimbrel_api::ErrorCode::NoSpace);
        assert!(refused.to_string().contains("alpha has"), "{refused}");
        let spare = host.spare_capacity(&host.name, &[]).unwrap().memory;
        assert!(spare <= all / 3, "what other hosts are told: {spare} of {all}");
        drop(most);
        host.reserve_memory(ByteSize(all / 2)).unwrap();
    }
}
