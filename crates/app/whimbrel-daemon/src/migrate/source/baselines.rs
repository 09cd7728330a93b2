//! Baselines on the source: finds the capsules that both hosts have and the pages that may differ from them.
//!
//! See [`whimbrel_migrate::baseline`]. Pages that may differ are known without reading in two cases: the
//! dirty log of the store, if the baseline is the machine's last capsule, and the allocated pages of a disk's
//! overlay, if the baseline is its base. Otherwise all pages are compared by digest.

use crate::{
    core::refs,
    core::state::Core,
    machine::record::{DiskBase, Record},
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};
use whimbrel_block::{Device, RawDisk};
use whimbrel_capture::{Consumer, DirtyLog};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE, PageRun, PageSet};
use whimbrel_image::{ImageRef, page_digests};
use whimbrel_migrate::{
    baseline::{ArrayBaseline, Baseline, BaselineContent, MayDiffer},
    protocol,
    source::BoxError,
};
use whimbrel_store::{Pin, StoredDisk, StoredImage};
use whimbrel_vm::RunningDisk;

/// Most capsules that are examined on the way up from the machine's newest one.
const ANCESTORS_MAX: usize = 256;

/// Parts of a machine that tell which pages differ from a baseline.
pub(super) struct DirtySources<'a> {
    pub(super) record: &'a Record,
    pub(super) disks: &'a [RunningDisk],
    /// Stored images to which the dirty log of the store is relative.
    pub(super) stored: &'a BTreeMap<String, Option<Digest>>,
}

impl Core {
    /// Ancestors of the machine that are complete here, the nearest first.
    pub(super) fn local_ancestors(&self, record: &Record) -> Vec<CapsuleId> {
        let (mut bases, mut seen) = (Vec::new(), BTreeSet::new());
        let mut next: VecDeque<CapsuleId> = record.last.into_iter().chain(record.origin).collect();
        while let Some(id) = next.pop_front() {
            if seen.len() >= ANCESTORS_MAX || bases.len() >= protocol::BASES_MAX {
                break;
            }
            if !seen.insert(id) {
                continue;
            }
            // The ancestors are known from the manifest, which a partial capsule has too.
            let Ok(manifest) = self.store.manifest(&id) else { continue };
            if !self.is_partial(&id) {
                bases.push(id);
            }
            next.extend(manifest.parents.iter().copied().chain(refs::lineage_of(&manifest)));
        }
        bases
    }

    /// Baseline of an array on the target, as seen from the source.
    pub(super) fn baseline(
        &self,
        parts: &DirtySources<'_>,
        ledger: &mut DirtyLog,
        begun: &Baseline,
    ) -> Result<ArrayBaseline, BoxError> {
        let name = ledger.name().to_owned();
        let disk = parts.disks.iter().position(|disk| disk.name() == name);
        let capsule = match begun {
            Baseline::Capsule(capsule) => *capsule,
            Baseline::File => {
                let disk = disk.ok_or("only disks have a file as their baseline")?;
                return Ok(ArrayBaseline {
                    may_differ: MayDiffer::These(parts.disks[disk].allocated_pages()),
                    content: None,
                });
            }
            Baseline::Zeros => return Err("an array of zeros has no baseline".into()),
        };
        let pages = ledger.page_count();
        // Complete when it was offered. If it has since gone, everything may differ.
        let Ok(pin) = self.store.pin(&capsule) else {
            return Ok(ArrayBaseline { may_differ: MayDiffer::These(PageSet::full(pages)), content: None });
        };
        let manifest = self.store.manifest(&capsule)?;
        let image = manifest.image(&name).filter(|image| image.size() == pages * PAGE_SIZE as u64);
        let image = image.ok_or_else(|| format!("{} has no image of {name}", capsule.short()))?;
        let may_differ = self.may_differ(parts, ledger, disk, image)?;
        Ok(ArrayBaseline { may_differ, content: Some(self.content(image, pin)?) })
    }

    fn may_differ(
        &self,
        parts: &DirtySources<'_>,
        ledger: &DirtyLog,
        disk: Option<usize>,
        image: &ImageRef,
    ) -> Result<MayDiffer, BoxError> {
        let to_disk = |set: &PageSet| match &image.cuts {
            Some(cuts) => cuts.to_disk(set),
            None => set.clone(),
        };
        let cuts = disk.and_then(|disk| parts.disks[disk].alignment());
        let is_followed = parts.stored.get(ledger.name()) == Some(&image.root) && cuts == image.cuts.as_ref();
        let unseen =
            ledger.dirty_pages(Consumer::Store).filter(|set| is_followed && set.len() == image.pages);
        if let Some(unseen) = unseen {
            return Ok(MayDiffer::These(to_disk(unseen)));
        }
        if let Some(disk) = disk
            && let Some((root, cuts)) = parts.record.bases.get(disk).and_then(DiskBase::whole_image)
            && (Some(*root), cuts) == (image.root, image.cuts.as_ref())
        {
            return Ok(MayDiffer::These(parts.disks[disk].allocated_pages()));
        }
        let present = self.store.image(image.root, image.pages).present()?;
        Ok(MayDiffer::TheseOrPopulated(to_disk(&present)))
    }

    fn content(&self, image: &ImageRef, pin: Pin) -> Result<Arc<dyn BaselineContent>, BoxError> {
        let stored = self.store.image(image.root, image.pages);
        Ok(match &image.cuts {
            None => Arc::new(ByDigest { image: stored, _pin: pin }),
            Some(cuts) => {
                let device = RawDisk::new(Arc::new(StoredDisk::new(stored)), cuts.clone())?;
                Arc::new(ByContent { device, _pin: pin })
            }
        })
    }
}

/// A stored image whose pages equal those of the array: compared by the digests of its tree.
struct ByDigest {
    image: StoredImage,
    _pin: Pin,
}

impl BaselineContent for ByDigest {
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), BoxError> {
        Ok(self.image.read(run, out)?)
    }

    fn same(&self, run: PageRun, data: &[u8]) -> Result<Vec<bool>, BoxError> {
        let digests: Vec<Option<Digest>> =
            run.pages().map(|page| self.image.digest(page)).collect::<Result<_, _>>()?;
        let pages = data.as_chunks::<PAGE_SIZE>().0;
        // Pages that are zero in the baseline need no digest.
        let asked: Vec<&[u8; PAGE_SIZE]> =
            pages.iter().zip(&digests).filter(|(_, digest)| digest.is_some()).map(|(page, _)| page).collect();
        let mut found = page_digests(&asked).into_iter();
        let same = |(page, digest): (&[u8; PAGE_SIZE], Option<Digest>)| match digest {
            Some(digest) => found.next() == Some(digest),
            None => whimbrel_core::is_zero(page),
        };
        Ok(pages.iter().zip(digests).map(same).collect())
    }
}

/// A stored image with another alignment than the disk: compared by content.
struct ByContent {
    device: RawDisk,
    _pin: Pin,
}

impl BaselineContent for ByContent {
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), BoxError> {
        Ok(self.device.read_at(run.offset(), out)?)
    }

    fn same(&self, run: PageRun, data: &[u8]) -> Result<Vec<bool>, BoxError> {
        let mut base = vec![0; run.bytes()];
        self.read(run, &mut base)?;
        Ok(base.chunks(PAGE_SIZE).zip(data.chunks(PAGE_SIZE)).map(|(base, data)| base == data).collect())
    }
}
