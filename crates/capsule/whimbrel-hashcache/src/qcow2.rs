//! Reader of qcow2 images (versions 2 and 3, QEMU's `docs/interop/qcow2.txt`): finds the clusters in the
//! file.
//!
//! It reads only what a hash cache needs: plain clusters of the active layer. Compressed and zero clusters,
//! backing files and snapshots are left out, since a page that is not found costs only a transfer. Images
//! with external data files or encryption are rejected.
//!
//! The image may be hostile or change while it is read. Every offset is checked against the file, and every
//! table is bounded by the file's length before it is allocated. A walk ends when tables or data add up to
//! more than the file has, so tables that point at each other cost no more than one pass over the file. A
//! single invalid entry is skipped.

use std::{fs::File, io, os::unix::fs::FileExt as _};

const MAGIC: u32 = 0x5146_49fb;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const ALL_ZEROS: u64 = 1;
/// Limit of QEMU itself.
const MAX_L1_BYTES: u64 = 32 << 20;
/// Limit of offsets in the cache.
const MAX_SIZE: u64 = 1 << 49;

/// Random access to the bytes of an image.
pub trait ReadAt {
    /// Fills `buffer` from `offset`.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Length in bytes.
    fn size(&self) -> io::Result<u64>;
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

impl ReadAt for [u8] {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let from = usize::try_from(offset).ok().and_then(|offset| self.get(offset..)).ok_or_else(end)?;
        buffer.copy_from_slice(from.get(..buffer.len()).ok_or_else(end)?);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        (**self).read_at(buffer, offset)
    }

    fn size(&self) -> io::Result<u64> {
        (**self).size()
    }
}

/// Reasons to reject an image.
#[derive(Debug, thiserror::Error)]
pub enum Qcow2Error {
    /// The file ends too early, or the operating system returned an error.
    #[error("cannot read the {what}")]
    Read {
        /// Part of the image: `header`, `L1 table`, …
        what: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The file is no qcow2 image.
    #[error("the qcow2 magic number is missing")]
    Magic,
    /// The version is neither 2 nor 3.
    #[error("qcow2 version {version} is not supported")]
    Version {
        /// Version that was found.
        version: u32,
    },
    /// The image uses a feature with which clusters are not plain content.
    #[error("the image uses {feature}, which is not supported")]
    Feature {
        /// Name of the feature.
        feature: &'static str,
    },
    /// A field is invalid.
    #[error("the {field} is invalid")]
    Field {
        /// Name of the field.
        field: &'static str,
    },
    /// The tables refer to more tables or clusters than the file can have.
    #[error("the tables refer to more data than the file has")]
    Overlap,
}

/// Part of the image that is contiguous in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the image.
    pub guest: u64,
    /// Offset in the file.
    pub host: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Checked header and first-level table of an image.
#[derive(Debug)]
pub struct Map<S> {
    source: S,
    file_size: u64,
    cluster_bits: u32,
    size: u64,
    l1: Vec<u64>,
}

impl<S: ReadAt> Map<S> {
    /// Reads the header and the first-level table.
    pub fn open(source: S) -> Result<Self, Qcow2Error> {
        let read = |what, source| Qcow2Error::Read { what, source };
        let file_size = source.size().map_err(|e| read("size", e))?;
        let mut header = [0; 104];
        source.read_at(&mut header[..72], 0).map_err(|e| read("header", e))?;
        let version = be32(&header, 4);
        if be32(&header, 0) != MAGIC {
            return Err(Qcow2Error::Magic);
        }
        if version == 3 {
            source.read_at(&mut header[72..], 72).map_err(|e| read("header", e))?;
        }
        check_features(&header, version)?;
        let cluster_bits = be32(&header, 20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(Qcow2Error::Field { field: "cluster size" });
        }
        let size = be64(&header, 24);
        if size > MAX_SIZE {
            return Err(Qcow2Error::Field { field: "image size" });
        }
        let l1 = read_l1(&source, &header, file_size)?;
        // One cluster of second-level entries, eight bytes each.
        let covered = 1 << (2 * cluster_bits - 3);
        if (l1.len() as u64) < size.div_ceil(covered) {
            return Err(Qcow2Error::Field { field: "L1 size" });
        }
        Ok(Self { source, file_size, cluster_bits, size, l1 })
    }

    /// Size of the image in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Walks the tables. Extents come in the order of the image and are as long as possible.
    pub fn extents(self) -> Extents<S> {
        let (tables, data) = (self.file_size >> self.cluster_bits, self.file_size);
        Extents { map: self, l1_at: 0, l2: Vec::new(), l2_at: 0, guest: 0, tables, data, pending: None }
    }
}

fn check_features(header: &[u8; 104], version: u32) -> Result<(), Qcow2Error> {
    let feature = |feature| Err(Qcow2Error::Feature { feature });
    if !(2..=3).contains(&version) {
        return Err(Qcow2Error::Version { version });
    }
    if be32(header, 32) != 0 {
        return feature("encryption");
    }
    // Version 2 does not have this field; its bytes were not read and are zero. Bit 0 (refcounts may be
    // wrong), bit 1 (marked corrupt) and bit 3 (another compression) do not affect plain clusters.
    let incompatible = be64(header, 72);
    match incompatible & !0b1011 {
        0 => Ok(()),
        bits if bits & 0b100 != 0 => feature("an external data file"),
        bits if bits & 0b1_0000 != 0 => feature("extended L2 entries"),
        _ => feature("an unknown feature"),
    }
}

fn read_l1(source: &impl ReadAt, header: &[u8; 104], file_size: u64) -> Result<Vec<u64>, Qcow2Error> {
    let (entries, offset) = (be32(header, 36), be64(header, 40));
    let bytes = u64::from(entries) * 8;
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= file_size);
    if bytes > MAX_L1_BYTES || !fits {
        return Err(Qcow2Error::Field { field: "L1 table" });
    }
    let mut table = vec![0; bytes as usize];
    source.read_at(&mut table, offset).map_err(|source| Qcow2Error::Read { what: "L1 table", source })?;
    Ok(words(&table))
}

/// Iterator over the plain extents of an image; ends after the first error.
#[derive(Debug)]
pub struct Extents<S> {
    map: Map<S>,
    l1_at: usize,
    l2: Vec<u64>,
    l2_at: usize,
    /// Offset in the image of the next entry of `l2`.
    guest: u64,
    /// Limit of tables still to be read.
    tables: u64,
    /// Limit of data bytes still to be returned.
    data: u64,
    pending: Option<Extent>,
}

impl<S: ReadAt> Extents<S> {
    fn cluster(&mut self) -> Result<Option<Extent>, Qcow2Error> {
        let size = 1 << self.map.cluster_bits;
        loop {
            while let Some(entry) = self.l2.get(self.l2_at).copied() {
                let guest = self.guest;
                self.l2_at += 1;
                self.guest += size;
                if guest >= self.map.size {
                    return Ok(None);
                }
                let Some(host) = self.plain(entry) else { continue };
                let length = size.min(self.map.size - guest).min(self.map.file_size - host);
                self.data = self.data.checked_sub(length).ok_or(Qcow2Error::Overlap)?;
                return Ok(Some(Extent { guest, host, length }));
            }
            if !self.next_table()? {
                return Ok(None);
            }
        }
    }

    /// File offset of a second-level entry's cluster, if it is plain and within the file.
    fn plain(&self, entry: u64) -> Option<u64> {
        let host = entry & OFFSET_MASK;
        let plain = entry & (COMPRESSED | ALL_ZEROS) == 0 && host != 0;
        (plain && self.aligned(host) && host < self.map.file_size).then_some(host)
    }

    fn aligned(&self, offset: u64) -> bool {
        offset.trailing_zeros() >= self.map.cluster_bits
    }

    /// Reads the next second-level table; false after the last.
    fn next_table(&mut self) -> Result<bool, Qcow2Error> {
        let bytes = 1u64 << self.map.cluster_bits;
        let covered = bytes / 8 * bytes;
        while let Some(entry) = self.map.l1.get(self.l1_at) {
            self.guest = self.l1_at as u64 * covered;
            self.l1_at += 1;
            if self.guest >= self.map.size {
                return Ok(false);
            }
            let offset = entry & OFFSET_MASK;
            let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.map.file_size);
            if offset == 0 || !inside || !self.aligned(offset) {
                continue;
            }
            self.tables = self.tables.checked_sub(1).ok_or(Qcow2Error::Overlap)?;
            let mut table = vec![0; bytes as usize];
            let read = self.map.source.read_at(&mut table, offset);
            read.map_err(|source| Qcow2Error::Read { what: "L2 table", source })?;
            (self.l2, self.l2_at) = (words(&table), 0);
            return Ok(true);
        }
        Ok(false)
    }

    fn end(&mut self) {
        (self.l1_at, self.l2_at) = (self.map.l1.len(), self.l2.len());
    }
}

impl<S: ReadAt> Iterator for Extents<S> {
    type Item = Result<Extent, Qcow2Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.cluster() {
                Ok(Some(next)) => match &mut self.pending {
                    Some(last)
                        if last.guest + last.length == next.guest && last.host + last.length == next.host =>
                    {
                        last.length += next.length;
                    }
                    pending => {
                        if let Some(done) = pending.replace(next) {
                            return Some(Ok(done));
                        }
                    }
                },
                Ok(None) => {
                    self.end();
                    return self.pending.take().map(Ok);
                }
                Err(error) => {
                    self.end();
                    self.pending = None;
                    return Some(Err(error));
                }
            }
        }
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| be64(word, 0)).collect()
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|i| bytes[at + i]))
}
