//! Checks of what a host needs for Whimbrel.
//!
//! No check changes the host; the one of KVM runs a guest of a few instructions for at most 4 s. After a
//! failed check the daemon will not work; after a warning something is slower or missing. The crates know
//! their own requirements (`probe`), which become rows here.

mod kernel;
mod memory;
mod programs;

use serde::Serialize;
use std::{fmt, path::Path};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CheckStatus {
    Ok,
    /// Something is slower or missing.
    Warn,
    /// Daemon will not work.
    Fail,
}

impl fmt::Display for CheckStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        })
    }
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) verdict: CheckStatus,
    pub(crate) found: String,
    /// Remedy, if the check did not succeed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
}

impl Check {
    pub(crate) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: CheckStatus::Ok, found: found.into(), fix: None }
    }

    pub(crate) fn bad(name: &'static str, verdict: CheckStatus, found: impl Into<String>, fix: &str) -> Self {
        Self { name, verdict, found: found.into(), fix: Some(fix.to_owned()) }
    }
}

/// Runs all checks, the basic ones first.
pub(crate) fn checks(socket: Option<&Path>) -> Vec<Check> {
    let mut checks = vec![kernel::root(), kernel::version(), kernel::landlock(), kernel::control_groups()];
    checks.extend(memory::checks());
    checks.push(kernel::shared_memory());
    checks.extend(programs::qemu());
    checks.extend([kernel::tun(), programs::network_tools(), kernel::fuse()]);
    checks.extend([programs::uefi(), programs::tpm(), programs::containers()]);
    checks.extend(socket.map(programs::daemon));
    checks
}
