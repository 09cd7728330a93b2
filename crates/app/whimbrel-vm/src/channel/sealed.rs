//! Sealed files of memory: what is too large for a packet. Nobody can change one that was received.

use super::{ChannelError, failed};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use std::{
    fs::File,
    io::{self, Write},
    os::{fd::OwnedFd, unix::fs::FileExt},
};

const SEALS: SealFlags =
    SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Writes `bytes` to a file of memory that cannot be changed any more.
pub fn seal(bytes: &[u8]) -> Result<OwnedFd, ChannelError> {
    let make = || {
        let mut file = File::from(memfd_create("state", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.write_all(bytes)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(file.into())
    };
    make().map_err(failed("write for"))
}

/// Reads a sealed file of at most `limit` bytes.
pub fn unseal(file: OwnedFd, limit: u64) -> Result<Vec<u8>, ChannelError> {
    let file = File::from(file);
    let read = || {
        if !fcntl_get_seals(&file)?.contains(SEALS) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a file that is not sealed"));
        }
        let len = file.metadata()?.len();
        if len > limit {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a state that is too large"));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    };
    read().map_err(failed("read from"))
}
