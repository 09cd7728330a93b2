//! The capsule store as a keeper of images: each version is a capsule with one image, written over the
//! version before.

use super::keeper::{Keeper, timed};
use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;
use whimbrel_core::{ByteSize, CapsuleId, EXTENT_PAGES, EXTENT_SIZE, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_image::{FORMAT, ImageRef, Manifest};
use whimbrel_store::{Options, Store};

const IMAGE: &str = "memory";

/// Our store in a folder of its own.
pub(crate) struct Ours {
    folder: TempDir,
    newest: Option<CapsuleId>,
}

impl Ours {
    /// An empty store below `scratch`.
    pub(crate) fn new(scratch: &Path) -> Result<Self> {
        Ok(Self { folder: TempDir::new_in(scratch)?, newest: None })
    }

    fn open(&self) -> Result<Store> {
        Ok(Store::open(self.folder.path(), Options::create())?)
    }

    /// Puts every page of `image` over the newest version, as if nobody knew which ones changed, and commits.
    fn put(&mut self, image: &Path, version: &str) -> Result<()> {
        let store = self.open()?;
        let writer = store.writer()?;
        let mut file = File::open(image)?;
        let pages = file.metadata()?.len() / PAGE_SIZE as u64;
        let base = self.newest.map(|id| store.manifest(&id)).transpose()?;
        let base = base.and_then(|manifest| manifest.image(IMAGE)?.root);
        let mut writing = writer.image(base, pages)?;
        let mut buffer = vec![0; EXTENT_SIZE];
        for run in PageRun::new(0, pages).chunks(EXTENT_PAGES as u64) {
            let data = &mut buffer[..run.bytes()];
            file.read_exact(data)?;
            writing.put(run, data)?;
        }
        let image = writing.finish()?;
        let images = vec![ImageRef { name: IMAGE.into(), pages, root: image.root, cuts: None }];
        let manifest = manifest(images, self.newest.into_iter().collect());
        self.newest = Some(writer.commit(&manifest, &[version.parse()?])?);
        Ok(())
    }

    fn get(&self, version: &str, to: &Path) -> Result<()> {
        let store = self.open()?;
        let manifest = store.manifest(&store.resolve(version)?)?;
        let kept = manifest.image(IMAGE).context("the capsule has no image")?;
        let image = store.image(kept.root, kept.pages);
        let file = File::create(to)?;
        file.set_len(kept.pages * PAGE_SIZE as u64)?;
        let threads = std::thread::available_parallelism().map_or(2, |threads| threads.get());
        image.restore(threads, |run, data| file.write_all_at(data, run.offset()))?;
        Ok(())
    }
}

impl Keeper for Ours {
    fn name(&self) -> &'static str {
        "whimbrel"
    }

    fn save(&mut self, image: &Path, version: &str) -> Result<Duration> {
        timed(|| self.put(image, version))
    }

    fn restore(&mut self, version: &str, to: &Path) -> Result<Duration> {
        timed(|| self.get(version, to))
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A capsule of nothing but images.
pub(crate) fn manifest(images: Vec<ImageRef>, parents: Vec<CapsuleId>) -> Manifest {
    let machine = MachineConfig::minimal(ByteSize(1 << 20));
    Manifest {
        format: FORMAT,
        machine,
        device: vec![],
        images,
        parents,
        time: 0,
        host: "bench".into(),
        labels: BTreeMap::new(),
        working_set: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_come_back_as_they_were() {
        let scratch = tempfile::tempdir().unwrap();
        let mut ours = Ours::new(scratch.path()).unwrap();
        let image = scratch.path().join("image");
        let mut bytes: Vec<u8> = (0..600 * PAGE_SIZE).map(|i| (i / PAGE_SIZE % 7) as u8).collect();
        std::fs::write(&image, &bytes).unwrap();
        ours.save(&image, "first").unwrap();
        bytes[300 * PAGE_SIZE + 5] = 99;
        std::fs::write(&image, &bytes).unwrap();
        ours.save(&image, "later").unwrap();
        let back = scratch.path().join("back");
        ours.restore("later", &back).unwrap();
        assert!(std::fs::read(&back).unwrap() == bytes);
        bytes[300 * PAGE_SIZE + 5] = (300 % 7) as u8;
        ours.restore("first", &back).unwrap();
        assert!(std::fs::read(&back).unwrap() == bytes);
    }
}
