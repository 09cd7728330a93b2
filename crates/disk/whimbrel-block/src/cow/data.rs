//! Data file of an overlay: the allocated pages at their own offsets, encrypted if the overlay has a key.
//!
//! Encrypted are sectors of 512 bytes, which disks of guests have too. So a write replaces whole sectors,
//! unless a client that is no guest writes a part of one: that is read, changed and written under a lock.
//! Holes of the file are zeros of the disk, encrypted or not.

use super::xts::{CipherError, SECTOR, SectorCipher};
use crate::{BlockError, Device, Extent, FileDevice, latch::Latch, range_lock::RangeLock};
use std::{fs::File, io, io::IoSlice};

/// Most bytes that are encrypted before they are written.
const PIECE: usize = 256 << 10;

pub(super) struct OverlayData {
    file: FileDevice,
    cipher: Option<SectorCipher>,
    /// Sectors that are being written.
    locks: RangeLock,
}

impl OverlayData {
    pub(super) fn new(file: FileDevice, cipher: Option<SectorCipher>) -> Self {
        Self { file, cipher, locks: RangeLock::default() }
    }

    /// The file, to be passed to another process.
    pub(super) fn file(&self) -> &File {
        self.file.file()
    }

    pub(super) fn latch(&self) -> &Latch {
        self.file.latch()
    }

    pub(super) fn flush(&self) -> Result<(), BlockError> {
        self.file.flush()
    }

    /// Makes holes of complete pages.
    pub(super) fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.file.trim(offset, len)
    }

    pub(super) fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        self.file.extents(offset, len)
    }

    pub(super) fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        self.read_by(offset, out, |offset, out| self.file.read_at(offset, out).map(|()| true)).map(drop)
    }

    pub(super) fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, BlockError> {
        self.read_by(offset, out, |offset, out| self.file.try_read_at(offset, out))
    }

    /// Reads with `read`, which returns whether it could read at once.
    fn read_by(
        &self,
        offset: u64,
        out: &mut [u8],
        read: impl Fn(u64, &mut [u8]) -> Result<bool, BlockError>,
    ) -> Result<bool, BlockError> {
        let Some(cipher) = &self.cipher else { return read(offset, out) };
        let (start, end) = sectors(offset, out.len());
        let failed = |error: CipherError| BlockError::io("decrypt", offset, io::Error::other(error));
        if (start, end) == (offset, offset + out.len() as u64) {
            let is_read = read(offset, out)?;
            cipher.decrypt(start / SECTOR as u64, out).map_err(failed)?;
            return Ok(is_read);
        }
        let mut whole = vec![0; (end - start) as usize];
        let is_read = read(start, &mut whole)?;
        cipher.decrypt(start / SECTOR as u64, &mut whole).map_err(failed)?;
        out.copy_from_slice(&whole[(offset - start) as usize..][..out.len()]);
        Ok(is_read)
    }

    pub(super) fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        match &self.cipher {
            None => self.file.write_at(offset, data),
            Some(cipher) => self.write_encrypted(cipher, offset, data),
        }
    }

    /// Writes the parts one after the other, from `offset` on.
    pub(super) fn write_parts(&self, offset: u64, parts: &mut [IoSlice<'_>]) -> Result<(), BlockError> {
        match &self.cipher {
            None => self.file.write_parts(offset, parts),
            Some(cipher) => {
                let data = parts.iter().map(|part| &**part).collect::<Vec<_>>().concat();
                self.write_encrypted(cipher, offset, &data)
            }
        }
    }

    fn write_encrypted(&self, cipher: &SectorCipher, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        let (start, end) = sectors(offset, data.len());
        let _guard = self.locks.lock(start / SECTOR as u64..end / SECTOR as u64);
        let failed = |error: CipherError| BlockError::io("encrypt", offset, io::Error::other(error));
        let mut written = 0;
        while written < data.len() {
            let from = offset + written as u64;
            let (start, _) = sectors(from, 0);
            let len = (data.len() - written).min(PIECE - (from - start) as usize);
            let (_, end) = sectors(from, len);
            let mut piece = vec![0; (end - start) as usize];
            if (start, end) != (from, from + len as u64) {
                self.read_at(start, &mut piece)?;
            }
            piece[(from - start) as usize..][..len].copy_from_slice(&data[written..written + len]);
            cipher.encrypt(start / SECTOR as u64, &mut piece).map_err(failed)?;
            self.file.write_at(start, &piece)?;
            written += len;
        }
        Ok(())
    }
}

/// Start of the first sector and end of the last one of a range.
fn sectors(offset: u64, len: usize) -> (u64, u64) {
    let sector = SECTOR as u64;
    (offset / sector * sector, (offset + len as u64).next_multiple_of(sector))
}
