//! Remote disk: a disk of which some pages are on other hosts.
//!
//! An I/O error would damage the guest's file system, so a read that cannot be served now blocks and is
//! retried until the page arrives or the machine ends. [`Stall`] tells users the reason. Damaged content, and
//! content that no host has, is an error at once.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use whimbrel_block::{BlockError, Device, Extent};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet, error_chain, lock};
use whimbrel_store::StoreError;

/// First and longest interval between attempts.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Reads in this time go on the prefetch list, as faults of memory do.
const TOUCH_WINDOW: Duration = Duration::from_secs(10);

/// Reason why a machine waits for another host, for users.
#[derive(Debug, Default)]
pub(super) struct Stall {
    reason: Mutex<Option<String>>,
    over: AtomicBool,
}

impl Stall {
    pub(super) fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    fn set(&self, reason: Option<String>) {
        *lock(&self.reason) = reason;
    }

    /// Ends all waits, as the machine ends.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Release);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
}

/// A block device whose reads wait for other hosts.
pub(super) struct RemoteDisk {
    below: Arc<dyn Device>,
    stall: Arc<Stall>,
    opened: Instant,
    touched: Mutex<PageSet>,
}

impl RemoteDisk {
    pub(super) fn new(below: Arc<dyn Device>, stall: Arc<Stall>) -> Self {
        let pages = below.size().div_ceil(PAGE_SIZE as u64);
        Self { below, stall, opened: Instant::now(), touched: Mutex::new(PageSet::empty(pages)) }
    }

    /// Pages read in the first seconds.
    pub(super) fn touched(&self) -> PageSet {
        lock(&self.touched).clone()
    }

    fn touch(&self, offset: u64, len: u64) {
        if len == 0 || self.opened.elapsed() > TOUCH_WINDOW {
            return;
        }
        let (first, end) = (offset / PAGE_SIZE as u64, (offset + len).div_ceil(PAGE_SIZE as u64));
        let mut touched = lock(&self.touched);
        touched.insert_run(PageRun::new(first, end - first));
    }

    /// Repeats `attempt` until it succeeds, fails for good, or the machine ends.
    fn wait<T>(&self, mut attempt: impl FnMut() -> Result<T, BlockError>) -> Result<T, BlockError> {
        let mut pause = PAUSE;
        loop {
            match attempt() {
                Err(error) if is_retryable(&error) && !self.stall.is_over() => {
                    self.stall.set(Some(error_chain(&error)));
                    thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                Err(_) if self.stall.is_over() => return Err(BlockError::Closed),
                other => {
                    if pause > PAUSE {
                        self.stall.set(None);
                    }
                    return other;
                }
            }
        }
    }
}

/// Whether the same read may succeed later.
fn is_retryable(error: &BlockError) -> bool {
    match error {
        BlockError::Content { source, .. } => {
            source.downcast_ref::<StoreError>().is_some_and(StoreError::is_retryable)
                || super::missing_pages::is_retryable(&**source)
        }
        _ => false,
    }
}

impl Device for RemoteDisk {
    fn size(&self) -> u64 {
        self.below.size()
    }

    fn is_read_only(&self) -> bool {
        self.below.is_read_only()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        BlockError::check(offset, out.len() as u64, self.size())?;
        self.touch(offset, out.len() as u64);
        let begun = Instant::now();
        self.wait(|| self.below.read_at(offset, out))?;
        whimbrel_memory::PAGE_WAITS.observe_time(begun.elapsed());
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.below.write_at(offset, data)
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.below.write_zeroes(offset, len)
    }

    fn flush(&self) -> Result<(), BlockError> {
        self.below.flush()
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        self.wait(|| self.below.extents(offset, len))
    }

    fn may_wait(&self, _offset: u64, _len: u64) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use whimbrel_store::RemoteObjectsError;

    /// Unreachable for this many reads; then broken for good if the number is odd.
    struct Away(AtomicU32, bool);

    impl whimbrel_block::ReadOnlyDevice for Away {
        fn size(&self) -> u64 {
            8192
        }

        fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
            let left = self.0.load(Ordering::Relaxed);
            let len = out.len() as u64;
            if left > 0 || self.1 {
                self.0.store(left.saturating_sub(1), Ordering::Relaxed);
                let source = RemoteObjectsError { source: "the cable is out".into(), retryable: left > 0 };
                let source = Box::new(StoreError::Remote { source });
                return Err(BlockError::Content { offset, len, source });
            }
            out.fill(7);
            Ok(())
        }
    }

    #[test]
    fn a_read_waits_until_the_content_is_back_and_says_why_meanwhile() {
        let stall = Arc::new(Stall::default());
        let disk = RemoteDisk::new(Arc::new(Away(AtomicU32::new(3), false)), stall.clone());
        let mut out = [0; 4096];
        thread::scope(|scope| {
            let read = scope.spawn(|| disk.read_at(4096, &mut out));
            while stall.reason().is_none() && !read.is_finished() {
                thread::yield_now();
            }
            assert!(stall.reason().is_none_or(|reason| reason.contains("the cable is out")));
            read.join().unwrap().unwrap();
        });
        assert!(out == [7; 4096] && stall.reason().is_none());
        assert!(disk.touched().contains(1) && !disk.touched().contains(0));
    }

    #[test]
    fn what_will_never_come_is_an_error_and_an_ended_machine_waits_no_longer() {
        let stall = Arc::new(Stall::default());
        let broken = RemoteDisk::new(Arc::new(Away(AtomicU32::new(1), true)), stall.clone());
        assert!(matches!(broken.read_at(0, &mut [0; 512]), Err(BlockError::Content { .. })));
        let away = RemoteDisk::new(Arc::new(Away(AtomicU32::new(u32::MAX), false)), stall.clone());
        thread::scope(|scope| {
            let read = scope.spawn(|| away.read_at(0, &mut [0; 512]));
            stall.end();
            assert!(matches!(read.join().unwrap(), Err(BlockError::Closed)));
        });
    }
}
