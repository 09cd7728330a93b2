//! Write throttle: limits the rate of writes, for a machine that writes its disk faster than it can be
//! copied.
//!
//! Reads, flushes and operations that free blocks are not limited. A change of the rate applies at once, also
//! to a waiting write.

use crate::{BlockError, Device, layer::all_but_io};
use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_core::lock;

/// Idle time that later writes may use.
const BURST: Duration = Duration::from_millis(50);

/// Device whose writes can be throttled.
pub struct WriteThrottle {
    inner: Arc<dyn Device>,
    read: AtomicU64,
    written: AtomicU64,
    pace: Mutex<RateState>,
    changed: Condvar,
}

struct RateState {
    /// Bytes a second; none is no limit.
    rate: Option<u64>,
    /// Time at which the budget covers the writes that passed.
    free_at: Instant,
}

impl WriteThrottle {
    /// Wraps `inner` without a limit.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let pace = Mutex::new(RateState { rate: None, free_at: Instant::now() });
        Self { inner, read: AtomicU64::new(0), written: AtomicU64::new(0), pace, changed: Condvar::new() }
    }

    /// Limits writes to `rate` bytes a second from now on; none removes the limit.
    pub fn set_rate(&self, rate: Option<u64>) {
        let mut pace = lock(&self.pace);
        if pace.rate != rate {
            *pace = RateState { rate, free_at: Instant::now() };
            self.changed.notify_all();
        }
    }

    /// Bytes read so far.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes written so far, delayed or not.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Waits until `bytes` may be written.
    fn wait(&self, bytes: u64) {
        let mut pace = lock(&self.pace);
        while let Some(rate) = pace.rate {
            let now = Instant::now();
            let wait = pace.free_at.saturating_duration_since(now);
            if wait.is_zero() {
                let start = pace.free_at.max(now.checked_sub(BURST).unwrap_or(now));
                pace.free_at = start + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
                break;
            }
            let waited = self.changed.wait_timeout(pace, wait);
            pace = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(pace);
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Device for WriteThrottle {
    all_but_io!(inner);

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        self.inner.read_at(offset, out)?;
        self.read.fetch_add(out.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, BlockError> {
        let done = self.inner.try_read_at(offset, out)?;
        self.read.fetch_add(if done { out.len() as u64 } else { 0 }, Ordering::Relaxed);
        Ok(done)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.wait(data.len() as u64);
        self.inner.write_at(offset, data)
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.inner.write_zeroes(offset, len)
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.inner.trim(offset, len)
    }

    /// While throttled, all writes count as waiting, so that they do not delay other requests.
    fn may_wait(&self, offset: u64, len: u64) -> bool {
        lock(&self.pace).rate.is_some() || self.inner.may_wait(offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemDevice;

    #[test]
    fn a_write_that_waits_goes_on_when_the_brake_is_let_go() {
        let brake = WriteThrottle::new(Arc::new(MemDevice::new(vec![0; 8192])));
        assert!(!brake.may_wait(0, 1));
        brake.set_rate(Some(1));
        assert!(brake.may_wait(0, 1));
        // The budget is not used yet; this write uses more than an hour of it.
        brake.write_at(0, &[1; 4096]).unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| brake.write_at(4096, &[2; 4096]));
            let mut out = [0; 1];
            brake.read_at(0, &mut out).unwrap();
            assert_eq!((out, brake.read(), brake.written()), ([1], 1, 4096), "reads pass, the write waits");
            brake.set_rate(None);
            writer.join().unwrap().unwrap();
        });
        assert_eq!(brake.written(), 8192);
    }

    #[test]
    fn in_the_long_run_the_rate_is_kept() {
        let brake = WriteThrottle::new(Arc::new(MemDevice::new(vec![0; 4096])));
        brake.set_rate(Some(4096 * 1000));
        let begun = Instant::now();
        (0..200).for_each(|_| brake.write_at(0, &[1; 4096]).unwrap());
        // 200 pages at 1000 a second, of which 50 ms may have been idle and one is not waited for.
        assert!(begun.elapsed() >= Duration::from_millis(140), "{:?}", begun.elapsed());
    }
}
