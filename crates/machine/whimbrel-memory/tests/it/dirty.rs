//! Dirty sets compared with the writes of a real process.

use crate::support::*;
use proptest::prelude::*;
use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::PageArray;
use whimbrel_memory::{Attachment, GuestRam, Mode, RamTarget, ScanOrder};

const PAGES: u64 = 700;

const ORDERS: [ScanOrder; 2] = [ScanOrder::TakeAtOnce, ScanOrder::LookFirst];

fn target(kind: &str) -> (Target, GuestRam, tempfile::TempPath) {
    target_in_order(kind, ScanOrder::TakeAtOnce)
}

fn target_in_order(kind: &str, order: ScanOrder) -> (Target, GuestRam, tempfile::TempPath) {
    let file = ram_file("dirty", PAGES);
    let target = Target::serving(kind, text(&file), PAGES);
    let which = match kind {
        "anonymous" => RamTarget::Range(target.base, PAGES * PAGE as u64),
        _ => by_path(&file),
    };
    let attachment = Attachment::attach(target.pid(), which, Mode::Track).unwrap();
    let ram = attachment.ram_in_order(order).unwrap();
    (target, ram, file)
}

fn pages(set: &PageSet) -> BTreeSet<u64> {
    set.iter().collect()
}

fn rounds() -> impl Strategy<Value = Vec<(Vec<u64>, Vec<u64>)>> {
    let some = || prop::collection::vec(0..PAGES, 0..40);
    prop::collection::vec((some(), some()), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_dirty_set_holds_exactly_what_was_written_and_nothing_only_read(rounds in rounds()) {
        for (kind, order) in ["shared", "private", "anonymous"].into_iter().flat_map(|k| ORDERS.map(|o| (k, o))) {
            let (mut target, mut ram, _file) = target_in_order(kind, order);
            // Of blocks that hold something.
            (0..PAGES).step_by(512).for_each(|page| target.write(page, 1));
            ram.take_dirty().unwrap();
            for (round, (writes, reads)) in rounds.iter().enumerate() {
                reads.iter().for_each(|page| { target.sum(*page); });
                writes.iter().for_each(|page| target.write(*page, round as u8 + 1));
                let dirty = ram.take_dirty().unwrap();
                prop_assert_eq!(pages(&dirty), writes.iter().copied().collect::<BTreeSet<_>>(), "{}", kind);
                for page in dirty.iter() {
                    let mut copy = vec![0; PAGE];
                    ram.read(PageRun::new(page, 1), &mut copy).unwrap();
                    prop_assert_eq!(copy[17], round as u8 + 1);
                }
                let all = ram.populated().unwrap();
                prop_assert!(dirty.iter().all(|page| all.contains(page)));
            }
        }
    }
}

/// A copy that is brought up to date from the dirty sets alone must be the memory whenever the writer rests.
/// It writes each page once a race, so that no later write hides a lost one.
#[test]
fn no_write_is_lost_that_races_with_scans() {
    for (kind, order) in ["shared", "private"].into_iter().flat_map(|kind| ORDERS.map(|order| (kind, order)))
    {
        let (mut target, mut ram, _file) = target_in_order(kind, order);
        let mut copy = vec![0; PAGES as usize * PAGE];
        let mut memory = copy.clone();
        let follow = |ram: &mut GuestRam, copy: &mut [u8]| {
            for run in ram.take_dirty().unwrap().runs() {
                let start = run.offset() as usize;
                ram.read(run, &mut copy[start..start + run.bytes()]).unwrap();
            }
        };
        for race in 0..400 {
            target.send(&format!("race {}", PAGES / 64 * 64));
            let racing = AtomicBool::new(true);
            thread::scope(|scope| {
                scope.spawn(|| {
                    target.line();
                    racing.store(false, Ordering::SeqCst);
                });
                while racing.load(Ordering::SeqCst) {
                    follow(&mut ram, &mut copy);
                }
            });
            follow(&mut ram, &mut copy);
            ram.read(PageRun::new(0, PAGES), &mut memory).unwrap();
            let page = |bytes: &[u8], page: usize| bytes[page * PAGE..][..PAGE].to_vec();
            let lost = (0..PAGES as usize).filter(|at| page(&copy, *at) != page(&memory, *at)).count();
            assert_eq!(lost, 0, "pages of {kind} memory, {order:?}, race {race}");
        }
    }
}

#[test]
fn pages_written_before_the_attachment_are_populated_but_not_dirty() {
    let file = ram_file("dirty", PAGES);
    let mut target = Target::serving("shared", text(&file), PAGES);
    target.write(3, 1);
    target.write(600, 1);
    let mut ram = Attachment::attach(target.pid(), by_path(&file), Mode::Track).unwrap().ram().unwrap();
    assert_eq!(pages(&ram.populated().unwrap()), BTreeSet::from([3, 600]));
    assert!(ram.take_dirty().unwrap().is_empty());
    target.write(3, 2);
    assert_eq!(pages(&ram.take_dirty().unwrap()), BTreeSet::from([3]));
}

#[test]
fn memory_that_was_never_touched_takes_no_page_table_and_is_tracked_once_it_is() {
    const LARGE: u64 = 1 << 20;
    let file = ram_file("large", LARGE);
    let mut target = Target::serving("shared", text(&file), LARGE);
    target.write(5, 1);
    let attachment = Attachment::attach(target.pid(), by_path(&file), Mode::Track).unwrap();
    let mut ram = attachment.ram().unwrap();
    assert!(ram.take_dirty().unwrap().is_empty());
    // A mark for each page of 4 GiB would take 8 MiB.
    let status = std::fs::read_to_string(format!("/proc/{}/status", target.pid())).unwrap();
    let tables = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    let tables: u64 = tables.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(tables < 1024, "{tables} kB");
    target.write(LARGE - 1, 2);
    target.write(600_000, 2);
    assert_eq!(pages(&ram.take_dirty().unwrap()), BTreeSet::from([600_000, LARGE - 1]));
    // Its neighbours are tracked as well now: what is only read is not dirty.
    target.sum(600_001);
    target.write(600_002, 3);
    assert_eq!(pages(&ram.take_dirty().unwrap()), BTreeSet::from([600_002]));
    // Another one who attaches does not know what was armed, and misses nothing.
    target.write(LARGE - 2, 4);
    let mut other = attachment.ram().unwrap();
    assert_eq!(pages(&other.take_dirty().unwrap()), BTreeSet::from([LARGE - 2]));
}

#[test]
fn pages_put_back_are_in_the_next_set_and_only_in_that() {
    let (mut target, mut ram, _file) = target("shared");
    target.write(1, 1);
    target.write(2, 1);
    let taken = ram.take_dirty().unwrap();
    ram.put_back(&taken);
    target.write(9, 1);
    assert_eq!(pages(&ram.take_dirty().unwrap()), BTreeSet::from([1, 2, 9]));
    assert!(ram.take_dirty().unwrap().is_empty());
}

#[test]
fn a_target_that_ended_is_an_error_and_not_an_unwritten_memory() {
    let (mut target, mut ram, _file) = target("shared");
    target.write(1, 1);
    target.child.kill().unwrap();
    target.child.wait().unwrap();
    ram.take_dirty().unwrap_err();
}

#[test]
fn reading_past_the_end_is_refused() {
    let (_target, ram, _file) = target("shared");
    let mut two = vec![0; 2 * PAGE];
    ram.read(PageRun::new(PAGES - 1, 2), &mut two).unwrap_err();
    ram.read(PageRun::new(u64::MAX, 2), &mut two).unwrap_err();
    ram.read(PageRun::new(0, 1), &mut two).unwrap_err();
}

#[test]
fn what_a_clone_writes_stays_its_own() {
    let file = ram_file("template", PAGES);
    let attach = |target: &Target| {
        Attachment::attach(target.pid(), by_path(&file), Mode::Track).unwrap().ram().unwrap()
    };
    let mut targets = [0, 1].map(|_| Target::serving("private", text(&file), PAGES));
    let mut rams = [attach(&targets[0]), attach(&targets[1])];
    targets[0].write(5, 7);
    assert_eq!(pages(&rams[0].take_dirty().unwrap()), BTreeSet::from([5]));
    assert!(rams[1].take_dirty().unwrap().is_empty());
    let byte = |ram: &GuestRam| {
        let mut copy = vec![0; PAGE];
        ram.read(PageRun::new(5, 1), &mut copy).unwrap();
        copy[17]
    };
    assert_eq!((byte(&rams[0]), byte(&rams[1])), (7, 0));
}
