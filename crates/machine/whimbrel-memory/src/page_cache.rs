//! Page cache: how many pages of a RAM file have content (`cachestat(2)`, Linux 6.5).
//!
//! Exact for a file on a tmpfs: its pages are in memory or in swap, both are counted, and a hole that is read
//! stays one.

use linux_raw_sys::general as sys;
use std::{fs::File, io, os::fd::AsRawFd};
use whimbrel_core::PAGE_SIZE;

/// Pages with content among `pages` pages of a file on a tmpfs, from byte `start` on.
pub(crate) fn pages_with_content(file: &File, start: u64, pages: u64) -> io::Result<u64> {
    if pages == 0 {
        // No length stands for all up to the end of the file.
        return Ok(0);
    }
    let range = sys::cachestat_range { off: start, len: pages * PAGE_SIZE as u64 };
    let mut found =
        sys::cachestat { nr_cache: 0, nr_dirty: 0, nr_writeback: 0, nr_evicted: 0, nr_recently_evicted: 0 };
    // SAFETY: cachestat reads one `cachestat_range` and writes one `cachestat`, both live locals.
    let done = unsafe {
        libc::syscall(sys::__NR_cachestat.into(), file.as_raw_fd(), &raw const range, &raw mut found, 0_u32)
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(found.nr_cache + found.nr_evicted) }
}
