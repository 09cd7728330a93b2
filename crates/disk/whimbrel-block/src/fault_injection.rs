//! Fault injection: a layer that fails on purpose, to test that the layers above survive it.
//!
//! Failures are counted, not random: the plan numbers the write or flush that fails, so a failing test is
//! repeatable.

use crate::{BlockError, Device, Extent};
use std::io;
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering::SeqCst},
};
use whimbrel_core::lock;

/// Operations that are to fail. Counts begin at 1; none never fails.
#[derive(Debug, Clone, Default)]
pub struct FaultPlan {
    /// Number of the write (of any kind) that fails.
    pub write: Option<u64>,
    /// Bytes of the failing write that are written nevertheless.
    pub torn_at: usize,
    /// Number of the flush that fails.
    pub flush: Option<u64>,
}

/// Passes everything on, except failures according to the plan.
pub struct FaultInjector {
    inner: Arc<dyn Device>,
    plan: Mutex<FaultPlan>,
    writes: AtomicU64,
    flushes: AtomicU64,
}

impl FaultInjector {
    /// Wraps `inner` with this plan.
    pub fn new(inner: Arc<dyn Device>, plan: FaultPlan) -> Self {
        Self { inner, plan: Mutex::new(plan), writes: AtomicU64::new(0), flushes: AtomicU64::new(0) }
    }

    /// Replaces the plan; counting continues.
    pub fn set_plan(&self, plan: FaultPlan) {
        *lock(&self.plan) = plan;
    }

    fn plan(&self) -> FaultPlan {
        lock(&self.plan).clone()
    }

    fn broken(action: &'static str, offset: u64) -> BlockError {
        BlockError::io(action, offset, io::Error::from(rustix::io::Errno::IO))
    }

    /// Fails if the write that begins now is the one to fail.
    fn count_write(&self, offset: u64) -> Result<(), BlockError> {
        let count = self.writes.fetch_add(1, SeqCst) + 1;
        if self.plan().write == Some(count) { Err(Self::broken("write", offset)) } else { Ok(()) }
    }
}

impl Device for FaultInjector {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        self.inner.read_at(offset, out)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        if let Err(error) = self.count_write(offset) {
            self.inner.write_at(offset, &data[..self.plan().torn_at.min(data.len())])?;
            return Err(error);
        }
        self.inner.write_at(offset, data)
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.count_write(offset)?;
        self.inner.write_zeroes(offset, len)
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.count_write(offset)?;
        self.inner.trim(offset, len)
    }

    fn flush(&self) -> Result<(), BlockError> {
        let count = self.flushes.fetch_add(1, SeqCst) + 1;
        if self.plan().flush == Some(count) {
            return Err(Self::broken("sync", 0));
        }
        self.inner.flush()
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        self.inner.extents(offset, len)
    }

    fn may_wait(&self, offset: u64, len: u64) -> bool {
        self.inner.may_wait(offset, len)
    }
}
