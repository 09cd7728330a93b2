//! A device whose content is chosen later, or exchanged, while clients are connected.
//!
//! A QEMU started ahead of time is connected to a `Switch` and learns nothing but its size. A request that
//! starts after [`SwappableDevice::set`] returned goes to the new device; one that was under way ends on the
//! old one, so exchange only while the machine is paused or before it ran. No lock is held while a device
//! works.

use crate::{BlockError, Device, Extent, ExtentKind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What a read gets before there is a device. Writes always wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeforeSet {
    /// It waits until there is one.
    Wait,
    /// Zeros.
    Zeros,
}

/// The device offered is not the one that was announced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a device of {offered} bytes cannot stand for one of {announced}")]
pub struct SwitchError {
    /// Size that clients were told, in bytes.
    pub announced: u64,
    /// Size of the device offered, in bytes.
    pub offered: u64,
}

/// A device that passes everything to the one that is set.
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
    /// A switch of `size` bytes with no device yet.
    pub fn new(size: u64, before: BeforeSet) -> Self {
        Self { size, before, target: Mutex::new(Target::Unset), changed: Condvar::new() }
    }

    /// Passes requests to `device` from now on; those that waited go on. Returns the device before.
    ///
    /// # Errors
    /// If its size is not the switch's; nothing changes then.
    pub fn set(&self, device: Arc<dyn Device>) -> Result<Option<Arc<dyn Device>>, SwitchError> {
        if device.size() != self.size {
            return Err(SwitchError { announced: self.size, offered: device.size() });
        }
        Ok(self.replace(Target::Set(device)))
    }

    /// Refuses requests from now on, also those that wait. Call it before stopping a server whose clients may
    /// wait.
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

    /// The device now, if there is one; waits for nothing.
    fn now(&self) -> Result<Option<Arc<dyn Device>>, BlockError> {
        match &*self.lock() {
            Target::Unset => Ok(None),
            Target::Set(device) => Ok(Some(device.clone())),
            Target::Closed => Err(BlockError::Closed),
        }
    }

    /// The device, waited for.
    fn get(&self) -> Result<Arc<dyn Device>, BlockError> {
        let unset = |target: &mut Target| matches!(target, Target::Unset);
        let target = self.changed.wait_while(self.lock(), unset).unwrap_or_else(PoisonError::into_inner);
        match &*target {
            Target::Set(device) => Ok(device.clone()),
            Target::Unset | Target::Closed => Err(BlockError::Closed),
        }
    }

    /// The device to read from; none means zeros.
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

    /// Nothing was written before there was a device, so there is nothing to wait for.
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
        // Before there is a device even zeros count as waiting: a write of the range would.
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
