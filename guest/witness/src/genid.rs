//! The generation id that the VMM gives the guest (the `vmgenid` device), read from physical memory.
//!
//! The device's ACPI table (an SSDT) names the address of a page in `VGIA`; the id stands 40 bytes into it
//! (QEMU docs/specs/vmgenid). The page is reserved by the firmware, so `/dev/mem` gives it out.

use std::{fs, fs::File, os::unix::fs::FileExt};

/// The 16 bytes of the id, or none without such a device.
pub(crate) fn read() -> Option<u128> {
    let tables = fs::read_dir("/sys/firmware/acpi/tables").ok()?;
    let address = tables.flatten().find_map(|entry| address_in(&fs::read(entry.path()).ok()?))?;
    let mut id = [0; 16];
    File::open("/dev/mem").ok()?.read_exact_at(&mut id, address + 40).ok()?;
    Some(u128::from_be_bytes(id))
}

/// The value of `Name (VGIA, <dword>)` in the bytecode of a table.
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
