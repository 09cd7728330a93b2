//! CRC-32 of IEEE 802.3, the checksum of a GUID partition table. Bit by bit without a lookup table, which is
//! enough for the 32 KiB of one partition table.

const POLYNOMIAL: u32 = 0xedb8_8320;

pub(super) fn crc32(parts: &[&[u8]]) -> u32 {
    let bytes = parts.iter().flat_map(|part| part.iter());
    !bytes.fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (POLYNOMIAL & (crc & 1).wrapping_neg()))
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn gives_the_check_value_of_the_standard() {
        assert_eq!(super::crc32(&[b"1234", b"56789"]), 0xcbf4_3926);
    }
}
