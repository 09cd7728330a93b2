//! Generation id: loads a machine that keeps its identity without notifying its guest. Pure.
//!
//! QEMU's generation id (`hw/acpi/vmgenid.c`) notifies the guest at every load: it raises an ACPI event, for
//! which the guest interprets bytecode and draws new random numbers before it continues. That is right for a
//! copy. A migrated machine is the same one, and with translated code the guest spends a quarter of the time
//! until its first answer on it.
//!
//! Devices may be loaded in any order without unmet dependencies. So the section of the generation id goes
//! first: the event that it raises is then overwritten by the following ACPI registers and interrupt
//! controllers.

/// Name of the section with its length. Before it: kind and id of the section; after it: instance, version,
/// the address that the guest set, and the footer.
const NAME: &[u8; 8] = b"\x07vmgenid";
const BEFORE_NAME: usize = 5;
const LEN: usize = 34;
const FULL: u8 = 0x04;
const FOOTER: u8 = 0x7e;

/// Moves the section of the generation id before the others in `devices`. None if there is not exactly one,
/// or its format is unknown.
pub(crate) fn with_identity_first(devices: &[u8]) -> Option<Vec<u8>> {
    let mut places = devices.windows(NAME.len()).enumerate().filter(|(_, bytes)| bytes == NAME);
    let (at, None) = (places.next()?.0.checked_sub(BEFORE_NAME)?, places.next()) else { return None };
    let section = devices.get(at..at + LEN)?;
    let (id, footer) = (&section[1..BEFORE_NAME], &section[LEN - BEFORE_NAME..]);
    if section[0] != FULL || footer[0] != FOOTER || footer[1..] != *id {
        return None;
    }
    Some([section, &devices[..at], &devices[at + LEN..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section() -> Vec<u8> {
        let mut section = b"\x04\0\0\0\x28\x07vmgenid\0\0\0\0\0\0\0\x01".to_vec();
        section.extend(b"\x28\xf0\xff\x1f\0\0\0\0\x7e\0\0\0\x28");
        section
    }

    #[test]
    fn the_section_moves_and_nothing_else_changes() {
        let devices = [&b"one"[..], &section(), b"two"].concat();
        let moved = with_identity_first(&devices).unwrap();
        assert_eq!(moved, [&section()[..], b"one", b"two"].concat());
        assert_eq!(with_identity_first(&moved).unwrap(), moved, "where it is first already");
    }

    #[test]
    fn what_is_not_known_stays_as_it_is() {
        let one = section();
        assert_eq!(with_identity_first(b"one, two"), None, "there is none");
        assert_eq!(with_identity_first(&[&one[..], &one].concat()), None, "two");
        assert_eq!(with_identity_first(&one[..LEN - 1]), None, "cut short");
        assert_eq!(with_identity_first(&one[4..]), None, "it begins before the devices");
        assert_eq!(with_identity_first(&[]), None);
        for at in [0, 4, LEN - 5, LEN - 1] {
            let mut other = one.clone();
            other[at] ^= 1;
            assert_eq!(with_identity_first(&other), None, "byte {at}");
        }
    }
}
