//! Page map scan: finds pages by state with `PAGEMAP_SCAN` (Linux 6.7,
//! Documentation/admin-guide/mm/pagemap.rst). The step that takes written pages re-arms write tracking, so
//! that no write is lost in between.

use crate::{
    scan_order::{self, ScanOrder},
    userfaultfd::Span,
};
use linux_raw_sys::general as sys;
use std::{fs::File, io, os::fd::AsRawFd};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};

/// Ioctl number `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
/// Runs requested from the kernel at a time: 96 KiB of result.
const BATCH: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scan {
    /// Pages written since they were last armed; arms them again. An absent page that was never armed counts
    /// too, since one that was written and then removed from the page table looks the same.
    TakeWritten,
    /// Written pages of private file mappings: a page that was only read still shows the file, and a private
    /// page is in memory or swapped out with its mark.
    TakeWrittenPrivate,
    /// Private copies, and anonymous pages, that are in memory or swapped out.
    Anonymous,
}

/// Effect of a call on the pages that match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Look,
    Take,
}

/// File `/proc/PID/pagemap` and buffers for the kernel's results.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: File,
    span: Span,
    order: ScanOrder,
    regions: Vec<sys::page_region>,
    /// What a look has found.
    seen: Vec<sys::page_region>,
}

impl Pagemap {
    pub(crate) fn new(file: File, span: Span, order: ScanOrder) -> Self {
        Self { file, span, order, regions: Vec::new(), seen: Vec::new() }
    }

    /// Adds the matching pages to `pages`, a set over the complete span. After an error, `pages` has those
    /// taken so far and nothing is lost.
    pub(crate) fn scan(&mut self, scan: Scan, pages: &mut PageSet) -> io::Result<()> {
        self.scan_run(scan, PageRun::new(0, self.span.bytes / PAGE_SIZE as u64), pages)
    }

    /// Like [`Pagemap::scan`], for the pages of `run` alone.
    pub(crate) fn scan_run(&mut self, scan: Scan, run: PageRun, pages: &mut PageSet) -> io::Result<()> {
        let from = self.span.start + run.offset();
        let end = from + run.bytes() as u64;
        match (scan, self.order) {
            (Scan::Anonymous, _) => self.walk(scan, Step::Look, (from, end), pages),
            (_, ScanOrder::TakeAtOnce) => self.walk(scan, Step::Take, (from, end), pages),
            (_, ScanOrder::LookFirst) => self.look_then_take(scan, (from, end), pages),
        }
    }

    fn walk(
        &mut self,
        scan: Scan,
        step: Step,
        (mut from, end): (u64, u64),
        pages: &mut PageSet,
    ) -> io::Result<()> {
        while from < end {
            let (found, walked) = self.call(scan, step, from, end)?;
            for region in &self.regions[..found] {
                let start = (region.start - self.span.start) / PAGE_SIZE as u64;
                pages.insert_run(PageRun::new(start, (region.end - region.start) / PAGE_SIZE as u64));
            }
            from = advanced(from, walked)?;
        }
        Ok(())
    }

    /// Takes what one call finds before the next one looks, so that the result of a look is bounded.
    fn look_then_take(
        &mut self,
        scan: Scan,
        (mut from, end): (u64, u64),
        pages: &mut PageSet,
    ) -> io::Result<()> {
        while from < end {
            let (found, walked) = self.call(scan, Step::Look, from, end)?;
            self.seen.clear();
            self.seen.extend_from_slice(&self.regions[..found]);
            for run in scan_order::joined(&self.seen) {
                self.walk(scan, Step::Take, (run.start, run.start + run.bytes), pages)?;
            }
            from = advanced(from, walked)?;
        }
        Ok(())
    }

    fn call(&mut self, scan: Scan, step: Step, start: u64, end: u64) -> io::Result<(usize, u64)> {
        let empty = sys::page_region { start: 0, end: 0, categories: 0 };
        self.regions.resize(BATCH, empty);
        let written = u64::from(sys::PAGE_IS_WRITTEN);
        let file = u64::from(sys::PAGE_IS_FILE);
        let tracked = u64::from(sys::PM_SCAN_CHECK_WPASYNC);
        let take = match step {
            Step::Look => 0,
            Step::Take => u64::from(sys::PM_SCAN_WP_MATCHING),
        };
        let any = u64::from(sys::PAGE_IS_PRESENT | sys::PAGE_IS_SWAPPED);
        let (flags, inverted, all, any) = match scan {
            Scan::TakeWritten => (take | tracked, 0, written, 0),
            Scan::TakeWrittenPrivate => (take | tracked, file, written | file, any),
            Scan::Anonymous => (0, file, file, any),
        };
        let mut argument = sys::pm_scan_arg {
            flags,
            vec: self.regions.as_mut_ptr() as u64,
            vec_len: self.regions.len() as u64,
            category_inverted: inverted,
            category_mask: all,
            category_anyof_mask: any,
            // Only the common categories of all matches, so that neighbours are merged into one region.
            return_mask: all & written,
            ..argument(start, end)
        };
        // SAFETY: PAGEMAP_SCAN reads and writes one `pm_scan_arg` and writes at most `vec_len` regions at
        // `vec`, which is a vector that this value exclusively borrows.
        let found = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        if found < 0 { Err(io::Error::last_os_error()) } else { Ok((found as usize, argument.walk_end)) }
    }
}

fn advanced(from: u64, walked: u64) -> io::Result<u64> {
    if walked > from { Ok(walked) } else { Err(io::Error::other("the scan does not advance")) }
}

/// Whether asynchronous write tracking (`WP_ASYNC`) is registered for the first page of `span`.
pub(crate) fn is_tracked(pagemap: &File, span: Span) -> io::Result<bool> {
    let mut region = sys::page_region { start: 0, end: 0, categories: 0 };
    let allowed = u64::from(sys::PAGE_IS_WPALLOWED);
    let mut argument = sys::pm_scan_arg {
        vec: &raw mut region as u64,
        vec_len: 1,
        category_mask: allowed,
        return_mask: allowed,
        ..argument(span.start, span.start + PAGE_SIZE as u64)
    };
    // SAFETY: PAGEMAP_SCAN reads and writes one `pm_scan_arg` and writes at most one region at `vec`, a live
    // local.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
    if found < 0 { Err(io::Error::last_os_error()) } else { Ok(found > 0) }
}

fn argument(start: u64, end: u64) -> sys::pm_scan_arg {
    sys::pm_scan_arg {
        size: size_of::<sys::pm_scan_arg>() as u64,
        flags: 0,
        start,
        end,
        walk_end: 0,
        vec: 0,
        vec_len: 0,
        max_pages: 0,
        category_inverted: 0,
        category_mask: 0,
        category_anyof_mask: 0,
        return_mask: 0,
    }
}

/// Tests whether the kernel supports the request, with a page of this process.
pub(crate) fn is_supported() -> io::Result<()> {
    let local = 0_u8;
    let start = &raw const local as u64 & !(PAGE_SIZE as u64 - 1);
    is_tracked(&File::open("/proc/self/pagemap")?, Span { start, bytes: PAGE_SIZE as u64 }).map(|_| ())
}
