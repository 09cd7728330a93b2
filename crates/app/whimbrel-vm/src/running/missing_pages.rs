//! Missing pages of a running machine: memory and disks with content on another host, and the thread that
//! fetches it.

use super::{Failpoint, memory::SharedPager};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use whimbrel_block::{BlockError, Cow, Device, Extent, ExtentKind};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet, lock};
use whimbrel_machine::PageError;
use whimbrel_memory::PageSource;
use whimbrel_migrate::{
    postcopy::{
        PageFetcher,
        page_fetcher::{PageFetchError, PageStore},
    },
    source::BoxError,
};

use whimbrel_qemu::{ProcessIdentity, QemuProcess};

/// Memory is the first array.
const MEMORY: usize = 0;

/// Source of the missing pages of memory.
pub(super) struct MissingMemory {
    fetcher: Arc<PageFetcher>,
    missing: PageSet,
}

impl MissingMemory {
    pub(super) fn new(fetcher: Arc<PageFetcher>) -> Self {
        Self { missing: fetcher.missing_at_start(MEMORY), fetcher }
    }
}

impl PageSource for MissingMemory {
    fn page_count(&self) -> u64 {
        self.missing.len()
    }

    fn present(&self) -> &PageSet {
        &self.missing
    }

    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        self.fetcher.read(MEMORY, run, out, false).map_err(|error| PageError::new("memory", "fetch", error))
    }
}

pub(super) struct MissingDiskPages {
    below: Arc<dyn Device>,
    fetcher: Arc<PageFetcher>,
    array: usize,
}

impl MissingDiskPages {
    /// Puts the missing pages over `below`, the baseline of the disk here.
    pub(super) fn new(below: Arc<dyn Device>, fetcher: Arc<PageFetcher>, array: usize) -> Self {
        Self { below, fetcher, array }
    }

    fn missing_runs(&self, offset: u64, len: u64) -> Vec<PageRun> {
        let (start, end) = (offset / PAGE_SIZE as u64, (offset + len).div_ceil(PAGE_SIZE as u64));
        self.fetcher.missing_runs(self.array, PageRun::new(start, end - start))
    }
}

/// Whether a read may succeed later, because the other host was only unreachable.
pub(super) fn is_retryable(error: &(dyn std::error::Error + Send + Sync + 'static)) -> bool {
    error.downcast_ref::<PageFetchError>().is_some()
}

impl whimbrel_block::ReadOnlyDevice for MissingDiskPages {
    fn size(&self) -> u64 {
        self.below.size()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        self.below.read_at(offset, out)?;
        let mut page = Vec::new();
        let end = offset + out.len() as u64;
        for run in self.missing_runs(offset, out.len() as u64) {
            page.resize(run.bytes(), 0);
            let read = self.fetcher.read(self.array, run, &mut page, true);
            let len = out.len() as u64;
            read.map_err(|error| BlockError::Content { offset, len, source: Box::new(error) })?;
            let (from, to) = (run.offset().max(offset), (run.offset() + run.bytes() as u64).min(end));
            out[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&page[(from - run.offset()) as usize..(to - run.offset()) as usize]);
        }
        Ok(())
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        let (mut list, mut at) = (Vec::new(), offset);
        for run in self.missing_runs(offset, len) {
            let (from, to) =
                (run.offset().max(offset), (run.offset() + run.bytes() as u64).min(offset + len));
            if at < from {
                list.extend(self.below.extents(at, from - at)?);
            }
            list.push(Extent { len: to - from, kind: ExtentKind::Data });
            at = to;
        }
        if at < offset + len {
            list.extend(self.below.extents(at, offset + len - at)?);
        }
        Ok(merged(list))
    }

    fn may_wait(&self, offset: u64, len: u64) -> bool {
        !self.missing_runs(offset, len).is_empty() || self.below.may_wait(offset, len)
    }
}

/// Merges neighbours of one kind.
fn merged(list: Vec<Extent>) -> Vec<Extent> {
    let mut merged: Vec<Extent> = Vec::new();
    for extent in list {
        match merged.last_mut() {
            Some(last) if last.kind == extent.kind => last.len += extent.len,
            _ => merged.push(extent),
        }
    }
    merged
}

pub(super) struct MemoryPageStore(pub(super) SharedPager);

impl PageStore for MemoryPageStore {
    fn missing(&self, owed: &PageSet) -> PageSet {
        let pager = lock(&self.0);
        // Without a pager the machine has ended and needs no pages.
        let Some(pager) = pager.as_ref() else { return PageSet::empty(owed.len()) };
        let mut missing = pager.missing();
        missing.intersect(owed);
        missing
    }

    fn fill(&self, run: PageRun, content: &[u8]) -> Result<(), BoxError> {
        let pager = lock(&self.0);
        Ok(pager.as_ref().ok_or("the machine has ended")?.fill(run, content)?)
    }

    fn sync(&self) -> Result<(), BoxError> {
        Ok(())
    }
}

pub(super) struct DiskPageStore(pub(super) Arc<Cow>);

impl PageStore for DiskPageStore {
    fn missing(&self, owed: &PageSet) -> PageSet {
        let mut missing = owed.clone();
        missing.subtract(&self.0.allocated());
        missing
    }

    fn fill(&self, run: PageRun, content: &[u8]) -> Result<(), BoxError> {
        Ok(self.0.fill(run, content)?)
    }

    fn sync(&self) -> Result<(), BoxError> {
        Ok(self.0.flush()?)
    }
}

/// Kills a QEMU that loads while the pages that it waits for cannot be fetched.
pub(super) struct LoadGuard {
    over: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Time after which a load without a connection is aborted.
const LOAD_PATIENCE: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl LoadGuard {
    pub(super) fn start(taking: Arc<PageFetcher>, process: ProcessIdentity, qemu_dir: &Path) -> Self {
        let (over, ended) = mpsc::channel();
        let log = qemu_dir.join("qemu.log");
        let guard = move || {
            let mut cut_off_since = None;
            while ended.recv_timeout(POLL_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                let cut_off = !taking.status().connected;
                let since = cut_off.then(|| *cut_off_since.get_or_insert_with(Instant::now));
                cut_off_since = since;
                if since.is_some_and(|since| since.elapsed() > LOAD_PATIENCE) {
                    tracing::warn!(from = %taking.from(), "aborting a load: its missing pages cannot be fetched");
                    return QemuProcess::adopt(process, &log).into_iter().for_each(|qemu| qemu.kill());
                }
            }
        };
        let thread = thread::Builder::new().name("loading".into()).spawn(guard);
        Self { over: Some(over), thread: thread.ok() }
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.over = None;
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

/// The thread that fetches missing pages; ends with the machine here.
pub(super) struct BackgroundFetch {
    fetcher: Arc<PageFetcher>,
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundFetch {
    /// Starts the thread. It calls `whole` once no page is missing and all are durable.
    pub(super) fn start(
        fetcher: Arc<PageFetcher>,
        stores: Vec<Option<Arc<dyn PageStore>>>,
        whole: impl FnOnce() + Send + 'static,
    ) -> Self {
        fetcher.reopen();
        let done = Arc::new(AtomicBool::new(false));
        let bring = {
            let (taking, done) = (fetcher.clone(), done.clone());
            move || {
                Failpoint::Fetch.reached_unless(|| taking.is_closed());
                if !taking.fetch_all(&stores) {
                    return;
                }
                let settled = stores.iter().flatten().try_for_each(|store| store.sync());
                match settled {
                    Ok(()) => {
                        done.store(true, Ordering::Release);
                        whole();
                    }
                    Err(error) => tracing::error!(error = &*error, "could not sync fetched pages"),
                }
            }
        };
        let thread = thread::Builder::new().name("bringing".into()).spawn(bring);
        let thread = thread.inspect_err(|error| tracing::error!(%error, "cannot start a fetch thread")).ok();
        Self { fetcher, done, thread }
    }

    /// Whether no page is missing.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }
}

impl Drop for BackgroundFetch {
    fn drop(&mut self) {
        if !self.is_done() {
            self.fetcher.close();
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a thread that fetched pages panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;
    use whimbrel_block::MemDevice;
    use whimbrel_machine::PageArray;
    use whimbrel_migrate::{
        link::LinkError,
        postcopy::{
            PageServer,
            messages::FetchPriority,
            page_fetcher::{FetchConnection, PendingReply},
        },
        protocol::HandoverId,
    };

    const PAGES: u64 = 16;

    /// The source's disk: every byte of a page is its number and 0x40.
    struct Old;

    impl PageArray for Old {
        fn name(&self) -> &str {
            "disk0"
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
            run.pages()
                .zip(out.chunks_exact_mut(PAGE_SIZE))
                .for_each(|(page, out)| out.fill(0x40 | page as u8));
            Ok(())
        }
    }

    struct Direct(Arc<PageServer>);

    struct Ready(Result<(Bytes, Bytes), LinkError>);

    impl PendingReply for Ready {
        fn wait(self: Box<Self>) -> Result<(Bytes, Bytes), LinkError> {
            self.0
        }
    }

    impl FetchConnection for Direct {
        fn request(&self, kind: u16, header: Vec<u8>) -> Result<Box<dyn PendingReply>, LinkError> {
            let answer =
                self.0.handle(kind, &header).map(|(header, payload)| (header.into(), payload.into()));
            Ok(Box::new(Ready(answer.map_err(|error| LinkError::Refused { reason: error.to_string() }))))
        }
        fn close(&self) {}
    }

    fn disk(owed: &PageSet, connected: bool) -> MissingDiskPages {
        let id = HandoverId([3; 16]);
        let giving = Arc::new(PageServer::new(id, vec![Box::new(Old), Box::new(Old)]));
        giving.open(owed.count());
        let taking = Arc::new(PageFetcher::new(id, "alpha".parse().unwrap(), &[PAGES, PAGES]));
        taking.restore_missing(vec![(1, owed.clone())]);
        if connected {
            taking.accept_connection(FetchPriority::Urgent, Arc::new(Direct(giving)));
        }
        let below = (0..PAGES).flat_map(|page| vec![page as u8; PAGE_SIZE]).collect();
        MissingDiskPages::new(Arc::new(MemDevice::new(below)), taking, 1)
    }

    fn set(pages: &[u64]) -> PageSet {
        let mut set = PageSet::empty(PAGES);
        pages.iter().for_each(|page| set.insert_run(PageRun::new(*page, 1)));
        set
    }

    proptest! {
        #[test]
        fn any_bytes_are_the_old_hosts_where_owed_and_those_below_elsewhere(
            owed in prop::collection::vec(0..PAGES, 0..12), start in 0..PAGES * 4096, len in 0..9000u64,
        ) {
            let len = len.min(PAGES * 4096 - start);
            let owed = set(&owed);
            let disk = disk(&owed, true);
            let mut out = vec![0xee; len as usize];
            disk.read_at(start, &mut out).unwrap();
            for (at, byte) in (start..).zip(&out) {
                let page = at / 4096;
                let expected = if owed.contains(page) { 0x40 | page as u8 } else { page as u8 };
                prop_assert_eq!(*byte, expected, "byte {}", at);
            }
            let extents = disk.extents(start, len).unwrap();
            prop_assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), len);
        }
    }

    #[test]
    fn what_is_not_owed_needs_nobody_and_what_is_says_who_has_it() {
        let disk = disk(&set(&[3]), false);
        assert!(!disk.may_wait(0, 3 * 4096) && disk.may_wait(0, 3 * 4096 + 1));
        disk.read_at(0, &mut [0; 3 * 4096]).unwrap();
        let Err(BlockError::Content { source, .. }) = disk.read_at(3 * 4096 + 17, &mut [0; 8]) else {
            panic!("nobody is connected");
        };
        assert!(is_retryable(&*source) && source.to_string().contains("alpha is not connected"), "{source}");
    }
}
