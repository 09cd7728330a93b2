//! Copy-on-write: the overlay of a machine over an immutable base.
//!
//! A page is in one of two states; while the disk is in use it only goes from the first to the second:
//!
//! ```text
//! state       read          write                                         zero, trim
//! base        the base      fill the page from the base, then allocate    allocate, punch a hole
//! overlay     the overlay   write the overlay                             punch a hole
//! ```
//!
//! The data is in a sparse file at the device's own offsets; one bit for each page says whether it is
//! allocated. There are two bitmaps. The *live* one is a mapped file in memory: a bit is set after the page
//! was written and before the write is acknowledged, so a daemon that is killed and restarted in the same
//! boot has every acknowledged write. The *durable* one is beside the data; a flush writes it after the data
//! was synced, so after a power failure it never lists a page whose data was not synced. `allocation.rs` has
//! the order and `format.rs` every byte.
//!
//! With a key the data is encrypted sector by sector (`data`, `xts`); bitmaps are not, so they tell which
//! pages were written.
//!
//! Locking: an allocated page needs no lock. Allocation locks exactly its pages, because two writers of
//! different parts of one page would each fill the rest from the base and lose the other's part.

mod allocation;
mod data;
mod format;
mod mapped_bitmap;
mod overlay_files;
mod xts;

pub use format::HeaderError;
pub use overlay_files::{OverlayDir, OverlayError, OverlayFiles, OverlayKey};
pub use xts::{CipherError, SectorCipher};

use crate::device::push_extent;
use crate::{
    BlockError, Device, Extent, FileDevice, ZeroDevice, group_commit::GroupCommit, range_lock::RangeLock,
};
use crate::{latch::Latch, tracked_device::pages_of};
use allocation::AllocationMap;
use data::OverlayData;
use mapped_bitmap::MappedWords;
use overlay_files::OpenedOverlay;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{self, IoSlice},
    ops::Range,
    path::PathBuf,
    sync::Arc,
};
use whimbrel_core::{Digest, PAGE_SIZE, PageRun, PageSet};

const PAGE: u64 = PAGE_SIZE as u64;

/// State of an overlay that its open files do not say, in plain types.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayState {
    /// Blocks of the bitmap that the durable one may lack: bit `b % 64` of word `b / 64`.
    unsaved: Vec<u64>,
}

/// Overlay over an immutable base.
pub struct Cow {
    base: Arc<dyn Device>,
    data: OverlayData,
    /// Live bitmap, which is used through its mapping.
    live: File,
    allocation: AllocationMap,
    locks: RangeLock,
    flushes: GroupCommit,
}

impl Cow {
    /// Creates an empty overlay over `base`. `base_id` identifies the base's content (the root digest of its
    /// image); `open` checks it.
    ///
    /// # Errors
    /// If there is an overlay already, the base ends inside a page, or a file cannot be created.
    pub fn create(place: &OverlayDir, base: Arc<dyn Device>, base_id: Digest) -> Result<Self, OverlayError> {
        Self::create_with_key(place, base, base_id, None)
    }

    /// Like [`Cow::create`], with the data encrypted if there is a key.
    pub fn create_with_key(
        place: &OverlayDir,
        base: Arc<dyn Device>,
        base_id: Digest,
        key: Option<&OverlayKey>,
    ) -> Result<Self, OverlayError> {
        let size = page_aligned(&*base)?;
        Self::over(place, base, place.create(size, base_id, key)?)
    }

    /// Opens the overlay that was created over `base`: with all acknowledged writes if it was last open in
    /// this boot, otherwise with all flushed ones.
    ///
    /// # Errors
    /// If it does not exist, or is in use, damaged or over another base.
    pub fn open(place: &OverlayDir, base: Arc<dyn Device>, base_id: Digest) -> Result<Self, OverlayError> {
        Self::open_with_key(place, base, base_id, None)
    }

    /// Like [`Cow::open`], with the key of overlays that are encrypted.
    pub fn open_with_key(
        place: &OverlayDir,
        base: Arc<dyn Device>,
        base_id: Digest,
        key: Option<&OverlayKey>,
    ) -> Result<Self, OverlayError> {
        let size = page_aligned(&*base)?;
        Self::over(place, base, place.open(size, base_id, key)?)
    }

    /// Makes an overlay that nobody uses as large as its disk has become; what is added is not allocated.
    /// Nothing happens to one that is not smaller than `size`, a multiple of the page size. Whatever
    /// interrupts it, the overlay has its former size or the new one, and all acknowledged writes.
    ///
    /// # Errors
    /// Those of opening it, or if a write fails.
    pub fn grow(
        place: &OverlayDir,
        size: u64,
        base_id: Digest,
        key: Option<&OverlayKey>,
    ) -> Result<(), OverlayError> {
        let now = place.size()?;
        if now >= size {
            return Ok(());
        }
        // What the base has does not matter to a flush.
        let base = Arc::new(ZeroDevice { size: now });
        let before = Self::over(place, base, place.open(now, base_id, key)?)?;
        let fail = |source: BlockError| {
            let (path, source) = (place.dir.clone(), io::Error::other(source));
            OverlayError::Io { action: "flush", path, source }
        };
        before.flush().map_err(fail)?;
        drop(before);
        place.enlarge(size)
    }

    fn over(place: &OverlayDir, base: Arc<dyn Device>, opened: OpenedOverlay) -> Result<Self, OverlayError> {
        let fail = |action, path: &PathBuf| {
            let path = path.clone();
            move |source| OverlayError::Io { action, path, source }
        };
        let OverlayFiles { data, durable, live } = opened.files;
        let pages = base.size() / PAGE;
        let words = MappedWords::new(&live, pages.div_ceil(64) as usize)
            .map_err(fail("map a bitmap in", &place.live_dir))?;
        let owned =
            AllocationMap::new(pages, words, durable).map_err(fail("compare the bitmaps of", &place.dir))?;
        let data = FileDevice::new(data, false).map_err(fail("open the data in", &place.dir))?;
        let data = OverlayData::new(data, opened.keys.map(SectorCipher::new));
        Ok(Self::new(base, data, live, owned))
    }

    fn new(base: Arc<dyn Device>, data: OverlayData, live: File, allocation: AllocationMap) -> Self {
        Self { base, data, live, allocation, locks: RangeLock::default(), flushes: GroupCommit::new() }
    }

    /// Copies of the open files, for another process that goes on with the overlay. The lock goes along.
    pub fn files(&self) -> io::Result<OverlayFiles> {
        let (data, durable) = (self.data.file().try_clone()?, self.allocation.durable().try_clone()?);
        Ok(OverlayFiles { data, durable, live: self.live.try_clone()? })
    }

    /// State that goes with the files. Nothing may use the overlay from then on until the other process
    /// does, or this one again.
    ///
    /// # Errors
    /// If a write or sync has failed: the other process would not know that data is lost.
    pub fn state(&self) -> Result<OverlayState, BlockError> {
        self.latch().check()?;
        Ok(OverlayState { unsaved: self.allocation.unsaved() })
    }

    /// Overlay over `base` of which another process has passed the files and the state; none if that
    /// process ended before it told, which costs a comparison of the bitmaps.
    ///
    /// # Errors
    /// If it is damaged, over another base or encrypted with another key, or the state is that of another
    /// overlay.
    pub fn from_parts(
        files: OverlayFiles,
        state: Option<&OverlayState>,
        base: Arc<dyn Device>,
        base_id: Digest,
        key: Option<&OverlayKey>,
    ) -> Result<Self, OverlayError> {
        let passed = || PathBuf::from("the passed overlay");
        let keys = files.check(page_aligned(&*base)?, base_id, key)?;
        let OverlayFiles { data, durable, live } = files;
        let fail = |action| move |source| OverlayError::Io { action, path: passed(), source };
        let pages = base.size() / PAGE;
        let words = MappedWords::new(&live, pages.div_ceil(64) as usize).map_err(fail("map a bitmap of"))?;
        let allocation = match state {
            Some(state) => AllocationMap::passed(pages, words, durable, &state.unsaved)
                .ok_or_else(|| OverlayError::OtherBase { dir: passed() })?,
            None => AllocationMap::new(pages, words, durable).map_err(fail("compare the bitmaps of"))?,
        };
        let data = FileDevice::new(data, false).map_err(fail("open the data of"))?;
        Ok(Self::new(base, OverlayData::new(data, keys.map(SectorCipher::new)), live, allocation))
    }

    /// Allocated pages, which may differ from the base.
    pub fn allocated(&self) -> PageSet {
        self.allocation.to_set()
    }

    /// Base device of the overlay.
    pub fn base(&self) -> &Arc<dyn Device> {
        &self.base
    }

    /// Removes pages from the overlay, with everything written to them. For a disk that is not in use yet; a
    /// flush makes it durable.
    pub fn deallocate(&self, run: PageRun) -> Result<(), BlockError> {
        BlockError::check(run.offset(), run.bytes() as u64, self.size())?;
        let _guard = self.locks.lock(run.pages());
        let outcome = self.data.trim(run.offset(), run.bytes() as u64);
        self.flushes.count_write();
        outcome?;
        self.allocation.remove(run);
        Ok(())
    }

    /// Stores the base's content in pages that are not yet allocated; pages written meanwhile stay. So
    /// content that arrives late never overwrites newer.
    pub fn fill(&self, run: PageRun, content: &[u8]) -> Result<(), BlockError> {
        BlockError::check(run.offset(), content.len() as u64, self.size())?;
        if content.len() != run.bytes() {
            return Err(BlockError::OutOfRange {
                offset: run.offset(),
                len: content.len() as u64,
                size: self.size(),
            });
        }
        let _guard = self.locks.lock(run.pages());
        let filled = self.each_run(run.offset(), content.len() as u64, |owned, range| {
            if owned {
                return Ok(());
            }
            let at = (range.start - run.offset()) as usize;
            self.data.write_at(range.start, &content[at..at + (range.end - range.start) as usize])?;
            self.allocation.insert(PageRun::new(range.start / PAGE, (range.end - range.start) / PAGE));
            Ok(())
        });
        self.flushes.count_write();
        filled
    }

    fn latch(&self) -> &Latch {
        self.data.latch()
    }

    /// Calls `each` for the maximal ranges of `offset .. offset + len` that are all allocated or all not.
    fn each_run(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(bool, Range<u64>) -> Result<(), BlockError>,
    ) -> Result<(), BlockError> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let page = at / PAGE;
            let (owned, pages) = self.allocation.run_at(page, end.div_ceil(PAGE));
            let until = ((page + pages) * PAGE).min(end);
            each(owned, at..until)?;
            at = until;
        }
        Ok(())
    }

    /// Writes `data`, fills the rest of its first and last page from the base, and allocates all pages.
    fn write_and_allocate(&self, offset: u64, data: &[u8], run: PageRun) -> Result<(), BlockError> {
        let _guard = self.locks.lock(run.pages());
        let end = offset + data.len() as u64;
        let (mut before, mut after) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        let before = &mut before[..self.fill_len(run.start, offset % PAGE)];
        let after = &mut after[..self.fill_len(run.end() - 1, end.next_multiple_of(PAGE) - end)];
        self.base.read_at(offset - before.len() as u64, before)?;
        self.base.read_at(end, after)?;
        let start = offset - before.len() as u64;
        self.data.write_parts(start, &mut [IoSlice::new(before), IoSlice::new(data), IoSlice::new(after)])?;
        self.allocation.insert(run);
        Ok(())
    }

    /// Number of `bytes` of `page` to fill from the base: all or none.
    fn fill_len(&self, page: u64, bytes: u64) -> usize {
        if self.allocation.run_at(page, page + 1).0 { 0 } else { bytes as usize }
    }

    /// Allocates the complete pages of the range as holes. Returns the bytes covered.
    fn punch(&self, offset: u64, len: u64) -> Result<Range<u64>, BlockError> {
        let (start, end) = (offset.next_multiple_of(PAGE), (offset + len) / PAGE * PAGE);
        if start >= end {
            return Ok(offset..offset);
        }
        let run = PageRun::new(start / PAGE, (end - start) / PAGE);
        let _guard = self.locks.lock(run.pages());
        // The data of a page that is not allocated may be left from a lost bitmap, so it is punched as well.
        let outcome = self.data.trim(start, end - start);
        self.flushes.count_write();
        outcome?;
        self.allocation.insert(run);
        Ok(start..end)
    }

    fn sync(&self) -> Result<(), BlockError> {
        let unsaved = self.allocation.take_unsaved();
        self.data.flush()?;
        self.latch().sync(self.allocation.save(&unsaved))
    }
}

whimbrel_core::opaque_debug!(Cow);

fn page_aligned(base: &dyn Device) -> Result<u64, OverlayError> {
    let size = base.size();
    if size.is_multiple_of(PAGE) { Ok(size) } else { Err(OverlayError::BaseSize { size }) }
}

impl Device for Cow {
    fn size(&self) -> u64 {
        self.base.size()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        BlockError::check(offset, out.len() as u64, self.size())?;
        self.each_run(offset, out.len() as u64, |owned, range| {
            let part = &mut out[(range.start - offset) as usize..(range.end - offset) as usize];
            if owned { self.data.read_at(range.start, part) } else { self.base.read_at(range.start, part) }
        })
    }

    fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, BlockError> {
        BlockError::check(offset, out.len() as u64, self.size())?;
        let mut all = true;
        self.each_run(offset, out.len() as u64, |owned, range| {
            let part = &mut out[(range.start - offset) as usize..(range.end - offset) as usize];
            let side = |part: &mut [u8]| match owned {
                true => self.data.try_read_at(range.start, part),
                false => self.base.try_read_at(range.start, part),
            };
            all = all && side(part)?;
            Ok(())
        })?;
        Ok(all)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        BlockError::check(offset, data.len() as u64, self.size())?;
        if data.is_empty() {
            return self.latch().check();
        }
        let run = pages_of(offset, data.len() as u64);
        let outcome = if self.allocation.has_all(run) {
            self.data.write_at(offset, data)
        } else {
            self.write_and_allocate(offset, data, run)
        };
        self.flushes.count_write();
        outcome
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        BlockError::check(offset, len, self.size())?;
        let zeros = [0; 2 * PAGE_SIZE];
        let punched = self.punch(offset, len)?;
        // Pages that the range covers partially: before the first complete page, and after the last. Without
        // a complete page that is everything, less than two pages.
        self.write_at(punched.end, &zeros[..(offset + len - punched.end) as usize])?;
        self.write_at(offset, &zeros[..(punched.start - offset) as usize])
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        BlockError::check(offset, len, self.size())?;
        self.latch().check()?;
        self.punch(offset, len).map(drop)
    }

    fn flush(&self) -> Result<(), BlockError> {
        self.flushes.flush(self.latch(), || self.sync())
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        BlockError::check(offset, len, self.size())?;
        let mut list = Vec::new();
        self.each_run(offset, len, |owned, range| {
            let len = range.end - range.start;
            let extents = match owned {
                true => self.data.extents(range.start, len)?,
                false => self.base.extents(range.start, len)?,
            };
            extents.into_iter().for_each(|extent| push_extent(&mut list, extent));
            Ok(())
        })?;
        Ok(list)
    }

    fn may_wait(&self, offset: u64, len: u64) -> bool {
        let mut waits = false;
        let within = BlockError::check(offset, len, self.size());
        // Only the base can be remote. A write that allocates a page may have to fill it from there.
        let walk = within.and_then(|()| {
            self.each_run(offset, len, |owned, range| {
                waits |= !owned && self.base.may_wait(range.start, range.end - range.start);
                Ok(())
            })
        });
        walk.is_ok() && waits
    }
}
