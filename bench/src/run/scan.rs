//! `scan.*`: what it costs to learn which pages of a running guest were written.
//!
//! The peer is the plain way to the same answer: read the whole page table as `/proc/PID/pagemap` shows it
//! and test the bit of each page (Linux Documentation/admin-guide/mm/pagemap.rst). It does not even re-arm
//! the pages.

use super::Context;
use crate::guest::{Guest, GuestPlan};
use crate::harness::{Goal, Row, Samples, alternate};
use anyhow::{Context as _, Result};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::{ByteSize, PAGE_SIZE};
use whimbrel_machine::PageArray as _;
use whimbrel_memory::{Attachment, Mode, RamTarget};
use whimbrel_testkit::guest::{GuestOptions, Work};

/// How long the guest runs between two scans: the epoch that replication would use.
const BETWEEN: Duration = Duration::from_millis(25);
/// A page is write-protected, so it was not written since it was armed.
const PROTECTED: u64 = 1 << 57;
const MEMORY: ByteSize = ByteSize(512 << 20);
/// A large guest. Most of its memory is never touched, so it fits into a smaller host.
const LARGE: ByteSize = ByteSize(64 << 30);

/// An idle guest, scanned as often as replication would.
pub(crate) fn idle(context: &Context) -> Result<Vec<Row>> {
    let options = GuestOptions { buffer_mib: 8, ..GuestOptions::default() };
    let (ours, theirs, pages) = scan(context.times(200, 40), MEMORY, options)?;
    let case = format!("512 MiB, {pages:.0} pages a scan");
    Ok(vec![
        Row::new("scan.idle", case, "ms", &ours).against("read pagemap", &theirs).goal(Goal::AtMost(1.0)),
    ])
}

/// A guest that writes as fast as it can.
pub(crate) fn busy(context: &Context) -> Result<Vec<Row>> {
    let work = Work::Dirty { region_mib: 128, pages_per_second: 0, bytes_per_page: 64 };
    let options = GuestOptions { buffer_mib: 8, work, ..GuestOptions::default() };
    let (ours, theirs, pages) = scan(context.times(200, 40), MEMORY, options)?;
    let case = format!("512 MiB, {pages:.0} pages a scan");
    Ok(vec![Row::new("scan.busy", case, "ms", &ours).against("read pagemap", &theirs)])
}

/// A large idle guest.
pub(crate) fn large(context: &Context) -> Result<Vec<Row>> {
    let options = GuestOptions { buffer_mib: 8, ..GuestOptions::default() };
    let (ours, theirs, pages) = scan(context.times(20, 5), LARGE, options)?;
    let case = format!("64 GiB, {pages:.0} pages a scan");
    let row = Row::new("scan.64g", case, "ms", &ours).against("read pagemap", &theirs);
    Ok(vec![row.goal(Goal::AtMost(3.0))])
}

/// Milliseconds of a scan, of the peer's, and the median of pages found.
fn scan(times: usize, memory: ByteSize, options: GuestOptions) -> Result<(Samples, Samples, f64)> {
    let mut guest = Guest::boot(&GuestPlan::small(memory, options))?;
    let pid = guest.qemu().pid().cast_signed();
    let attachment = Attachment::attach(pid, RamTarget::Path(guest.ram().to_owned()), Mode::Track)?;
    let mut memory = attachment.ram()?;
    let table = PageTable::of(pid, guest.ram().to_owned())?;
    memory.take_dirty()?;

    let mut pages = Vec::new();
    let ours = || {
        sleep(BETWEEN);
        let begun = Instant::now();
        let dirty = memory.take_dirty()?;
        let took = begun.elapsed();
        pages.push(dirty.count() as f64);
        Ok(took.as_secs_f64() * 1e3)
    };
    let theirs = || {
        sleep(BETWEEN);
        let begun = Instant::now();
        table.written()?;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    };
    let (ours, theirs) = alternate(times, ours, theirs)?;
    Ok((ours, theirs, Samples::new(pages).median()))
}

/// The part of a process's page table that maps one file.
struct PageTable {
    pagemap: File,
    first: u64,
    count: usize,
}

impl PageTable {
    fn of(pid: i32, file: PathBuf) -> Result<Self> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let name = file.to_string_lossy();
        let line =
            maps.lines().find(|line| line.ends_with(&*name)).context("QEMU does not map its memory file")?;
        let (range, _) = line.split_once(' ').context("a line of maps without a space")?;
        let (start, end) = range.split_once('-').context("a line of maps without a range")?;
        let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
        let page = PAGE_SIZE as u64;
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        Ok(Self { pagemap, first: start / page, count: ((end - start) / page) as usize })
    }

    /// How many pages are present and not protected.
    fn written(&self) -> Result<usize> {
        let mut entries = vec![0; self.count * 8];
        self.pagemap.read_exact_at(&mut entries, self.first * 8)?;
        let (entries, _) = entries.as_chunks::<8>();
        Ok(entries.iter().filter(|entry| u64::from_le_bytes(**entry) & PROTECTED == 0).count())
    }
}
