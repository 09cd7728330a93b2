//! Parts of a machine's record that describe what runs: the bases of its disks, and its QEMU process.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use whimbrel_alignment::PageAlignment;
use whimbrel_core::Digest;

/// The read-only content beneath a disk's overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum DiskBase {
    /// A raw image file of the user, which is never written.
    File {
        /// Path of the file.
        path: PathBuf,
    },
    /// An image of the store.
    Image {
        /// Root of the image.
        root: Digest,
        /// Alignment of its pages; none if they start at byte 0.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cuts: Option<PageAlignment>,
        /// Bytes of the image, if the disk has become larger; the rest of the disk is zeros.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size: Option<u64>,
    },
    /// Nothing: reads as zeros.
    Blank,
}

impl DiskBase {
    /// An image that is as large as the disk.
    pub fn image(root: Digest, cuts: Option<PageAlignment>) -> Self {
        Self::Image { root, cuts, size: None }
    }

    /// The image beneath a disk that has the size of the image.
    pub fn whole_image(&self) -> Option<(&Digest, Option<&PageAlignment>)> {
        match self {
            Self::Image { root, cuts, size: None } => Some((root, cuts.as_ref())),
            _ => None,
        }
    }

    /// The base of the disk once that is larger than `size`, its bytes so far.
    pub fn of_larger_disk(self, size: u64) -> Self {
        match self {
            Self::Image { root, cuts, size: None } => Self::Image { root, cuts, size: Some(size) },
            // A file is padded with zeros, and so is an image that was smaller already.
            other => other,
        }
    }
}

/// The QEMU process of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Process id of QEMU.
    pub pid: u32,
    /// From /proc/PID/stat: a later process with this pid has another value.
    pub started: u64,
    /// Name of its runtime directory.
    pub slot: String,
    /// Whether its memory is filled on demand, from the image `memory` (none: an empty one).
    pub lazy: bool,
    /// Root of the image that its memory is filled from.
    pub memory: Option<Digest>,
    /// Kind of its memory file. Absent in records of machines that never shared one.
    #[serde(default)]
    pub ram: RamFile,
}

/// Kind of a machine's memory file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RamFile {
    /// Owned by this machine: the file has what its guest writes.
    #[default]
    Own,
    /// The memory template of all clones of a capsule, without what their guests write.
    Template,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_that_was_written_down_before_there_were_cuts_has_none_and_is_written_as_then() {
        let root = Digest([7; 32]);
        let old = format!(r#"{{"kind":"image","root":"{root}"}}"#);
        let base: DiskBase = serde_json::from_str(&old).unwrap();
        assert_eq!(base, DiskBase::image(root, None));
        assert_eq!(serde_json::to_string(&base).unwrap(), old);
        let cut = DiskBase::image(root, Some("0180804000ff03".parse().unwrap()));
        let text = serde_json::to_string(&cut).unwrap();
        assert!(text.contains(r#""cuts":"0180804000ff03""#), "{text}");
        assert_eq!(serde_json::from_str::<DiskBase>(&text).unwrap(), cut);
        let larger = cut.of_larger_disk(4096).of_larger_disk(8192);
        assert!(matches!(larger, DiskBase::Image { size: Some(4096), .. }) && larger.whole_image().is_none());
    }
}
