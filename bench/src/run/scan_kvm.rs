//! `scan.kvm.faults`: faults of a guest of KVM after a scan, for each page that was dirty.
//!
//! A count, not a time: it holds wherever KVM follows the page tables of QEMU, whatever executes the guest's
//! instructions. The peer is the scan that takes at once, over all memory. Needs a KVM under which the guest
//! of `guest/kvm` runs.

use super::Context;
use crate::harness::{Goal, Row, Samples, alternate};
use anyhow::{Result, anyhow};
use std::cell::RefCell;
use whimbrel_machine::PageArray as _;
use whimbrel_memory::{Attachment, GuestRam, Mode, RamTarget, ScanOrder};
use whimbrel_testkit::guest::{KvmGuest, kvm_model};

/// Memory of the guest: the pages that it touches, and what is below them.
const MIB: u32 = 320;
/// Pages written, of the 65,536 that the guest reads after each scan.
const CASES: [(u8, &str); 3] =
    [(16, "1 of 65,536 pages dirty"), (4, "every 16th of 65,536 pages dirty"), (0, "65,536 pages dirty")];

/// Each case once as the product scans, and once in one scan.
pub(crate) fn faults(context: &Context) -> Result<Vec<Row>> {
    let cpu = kvm_model().map_err(|reason| anyhow!("no guest runs under KVM here: {reason}"))?;
    let times = context.times(5, 2);
    let mut guest = KvmGuest::start(cpu, 1, MIB).map_err(|reason| anyhow!(reason))?;
    let target = RamTarget::Path(guest.ram());
    let attachment = Attachment::attach(guest.pid().cast_signed(), target, Mode::Track)?;
    let mut looked = attachment.ram()?;
    let mut at_once = attachment.ram_in_order(ScanOrder::TakeAtOnce)?;
    guest.rest()?;
    // Now the guest has all of its pages, and each view of its memory knows where they are.
    guest.touch(0)?;
    looked.take_dirty()?;
    at_once.take_dirty()?;
    let guest = RefCell::new(guest);
    CASES
        .iter()
        .map(|(shift, case)| {
            let ours = || after_a_scan(&mut guest.borrow_mut(), &mut looked, *shift);
            let theirs = || after_a_scan(&mut guest.borrow_mut(), &mut at_once, *shift);
            let (ours, theirs): (Samples, Samples) = alternate(times, ours, theirs)?;
            let row = Row::new("scan.kvm.faults", *case, "faults/page", &ours);
            Ok(row.against("one scan that takes", &theirs).goal(Goal::AtMost(1.2)))
        })
        .collect()
}

/// The guest touches its pages, is scanned, and touches them again: its faults then, for each dirty page.
fn after_a_scan(guest: &mut KvmGuest, ram: &mut GuestRam, shift: u8) -> Result<f64> {
    guest.touch(shift)?;
    ram.take_dirty()?;
    guest.touch(shift)?;
    let dirty = ram.take_dirty()?.count();
    let before = guest.counts()?;
    guest.touch(shift)?;
    let faults = guest.counts()?.faults_fixed - before.faults_fixed;
    Ok(faults as f64 / dirty as f64)
}
