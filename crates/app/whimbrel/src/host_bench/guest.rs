//! Guest of `doctor --bench`: a boot sector in real mode that waits for the next tick of the clock (18.2 a
//! second), writes a word to each of 128 pages, and begins again.

use std::{fs, io, path::Path};

/// Bytes of its disk.
const DISK: usize = 1 << 20;

/// Machine code (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2), at 0x7c00.
const CODE: [u8; 38] = [
    0xfa, // cli
    0x31, 0xc0, // xor ax, ax
    0x8e, 0xd8, // mov ds, ax
    0x8e, 0xd0, // mov ss, ax
    0xbc, 0x00, 0x7c, // mov sp, 0x7c00
    0xfb, // sti
    0xf4, // tick: hlt
    0xb8, 0x00, 0x10, // mov ax, 0x1000
    0x8e, 0xc0, // segment: mov es, ax
    0x31, 0xff, // xor di, di
    0x26, 0xff, 0x05, // page: inc word es:[di]
    0x81, 0xc7, 0x00, 0x10, // add di, 0x1000
    0x73, 0xf7, // jnc page
    0x05, 0x00, 0x10, // add ax, 0x1000
    0x3d, 0x00, 0x90, // cmp ax, 0x9000
    0x72, 0xeb, // jb segment
    0xeb, 0xe5, // jmp tick
];

/// Writes the disk that boots it.
pub(super) fn write_disk(path: &Path) -> io::Result<()> {
    let mut disk = vec![0; DISK];
    disk[..CODE.len()].copy_from_slice(&CODE);
    // What a BIOS looks for.
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(path, disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Target of the jump whose offset is at `at`.
    fn target(at: usize) -> usize {
        (at + 1).wrapping_add_signed(isize::from(CODE[at].cast_signed()))
    }

    #[test]
    fn every_jump_leads_to_the_beginning_of_an_instruction() {
        let (tick, segment, page) = (11, 15, 19);
        assert_eq!((CODE[tick], CODE[segment], CODE[page]), (0xf4, 0x8e, 0x26));
        assert_eq!((target(27), target(35), target(37)), (page, segment, tick));
    }
}
