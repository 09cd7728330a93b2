//! Checks of the kernel features that are needed to read and track guest memory.

use super::{Check, CheckStatus};
use whimbrel_memory::{Finding, Requirement};

pub(super) fn checks() -> Vec<Check> {
    whimbrel_memory::probe().into_iter().map(row).collect()
}

fn row(finding: Finding) -> Check {
    let name = match finding.requirement {
        Requirement::Userfaultfd => "userfaultfd",
        Requirement::Features => "userfaultfd features",
        Requirement::PagemapScan => "pagemap scan",
        Requirement::Ptrace => "ptrace",
    };
    let verdict = if finding.met { CheckStatus::Ok } else { CheckStatus::Fail };
    Check { name, verdict, found: finding.sentence, fix: finding.fix.map(str::to_owned) }
}
