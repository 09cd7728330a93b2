//! Alignment of image files: finds where the pages of guest files are in a raw or qcow2 image.
//!
//! In a qcow2 image only uncompressed clusters are examined, as in the hash cache for which this is:
//! compressed clusters and a backing file read as zeros. An unreadable image has no alignment, which only
//! makes the cache find less.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path};
use whimbrel_alignment::{PageAlignment, ReadAt, inspect};
use whimbrel_hashcache::{
    SourceKind,
    qcow2::{Extent, Map},
};

/// Most extents of a qcow2 image that are held in memory (6 MiB); a more fragmented image is skipped.
const EXTENTS_MAX: usize = 1 << 18;

/// Alignment of the image in a file, unless pages are at multiples of 4 KiB.
pub(crate) fn alignment_of_file(path: &Path, kind: SourceKind) -> Option<PageAlignment> {
    let file = File::open(path).ok()?;
    let layout = match kind {
        SourceKind::Memory => return None,
        SourceKind::Raw => {
            let size = file.metadata().ok()?.len();
            inspect(&file, size)
        }
        SourceKind::Qcow2 => {
            let map = Map::open(file.try_clone().ok()?).ok()?;
            let size = map.size();
            let extents: Vec<Extent> = map.extents().take(EXTENTS_MAX + 1).collect::<Result<_, _>>().ok()?;
            if extents.len() > EXTENTS_MAX {
                return None;
            }
            inspect(&UncompressedImage { file, extents }, size)
        }
    };
    layout.page_alignment().ok().filter(|cuts| !cuts.is_identity())
}

/// The uncompressed parts of a qcow2 image in guest order; zeros between them.
struct UncompressedImage {
    file: File,
    extents: Vec<Extent>,
}

impl ReadAt for UncompressedImage {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        out.fill(0);
        let end = offset + out.len() as u64;
        let first = self.extents.partition_point(|extent| extent.guest + extent.length <= offset);
        for extent in self.extents[first..].iter().take_while(|extent| extent.guest < end) {
            let (from, to) = (extent.guest.max(offset), (extent.guest + extent.length).min(end));
            let part = &mut out[(from - offset) as usize..(to - offset) as usize];
            self.file.read_exact_at(part, extent.host + (from - extent.guest))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// A disk with an NTFS partition at sector 63, as far as its first sectors tell.
    fn odd_disk() -> Vec<u8> {
        let mut disk = vec![0; 8 << 20];
        disk[446 + 4] = 7;
        disk[446 + 8..446 + 12].copy_from_slice(&63u32.to_le_bytes());
        disk[446 + 12..446 + 16].copy_from_slice(&16_000u32.to_le_bytes());
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        disk
    }

    fn converted(dir: &Path, raw: &Path, options: &[&str]) -> std::path::PathBuf {
        let path = dir.join("disk.qcow2");
        let status = Command::new("qemu-img")
            .args(["convert", "-f", "raw", "-O", "qcow2"])
            .args(options)
            .args([raw, &path])
            .status();
        assert!(status.expect("qemu-img is installed").success());
        path
    }

    #[test]
    fn an_image_is_cut_the_same_whether_raw_or_qcow2() {
        let dir = tempfile::tempdir().unwrap();
        let raw = dir.path().join("disk.raw");
        std::fs::write(&raw, odd_disk()).unwrap();
        let cuts = alignment_of_file(&raw, SourceKind::Raw).expect("cuts");
        assert!(cuts.changes().any(|border| border.start == 63 * 512 && border.phase == 3584), "{cuts:?}");
        for cluster in ["cluster_size=512", "cluster_size=64k"] {
            let path = converted(dir.path(), &raw, &["-o", cluster]);
            assert_eq!(alignment_of_file(&path, SourceKind::Qcow2), Some(cuts.clone()), "{cluster}");
        }
    }

    #[test]
    fn what_cannot_be_read_has_no_cuts() {
        let dir = tempfile::tempdir().unwrap();
        let raw = dir.path().join("disk.raw");
        assert_eq!(alignment_of_file(&raw, SourceKind::Raw), None, "it does not exist");
        std::fs::write(&raw, odd_disk()).unwrap();
        assert_eq!(alignment_of_file(&raw, SourceKind::Qcow2), None, "it is none");
        assert_eq!(alignment_of_file(&raw, SourceKind::Memory), None);
        let compressed = converted(dir.path(), &raw, &["-c"]);
        assert_eq!(alignment_of_file(&compressed, SourceKind::Qcow2), None, "its table is not plain");
    }
}
