//! Memory of the guest: dropping caches, and the mapping of physical addresses to the host's page numbers.

use std::{fs, io};

/// Guest-physical address at which memory continues above the hole below 4 GiB.
const FOUR_GIB: u64 = 1 << 32;
pub(crate) const PAGE: u64 = 4096;

/// Drops clean page cache, dentries and inodes; returns free memory before and after, in bytes.
pub(crate) fn drop_caches() -> io::Result<(u64, u64)> {
    let before = free()?;
    // Dirty pages cannot be dropped, and would soon be dirty again if they were written now, so only clean
    // ones are.
    fs::write("/proc/sys/vm/drop_caches", "3")?;
    Ok((before, free()?))
}

fn free() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let kib =
        text.lines().find_map(|line| line.strip_prefix("MemFree:")?.trim().strip_suffix(" kB")?.parse().ok());
    let kib: u64 = kib.ok_or_else(|| io::Error::other("/proc/meminfo without MemFree"))?;
    Ok(kib.saturating_mul(1024))
}

/// Mapping of the host's page array to the guest's physical addresses: in order, with a hole below 4 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Pages below the hole.
    low: u64,
}

impl Layout {
    /// Layout of a machine with `pages` pages.
    pub(crate) fn of(pages: u64) -> Self {
        Self::read(pages, &fs::read_to_string("/proc/iomem").unwrap_or_default())
    }

    fn read(pages: u64, iomem: &str) -> Self {
        let above = iomem.lines().filter_map(|line| {
            let (range, what) = line.split_once(" : ")?;
            let (start, end) = range.trim_start().split_once('-')?;
            let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
            // Indented lines are parts of others.
            let whole = what == "System RAM" && !line.starts_with(' ') && start >= FOUR_GIB;
            whole.then(|| (end.saturating_add(1).saturating_sub(start)) / PAGE)
        });
        Self { low: pages.saturating_sub(above.fold(0, u64::saturating_add)) }
    }

    /// Index in the host's page array of this frame number.
    pub(crate) fn page_index(self, frame: u64) -> Option<u64> {
        match frame.checked_sub(FOUR_GIB / PAGE) {
            Some(above) => self.low.checked_add(above),
            None => (frame < self.low).then_some(frame),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IOMEM: &str = "00001000-0009fbff : System RAM\n00100000-7fffffff : System RAM\n  01000000-01ffffff : Kernel code\n\
                         b0000000-bfffffff : PCI ECAM 0000\n100000000-17fffffff : System RAM\n  100000000-1000fffff : System RAM\n";

    #[test]
    fn memory_above_the_hole_follows_memory_below_it() {
        let layout = Layout::read(0x100000, IOMEM);
        assert_eq!(layout, Layout { low: 0x80000 }, "4 GiB, two of them above the hole");
        assert_eq!(layout.page_index(5), Some(5));
        assert_eq!(layout.page_index(0x80000), None, "in the hole");
        assert_eq!(layout.page_index(0x100000), Some(0x80000));
    }

    #[test]
    fn a_small_machine_has_no_hole() {
        let layout = Layout::read(1000, "00100000-003e7fff : System RAM\n");
        assert_eq!((layout.page_index(999), layout.page_index(1000)), (Some(999), None));
        assert_eq!(
            Layout::read(7, "").page_index(6),
            Some(6),
            "a guest that says nothing is taken for a small one"
        );
    }
}
