//! Queries about capsules: list, resolve, lineage, differences.

use crate::{
    error::{Result, StoreError},
    index::PackLocation,
    store::Store,
};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use whimbrel_core::{ByteSize, CapsuleId, Digest, PAGE_SIZE, PageSet, RefName};
use whimbrel_image::{ImageRef, Manifest, pack_frame::Kind, tree};

/// A capsule and the refs that name it.
#[derive(Debug, Clone)]
pub struct CapsuleInfo {
    /// Capsule id, the digest of the manifest.
    pub id: CapsuleId,
    /// Manifest of the capsule.
    pub manifest: Manifest,
    /// Refs that name the capsule directly.
    pub refs: Vec<RefName>,
    /// Whether a ref names the capsule or a descendant of it.
    pub reachable: bool,
}

/// Difference of one image between two capsules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageChange {
    /// Name of the image: `memory`, `disk0`, …
    pub name: String,
    /// Number of pages that differ.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: ByteSize,
    /// Different pages whose new content the old image does not have anywhere.
    pub new_contents: u64,
}

/// Changes of an image in two descendants of one capsule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Divergence {
    /// Name of the image: `memory`, `disk0`, …
    pub name: String,
    /// Pages that the first descendant changed.
    pub ours: PageSet,
    /// Pages that the second descendant changed.
    pub theirs: PageSet,
    /// Pages that both changed to different content.
    pub conflicts: PageSet,
}

impl Store {
    /// Every capsule in the store, newest first. Damaged refs and manifests are left out.
    pub fn capsules(&self) -> Result<Vec<CapsuleInfo>> {
        let mut refs = BTreeMap::<CapsuleId, Vec<RefName>>::new();
        for (name, id) in self.readable_refs()?.0 {
            refs.entry(id).or_default().push(name);
        }
        let reachable = self.ancestors_with(refs.keys().copied(), |_| true)?;
        let reachable: BTreeSet<CapsuleId> = reachable.into_iter().map(|(id, _)| id).collect();
        let mut capsules = Vec::new();
        for id in self.manifest_ids()? {
            let Ok(manifest) = self.manifest(&id) else { continue };
            let refs = refs.remove(&id).unwrap_or_default();
            capsules.push(CapsuleInfo { id, manifest, refs, reachable: reachable.contains(&id) });
        }
        capsules.sort_by_key(|capsule| (std::cmp::Reverse(capsule.manifest.time), capsule.id));
        Ok(capsules)
    }

    /// Ids of all readable manifests; the index tells the kind of each frame.
    pub(crate) fn manifest_ids(&self) -> Result<BTreeSet<CapsuleId>> {
        let objects = &self.inner.objects;
        objects.indexes.refresh()?;
        let indexes = objects.indexes.snapshot();
        let places: HashSet<PackLocation> = indexes
            .iter()
            .flat_map(|index| index.places())
            .filter(|place| place.kind == Kind::Manifest)
            .collect();
        let id = |place: &PackLocation| match objects.frame(place) {
            Ok(frame) => frame.digest(0).copied().map(CapsuleId),
            Err(error) => {
                // One that cannot be read hides no other.
                let error = &error as &dyn std::error::Error;
                tracing::warn!(pack = %place.pack, offset = place.offset, error, "cannot read a manifest");
                None
            }
        };
        Ok(places.iter().filter_map(id).collect())
    }

    /// Resolves a ref, or the first digits (at least four) of an id.
    pub fn resolve(&self, text: &str) -> Result<CapsuleId> {
        if let Ok(name) = text.parse::<RefName>()
            && let Some(id) = self.get_ref(&name)?
        {
            return Ok(id);
        }
        let unknown = || StoreError::Unknown { text: text.chars().take(80).collect() };
        if text.len() < 4 || text.len() > 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(unknown());
        }
        let digits = text.to_ascii_lowercase();
        let ids = self.manifest_ids()?;
        let mut matches = ids.iter().filter(|id| id.to_string().starts_with(&digits));
        let first = matches.next().ok_or_else(unknown)?;
        match matches.count() {
            0 => Ok(*first),
            more => Err(StoreError::Ambiguous { text: digits, matches: more + 1 }),
        }
    }

    /// A capsule and its ancestors that are still in the store, children before parents, newest first.
    pub fn log(&self, id: &CapsuleId) -> Result<Vec<(CapsuleId, Manifest)>> {
        self.manifest(id)?;
        self.ancestors([*id])
    }

    /// Returns `from` and their ancestors that are in the store.
    pub(crate) fn ancestors(
        &self,
        from: impl IntoIterator<Item = CapsuleId>,
    ) -> Result<Vec<(CapsuleId, Manifest)>> {
        self.ancestors_with(from, |error| matches!(error, StoreError::Missing { .. }))
    }

    /// Like [`Store::ancestors`], without those whose manifests fail in a way that `passes`.
    fn ancestors_with(
        &self,
        from: impl IntoIterator<Item = CapsuleId>,
        passes: impl Fn(&StoreError) -> bool,
    ) -> Result<Vec<(CapsuleId, Manifest)>> {
        let mut found = Vec::new();
        let mut seen = HashSet::new();
        let mut level: Vec<CapsuleId> = from.into_iter().collect();
        while !level.is_empty() {
            let mut above = Vec::new();
            for id in level.into_iter().filter(|id| seen.insert(*id)) {
                let manifest = match self.manifest(&id) {
                    Err(error) if passes(&error) => continue,
                    other => other?,
                };
                above.extend(manifest.parents.iter().copied());
                found.push((id, manifest));
            }
            level = above;
        }
        Ok(found)
    }

    /// Capsules that name `id` as a parent.
    pub fn children(&self, id: &CapsuleId) -> Result<Vec<CapsuleId>> {
        let capsules = self.capsules()?.into_iter().filter(|capsule| capsule.manifest.parents.contains(id));
        Ok(capsules.map(|capsule| capsule.id).collect())
    }

    /// Bytes of pages that a capsule has and its parent does not have at the same position, equal pages
    /// counted once and before compression. Of several parents the nearest counts. Without a parent in the
    /// store, all pages count.
    pub fn added(&self, id: &CapsuleId) -> Result<ByteSize> {
        let manifest = self.manifest(id)?;
        let mut least = None;
        for parent in &manifest.parents {
            let parent = match self.manifest(parent) {
                Err(StoreError::Missing { .. }) => continue,
                other => other?,
            };
            let added = self.contents_beside(&manifest, Some(&parent))?;
            least = Some(least.map_or(added, |least: u64| least.min(added)));
        }
        let pages = least.map_or_else(|| self.contents_beside(&manifest, None), Ok)?;
        Ok(ByteSize(pages * PAGE_SIZE as u64))
    }

    fn contents_beside(&self, manifest: &Manifest, parent: Option<&Manifest>) -> Result<u64> {
        let mut contents = HashSet::<Digest>::new();
        for image in &manifest.images {
            let old = parent.and_then(|parent| parent.image(&image.name));
            let old = old.filter(|old| old.pages == image.pages).and_then(|old| old.root);
            tree::diff(&self.inner.objects, old, image.root, image.pages, &mut |d| {
                contents.extend(d.new);
                Ok::<_, StoreError>(())
            })?;
        }
        Ok(contents.len() as u64)
    }

    /// Changes of the image `name` from `base` to `ours` and to `theirs`. None if it is not in all three with
    /// one length.
    pub fn divergence(
        &self,
        name: &str,
        base: &Manifest,
        ours: &Manifest,
        theirs: &Manifest,
    ) -> Result<Option<Divergence>> {
        let (Some(base), Some(ours), Some(theirs)) = (base.image(name), ours.image(name), theirs.image(name))
        else {
            return Ok(None);
        };
        let alike = |image: &ImageRef| image.pages == base.pages && image.cuts == base.cuts;
        if !alike(ours) || !alike(theirs) {
            return Ok(None);
        }
        let (pages, name) = (base.pages, name.to_owned());
        let (base, ours_root, theirs_root) = (base.root, ours.root, theirs.root);
        let ours = self.changed_pages(base, ours_root, pages)?;
        let theirs = self.changed_pages(base, theirs_root, pages)?;
        let mut conflicts = ours.clone();
        conflicts.intersect(&theirs);
        if !conflicts.is_empty() {
            conflicts.intersect(&self.changed_pages(ours_root, theirs_root, pages)?);
        }
        Ok(Some(Divergence { name, ours, theirs, conflicts }))
    }

    /// Pages that differ between two images of `pages` pages.
    pub fn changed_pages(&self, old: Option<Digest>, new: Option<Digest>, pages: u64) -> Result<PageSet> {
        let mut changed = PageSet::empty(pages);
        tree::diff(&self.inner.objects, old, new, pages, &mut |d| {
            changed.insert(d.page);
            Ok::<_, StoreError>(())
        })?;
        Ok(changed)
    }

    /// Differences between two capsules, image by image. If only one has an image, or its length changed, all
    /// its pages that are not zero count as different.
    pub fn diff(&self, old: &CapsuleId, new: &CapsuleId) -> Result<Vec<ImageChange>> {
        let (old, new) = (self.manifest(old)?, self.manifest(new)?);
        let names: BTreeSet<&str> =
            old.images.iter().chain(&new.images).map(|image| image.name.as_str()).collect();
        names.into_iter().map(|name| self.diff_image(name, &old, &new)).collect()
    }

    fn diff_image(&self, name: &str, old: &Manifest, new: &Manifest) -> Result<ImageChange> {
        let (old, new) = (old.image(name), new.image(name));
        let (mut pages, mut contents) = (0, BTreeSet::<Digest>::new());
        let mut count = |new: Option<Digest>| {
            pages += 1;
            contents.extend(new);
            Ok(())
        };
        let objects = &self.inner.objects;
        match (old, new) {
            (Some(old), Some(new)) if old.pages == new.pages => {
                tree::diff(objects, old.root, new.root, new.pages, &mut |d| count(d.new))?;
            }
            (old, new) => {
                let sides = [(old, false), (new, true)].into_iter();
                for (image, is_new) in sides.filter_map(|(image, is_new)| Some((image?, is_new))) {
                    tree::diff(objects, None, image.root, image.pages, &mut |d| {
                        count(d.new.filter(|_| is_new))
                    })?;
                }
            }
        }
        if let Some(old) = old {
            tree::walk(objects, old.root, old.pages, &mut |visit| {
                if let tree::Visit::Page { digest, .. } = visit {
                    contents.remove(&digest);
                }
                Ok(!contents.is_empty())
            })?;
        }
        let bytes = ByteSize(pages * PAGE_SIZE as u64);
        Ok(ImageChange { name: name.to_owned(), pages, bytes, new_contents: contents.len() as u64 })
    }
}
