//! Writers: the processes that wrote the pages of a sample.
//!
//! The host knows which pages of memory were written, the guest which process maps them
//! (`/proc/PID/pagemap`). So no counter of the guest's kernel is needed, and writes to memory that was mapped
//! long ago count too. A page that several processes map counts for each.

use crate::memory::{Layout, PAGE};
use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
};
use whimbrel_guest_protocol::Process;

/// Entries of a pagemap that are read at once.
const ENTRIES: usize = 8192;
/// Most entries read for one process: 16 GiB of addresses.
const ENTRIES_MAX: u64 = 4 << 20;
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
/// Process id of init, which must not be stunned.
const INIT: u32 = 1;

/// Set of pages of memory.
pub(crate) struct Sample {
    bits: Vec<u64>,
}

impl Sample {
    pub(crate) fn new(pages: &[u32]) -> Self {
        let highest = pages.iter().max().map_or(0, |page| *page as usize + 1);
        let mut bits = vec![0u64; highest.div_ceil(64)];
        pages.iter().for_each(|page| bits[*page as usize / 64] |= 1 << (page % 64));
        Self { bits }
    }

    fn contains(&self, page: u64) -> bool {
        let word = usize::try_from(page / 64).ok().and_then(|at| self.bits.get(at));
        word.is_some_and(|word| word & 1 << (page % 64) != 0)
    }
}

/// All processes that map pages of the sample, each page counted `each` times; without this process, init and
/// kernel threads.
pub(crate) fn of(sample: &Sample, layout: Layout, each: u32) -> Vec<Process> {
    let own = std::process::id();
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let wrote = |pid: u32| {
        // A process that has ended meanwhile writes no more.
        let pages = pages_of(pid, sample, layout).ok().filter(|pages| *pages > 0)?;
        Some(Process { pid, pages: pages.saturating_mul(each), name: name(pid) })
    };
    pids.filter(|pid| *pid != own && *pid != INIT).filter_map(wrote).collect()
}

/// Name of a process as the kernel stores it.
fn name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).map(|name| name.trim_end().to_owned()).unwrap_or_default()
}

fn pages_of(pid: u32, sample: &Sample, layout: Layout) -> io::Result<u32> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    if maps.is_empty() {
        // Kernel threads map nothing.
        return Ok(0);
    }
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let (mut count, mut looked) = (0u32, 0);
    for (start, end) in maps.lines().filter_map(writable) {
        let mut at = start / PAGE;
        while at < end / PAGE && looked < ENTRIES_MAX {
            let mut entries = vec![0; 8 * ENTRIES.min((end / PAGE - at) as usize)];
            let read = pagemap.read_at(&mut entries, at * 8)? / 8;
            if read == 0 {
                break;
            }
            let (entries, _) = entries.as_chunks::<8>();
            let frames = entries[..read].iter().map(|entry| u64::from_le_bytes(*entry));
            let ours = frames
                .filter(|entry| entry & PRESENT != 0)
                .filter_map(|entry| layout.page_index(entry & FRAME));
            count = count.saturating_add(ours.filter(|page| sample.contains(*page)).count() as u32);
            (at, looked) = (at + read as u64, looked + read as u64);
        }
    }
    Ok(count)
}

/// Address range of a line of `/proc/PID/maps`, if it is writable.
fn writable(line: &str) -> Option<(u64, u64)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let writable = rest.as_bytes().get(1) == Some(&b'w');
    writable.then_some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_what_it_was_made_of() {
        let sample = Sample::new(&[0, 63, 64, 1000]);
        assert_eq!((0..2000).filter(|page| sample.contains(*page)).collect::<Vec<_>>(), [0, 63, 64, 1000]);
        assert!(!Sample::new(&[]).contains(0));
    }

    #[test]
    fn only_what_can_be_written_is_looked_at() {
        assert_eq!(writable("7f00-8000 rw-p 00000000 00:00 0 "), Some((0x7f00, 0x8000)));
        assert_eq!(writable("7f00-8000 r-xp 00000000 fe:00 12 /bin/sh"), None);
        assert_eq!(writable("nonsense"), None);
    }
}
