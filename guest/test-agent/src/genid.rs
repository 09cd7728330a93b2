//! Generation id of the guest (the `vmgenid` device), read from physical memory.
//!
//! The device's ACPI table (an SSDT) has the address of a page in `VGIA`; the id is at offset 40 of the page
//! (QEMU docs/specs/vmgenid). The page is reserved by the firmware, so `/dev/mem` allows access, but only by
//! `mmap`: `read` ends with the memory that the kernel uses. All `unsafe` of the test agent is here.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::{fs, fs::File, ptr};

/// Page size of the guest.
const PAGE: usize = 4096;
/// Offset of the id in its page.
const OFFSET: usize = 40;

/// Generation id, or none without such a device.
pub(crate) fn read() -> Option<u128> {
    let tables = fs::read_dir("/sys/firmware/acpi/tables").ok()?;
    let address = tables.flatten().find_map(|entry| address_in(&fs::read(entry.path()).ok()?))?;
    physical_page(address).map(u128::from_be_bytes)
}

/// Reads the bytes at [`OFFSET`] in the page of physical memory at `address`.
fn physical_page(address: u64) -> Option<[u8; 16]> {
    if !address.is_multiple_of(PAGE as u64) {
        return None;
    }
    let memory = File::open("/dev/mem").ok()?;
    // SAFETY: a new mapping at an address of the kernel's choice overlaps no memory that Rust uses.
    let page =
        unsafe { mmap(ptr::null_mut(), PAGE, ProtFlags::READ, MapFlags::SHARED, &memory, address) }.ok()?;
    let id = page.cast::<u8>().wrapping_add(OFFSET).cast::<[u8; 16]>();
    // SAFETY: the 16 bytes are inside the page just mapped readable, `[u8; 16]` needs no alignment, and the
    // read is volatile because the VMM may change them at any time. The mapping is not used after `munmap`.
    unsafe {
        let bytes = id.read_volatile();
        munmap(page, PAGE).ok()?;
        Some(bytes)
    }
}

/// Finds the value of `Name (VGIA, <dword>)` in the bytecode of a table.
fn address_in(table: &[u8]) -> Option<u64> {
    const NAME: &[u8] = b"\x08VGIA\x0c";
    let at = table.windows(NAME.len()).position(|window| window == NAME)? + NAME.len();
    let dword = table.get(at..at + 4)?;
    Some(u64::from(u32::from_le_bytes(dword.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_off_table_names_no_address() {
        assert_eq!(address_in(b"SSDT\x08VGIA\x0c\x00\x10\x20\x30!"), Some(0x3020_1000));
        assert_eq!(address_in(b"SSDT\x08VGIA\x0c\x00\x10"), None);
        assert_eq!(address_in(b""), None);
    }
}
