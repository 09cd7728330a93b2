//! Figures, printed: `cargo test -p whimbrel-memory --test figures -- --ignored --nocapture --test-threads
//! 1`.

use crate::support::*;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::PageArray;
use whimbrel_memory::{Attachment, Mode, Pager};

fn pages(mib: u64) -> u64 {
    mib << 20 >> 12
}

fn median(mut run: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<_> = (0..15).map(|_| run()).collect();
    times.sort_unstable();
    times[7]
}

fn timed<T>(run: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = run();
    (start.elapsed(), result)
}

#[test]
#[ignore = "prints figures, judges nothing"]
fn attaching_and_starting() {
    for (mib, mode) in [(512, Mode::Track), (2048, Mode::Track), (512, Mode::Lazy), (2048, Mode::Lazy)] {
        let file = ram_file("figures", pages(mib));
        let image = Arc::new(Image::new(pages(mib), 16));
        let mut starts = Vec::new();
        let attach = median(|| {
            let target = Target::serving("shared", text(&file), pages(mib));
            let (time, attachment) =
                timed(|| Attachment::attach(target.pid(), by_path(&file), mode).unwrap());
            if mode == Mode::Lazy {
                let (time, _pager) = timed(|| Pager::start(&attachment, image.clone()).unwrap());
                starts.push(time);
            }
            time
        });
        starts.sort_unstable();
        println!("{mib} MiB {mode:?}: attach {attach:?}, pager start {:?}", starts.get(7));
    }
}

#[test]
#[ignore = "prints figures, judges nothing"]
fn scanning_and_reading() {
    let all = pages(512);
    let file = ram_file("figures", all);
    let mut target = Target::serving("shared", text(&file), all);
    let attachment = Attachment::attach(target.pid(), by_path(&file), Mode::Track).unwrap();
    let mut ram = attachment.ram().unwrap();
    println!("scan, never touched: {:?}", median(|| timed(|| ram.take_dirty().unwrap()).0));
    for page in 0..all {
        target.write(page, 1);
    }
    let (time, dirty) = timed(|| ram.take_dirty().unwrap());
    println!("scan, {} dirty: {time:?}", dirty.count());
    println!("scan, idle: {:?}", median(|| timed(|| ram.take_dirty().unwrap()).0));
    let mut copy = vec![0; 1 << 20];
    let big = timed(|| (0..512).for_each(|at| ram.read(PageRun::new(at * 256, 256), &mut copy).unwrap())).0;
    println!("read by MiB: {:.1} GB/s", (512 << 20) as f64 / big.as_nanos() as f64);
    let mut one = vec![0; PAGE];
    let read = |i: u64| ram.read(PageRun::new(i * 7919 % all, 1), &mut one);
    let small = timed(|| (0..100_000).map(read).all(|result| result.is_ok())).0;
    println!("read single pages: {:?} each", small / 100_000);
}

#[test]
#[ignore = "prints figures, judges nothing"]
fn filling() {
    for kind in ["shared", "private"] {
        let all = pages(512);
        let file = ram_file("figures", all);
        let mut target = Target::serving(kind, text(&file), all);
        let attachment = Attachment::attach(target.pid(), by_path(&file), Mode::Lazy).unwrap();
        let image = Arc::new(Image::new(all, 1));
        let pager = Pager::start(&attachment, image).unwrap();
        let page = |i: u64| i * 7919 % all;
        let faults = timed(|| (0..2000).map(page).for_each(|page| target.write(page, 1))).0;
        let pipes = timed(|| (0..2000).map(page).for_each(|page| target.write(page, 2))).0;
        println!("{kind}: fault {:?}", faults.saturating_sub(pipes) / 2000);
        drop(pager);
        let attachment = Attachment::adopt(target.pid(), by_path(&file), Mode::Lazy).unwrap();
        let pager = Pager::start(&attachment, Arc::new(Constant(PageSet::full(all)))).unwrap();
        let missing = all - pager.state().resident;
        pager.prefetch_all();
        let filling = timed(|| assert!(pager.wait_resident(Duration::from_secs(60)))).0;
        println!("{kind}: filling {:.2} GB/s", (missing as usize * PAGE) as f64 / filling.as_nanos() as f64);
    }
}

/// A source that costs nothing.
struct Constant(PageSet);

impl whimbrel_memory::PageSource for Constant {
    fn page_count(&self) -> u64 {
        self.0.len()
    }

    fn present(&self) -> &PageSet {
        &self.0
    }

    fn read(&self, _: PageRun, out: &mut [u8]) -> Result<(), whimbrel_machine::PageError> {
        out.fill(7);
        Ok(())
    }

    fn preferred_run(&self, page: u64) -> PageRun {
        PageRun::new(page / 64 * 64, 64)
    }
}
