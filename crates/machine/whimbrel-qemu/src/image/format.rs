//! Formats of disk images, by the first and the last bytes of a file, and the files that an image names.
//!
//! Sources: QEMU's `docs/interop/qcow2.txt`, VMware's "Virtual Disk Format 5.0", Microsoft's VHD and VHDX
//! specifications, and QEMU's `block/vmdk.c` for what it follows.

use super::ImageError;
use std::{
    fmt,
    fs::File,
    io::{self, Seek, SeekFrom},
    os::unix::fs::FileExt,
};

/// Bytes at the start that have every header and the descriptor of a VMDK.
const HEAD: usize = 64 << 10;
/// Bytes of the footer of a VHD.
const FOOTER: u64 = 512;
/// Longest name that QEMU takes from a qcow2 header.
const NAME_MAX: usize = 1023;

const QCOW2: &[u8] = b"QFI\xfb";
const VMDK: &[u8] = b"KDMV";
const VHD: &[u8] = b"conectix";

/// Archives, as containers and appliances are.
const TAR: &str = "tar";

/// Formats that are recognised and not read: magic, offset, name.
const OTHERS: [(&[u8], usize, &str); 7] = [
    (b"# Disk DescriptorFile", 0, "vmdk with its content in other files"),
    (b"COWD", 0, "vmdk of version 3"),
    (b"QED\0", 0, "qed"),
    (b"\x7f\x10\xda\xbe", 64, "vdi"),
    (b"WithoutFreeSpace", 0, "parallels"),
    (b"ustar", 257, TAR),
    (b"BZh", 0, "bzip2"),
];

/// Compressions in which images are published: magic, name.
const COMPRESSIONS: [(&[u8], &str); 3] =
    [(b"\x1f\x8b\x08", "gzip"), (b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")];

/// Format of a disk image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageFormat {
    /// The bytes of the disk: whatever has no other format's magic.
    Raw,
    /// QEMU's format, versions 2 and 3.
    Qcow2,
    /// VMware's format, in one file.
    Vmdk,
    /// The format of Hyper-V.
    Vhdx,
    /// Virtual PC's VHD, which QEMU calls vpc.
    Vpc,
    /// Compressed as a whole, by this: the image is what comes out.
    Compressed(&'static str),
    /// One that is not read.
    Other(&'static str),
}

impl ImageFormat {
    /// Format of the content of `file`.
    pub fn of(file: &File) -> io::Result<Self> {
        Self::of_parts(&head(file)?, &footer(file)?)
    }

    /// Whether it is an archive.
    pub fn is_tar(self) -> bool {
        self == Self::Other(TAR)
    }

    fn of_parts(head: &[u8], footer: &[u8]) -> io::Result<Self> {
        let starts = |magic: &[u8]| head.starts_with(magic);
        let other =
            OTHERS.iter().find(|(magic, at, _)| head.get(*at..).is_some_and(|h| h.starts_with(magic)));
        let compression = COMPRESSIONS.iter().find(|(magic, _)| starts(magic));
        Ok(match other {
            Some((.., name)) => Self::Other(name),
            None if compression.is_some() => Self::Compressed(compression.map_or("", |(_, name)| name)),
            None if starts(QCOW2) => Self::Qcow2,
            None if starts(VMDK) => Self::Vmdk,
            None if starts(b"vhdxfile") => Self::Vhdx,
            None if starts(VHD) || footer.starts_with(VHD) => Self::Vpc,
            None => Self::Raw,
        })
    }

    /// Refuses an image whose header names other files or is damaged. What QEMU finds in it beyond that, it
    /// finds while confined.
    pub fn check_alone(self, file: &File) -> Result<(), ImageError> {
        match self {
            Self::Qcow2 => check_qcow2(&head(file).map_err(ImageError::Read)?),
            Self::Vmdk => check_vmdk(&head(file).map_err(ImageError::Read)?),
            // QEMU refuses those that are differences to another file, and opens none.
            Self::Raw | Self::Vhdx | Self::Vpc => Ok(()),
            Self::Compressed(_) => Err(ImageError::Unsupported { format: "compressed twice" }),
            Self::Other(format) => Err(ImageError::Unsupported { format }),
        }
    }

    /// Name of QEMU's driver.
    pub(super) fn driver(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vmdk => "vmdk",
            Self::Vhdx => "vhdx",
            Self::Vpc => "vpc",
            Self::Compressed(name) | Self::Other(name) => name,
        }
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.driver())
    }
}

/// The first bytes of a file, fewer if it is shorter.
fn head(file: &File) -> io::Result<Vec<u8>> {
    let mut head = vec![0; HEAD];
    let mut filled = 0;
    while filled < HEAD {
        match file.read_at(&mut head[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    head.truncate(filled);
    Ok(head)
}

/// The last bytes of a file; none if it is shorter.
fn footer(mut file: &File) -> io::Result<Vec<u8>> {
    // A seek, because it also gives the size of block devices.
    let size = file.seek(SeekFrom::End(0))?;
    file.rewind()?;
    let length = FOOTER.min(size);
    let mut footer = vec![0; length as usize];
    file.read_exact_at(&mut footer, size - length)?;
    Ok(footer)
}

/// Big-endian number at `at`.
fn number(head: &[u8], at: usize, bytes: usize) -> Result<u64, ImageError> {
    let field = at.checked_add(bytes).and_then(|end| head.get(at..end));
    let field = field.ok_or(ImageError::Header { what: "it is cut off" })?;
    Ok(field.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

fn check_qcow2(head: &[u8]) -> Result<(), ImageError> {
    const DATA_FILE: u64 = 1 << 2;
    let version = number(head, 4, 4)?;
    if !(2..=3).contains(&version) {
        return Err(ImageError::Unsupported { format: "qcow of a version other than 2 and 3" });
    }
    let (backing, length) = (number(head, 8, 8)?, number(head, 16, 4)?);
    if backing != 0 {
        return Err(needs("backing file", text_at(head, backing, length)));
    }
    if number(head, 32, 4)? != 0 {
        return Err(ImageError::Unsupported { format: "encrypted qcow2" });
    }
    if version == 3 && number(head, 72, 8)? & DATA_FILE != 0 {
        return Err(needs("data file", data_file(head).unwrap_or_default()));
    }
    Ok(())
}

/// Name of the external data file, from the header extensions after the header.
fn data_file(head: &[u8]) -> Option<String> {
    const DATA_FILE_NAME: u64 = 0x4441_5441;
    let mut at = number(head, 100, 4).ok()? as usize;
    loop {
        let (kind, length) = (number(head, at, 4).ok()?, number(head, at + 4, 4).ok()?);
        match kind {
            0 => return None,
            DATA_FILE_NAME => return Some(text_at(head, at as u64 + 8, length)),
            _ => at = at.checked_add(8)?.checked_add(length.next_multiple_of(8) as usize)?,
        }
    }
}

/// QEMU reads the embedded descriptor from here (`vmdk_open` of its block/vmdk.c).
const VMDK_DESCRIPTOR: usize = 0x200;

fn check_vmdk(head: &[u8]) -> Result<(), ImageError> {
    let capacity = head.get(12..20).ok_or(ImageError::Header { what: "it is cut off" })?;
    if capacity.iter().all(|byte| *byte == 0) {
        // QEMU then opens every file that the descriptor lists.
        return Err(needs("extent", quoted_after(head, b"RW ").unwrap_or_default()));
    }
    match quoted_after(head.get(VMDK_DESCRIPTOR..).unwrap_or_default(), b"parentFileNameHint") {
        Some(name) => Err(needs("backing file", name)),
        None => Ok(()),
    }
}

/// The next text in quotes after `key`; empty if there is none, none without the key.
fn quoted_after(text: &[u8], key: &[u8]) -> Option<String> {
    let at = text.windows(key.len()).position(|window| window == key)?;
    let mut parts = text[at..].splitn(3, |byte| *byte == b'"');
    Some(parts.nth(1).map(shown).unwrap_or_default())
}

fn text_at(head: &[u8], at: u64, length: u64) -> String {
    let from = head.get(usize::try_from(at).unwrap_or(usize::MAX)..).unwrap_or_default();
    shown(&from[..from.len().min(length.min(NAME_MAX as u64) as usize)])
}

fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(&name[..name.len().min(NAME_MAX)]).into_owned()
}

fn needs(role: &'static str, name: String) -> ImageError {
    ImageError::NeedsFile { role, name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_is_what_has_no_other_magic() {
        let of = |head: &[u8], footer: &[u8]| ImageFormat::of_parts(head, footer).unwrap();
        assert_eq!(of(b"\xeb\x63\x90 a boot sector", b"conec"), ImageFormat::Raw);
        assert_eq!(of(b"", b""), ImageFormat::Raw);
        assert_eq!(of(b"", b"conectix and its geometry"), ImageFormat::Vpc);
        assert_eq!(of(b"QFI\xfb\0\0\0\x03", b""), ImageFormat::Qcow2);
        assert_eq!(of(b"vhdxfile", b""), ImageFormat::Vhdx);
        assert_eq!(of(b"KDMV", b""), ImageFormat::Vmdk);
        let mut tar = vec![0; 512];
        tar[257..262].copy_from_slice(b"ustar");
        assert!(matches!(of(&tar, b""), ImageFormat::Other("tar")));
        assert!(matches!(of(b"# Disk DescriptorFile\nversion=1", b""), ImageFormat::Other(_)));
    }

    proptest::proptest! {
        #[test]
        fn no_header_is_a_panic_or_endless(rest in proptest::collection::vec(0..=255_u8, 0..2000), version in 2..4_u8) {
            let mut head = [QCOW2, &[0, 0, 0, version], &[0; 12], &rest].concat();
            let _ = check_qcow2(&head);
            head[..8].copy_from_slice(b"KDMV\x01\0\0\0");
            let _ = check_vmdk(&head);
        }
    }

    #[test]
    fn a_header_that_ends_anywhere_is_refused_and_never_a_panic() {
        let mut whole = vec![0; 4096];
        whole[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        whole[79] = 4;
        whole[103] = 104;
        whole[104..112].copy_from_slice(b"DATA\xff\xff\xff\xff");
        for length in 4..whole.len() {
            assert!(check_qcow2(&whole[..length]).is_err(), "{length} bytes");
        }
        whole[8..20].fill(0xff);
        let refused = check_qcow2(&whole).unwrap_err();
        assert!(matches!(refused, ImageError::NeedsFile { role: "backing file", name } if name.is_empty()));
        for length in 4..20 {
            assert!(check_vmdk(&whole[..length]).is_err(), "{length} bytes");
        }
    }
}
