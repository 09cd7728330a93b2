//! Lazy pages: the content that a real process reads from absent pages.

use crate::support::*;
use std::{
    fs,
    os::unix::fs::MetadataExt,
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::PageArray;
use whimbrel_memory::{AttachError, Attachment, GuestRam, Mode, Pager, PagerEnd, Prefetch, StartError};

const PAGES: u64 = 600;
const PATIENCE: Duration = Duration::from_secs(20);

struct Scene {
    target: Target,
    attachment: Attachment,
    image: Arc<Image>,
    file: tempfile::TempPath,
}

fn scene(kind: &str, frame: u64) -> Scene {
    let file = ram_file("lazy", PAGES);
    let target = Target::serving(kind, text(&file), PAGES);
    let attachment = Attachment::attach(target.pid(), by_path(&file), Mode::Lazy).unwrap();
    Scene { target, attachment, image: Arc::new(Image::new(PAGES, frame)), file }
}

impl Scene {
    fn pager(&self) -> Pager {
        Pager::start(&self.attachment, self.image.clone()).unwrap()
    }

    fn assert_sees(&mut self, page: u64) {
        assert_eq!(self.target.sum(page), sum_of(&self.image.page(page)), "page {page}");
    }
}

fn read(ram: &GuestRam, page: u64) -> Vec<u8> {
    let mut copy = vec![0xee; PAGE];
    ram.read(PageRun::new(page, 1), &mut copy).unwrap();
    copy
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn every_page_is_right_and_only_real_writes_are_dirty(kind: &str, frame: u64) {
    let mut scene = scene(kind, frame);
    let pager = scene.pager();
    let mut ram = scene.attachment.ram().unwrap();
    for page in (0..PAGES).rev().step_by(3) {
        scene.assert_sees(page);
    }
    assert!(ram.take_dirty().unwrap().is_empty(), "reading is no writing");
    // A present page, a zero page (5 of 8), and one not touched so far.
    for page in [2, 5, 13, 300] {
        scene.target.write(page, 0x77);
    }
    let dirty: Vec<_> = ram.take_dirty().unwrap().iter().collect();
    assert_eq!(dirty, [2, 5, 13, 300]);
    for page in 0..PAGES {
        let mut expected = scene.image.page(page);
        if dirty.contains(&page) {
            expected[17] = 0x77;
        }
        assert!(read(&ram, page) == expected, "page {page}");
    }
    assert!(ram.take_dirty().unwrap().is_empty(), "our reading is no writing");
    assert!(pager.stop().faults > 0);
}

#[test]
fn shared_memory_fills_with_the_right_pages_and_stays_clean() {
    every_page_is_right_and_only_real_writes_are_dirty("shared", 1);
    every_page_is_right_and_only_real_writes_are_dirty("shared", 16);
}

#[test]
fn a_template_fills_with_the_right_pages_and_stays_clean() {
    every_page_is_right_and_only_real_writes_are_dirty("private", 1);
    every_page_is_right_and_only_real_writes_are_dirty("private", 16);
}

#[test]
fn a_page_that_is_not_here_is_captured_from_the_source_and_not_as_zeros() {
    for kind in ["shared", "private"] {
        let scene = scene(kind, 4);
        let mut ram = scene.attachment.ram().unwrap();
        let mut copy = vec![0; PAGE];
        ram.read(PageRun::new(1, 1), &mut copy).expect_err("nobody knows its content yet");
        let pager = scene.pager();
        let mut all = vec![0; PAGES as usize * PAGE];
        ram.read(PageRun::new(0, PAGES), &mut all).unwrap();
        for (page, content) in all.chunks(PAGE).enumerate() {
            assert!(content == scene.image.page(page as u64), "page {page}");
        }
        assert_eq!(pager.state().resident, 0, "a capture fills nothing");
        let mut missing = PageSet::full(PAGES);
        missing.subtract(&ram.populated().unwrap());
        assert!(missing.iter().all(|page| page % 8 == 5), "only zero pages may be left out");
    }
}

#[test]
fn prefetch_brings_everything_and_says_so() {
    for kind in ["shared", "private"] {
        let mut scene = scene(kind, 16);
        let pager = scene.pager();
        pager.pause_prefetch(true);
        pager.prefetch_all();
        assert_eq!(pager.state().prefetch, Prefetch::Paused);
        assert!(!pager.wait_resident(Duration::from_millis(20)));
        assert_eq!(pager.state().resident, 0);
        pager.pause_prefetch(false);
        assert!(pager.wait_resident(PATIENCE));
        eventually("the prefetch ends", || pager.state().prefetch == Prefetch::Idle);
        // Even without a pager every page is correct now, except zero pages.
        let state = pager.stop();
        assert_eq!((state.resident, state.total, state.end), (525, 525, Some(PagerEnd::Stopped)));
        (0..PAGES).filter(|page| page % 8 != 5).for_each(|page| scene.assert_sees(page));
        assert!(scene.attachment.ram().unwrap().take_dirty().unwrap().is_empty(), "{kind}");
    }
}

#[test]
fn a_failing_source_stalls_the_guest_and_does_not_kill_it() {
    let mut scene = scene("shared", 4);
    let pager = scene.pager();
    *scene.image.failing.lock().unwrap() = true;
    scene.target.send("sum 9");
    eventually("the stall is seen", || pager.state().stalled.is_some());
    assert!(pager.state().stalled.unwrap().contains("the link is down"));
    *scene.image.failing.lock().unwrap() = false;
    assert_eq!(scene.target.line(), sum_of(&scene.image.page(9)).to_string());
    eventually("the stall is over", || pager.state().stalled.is_none());
    assert!(pager.touched().contains(9));
}

#[test]
fn many_threads_wait_for_their_pages_at_once_and_none_for_another_ones() {
    for kind in ["shared", "private"] {
        let mut scene = scene(kind, 4);
        let pager = scene.pager();
        scene.image.gate.close(true);
        // Two frames, two pages of one of them.
        let pages = [8, 200, 201];
        scene.target.send("sums 8 200 201");
        eventually("both frames are asked for", || scene.image.gate.waiting() == 2);
        scene.image.gate.close(false);
        let expected = pages.iter().fold(0, |all, page| all ^ sum_of(&scene.image.page(*page)));
        assert_eq!(scene.target.line(), expected.to_string(), "{kind}");
        assert_eq!(scene.image.gate.most(), 2, "a frame is fetched once");

        scene.image.gate.close(true);
        let pages: Vec<u64> = (20..60).step_by(2).chain(300..340).filter(|page| page % 8 != 5).collect();
        let words = pages.iter().map(|page| format!(" {page}")).collect::<String>();
        scene.target.send(&format!("sums{words}"));
        eventually("as many as are served at once", || scene.image.gate.waiting() == 8);
        scene.image.gate.close(false);
        let expected = pages.iter().fold(0, |all, page| all ^ sum_of(&scene.image.page(*page)));
        assert_eq!(scene.target.line(), expected.to_string(), "{kind}");
        assert_eq!(scene.image.gate.most(), 8);
        drop(pager);
    }
}

#[test]
fn a_stall_of_the_prefetch_ends_with_it_though_the_guest_touches_nothing() {
    let scene = scene("shared", 4);
    let pager = scene.pager();
    *scene.image.failing.lock().unwrap() = true;
    pager.prefetch_all();
    eventually("the stall is seen", || pager.state().stalled.is_some());
    *scene.image.failing.lock().unwrap() = false;
    assert!(pager.wait_resident(PATIENCE));
    eventually("the stall is over", || pager.state().stalled.is_none());
    assert_eq!(pager.state().faults, 0);
}

#[test]
fn what_a_machine_touched_is_listed_and_is_there_before_it_is_touched_the_next_time() {
    let mut first = scene("shared", 1);
    let pager = first.pager();
    for page in [9, 200, 302] {
        first.assert_sees(page);
    }
    // A fault is recorded after the page is there.
    eventually("all of them are listed", || pager.touched().iter().eq([9, 200, 302]));
    let list = pager.touched();
    let mut next = scene("shared", 1);
    let pager = next.pager();
    pager.prefetch(&list);
    eventually("the list is here", || {
        pager.state().resident == 3 && pager.state().prefetch == Prefetch::Idle
    });
    for page in [9, 200, 302] {
        next.assert_sees(page);
    }
    assert_eq!(pager.state().faults, 0, "no page was waited for");
    next.assert_sees(10);
    eventually("a fault of another page", || pager.state().faults == 1);
}

#[test]
fn a_target_that_dies_ends_the_pager() {
    let mut scene = scene("shared", 4);
    let pager = scene.pager();
    *scene.image.failing.lock().unwrap() = true;
    scene.target.send("sum 9");
    eventually("the fault is pending", || pager.state().stalled.is_some());
    scene.target.child.kill().unwrap();
    scene.target.child.wait().unwrap();
    eventually("the pager ends", || pager.state().end == Some(PagerEnd::TargetEnded));
    assert!(!pager.wait_resident(PATIENCE), "and nobody waits for it");
}

#[test]
fn a_fault_that_a_stopped_pager_had_read_is_served_by_the_next_one() {
    let mut scene = scene("shared", 4);
    let pager = scene.pager();
    *scene.image.failing.lock().unwrap() = true;
    scene.target.send("sum 9");
    eventually("the fault is pending", || pager.state().stalled.is_some());
    pager.stop();
    *scene.image.failing.lock().unwrap() = false;
    let adopted = Attachment::adopt(scene.target.pid(), by_path(&scene.file), Mode::Lazy).unwrap();
    let _pager = Pager::start(&adopted, scene.image.clone()).unwrap();
    assert_eq!(scene.target.line(), sum_of(&scene.image.page(9)).to_string());
}

#[test]
fn the_fault_of_a_machine_whose_daemon_was_killed_is_served_after_adoption() {
    let file = ram_file("lazy", PAGES);
    let mut target = Target::serving("shared", text(&file), PAGES);
    let mut daemon = Target::spawn(&["attach", &target.pid().to_string(), text(&file)]);
    assert_eq!(daemon.line(), format!("attached {PAGES}"));
    target.send("sum 9");
    drop(daemon);
    let refused = Attachment::open(target.pid(), by_path(&file));
    assert!(matches!(refused, Err(AttachError::Lazy { .. })), "tracked alone it would wait for ever");
    let image = Arc::new(Image::new(PAGES, 4));
    let attachment = Attachment::adopt(target.pid(), by_path(&file), Mode::Lazy).unwrap();
    let _pager = Pager::start(&attachment, image.clone()).unwrap();
    assert_eq!(target.line(), sum_of(&image.page(9)).to_string());
}

#[test]
fn a_page_given_away_comes_back_as_zeros_and_not_as_the_old_content() {
    let mut scene = scene("shared", 1);
    let pager = scene.pager();
    let ram = scene.attachment.ram().unwrap();
    scene.assert_sees(9);
    // The target continues a moment before the pager has recorded the page.
    eventually("the fault is counted", || pager.state().faults == 1);
    let file = fs::File::options().write(true).open(&scene.file).unwrap();
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 9 * PAGE as u64, PAGE as u64).unwrap();
    assert!(read(&ram, 9) == vec![0; PAGE]);
    assert_eq!(scene.target.sum(9), 0);
}

#[test]
fn clones_share_the_pages_of_their_template_and_keep_their_writes() {
    let mut first = scene("private", 8);
    let mut second = Target::serving("private", text(&first.file), PAGES);
    let attachment = Attachment::attach(second.pid(), by_path(&first.file), Mode::Lazy).unwrap();
    let pagers = [first.pager(), Pager::start(&attachment, first.image.clone()).unwrap()];
    for page in 0..PAGES {
        first.assert_sees(page);
        assert_eq!(second.sum(page), sum_of(&first.image.page(page)));
    }
    let blocks = fs::metadata(&first.file).unwrap().blocks();
    assert_eq!(blocks * 512, PAGES * PAGE as u64, "every page is in the template once");
    assert_eq!((private_pages(&first.target), private_pages(&second)), (0, 0), "and nowhere else");
    first.target.write(3, 0x55);
    assert_eq!((private_pages(&first.target), private_pages(&second)), (1, 0));
    assert_eq!(second.sum(3), sum_of(&first.image.page(3)));
    let mut rams = [first.attachment.ram().unwrap(), attachment.ram().unwrap()];
    assert_eq!(rams[0].take_dirty().unwrap().iter().collect::<Vec<_>>(), [3]);
    assert!(rams[1].take_dirty().unwrap().is_empty());
    drop(pagers);
}

#[test]
fn a_clone_that_gives_a_page_back_changes_neither_the_template_nor_its_sibling() {
    let mut first = scene("private", 8);
    let mut second = Target::serving("private", text(&first.file), PAGES);
    let attachment = Attachment::attach(second.pid(), by_path(&first.file), Mode::Lazy).unwrap();
    let pagers = [first.pager(), Pager::start(&attachment, first.image.clone()).unwrap()];
    first.assert_sees(9);
    first.target.write(9, 0x55);
    first.target.write(10, 0x55);
    assert_eq!(private_pages(&first.target), 2);
    for page in [9, 10, 11] {
        first.target.send(&format!("give {page}"));
        assert_eq!(first.target.line(), "0", "giving back succeeds");
    }
    assert_eq!(private_pages(&first.target), 0, "and the host has the memory");
    for page in [9, 10, 11] {
        assert_eq!(second.sum(page), sum_of(&first.image.page(page)), "the sibling sees the template");
        first.assert_sees(page);
    }
    drop(pagers);
}

/// Pages of the RAM mapping that belong to the process alone.
fn private_pages(target: &Target) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", target.pid())).unwrap();
    let start = format!("{:x}-", target.base);
    let lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let line = lines.into_iter().find(|line| line.starts_with("Anonymous:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 4
}

#[test]
fn a_pager_refuses_what_it_cannot_serve() {
    let scene = scene("shared", 1);
    let short = Arc::new(Image::new(PAGES - 1, 1));
    assert!(matches!(Pager::start(&scene.attachment, short), Err(StartError::WrongLength { .. })));
    let pager = scene.pager();
    assert!(matches!(Pager::start(&scene.attachment, scene.image.clone()), Err(StartError::Served)));
    pager.stop();
    scene.pager();
    let file = ram_file("track", PAGES);
    let target = Target::serving("shared", text(&file), PAGES);
    let track = Attachment::attach(target.pid(), by_path(&file), Mode::Track).unwrap();
    assert!(matches!(Pager::start(&track, scene.image.clone()), Err(StartError::NotLazy)));
}

#[test]
fn pages_that_come_unasked_fill_what_is_missing_and_never_what_was_written() {
    let mut scene = scene("shared", 1);
    let pager = scene.pager();
    let mut ram = scene.attachment.ram().unwrap();
    // Page 5 is zero in the source, page 6 is not.
    scene.target.write(6, 0x77);
    let mut written = scene.image.page(6);
    written[17] = 0x77;
    let run = PageRun::new(0, 64);
    let content: Vec<u8> = run.pages().flat_map(|page| scene.image.page(page)).collect();
    *scene.image.failing.lock().unwrap() = true;
    pager.fill(run, &content).unwrap();
    for page in run.pages() {
        let expected = if page == 6 { written.clone() } else { scene.image.page(page) };
        assert!(scene.target.sum(page) == sum_of(&expected) && read(&ram, page) == expected, "page {page}");
    }
    assert_eq!(ram.take_dirty().unwrap().iter().collect::<Vec<_>>(), [6], "what came is no write");
    assert!(pager.missing().iter().all(|page| page >= 64) && pager.missing().contains(64));
    assert_eq!(pager.missing().count(), pager.state().total - pager.state().resident);
    assert!(pager.fill(PageRun::new(PAGES - 1, 2), &content[..2 * PAGE]).is_err(), "past the end");
    assert!(pager.fill(PageRun::new(70, 2), &content[..PAGE]).is_err(), "too little content");
}
