//! What a scan costs a guest of KVM, in faults that KVM counts. Skipped, with the reason, where no guest of
//! our own runs under KVM.

use whimbrel_machine::PageArray;
use whimbrel_memory::{Attachment, Mode, RamTarget, ScanOrder};
use whimbrel_testkit::guest::{KvmGuest, kvm_model};

/// Pages that the guest reads each time.
const PAGES: u64 = 65_536;

#[test]
fn after_a_scan_a_guest_faults_on_the_pages_that_were_written_and_on_hardly_any_other() {
    let cpu = match kvm_model() {
        Ok(cpu) => cpu,
        Err(reason) => return println!("kvm::after_a_scan_a_guest_faults: skipped, {reason}"),
    };
    let mut guest = KvmGuest::start(cpu, 1, 320).unwrap();
    let target = RamTarget::Path(guest.ram());
    let attachment = Attachment::attach(guest.pid().cast_signed(), target, Mode::Track).unwrap();
    let mut ram = attachment.ram().unwrap();
    let mut at_once = attachment.ram_in_order(ScanOrder::TakeAtOnce).unwrap();
    guest.rest().unwrap();
    for (shift, written) in [(0, PAGES), (16, 1), (4, PAGES / 16), (1, PAGES / 2)] {
        // Twice, so that the guest has all pages, and those of this step are the ones written last.
        for _ in 0..2 {
            ram.take_dirty().unwrap();
            guest.touch(shift).unwrap();
        }
        let before = guest.counts().unwrap().remote_flushes;
        let dirty = ram.take_dirty().unwrap().count();
        let flushes = guest.counts().unwrap().remote_flushes - before;
        let faults = faults_of(&mut guest, shift);
        at_once.take_dirty().unwrap();
        let otherwise = faults_of(&mut guest, shift);
        println!(
            "{written} written, {dirty} dirty, {flushes} flushes: {faults} faults, {otherwise} after a scan that \
             takes at once"
        );
        // The guest has a stack, variables and a used ring beside them.
        assert!((written..written + 16).contains(&dirty), "{dirty} dirty of {written} written");
        assert!(faults > 0, "nothing was counted");
        assert!(faults * 10 <= dirty * 12, "{faults} faults after {dirty} dirty pages");
    }
}

/// Faults of the guest while it reads all pages and writes some.
fn faults_of(guest: &mut KvmGuest, shift: u8) -> u64 {
    let before = guest.counts().unwrap().faults_fixed;
    guest.touch(shift).unwrap();
    guest.counts().unwrap().faults_fixed - before
}
