//! What comes through a guest's devices and from files for its disks.

use std::{fs::File, io::Write};
use whimbrel_net::{Mac, PortFilter, allowed, offload};
use whimbrel_qemu::ImageFormat;

const OWN: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

/// A frame of a guest: an allowed one has the guest's own address, and one that is too short has none.
pub fn guest_frame(data: &[u8]) {
    assert_eq!(allowed(data, PortFilter::Off), Ok(()));
    if allowed(data, PortFilter::Only(Mac(OWN))).is_ok() {
        assert_eq!(data.get(6..12), Some(&OWN[..]), "a frame of another station was let out");
    }
}

/// A packet of a guest: if its header fits, it is the same as some frames, none of them longer than itself.
pub fn guest_packet(data: &[u8]) {
    let frames = offload::plain(data);
    assert_eq!(offload::check(data).is_err(), frames.is_empty());
    assert!(frames.iter().all(|frame| frame.len() < data.len()), "a frame grew");
}

/// A file that somebody wants to import: it is recognised and checked without reading beyond its end.
pub fn disk_image(data: &[u8]) {
    let file = || -> std::io::Result<File> {
        let mut file = tempfile::tempfile()?;
        file.write_all(data)?;
        Ok(file)
    };
    let file = file().expect("a file for the image");
    let format = ImageFormat::of(&file).expect("a readable file");
    assert_eq!(format, ImageFormat::of(&file).expect("a readable file"));
    let checked = format.check_alone(&file).is_ok();
    assert!(checked || format != ImageFormat::Raw, "a raw image names no other file");
}

/// Frames that pass: ARP, IPv4 with UDP, IPv6 with ICMPv6, and one behind a VLAN tag.
pub(crate) fn guest_frames() -> Vec<Vec<u8>> {
    let frame = |kind: &[u8], payload: &[u8]| [&[0xff; 6][..], &OWN, kind, payload].concat();
    let arp = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &OWN, &[10, 0, 0, 2], &[0; 6], &[10, 0, 0, 1]].concat();
    let mut udp = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1];
    udp.extend([0, 68, 0, 67, 0, 8, 0, 0]);
    let mut icmp = vec![0x60, 0, 0, 0, 0, 8, 58, 255];
    icmp.extend([0xfe; 32]);
    icmp.extend([135, 0, 0, 0, 0, 0, 0, 0]);
    let tagged = [&[0, 7, 8, 0][..], &udp].concat();
    vec![frame(&[8, 6], &arp), frame(&[8, 0], &udp), frame(&[0x86, 0xdd], &icmp), frame(&[0x81, 0], &tagged)]
}

/// Packets whose headers fit: nothing left, a checksum, TCP over IPv4 and IPv6 behind a VLAN tag, and UDP.
pub(crate) fn guest_packets() -> Vec<Vec<u8>> {
    let header = |kind: u8, words: [u16; 4]| {
        let flags = u8::from(words[2] > 0);
        [&[flags, kind][..], &words.map(u16::to_ne_bytes).concat()].concat()
    };
    let udp = &guest_frames()[1];
    let tcp = [&[0, 80, 0, 90, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x19, 1, 0, 0, 0, 0, 0][..], &[7; 300]].concat();
    let mut ipv4 = [&udp[..34], &tcp].concat();
    ipv4[23] = 6;
    let mut ipv6 = [&[0xff; 6][..], &OWN, &[0x81, 0, 0, 7, 0x86, 0xdd, 0x60]].concat();
    ipv6.extend([0, 0, 0, 1, 64, 6, 64]);
    ipv6.extend([0xfd; 32]);
    ipv6.extend(&tcp);
    let long_udp = [&udp[..], &[9; 300]].concat();
    vec![
        [header(0, [0; 4]), udp.clone()].concat(),
        [header(0, [0, 0, 34, 6]), udp.clone()].concat(),
        [header(1, [54, 100, 34, 16]), ipv4].concat(),
        [header(4, [78, 100, 58, 16]), ipv6].concat(),
        [header(5, [42, 100, 34, 6]), long_udp].concat(),
    ]
}

/// Headers of the formats that are recognised, and a raw image.
pub(crate) fn disk_images() -> Vec<Vec<u8>> {
    let mut qcow2 = vec![0; 512];
    qcow2[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    qcow2[20..24].copy_from_slice(&16u32.to_be_bytes());
    qcow2[24..32].copy_from_slice(&(1u64 << 20).to_be_bytes());
    qcow2[100..104].copy_from_slice(&104u32.to_be_bytes());
    let vmdk = [&b"KDMV\x01\0\0\0"[..], &[0; 504]].concat();
    let vhdx = [&b"vhdxfile"[..], &[0; 504]].concat();
    let vpc = [&[0; 512][..], b"conectix", &[0; 504]].concat();
    vec![qcow2, vmdk, vhdx, vpc, vec![0x55; 600]]
}
