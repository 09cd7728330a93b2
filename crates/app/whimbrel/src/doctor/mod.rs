//! What a machine must have for Whimbrel to work on it, as a list of checks.
//!
//! Every check only looks and changes nothing; the one of KVM runs a guest of a few instructions for at most
//! 4 s. A check that fails means that the daemon will not work; one that warns, that something will be slower
//! or missing. What an engine needs it says itself (`probe` of its crate); here it becomes a row.

mod kernel;
mod memory;
mod programs;

use serde::Serialize;
use std::{fmt, path::Path};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CheckStatus {
    /// As it should be.
    Ok,
    /// Something will be slower or missing.
    Warn,
    /// Whimbrel will not work.
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

/// One thing that was looked at.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Check {
    /// What.
    pub(crate) name: &'static str,
    /// How it is.
    pub(crate) verdict: CheckStatus,
    /// What was found.
    pub(crate) found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: CheckStatus::Ok, found: found.into(), fix: None }
    }

    fn bad(name: &'static str, verdict: CheckStatus, found: impl Into<String>, fix: &str) -> Self {
        Self { name, verdict, found: found.into(), fix: Some(fix.to_owned()) }
    }
}

/// Makes all checks, the basic ones first.
pub(crate) fn checks(socket: &Path) -> Vec<Check> {
    let mut checks = vec![kernel::root(), kernel::version()];
    checks.extend(memory::checks());
    checks.push(kernel::shared_memory());
    checks.extend(programs::qemu());
    checks.extend([kernel::tun(), programs::bridge_tools(), kernel::fuse(), programs::daemon(socket)]);
    checks
}
