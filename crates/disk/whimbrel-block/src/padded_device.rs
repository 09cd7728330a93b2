//! Padded device: a device that is longer than the one below it; the rest reads as zeros.
//!
//! For a disk that is larger than its base file; a writable layer goes above.

use crate::{BlockError, Device, Extent, ExtentKind};
use std::sync::Arc;

/// Read-only device of `size` bytes that begins with another one.
pub struct Padded {
    inner: Arc<dyn Device>,
    size: u64,
}

impl Padded {
    /// Extends `inner` to `size` bytes.
    ///
    /// # Errors
    /// If `inner` is longer than that.
    pub fn new(inner: Arc<dyn Device>, size: u64) -> Result<Self, BlockError> {
        BlockError::check(0, inner.size(), size)?;
        Ok(Self { inner, size })
    }

    /// Number of bytes that the inner device has of `len` bytes from `offset` on.
    fn inner_part(&self, offset: u64, len: u64) -> u64 {
        self.inner.size().saturating_sub(offset).min(len)
    }
}

impl crate::ReadOnlyDevice for Padded {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        BlockError::check(offset, out.len() as u64, self.size)?;
        let (inner, padding) = out.split_at_mut(self.inner_part(offset, out.len() as u64) as usize);
        padding.fill(0);
        if inner.is_empty() { Ok(()) } else { self.inner.read_at(offset, inner) }
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        BlockError::check(offset, len, self.size)?;
        let inner = self.inner_part(offset, len);
        let mut extents = if inner == 0 { Vec::new() } else { self.inner.extents(offset, inner)? };
        let padding = len - inner;
        match extents.last_mut() {
            Some(last) if last.kind == ExtentKind::Hole => last.len += padding,
            _ if padding > 0 => extents.push(Extent { len: padding, kind: ExtentKind::Hole }),
            _ => {}
        }
        Ok(extents)
    }

    fn may_wait(&self, offset: u64, len: u64) -> bool {
        match self.inner_part(offset, len) {
            0 => false,
            inner => self.inner.may_wait(offset, inner),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemDevice;

    #[test]
    fn the_padding_is_zeros_and_a_hole() {
        let inner = MemDevice::new(vec![7; 8192]);
        let padded = Padded::new(Arc::new(inner), 16384).unwrap();
        let mut out = vec![1; 16384];
        padded.read_at(0, &mut out).unwrap();
        assert!(out[..8192].iter().all(|b| *b == 7) && out[8192..].iter().all(|b| *b == 0));
        padded.read_at(12288, &mut out[..4096]).unwrap();
        let tail = padded.extents(4096, 12288).unwrap();
        assert_eq!(tail.last(), Some(&Extent { len: 8192, kind: ExtentKind::Hole }));
        assert_eq!(tail.iter().map(|e| e.len).sum::<u64>(), 12288);
        assert!(padded.read_at(16000, &mut out).is_err());
        assert!(Padded::new(Arc::new(MemDevice::new(vec![7; 8192])), 4096).is_err());
    }
}
