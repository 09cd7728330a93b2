//! Swappable device: its content is chosen later, or exchanged, while clients are connected.
//!
//! A prestarted QEMU is connected to a [`SwappableDevice`] and learns only its size. A request that starts
//! after [`SwappableDevice::set`] returned goes to the new device; one in progress ends on the old one. So
//! exchange devices only while the machine is paused or before it ran. No lock is held while a device works.

use crate::{BlockError, Device, Extent, ExtentKind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Result of a read before there is a device. Writes always wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeforeSet {
    /// The read waits until there is a device.
    Wait,
    /// The read returns zeros.
    Zeros,
}

/// The new device has another size than clients were told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a device of {offered} bytes cannot replace one of {announced} bytes")]
pub struct SwapError {
    /// Size that clients were told, in bytes.
    pub announced: u64,
    /// Size of the new device, in bytes.
    pub offered: u64,
}

/// Device that forwards everything to the one that is set.
pub struct SwappableDevice {
    size: u64,
    before: BeforeSet,
    target: Mutex<Target>,
    changed: Condvar,
}

enum Target {
    Unset,
    Set(Arc<dyn Device>),
    Closed,
}

impl SwappableDevice {
    /// Creates a device of `size` bytes without content.
    pub fn new(size: u64, before: BeforeSet) -> Self {
        Self { size, before, target: Mutex::new(Target::Unset), changed: Condvar::new() }
    }

    /// Forwards requests to `device` from now on; waiting ones continue. Returns the previous device.
    ///
    /// # Errors
    /// If it has another size; nothing changes then.
    pub fn set(&self, device: Arc<dyn Device>) -> Result<Option<Arc<dyn Device>>, SwapError> {
        if device.size() != self.size {
            return Err(SwapError { announced: self.size, offered: device.size() });
        }
        Ok(self.replace(Target::Set(device)))
    }

    /// Rejects requests from now on, including waiting ones. Call it before stopping a server whose clients
    /// may wait.
    pub fn close(&self) -> Option<Arc<dyn Device>> {
        self.replace(Target::Closed)
    }

    fn replace(&self, target: Target) -> Option<Arc<dyn Device>> {
        let old = std::mem::replace(&mut *self.lock(), target);
        self.changed.notify_all();
        match old {
            Target::Set(device) => Some(device),
            Target::Unset | Target::Closed => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Target> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Current device, without waiting.
    fn now(&self) -> Result<Option<Arc<dyn Device>>, BlockError> {
        match &*self.lock() {
            Target::Unset => Ok(None),
            Target::Set(device) => Ok(Some(device.clone())),
            Target::Closed => Err(BlockError::Closed),
        }
    }

    fn get(&self) -> Result<Arc<dyn Device>, BlockError> {
        let unset = |target: &mut Target| matches!(target, Target::Unset);
        let target = self.changed.wait_while(self.lock(), unset).unwrap_or_else(PoisonError::into_inner);
        match &*target {
            Target::Set(device) => Ok(device.clone()),
            Target::Unset | Target::Closed => Err(BlockError::Closed),
        }
    }

    /// Device to read from; none means zeros.
    fn source(&self) -> Result<Option<Arc<dyn Device>>, BlockError> {
        match self.before {
            BeforeSet::Wait => self.get().map(Some),
            BeforeSet::Zeros => self.now(),
        }
    }
}

impl Device for SwappableDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        matches!(self.now(), Ok(Some(device)) if device.is_read_only())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        BlockError::check(offset, out.len() as u64, self.size)?;
        match self.source()? {
            Some(device) => device.read_at(offset, out),
            None => {
                out.fill(0);
                Ok(())
            }
        }
    }

    fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, BlockError> {
        match self.now()? {
            Some(device) => device.try_read_at(offset, out),
            None if self.before == BeforeSet::Wait => Ok(false),
            None => self.read_at(offset, out).map(|()| true),
        }
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.get()?.write_at(offset, data)
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.get()?.write_zeroes(offset, len)
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.get()?.trim(offset, len)
    }

    /// Nothing was written before there was a device, so there is nothing to flush.
    fn flush(&self) -> Result<(), BlockError> {
        self.now()?.map_or(Ok(()), |device| device.flush())
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        BlockError::check(offset, len, self.size)?;
        match self.source()? {
            Some(device) => device.extents(offset, len),
            None => Ok(vec![Extent { len, kind: ExtentKind::Hole }]),
        }
    }

    fn may_wait(&self, offset: u64, len: u64) -> bool {
        // Before there is a device even zeros count as waiting, because a write of the range would wait.
        self.now().is_ok_and(|device| device.is_none_or(|d| d.may_wait(offset, len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemDevice, ZeroDevice};

    #[test]
    fn a_read_before_the_device_waits_for_it_and_never_sees_zeros() {
        let switch = SwappableDevice::new(4096, BeforeSet::Wait);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut out = [0; 4096];
                switch.read_at(0, &mut out).map(|()| out)
            });
            assert!(switch.may_wait(0, 1));
            assert!(switch.set(Arc::new(ZeroDevice { size: 512 })).is_err());
            assert!(switch.set(Arc::new(MemDevice::new(vec![7; 4096]))).unwrap().is_none());
            assert_eq!(reader.join().unwrap().unwrap(), [7; 4096]);
        });
    }

    #[test]
    fn closing_ends_those_who_wait() {
        let switch = SwappableDevice::new(4096, BeforeSet::Zeros);
        let mut out = [1; 16];
        switch.read_at(0, &mut out).unwrap();
        assert_eq!(out, [0; 16]);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| switch.write_at(0, &[1]));
            switch.close();
            assert!(matches!(writer.join().unwrap(), Err(BlockError::Closed)));
        });
        assert!(matches!(switch.read_at(0, &mut out), Err(BlockError::Closed)));
    }
}
