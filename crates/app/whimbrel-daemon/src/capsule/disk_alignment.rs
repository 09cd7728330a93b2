//! Alignment of the disks of machines: how their bytes are grouped into the pages of images.
//!
//! A running machine does not use it: overlays, dirty pages and migrations count bytes of the disk. A disk is
//! inspected once, for its first image; later images have the alignment of the one before. Another alignment
//! would be correct too, but would make every page new.

use crate::{
    core::state::Core,
    machine::record::{DiskBase, Record},
};
use std::sync::Arc;
use whimbrel_alignment::PageAlignment;
use whimbrel_block::{AlignedDisk, Device, RawDisk, layout_of};
use whimbrel_core::PageSet;
use whimbrel_image::Manifest;

impl Core {
    /// Alignment of the next image of disk `index`, which reads as `disk`. None if pages start at byte 0.
    pub(crate) fn alignment_for(
        &self,
        record: &Record,
        index: usize,
        disk: &dyn Device,
    ) -> Option<PageAlignment> {
        if let Some(DiskBase::Image { cuts, size, .. }) = record.bases.get(index) {
            return match size {
                None => cuts.clone(),
                // What follows the last border of a smaller image becomes longer.
                Some(_) => cuts.as_ref().and_then(|it| PageAlignment::new(disk.size(), it.changes()).ok()),
            };
        }
        let former = record.last.or(record.origin).and_then(|id| self.store.manifest(&id).ok());
        let image = former.as_ref().and_then(|former| former.image(&format!("disk{index}")));
        // An image of zeros has no content to find again.
        match image.filter(|image| image.root.is_some() && image.size() == disk.size()) {
            Some(image) => image.cuts.clone(),
            None => first_alignment(disk),
        }
    }
}

pub(crate) fn first_alignment(disk: &dyn Device) -> Option<PageAlignment> {
    layout_of(disk).page_alignment().ok().filter(|cuts| !cuts.is_identity())
}

pub(crate) fn disk_bases(manifest: &Manifest) -> Vec<DiskBase> {
    let base = |disk| match manifest.image(&format!("disk{disk}")) {
        Some(image) => match image.root {
            Some(root) => DiskBase::image(root, image.cuts.clone()),
            None => DiskBase::Blank,
        },
        None => DiskBase::Blank,
    };
    (0..manifest.machine.disks.len()).map(base).collect()
}

type Cause = Box<dyn std::error::Error + Send + Sync>;

pub(crate) fn aligned(disk: Arc<dyn Device>, cuts: Option<&PageAlignment>) -> Result<Arc<dyn Device>, Cause> {
    Ok(match cuts {
        None => disk,
        Some(cuts) => Arc::new(AlignedDisk::new(disk, cuts.clone())?),
    })
}

/// The aligned pages of an image as the disk.
pub(crate) fn unaligned(
    pages: Arc<dyn Device>,
    cuts: Option<&PageAlignment>,
) -> Result<Arc<dyn Device>, Cause> {
    Ok(match cuts {
        None => pages,
        Some(cuts) => Arc::new(RawDisk::new(pages, cuts.clone())?),
    })
}

/// Pages of the image with bytes of these disk pages; none if the set is of another disk.
pub(crate) fn image_pages(cuts: Option<&PageAlignment>, disk: PageSet) -> Option<PageSet> {
    match cuts {
        None => Some(disk),
        Some(cuts) => (cuts.disk_page_count() == disk.len()).then(|| cuts.to_aligned(&disk)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::PAGE_SIZE;

    #[test]
    fn written_pages_of_a_disk_are_all_pages_of_the_image_that_they_touch() {
        let cuts: PageAlignment = "0180804000ff03".parse().unwrap();
        let mut written = PageSet::empty(cuts.size() / PAGE_SIZE as u64);
        written.insert(100);
        let touched = image_pages(Some(&cuts), written.clone()).unwrap();
        assert_eq!((touched.count(), touched.len()), (2, cuts.page_count()));
        assert_eq!(image_pages(None, written.clone()), Some(written));
        assert_eq!(image_pages(Some(&cuts), PageSet::empty(3)), None, "another disk");
    }
}
