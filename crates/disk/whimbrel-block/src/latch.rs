//! Latch: after a failed write or sync all further writes fail.
//!
//! A kernel that reported a failed sync has marked the lost pages clean: the next sync would succeed and hide
//! the loss. So the first failure is remembered for the life of the device, and every later write or flush is
//! rejected with it. Reads continue. A full file system does not latch a *write*: nothing acknowledged is
//! lost, and a machine paused for lack of space continues once there is some.

use crate::BlockError;
use rustix::io::Errno;
use std::{io, sync::OnceLock};

/// Remembers the first failure; never resets.
#[derive(Debug, Default)]
pub(crate) struct Latch(OnceLock<&'static str>);

impl Latch {
    /// Fails with `Latched` if an action failed before.
    pub(crate) fn check(&self) -> Result<(), BlockError> {
        self.0.get().map_or(Ok(()), |action| Err(BlockError::Latched { action }))
    }

    /// Passes on the result of a write; latches a failure other than lack of space.
    pub(crate) fn write<T>(&self, offset: u64, outcome: io::Result<T>) -> Result<T, BlockError> {
        outcome.map_err(|source| {
            let full =
                [Errno::NOSPC, Errno::DQUOT].iter().any(|e| source.raw_os_error() == Some(e.raw_os_error()));
            if !full {
                self.0.get_or_init(|| "write");
            }
            BlockError::io("write", offset, source)
        })
    }

    /// Passes on the result of a sync; latches a failure.
    pub(crate) fn sync<T>(&self, outcome: io::Result<T>) -> Result<T, BlockError> {
        outcome.map_err(|source| {
            self.0.get_or_init(|| "sync");
            BlockError::io("sync", 0, source)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn os(errno: Errno) -> io::Result<()> {
        Err(errno.into())
    }

    #[test]
    fn a_full_file_system_refuses_one_write_and_a_broken_one_all() {
        let latch = Latch::default();
        assert!(latch.write(0, os(Errno::NOSPC)).is_err());
        assert!(latch.check().is_ok());
        assert!(latch.write(0, os(Errno::IO)).is_err());
        assert!(matches!(latch.check(), Err(BlockError::Latched { action: "write" })));
        assert!(latch.sync(os(Errno::NOSPC)).is_err());
        assert!(matches!(latch.check(), Err(BlockError::Latched { action: "write" })), "the first one stays");
    }

    #[test]
    fn a_sync_that_failed_for_lack_of_space_has_lost_data_and_latches() {
        let latch = Latch::default();
        assert!(latch.sync(os(Errno::NOSPC)).is_err());
        assert!(matches!(latch.check(), Err(BlockError::Latched { action: "sync" })));
    }
}
