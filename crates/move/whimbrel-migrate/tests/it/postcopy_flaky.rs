//! Tests of postcopy between a fake source and a fake target over a link that fails where a seed says, while
//! the machine reads and writes its pages.
//!
//! The fears: a page that never arrives, one that overwrites what the machine wrote, a source that frees
//! pages which the target lacks, a wait that never ends.

use bytes::Bytes;
use proptest::prelude::*;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError};
use whimbrel_migrate::{
    link::LinkError,
    postcopy::{
        PageFetcher, PageServer, encode_sets,
        messages::{FetchPriority, OfferFetchReply},
        page_fetcher::{FetchConnection, PageStore, PendingReply},
    },
    protocol::HandoverId,
    source::BoxError,
};

const PAGES: u64 = 400;
const ID: HandoverId = HandoverId([9; 16]);

fn content(array: u8, page: u64) -> Vec<u8> {
    match page % 5 {
        0 => vec![0; PAGE_SIZE],
        _ => (0..PAGE_SIZE as u64).map(|at| (at.wrapping_mul(page | 1) >> 3) as u8 ^ array).collect(),
    }
}

/// Array of the source, which never changes.
struct Kept(u8);

impl PageArray for Kept {
    fn name(&self) -> &str {
        "memory"
    }
    fn page_count(&self) -> u64 {
        PAGES
    }
    fn populated(&mut self) -> Result<PageSet, PageError> {
        Ok(PageSet::full(PAGES))
    }
    fn take_dirty(&mut self) -> Result<PageSet, PageError> {
        Ok(PageSet::empty(PAGES))
    }
    fn put_back(&mut self, _: &PageSet) {}
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        for (page, out) in run.pages().zip(out.chunks_exact_mut(PAGE_SIZE)) {
            out.copy_from_slice(&content(self.0, page));
        }
        Ok(())
    }
}

/// Array of the target: which pages are here, and their content.
struct Place(Mutex<Vec<Option<Vec<u8>>>>);

impl Place {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(vec![None; PAGES as usize])))
    }
}

impl PageStore for Place {
    fn missing(&self, owed: &PageSet) -> PageSet {
        let pages = self.0.lock().unwrap();
        let mut missing = owed.clone();
        owed.iter().filter(|page| pages[*page as usize].is_some()).for_each(|page| {
            missing.remove(page);
        });
        missing
    }
    fn fill(&self, run: PageRun, data: &[u8]) -> Result<(), BoxError> {
        let mut pages = self.0.lock().unwrap();
        for (page, data) in run.pages().zip(data.chunks_exact(PAGE_SIZE)) {
            pages[page as usize].get_or_insert_with(|| data.to_vec());
        }
        Ok(())
    }
    fn sync(&self) -> Result<(), BoxError> {
        Ok(())
    }
}

/// Connection that fails after some requests; every other failure loses the reply to one that was handled.
struct Cable {
    giving: Arc<PageServer>,
    left: AtomicU64,
    cut: AtomicBool,
    loses_answers: bool,
}

struct Ready(Result<(Bytes, Bytes), LinkError>);

impl PendingReply for Ready {
    fn wait(self: Box<Self>) -> Result<(Bytes, Bytes), LinkError> {
        self.0
    }
}

fn lost() -> LinkError {
    LinkError::Lost { source: "the cable is out".into() }
}

impl FetchConnection for Cable {
    fn request(&self, kind: u16, header: Vec<u8>) -> Result<Box<dyn PendingReply>, LinkError> {
        if self.cut.load(Ordering::SeqCst) {
            return Err(lost());
        }
        let last = self.left.fetch_sub(1, Ordering::SeqCst) <= 1;
        if last {
            self.cut.store(true, Ordering::SeqCst);
        }
        let reply =
            self.giving.handle(kind, &header).map(|(header, payload)| (header.into(), payload.into()));
        let reply = reply.map_err(|error| LinkError::Refused { reason: error.to_string() });
        match last {
            true if self.loses_answers => Ok(Box::new(Ready(Err(lost())))),
            true => Err(lost()),
            false => Ok(Box::new(Ready(reply))),
        }
    }
    fn close(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }
}

/// Source: connects again whenever a connection fails, until the target has every page.
fn attend(giving: &Arc<PageServer>, taking: &PageFetcher, lives: &[u64]) {
    let mut lives = lives.iter().copied().chain(std::iter::repeat(10_000));
    let mut cables: [Option<Arc<Cable>>; 2] = [None, None];
    while !giving.is_finished() {
        for (kind, cable) in [FetchPriority::Urgent, FetchPriority::Bulk].into_iter().zip(&mut cables) {
            if cable.as_ref().is_some_and(|cable| !cable.cut.load(Ordering::SeqCst)) {
                continue;
            }
            let left = lives.next().unwrap_or(1);
            let new = Arc::new(Cable {
                giving: giving.clone(),
                left: AtomicU64::new(left),
                cut: AtomicBool::new(false),
                loses_answers: left % 2 == 0,
            });
            *cable = Some(new.clone());
            if taking.accept_connection(kind, new) == OfferFetchReply::Whole {
                giving.mark_complete();
            }
        }
        thread::yield_now();
    }
}

/// Machine: touches pages as a seed says, writes to some, and checks what it reads.
fn live(taking: &PageFetcher, places: &[Arc<Place>; 2], mut seed: u64, steps: u64) -> Vec<(usize, u64, u8)> {
    let mut written = Vec::new();
    for _ in 0..steps {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let (array, page) = ((seed >> 20) as usize % 2, (seed >> 33) % PAGES);
        let here = |place: &Place| place.0.lock().unwrap()[page as usize].clone();
        let mine = written.iter().rev().find(|(a, p, _)| (*a, *p) == (array, page)).map(|(.., byte)| *byte);
        let now = match here(&places[array]) {
            Some(now) => now,
            None => {
                let mut out = vec![0xee; PAGE_SIZE];
                while taking.read(array, PageRun::new(page, 1), &mut out, array == 1).is_err() {
                    thread::yield_now();
                }
                if array == 0 {
                    // A fault is answered only where no page is.
                    places[0].fill(PageRun::new(page, 1), &out).unwrap();
                }
                out
            }
        };
        let expected = mine.map_or_else(|| content(array as u8, page), |byte| vec![byte; PAGE_SIZE]);
        assert!(now == expected, "page {page} of {array} is wrong");
        if seed >> 50 & 3 == 0 {
            let byte = (seed >> 52) as u8;
            places[array].0.lock().unwrap()[page as usize] = Some(vec![byte; PAGE_SIZE]);
            written.push((array, page, byte));
        }
    }
    written
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn every_page_comes_and_none_overwrites_what_was_written(
        seed: u64, steps in 0..120u64, lives in prop::collection::vec(1..40u64, 0..30),
    ) {
        let giving = Arc::new(PageServer::new(ID, vec![Box::new(Kept(0)), Box::new(Kept(1))]));
        let taking = PageFetcher::new(ID, "alpha".parse().unwrap(), &[PAGES, PAGES]);
        // All of memory, and every page of the disk except the first ones, which were sent.
        let mut disk = PageSet::full(PAGES);
        disk.remove_run(PageRun::new(0, 50));
        taking.restore_missing(vec![(0, PageSet::full(PAGES)), (1, disk.clone())]);
        let places = [Place::new(), Place::new()];
        places[1].fill(PageRun::new(0, 50), &(0..50).flat_map(|p| content(1, p)).collect::<Vec<_>>()).unwrap();
        let stores: Vec<Option<Arc<dyn PageStore>>> = places.iter().map(|p| Some(p.clone() as Arc<dyn PageStore>)).collect();
        giving.open(taking.status().missing_at_start);

        let written = thread::scope(|scope| {
            scope.spawn(|| attend(&giving, &taking, &lives));
            let machine = scope.spawn(|| live(&taking, &places, seed, steps));
            assert!(taking.fetch_all(&stores), "it ended without being closed");
            let written = machine.join().unwrap();
            assert!(!giving.is_finished(), "the source forgot before it was told");
            taking.mark_complete();
            written
        });
        for (array, place) in places.iter().enumerate() {
            let pages = place.0.lock().unwrap();
            for page in 0..PAGES {
                let mine = written.iter().rev().find(|(a, p, _)| (*a, *p) == (array, page)).map(|(.., byte)| *byte);
                let expected = mine.map_or_else(|| content(array as u8, page), |byte| vec![byte; PAGE_SIZE]);
                prop_assert!(pages[page as usize].as_ref() == Some(&expected), "page {} of {}", page, array);
            }
        }
        prop_assert!(giving.status().complete && giving.status().progress.missing == 0);
    }
}

#[test]
fn nothing_is_given_before_the_pause_nor_for_another_handover_nor_after_the_end() {
    let giving = Arc::new(PageServer::new(ID, vec![Box::new(Kept(0))]));
    let taking = PageFetcher::new(ID, "alpha".parse().unwrap(), &[PAGES]);
    taking.restore_missing(vec![(0, PageSet::full(PAGES))]);
    let other = PageFetcher::new(HandoverId([8; 16]), "alpha".parse().unwrap(), &[PAGES]);
    other.restore_missing(vec![(0, PageSet::full(PAGES))]);
    let cable = || {
        let (left, cut) = (AtomicU64::new(1000), AtomicBool::new(false));
        Arc::new(Cable { giving: giving.clone(), left, cut, loses_answers: false })
    };
    let read = |taking: &PageFetcher| {
        taking.accept_connection(FetchPriority::Urgent, cable());
        taking.read(0, PageRun::new(1, 1), &mut [0; PAGE_SIZE], false).map_err(|error| {
            std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source())
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(": ")
        })
    };
    assert!(read(&taking).unwrap_err().contains("still runs here"));
    giving.open(PAGES);
    assert!(read(&other).unwrap_err().contains("another handover"));
    read(&taking).unwrap();
    giving.end();
    assert!(read(&taking).unwrap_err().contains("stopped here by its user"));
    assert!(giving.is_finished());
}

#[test]
fn a_reader_and_the_background_stop_when_the_machine_ends() {
    let taking = PageFetcher::new(ID, "alpha".parse().unwrap(), &[PAGES]);
    taking.restore_missing(vec![(0, PageSet::full(PAGES))]);
    let stores: Vec<Option<Arc<dyn PageStore>>> = vec![Some(Place::new())];
    thread::scope(|scope| {
        let background = scope.spawn(|| taking.fetch_all(&stores));
        let error = taking.read(0, PageRun::new(1, 1), &mut [0; PAGE_SIZE], false).unwrap_err();
        assert!(error.to_string().contains("alpha is not connected"), "{error}");
        taking.close();
        assert!(!background.join().unwrap(), "pages are missing");
    });
    assert_eq!(taking.status().progress.missing, PAGES);
}

#[test]
fn what_is_said_to_be_owed_adds_up_and_is_checked() {
    let taking = PageFetcher::new(ID, "alpha".parse().unwrap(), &[PAGES]);
    assert!(taking.add_missing(1, false, &[]).is_err() && taking.add_missing(0, false, &[1, 2, 3]).is_err());
    let mut set = PageSet::empty(PAGES);
    set.insert_run(PageRun::new(7, 9));
    taking.restore_missing(
        whimbrel_migrate::postcopy::decode_sets(&encode_sets(&[(0, set.clone())]).unwrap(), &[PAGES])
            .unwrap(),
    );
    assert_eq!((taking.missing_at_start(0), taking.status().progress.missing), (set, 9));
    // Pages that are not missing are not requested.
    let mut out = [7; PAGE_SIZE];
    taking.read(0, PageRun::new(300, 1), &mut out, false).unwrap();
    assert!(out == [0; PAGE_SIZE]);
}
