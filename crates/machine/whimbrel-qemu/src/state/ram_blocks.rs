//! RAM blocks: locates the small memory blocks in QEMU's address space, to detect changes.
//!
//! Since QEMU 8 `info ramblock` shows the address of a block. On 7.2 it is searched for in the anonymous
//! mappings of the process: QEMU maps each block separately, at a multiple of 2 MiB, with the block's
//! greatest length and a guard page after it. Of several such mappings, the block is the one whose content
//! equals that in the stream header. A single one need not be equal, because the header of an adopted machine
//! may be out of date. In doubt no block counts as found: a wrong one would go unnoticed until the next
//! reboot of a copy. Reading uses `/proc/PID/mem`, which needs permission to trace QEMU.

use super::stream_header::StreamHeader;
use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
};

/// Block of the output of `info ramblock`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedBlock {
    pub(crate) name: String,
    pub(crate) used: u64,
    pub(crate) total: u64,
    pub(crate) address: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct RamBlockAddresses {
    memory: File,
    /// Index of each block in the header, and its address.
    found: Vec<(usize, u64)>,
    buffer: Vec<u8>,
}

/// Alignment of blocks on x86-64: `QEMU_VMALLOC_ALIGN` (QEMU include/qemu/osdep.h).
const ALIGN: u64 = 2 << 20;

/// Flash memory that nothing can write, the firmware's program: megabytes that need not be compared at every
/// pause.
const READ_ONLY: &str = "system.flash0";

/// Private, anonymous, writable mapping before a guard page.
struct Mapping {
    start: u64,
    len: u64,
}

impl RamBlockAddresses {
    /// Finds the blocks of `head` in process `pid`, whose small blocks must not change meanwhile. None if one
    /// is not found.
    pub(crate) fn find(pid: u32, head: &StreamHeader, shown: &[ListedBlock]) -> io::Result<Option<Self>> {
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        let mappings = guarded_mappings(&fs::read_to_string(format!("/proc/{pid}/maps"))?);
        let mut places = Self { memory, found: Vec::new(), buffer: Vec::new() };
        for (index, block) in head.blocks().iter().enumerate() {
            let Some(content) = block.content.as_ref().filter(|_| block.name != READ_ONLY) else { continue };
            let Some(shown) = shown.iter().find(|shown| shown.name == block.name) else { return Ok(None) };
            let Some(address) = places.locate(shown, content, &mappings) else { return Ok(None) };
            places.found.push((index, address));
        }
        Ok(Some(places))
    }

    fn locate(&self, block: &ListedBlock, content: &[u8], mappings: &[Mapping]) -> Option<u64> {
        if block.address.is_some() {
            return block.address;
        }
        let taken: Vec<u64> = self.found.iter().map(|(_, address)| *address).collect();
        let fits = |mapping: &&Mapping| {
            mapping.len == block.total
                && mapping.start.is_multiple_of(ALIGN)
                && !taken.contains(&mapping.start)
        };
        let candidates: Vec<u64> = mappings.iter().filter(fits).map(|mapping| mapping.start).collect();
        let agrees = |start: &&u64| {
            let mut now = vec![0; content.len()];
            self.memory.read_exact_at(&mut now, **start).is_ok_and(|()| now == content)
        };
        let mut agreeing = candidates.iter().filter(agrees);
        match (agreeing.next(), agreeing.next(), &candidates[..]) {
            (Some(start), None, _) | (None, _, [start]) => Some(*start),
            _ => None,
        }
    }

    fn read(&mut self, address: u64, len: usize) -> io::Result<&[u8]> {
        self.buffer.resize(len, 0);
        self.memory.read_exact_at(&mut self.buffer, address)?;
        Ok(&self.buffer)
    }

    /// Updates `head`; returns whether anything had changed. Costs a copy and a comparison of all small
    /// blocks (0.1 ms).
    pub(crate) fn refresh(&mut self, head: &mut StreamHeader) -> io::Result<bool> {
        let mut changed = false;
        for position in 0..self.found.len() {
            let (index, address) = self.found[position];
            let Some(len) = head.blocks()[index].content.as_ref().map(Vec::len) else { continue };
            changed |= head.update(index, self.read(address, len)?);
        }
        if changed {
            head.rewrite();
        }
        Ok(changed)
    }
}

/// Parses the table of `info ramblock`: name, page size (two words), offset, used, total and since QEMU 8 the
/// host address.
pub(crate) fn parse_ramblocks(table: &str) -> Vec<ListedBlock> {
    let number = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    table
        .lines()
        .filter_map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            // A name may have spaces, so search for the three consecutive numbers.
            let first = words.iter().position(|word| number(word).is_some())?;
            let (used, total) = (number(words.get(first + 1)?)?, number(words.get(first + 2)?)?);
            let name = words.get(..first.checked_sub(2)?)?.join(" ");
            Some(ListedBlock {
                name,
                used,
                total,
                address: words.get(first + 3).and_then(|word| number(word)),
            })
        })
        .collect()
}

fn guarded_mappings(maps: &str) -> Vec<Mapping> {
    let lines: Vec<_> = maps.lines().filter_map(parse_mapping).collect();
    let guarded = lines.windows(2).filter(|pair| {
        pair[0].anonymous
            && pair[0].rights == "rw-p"
            && pair[1].rights == "---p"
            && pair[0].end == pair[1].start
    });
    guarded.map(|pair| Mapping { start: pair[0].start, len: pair[0].end - pair[0].start }).collect()
}

struct MapsLine<'a> {
    start: u64,
    end: u64,
    rights: &'a str,
    anonymous: bool,
}

fn parse_mapping(line: &str) -> Option<MapsLine<'_>> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?;
    // Offset, device, inode; an anonymous mapping has no name after them.
    let anonymous = words.nth(3).is_none();
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    (start < end).then_some(MapsLine { start, end, rights, anonymous })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ramblock_tables_of_old_and_new_qemu_read_alike() {
        let old = "              Block Name    PSize              Offset               Used              Total\n\
            \x20                 pc.bios    4 KiB  0x0000000008000000 0x0000000000040000 0x0000000000050000\n";
        let new = "              Block Name    PSize              Offset               Used              Total                HVA  RO\n\
            \x20                 pc.bios    4 KiB  0x0000000008000000 0x0000000000040000 0x0000000000050000 0x00007fb0de600000  ro\n";
        let block = |address| ListedBlock { name: "pc.bios".into(), used: 0x40000, total: 0x50000, address };
        assert_eq!(parse_ramblocks(old), [block(None)]);
        assert_eq!(parse_ramblocks(new), [block(Some(0x7fb0_de60_0000))]);
        assert_eq!(parse_ramblocks("nonsense 0x1\n0x1 0x2 0x3"), []);
    }

    #[test]
    fn only_anonymous_mappings_before_a_guard_page_are_candidates() {
        let maps = "1000-3000 rw-p 00000000 00:00 0 \n3000-4000 ---p 00000000 00:00 0 \n\
            5000-6000 rw-p 00000000 00:00 0 [heap]\n6000-7000 ---p 00000000 00:00 0 \n\
            8000-9000 rw-p 00000000 00:00 0\na000-b000 ---p 00000000 00:00 0\n";
        let found: Vec<_> =
            guarded_mappings(maps).iter().map(|mapping| (mapping.start, mapping.len)).collect();
        assert_eq!(found, [(0x1000, 0x2000)]);
    }
}
