//! Options of a test guest on its kernel command line.

use std::fmt;

/// Options without which Debian's kernel tests its ciphers, makes files for probes and reads certificates
/// when it starts: a quarter of its boot in translated code.
const QUICK: &str = "cryptomgr.notests \
                     initcall_blacklist=init_kprobe_trace,init_uprobe_trace,load_system_certificate_list";

/// Work that a guest does beside answering requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Work {
    /// No work at all.
    #[default]
    Idle,
    /// No work, and the test agent counts once a second only, so that hundreds of guests leave the host idle.
    Resting,
    /// No work, but with the guest agent (the small guest only).
    GuestAgent,
    /// The test agent dirties memory.
    Dirty {
        /// Size of the region in MiB.
        region_mib: u32,
        /// Pages a second; 0 is as fast as it goes.
        pages_per_second: u32,
        /// Bytes changed in each page, 8 to 4096.
        bytes_per_page: u32,
    },
    /// A separate process dirties memory as fast as possible (the small guest only).
    MemoryWriter {
        /// Size of the region in MiB.
        region_mib: u32,
        /// Bytes changed in each page, 8 to 4096.
        bytes_per_page: u32,
        /// Whether the guest agent runs too.
        helper: bool,
    },
    /// Several processes dirty memory, each a region of its own (the small guest only).
    Writers {
        /// Number of processes.
        count: u32,
        /// Size of each region in MiB.
        region_mib: u32,
        /// Pages that each writes in a second; 0 is as fast as it goes.
        pages_per_second: u32,
    },
    /// Compiles C files for ever (the Debian guest only).
    Compile,
}

/// Options of a guest; `to_string` makes the kernel command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestOptions {
    /// Address and prefix of `eth0`, as `ADDRESS/PREFIX`, or `dhcp` (the small guest only).
    pub address: Option<String>,
    /// Size in MiB of the buffer whose content the test agent checks.
    pub buffer_mib: u32,
    /// Work beside answering requests.
    pub work: Work,
}

impl Default for GuestOptions {
    fn default() -> Self {
        Self { address: None, buffer_mib: 64, work: Work::Idle }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Idle => write!(f, "idle"),
            Work::Resting => write!(f, "idle tick=1000"),
            Work::GuestAgent => write!(f, "idle helper=on"),
            Work::Dirty { region_mib, pages_per_second, bytes_per_page } => {
                write!(f, "dirty:{region_mib}:{pages_per_second}:{bytes_per_page}")
            }
            Work::MemoryWriter { region_mib, bytes_per_page, helper } => {
                let helper = if *helper { " helper=on" } else { "" };
                write!(f, "idle munch={region_mib}:0:{bytes_per_page}{helper}")
            }
            Work::Writers { count, region_mib, pages_per_second } => {
                write!(f, "idle munch={region_mib}:{pages_per_second}:4096 munchers={count}")
            }
            Work::Compile => write!(f, "compile"),
        }
    }
}

impl fmt::Display for GuestOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A panic ends the guest at once instead of leaving a dead one to wait for.
        write!(f, "console=ttyS0 quiet panic=-1 {QUICK} buf={} work={}", self.buffer_mib, self.work)?;
        self.address.iter().try_for_each(|address| write!(f, " ip={address}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_print_as_the_guest_reads_them() {
        let work = Work::Dirty { region_mib: 64, pages_per_second: 20000, bytes_per_page: 64 };
        let options = GuestOptions { address: Some("10.77.0.9/24".into()), buffer_mib: 8, work };
        let expected =
            format!("console=ttyS0 quiet panic=-1 {QUICK} buf=8 work=dirty:64:20000:64 ip=10.77.0.9/24");
        assert_eq!(options.to_string(), expected);
    }
}
