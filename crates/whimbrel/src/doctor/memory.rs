//! What reading and tracking guest memory from outside needs of this machine.

use super::{Check, Verdict};
use whimbrel_memory::{Finding, Need};

pub(super) fn checks() -> Vec<Check> {
    whimbrel_memory::probe().into_iter().map(row).collect()
}

fn row(finding: Finding) -> Check {
    let name = match finding.need {
        Need::Userfaultfd => "userfaultfd",
        Need::Features => "userfaultfd features",
        Need::PagemapScan => "pagemap scan",
        Need::Ptrace => "ptrace",
    };
    let verdict = if finding.met { Verdict::Ok } else { Verdict::Fail };
    Check { name, verdict, found: finding.sentence, fix: finding.fix.map(str::to_owned) }
}
