//! A disk whose tables and superblocks are anything: eight bytes that are its size, then content.

use std::cell::Cell;
use std::io;
use whimbrel_alignment::{MAX_REGIONS, MAX_SECTORS, MAX_SIZE, ReadAt, SECTOR, inspect};

/// Content of which every read is counted and checked.
struct Disk<'a> {
    size: u64,
    content: &'a [u8],
    sectors: Cell<u64>,
}

impl ReadAt for Disk<'_> {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let len = out.len() as u64;
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.size), "a read past the end");
        self.sectors.set(self.sectors.get() + len.div_ceil(SECTOR));
        let found =
            usize::try_from(offset).ok().and_then(|offset| self.content.get(offset..)?.get(..out.len()));
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Partition tables and superblocks: few reads, and regions that can be.
pub fn disk_layout(data: &[u8]) {
    let Some((size, content)) = data.split_first_chunk::<8>() else { return };
    let disk = Disk { size: u64::from_le_bytes(*size), content, sectors: Cell::new(0) };
    let layout = inspect(&disk, disk.size);
    assert!(disk.sectors.get() <= MAX_SECTORS && layout.regions.len() <= MAX_REGIONS);
    let mut end = 0;
    for region in &layout.regions {
        assert!(end <= region.start && region.len <= disk.size - region.start, "{region:?}");
        assert!(region.start <= region.data && region.data <= region.start + region.len, "{region:?}");
        assert_eq!(region.phase, region.data % 4096);
        end = region.start + region.len;
    }
    assert_eq!(layout.page_alignment().is_ok(), disk.size <= MAX_SIZE);
}
