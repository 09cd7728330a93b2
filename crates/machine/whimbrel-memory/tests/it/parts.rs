//! Attachments that go on from the parts that another one has passed.

use crate::support::*;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::PageArray;
use whimbrel_memory::{AttachError, Attachment, Mode, Pager, RamTarget};

const PAGES: u64 = 700;

fn attached(kind: &str, mode: Mode) -> (Target, Attachment, tempfile::TempPath) {
    let file = ram_file("parts", PAGES);
    let target = Target::serving(kind, text(&file), PAGES);
    let which = match kind {
        "anonymous" => RamTarget::Range(target.base, PAGES * PAGE as u64),
        _ => by_path(&file),
    };
    let attachment = Attachment::attach(target.pid(), which, mode).unwrap();
    (target, attachment, file)
}

/// Passes an attachment as another process would get it, and ends the one that had it.
fn pass(attachment: Attachment) -> Attachment {
    let (descriptors, state) = (attachment.descriptors().unwrap(), attachment.state());
    drop(attachment);
    Attachment::from_parts(descriptors, &state).unwrap()
}

#[test]
fn a_page_written_around_the_passing_is_in_one_dirty_set() {
    for kind in ["shared", "private", "anonymous"] {
        let (mut target, attachment, _file) = attached(kind, Mode::Track);
        let mut old = attachment.ram().unwrap();
        target.write(600, 1);
        target.write(1, 1);
        old.take_dirty().unwrap();
        target.write(3, 2);
        drop(old);
        let mut new = pass(attachment).ram().unwrap();
        target.write(4, 3);
        let dirty: Vec<u64> = new.take_dirty().unwrap().iter().collect();
        assert_eq!(dirty, [3, 4], "{kind}");
        let mut copy = vec![0; 2 * PAGE];
        new.read(PageRun::new(3, 2), &mut copy).unwrap();
        assert_eq!((copy[17], copy[PAGE + 17]), (2, 3), "{kind}");
        assert!(new.take_dirty().unwrap().is_empty(), "{kind}");
    }
}

#[test]
fn parts_of_two_memories_are_not_mixed() {
    let (_one, first, _first_file) = attached("shared", Mode::Track);
    let (_other, second, _second_file) = attached("shared", Mode::Track);
    let (mut descriptors, state) = (first.descriptors().unwrap(), first.state());
    descriptors.userfaultfd = second.descriptors().unwrap().userfaultfd;
    let mixed = Attachment::from_parts(descriptors, &state);
    assert!(mixed.is_err(), "a userfaultfd of another process registers nothing here");
    let mut shifted = state.clone();
    shifted.start += PAGE as u64 / 2;
    let shifted = Attachment::from_parts(first.descriptors().unwrap(), &shifted);
    assert!(matches!(shifted, Err(AttachError::BadRange { .. })), "{shifted:?}");
    first.release().unwrap();
    let (mut target, third, _third_file) = attached("shared", Mode::Track);
    let (descriptors, state) = (third.descriptors().unwrap(), third.state());
    third.release().unwrap();
    let idle = Attachment::from_parts(descriptors, &state);
    assert!(matches!(idle, Err(AttachError::NothingToAdopt { .. })), "what was written is unknown: {idle:?}");
    target.write(0, 1);
}

#[test]
fn a_pager_that_waits_for_a_slow_source_holds_up_no_longer_than_allowed_and_loses_no_fault() {
    let patience = Duration::from_secs(60);
    let (mut target, attachment, _file) = attached("shared", Mode::Lazy);
    let image = Arc::new(Image::new(PAGES, 1));
    let mut pager = Pager::start(&attachment, image.clone()).unwrap();
    image.gate.close(true);
    target.send("sum 8");
    let deadline = Instant::now() + patience;
    while image.gate.waiting() == 0 {
        assert!(Instant::now() < deadline, "nobody asks for the page");
        std::thread::yield_now();
    }
    assert!(!pager.end_within(Duration::from_millis(5)), "the page is under way");
    assert!(Pager::start(&attachment, image.clone()).is_err(), "two would serve one memory");
    image.gate.close(false);
    assert!(pager.end_within(patience));
    assert_eq!(target.line().parse::<u64>().unwrap(), sum_of(&image.page(8)));
    let _next = Pager::start(&attachment, image.clone()).unwrap();
    assert_eq!(target.sum(16), sum_of(&image.page(16)));
}

#[test]
fn a_fault_that_waited_while_lazy_memory_was_passed_is_served_and_nothing_is_counted_twice() {
    let (mut target, attachment, _file) = attached("shared", Mode::Lazy);
    let image = Arc::new(Image::new(PAGES, 1));
    let pager = Pager::start(&attachment, image.clone()).unwrap();
    target.sum(8);
    target.sum(5);
    let before = pager.stop();
    let filled = attachment.filled().unwrap();
    assert!(filled.contains(8) && filled.contains(5));
    target.send("sum 16");
    let attachment = pass(attachment);
    assert!(!attachment.set_filled(PageSet::empty(PAGES + 1)), "the set of another memory");
    assert!(attachment.set_filled(filled));
    let pager = Pager::start(&attachment, image.clone()).unwrap();
    assert_eq!(target.line().parse::<u64>().unwrap(), sum_of(&image.page(16)));
    pager.prefetch_all();
    assert!(pager.wait_resident(Duration::from_secs(60)), "{:?}", pager.state());
    let after = pager.state();
    assert!(before.resident < after.resident);
    assert_eq!(after.resident, after.total);
}
