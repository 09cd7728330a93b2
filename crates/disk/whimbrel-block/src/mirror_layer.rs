//! Mirror layer: writes also go to a copy on another host, while a mirror is set.
//!
//! Zeroing or freeing a range is not sent: the range may be long, and the next round copies it almost for
//! free. A mirror is set and removed between writes, never during one.

use crate::{BlockError, Device, Mirror, layer::all_but_writes, tracked_device::pages_of};
use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicBool, Ordering},
};
use whimbrel_core::PageRun;

/// Block device that can be mirrored.
pub struct MirrorLayer {
    inner: Arc<dyn Device>,
    mirror: RwLock<Option<Arc<Mirror>>>,
    is_mirrored: AtomicBool,
}

impl MirrorLayer {
    /// Wraps `inner`, without a mirror.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, mirror: RwLock::new(None), is_mirrored: AtomicBool::new(false) }
    }

    /// Sets or removes the mirror for writes that begin from now on; earlier ones have ended on return. A
    /// previous mirror must have ended.
    pub fn set(&self, mirror: Option<Arc<Mirror>>) {
        let mut held = self.mirror.write().unwrap_or_else(PoisonError::into_inner);
        self.is_mirrored.store(mirror.is_some(), Ordering::Relaxed);
        *held = mirror;
    }

    /// Reads pages; the device may end inside its last page, whose rest is zeros.
    fn read_pages(&self, run: PageRun, out: &mut [u8]) -> Result<(), BlockError> {
        let there = self.inner.size().saturating_sub(run.offset()).min(out.len() as u64) as usize;
        self.inner.read_at(run.offset(), &mut out[..there])
    }

    /// Runs `write`, which changes a range and is not sent.
    fn run_unmirrored(
        &self,
        (offset, len): (u64, u64),
        write: impl FnOnce() -> Result<(), BlockError>,
    ) -> Result<(), BlockError> {
        let held = self.mirror.read().unwrap_or_else(PoisonError::into_inner);
        let outcome = write();
        let inside = self.inner.size().saturating_sub(offset).min(len);
        if let (Some(mirror), true) = (&*held, inside > 0) {
            mirror.record_missed(pages_of(offset, inside));
        }
        outcome
    }
}

impl Device for MirrorLayer {
    all_but_writes!(inner);

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        let held = self.mirror.read().unwrap_or_else(PoisonError::into_inner);
        let len = data.len() as u64;
        let write = || self.inner.write_at(offset, data);
        match &*held {
            Some(mirror) if len > 0 && BlockError::check(offset, len, self.size()).is_ok() => {
                mirror.write(pages_of(offset, len), write, |run, out| self.read_pages(run, out))
            }
            _ => write(),
        }
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.run_unmirrored((offset, len), || self.inner.write_zeroes(offset, len))
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.run_unmirrored((offset, len), || self.inner.trim(offset, len))
    }

    /// While mirrored, all writes count as waiting, so that they do not delay other requests.
    fn may_wait(&self, offset: u64, len: u64) -> bool {
        self.is_mirrored.load(Ordering::Relaxed) || self.inner.may_wait(offset, len)
    }
}
