//! Requirements of the crate on the host, checked and explained for people.

use crate::userfaultfd::{self, DEVICE};
use linux_raw_sys::general as sys;
use std::{fs, io};

/// Requirement on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// Permission to create a userfaultfd.
    Userfaultfd,
    /// Write tracking by userfaultfd, and missing pages of shared memory.
    Features,
    /// System call `PAGEMAP_SCAN` of Linux 6.7.
    PagemapScan,
    /// Tracing of processes of the same user.
    Ptrace,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Requirement that was checked.
    pub requirement: Requirement,
    /// Whether it is met.
    pub met: bool,
    /// Finding in one sentence.
    pub sentence: String,
    /// Advice to meet it; `None` when it is met.
    pub fix: Option<&'static str>,
}

/// Checks all requirements. Changes nothing; takes under a millisecond.
pub fn probe() -> Vec<Finding> {
    let offered = userfaultfd::kernel_features();
    vec![userfaultfd(&offered), features(&offered), pagemap_scan(), ptrace()]
}

fn userfaultfd(offered: &io::Result<u64>) -> Finding {
    let (sentence, fix) = match offered {
        Ok(_) => ("a userfaultfd can be created".to_owned(), None),
        Err(error) => (
            format!("a userfaultfd cannot be created with {DEVICE} ({error})"),
            Some(
                "run as root, with a kernel built with CONFIG_USERFAULTFD and a devtmpfs at /dev, or set the \
                 sysctl vm.unprivileged_userfaultfd to 1",
            ),
        ),
    };
    Finding { requirement: Requirement::Userfaultfd, met: fix.is_none(), sentence, fix }
}

fn features(offered: &io::Result<u64>) -> Finding {
    const NAMES: [(u32, &str); 3] = [
        (sys::UFFD_FEATURE_WP_ASYNC, "WP_ASYNC"),
        (sys::UFFD_FEATURE_WP_UNPOPULATED, "WP_UNPOPULATED"),
        (sys::UFFD_FEATURE_MISSING_SHMEM, "MISSING_SHMEM"),
    ];
    let offered = *offered.as_ref().unwrap_or(&0);
    let missing: Vec<_> =
        NAMES.iter().filter(|(bit, _)| offered & u64::from(*bit) == 0).map(|(_, name)| *name).collect();
    let met = missing.is_empty();
    let sentence = if met {
        "userfaultfd offers write tracking and missing pages of shared memory".to_owned()
    } else {
        format!("userfaultfd does not offer {}", missing.join(", "))
    };
    let fix = "use Linux 6.7 or later, built with CONFIG_PTE_MARKER_UFFD_WP, on x86_64";
    Finding { requirement: Requirement::Features, met, sentence, fix: (!met).then_some(fix) }
}

fn pagemap_scan() -> Finding {
    let (met, sentence) = match crate::pagemap::is_supported() {
        Ok(()) => (true, "the kernel can scan for written pages".to_owned()),
        Err(error) => (false, format!("the kernel cannot scan for written pages ({error})")),
    };
    Finding {
        requirement: Requirement::PagemapScan,
        met,
        sentence,
        fix: (!met).then_some("use Linux 6.7 or later"),
    }
}

fn ptrace() -> Finding {
    // Absent without the Yama module, which equals 0.
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let (met, sentence) = match (scope.trim(), rustix::process::geteuid().is_root()) {
        ("3", _) => (false, "tracing is switched off until the next boot (ptrace_scope is 3)"),
        ("2", false) => (false, "only root may trace processes (ptrace_scope is 2)"),
        ("1", false) => (true, "processes that were started from here can be traced (ptrace_scope is 1)"),
        _ => (true, "processes can be traced"),
    };
    let fix = "run as root, or set the sysctl kernel.yama.ptrace_scope to 1 or 0";
    Finding {
        requirement: Requirement::Ptrace,
        met,
        sentence: sentence.to_owned(),
        fix: (!met).then_some(fix),
    }
}
