//! Code cave: unused executable bytes of a process, in the padding between the end of a program's code and
//! the end of its page.
//!
//! ELF maps whole pages, so after the last byte of an executable segment there is up to a page that no code
//! can reach. A slot is used only if it is all zero, so one used before (in which a thread might still be) is
//! never used again.

use crate::{
    AttachError,
    arch::STUB_SIZE,
    process::{Mapping, Process},
};
use std::{fs::File, os::unix::fs::FileExt};

const ALIGN: u64 = 16;
const PAGE: u64 = whimbrel_core::PAGE_SIZE as u64;
/// Most program headers read of one file; real files have about a dozen.
const MAX_HEADERS: usize = 64;
const HEADER_LEN: usize = 64;
const ENTRY_LEN: usize = 56;
const PT_LOAD: u32 = 1;
const PF_X: u32 = 1;

/// Finds [`STUB_SIZE`] unused executable bytes; returns their address.
pub(crate) fn find(process: &Process) -> Result<u64, AttachError> {
    let memory = process.file("mem")?;
    let mappings = process.mappings()?;
    let slot = mappings.iter().filter(|m| m.executable && m.readable).find_map(|code| {
        let head = mappings.iter().rev().find(|m| is_head_of(m, code))?;
        let end = code_end(&memory, head.start, code)?;
        empty_slot(&memory, end, code.end)
    });
    slot.ok_or(AttachError::NoRoom { pid: process.number(), bytes: STUB_SIZE })
}

/// Whether `head` maps the beginning of the file that `code` is mapped from.
fn is_head_of(head: &Mapping, code: &Mapping) -> bool {
    let same = head.device == code.device && head.inode == code.inode && head.name == code.name;
    let is_file = code.inode != 0 || code.name == "[vdso]";
    is_file && same && head.offset == 0 && head.readable && head.start <= code.start
}

/// Address after the last byte of the executable segment that `code` maps, if its padding is in `code`.
fn code_end(memory: &File, head: u64, code: &Mapping) -> Option<u64> {
    let mut header = [0; HEADER_LEN];
    memory.read_exact_at(&mut header, head).ok()?;
    if header[..6] != *b"\x7fELF\x02\x01" || u16_at(&header, 54) as usize != ENTRY_LEN {
        return None;
    }
    let count = u16_at(&header, 56) as usize;
    let mut table = vec![0; count.min(MAX_HEADERS) * ENTRY_LEN];
    memory.read_exact_at(&mut table, head.checked_add(u64_at(&header, 32))?).ok()?;
    let ends = table.chunks_exact(ENTRY_LEN).filter_map(|entry| {
        let (offset, in_file, in_memory) = (u64_at(entry, 8), u64_at(entry, 32), u64_at(entry, 40));
        let plain = u32_at(entry, 0) == PT_LOAD && u32_at(entry, 4) & PF_X != 0 && in_file == in_memory;
        plain.then(|| offset.checked_add(in_file)).flatten()
    });
    let span = code.offset..code.offset + (code.end - code.start);
    ends.filter(|end| span.contains(end)).map(|end| code.start + (end - code.offset)).next_back()
}

/// First aligned slot of zeros in `from..end`, which is at most a page, as padding is.
fn empty_slot(memory: &File, from: u64, end: u64) -> Option<u64> {
    let from = from.next_multiple_of(ALIGN);
    let len = end.checked_sub(from).filter(|len| *len >= STUB_SIZE as u64 && *len < PAGE)?;
    let mut padding = vec![0; len as usize];
    memory.read_exact_at(&mut padding, from).ok()?;
    let starts = (0..=padding.len() - STUB_SIZE).step_by(ALIGN as usize);
    starts
        .into_iter()
        .find(|at| whimbrel_core::is_zero(&padding[*at..*at + STUB_SIZE]))
        .map(|at| from + at as u64)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
