//! Verification: reads everything and reports damage and the capsules that it affects.

use crate::{
    error::{Result, StoreError},
    file_names::{CONDEMNED, PACKS, PackId},
    gc_lease::{Condemned, live_leases},
    index::{Entry, PackLocation},
    store::Store,
};
use std::collections::{HashMap, HashSet};
use whimbrel_core::{
    CapsuleId, Digest,
    loss::{Loss, is_back},
};
use whimbrel_image::{
    ShortDigest,
    tree::{Visit, walk},
};

/// Result of [`Store::verify`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of frames read.
    pub frames: u64,
    /// Number of objects hashed.
    pub objects: u64,
    /// Bytes of the frames read.
    pub bytes: u64,
    /// Frames, indexes and refs that are damaged.
    pub damage: Vec<Damage>,
    /// Capsules that lack objects.
    pub broken: Vec<BrokenCapsule>,
    /// Capsules that are partly on other hosts; their objects here were verified.
    pub partial: Vec<CapsuleId>,
    /// Packs without an index and without a writer, left by a crash. `gc` indexes them.
    pub orphans: Vec<String>,
}

/// Damaged frame, index or ref.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Path relative to the store.
    pub file: String,
    /// Offset of the frame.
    pub offset: u64,
    /// Check that failed.
    pub reason: String,
    /// Short digests of the objects lost with it.
    pub objects: Vec<String>,
}

/// Capsule that cannot be restored completely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenCapsule {
    /// Id of the capsule.
    pub id: CapsuleId,
    /// Image that lacks objects; none for the manifest and blobs.
    pub image: Option<String>,
    /// Missing objects (the first hundred).
    pub missing: Vec<Digest>,
}

impl Report {
    /// Whether nothing is damaged or broken.
    pub fn is_complete(&self) -> bool {
        self.damage.is_empty() && self.broken.is_empty()
    }
}

/// What reading every frame found.
#[derive(Default)]
pub(crate) struct VerifiedFrames {
    /// Objects of which there is an undamaged copy.
    pub(crate) good: HashSet<ShortDigest>,
    /// Frames with damaged objects.
    pub(crate) damaged: Vec<Entry>,
}

/// Most objects that a broken capsule lists.
const MAX_LISTED: usize = 100;

impl Store {
    /// Reads every frame, computes every digest and checks that every capsule is complete. `progress` gets
    /// the bytes read and the bytes in total, and returns whether to go on.
    pub fn verify(&self, progress: impl FnMut(u64, u64) -> bool) -> Result<Report> {
        let mut report = Report::default();
        let frames = self.verify_frames(&mut report, progress)?;
        report.orphans = self.orphans()?;
        self.verify_capsules(&frames.good, &mut report)?;
        Ok(report)
    }

    pub(crate) fn verify_frames(
        &self,
        report: &mut Report,
        mut progress: impl FnMut(u64, u64) -> bool,
    ) -> Result<VerifiedFrames> {
        let catalog = &self.inner.objects.indexes;
        catalog.refresh()?;
        let total = catalog.packs().values().map(|len| u64::from(*len)).sum();
        let mut frames = VerifiedFrames::default();
        let condemned = match Condemned::read(&*self.inner.files) {
            Ok(condemned) => condemned.ids(),
            Err(error) => {
                report.damage.push(damage(CONDEMNED.to_owned(), 0, &with_sources(&error), &[]));
                HashSet::new()
            }
        };
        for index in catalog.snapshot().iter() {
            let Some(entries) = index.contents() else {
                report.damage.push(damage(format!("index/{}", index.name), 0, "body checksum", &[]));
                continue;
            };
            for entry in entries {
                // A collection that was killed may have removed the base of a delta that was to go too. If a
                // capsule needs an object of it after all, that capsule is broken.
                if let Some(damage) = self.verify_frame(&entry, report, &mut frames.good)
                    && (!condemned.contains(&entry.frame.pack) || is_back(Loss::DeadDeltaDamaged))
                {
                    report.damage.push(damage);
                    frames.damaged.push(entry);
                }
                if !progress(report.bytes, total) {
                    return Err(StoreError::Cancelled);
                }
            }
        }
        Ok(frames)
    }

    fn verify_frame(
        &self,
        entry: &Entry,
        report: &mut Report,
        good: &mut HashSet<ShortDigest>,
    ) -> Option<Damage> {
        let PackLocation { pack, offset, len, .. } = entry.frame;
        report.frames += 1;
        report.bytes += u64::from(len);
        let objects = &self.inner.objects;
        let decoded = match objects.decode(&entry.frame, &|key, below| objects.base(key, below)) {
            Ok(decoded) => decoded,
            Err(error) => {
                let reason = with_sources(&error);
                return Some(damage(pack.path(), offset.into(), &reason, &entry.keys));
            }
        };
        let fits = |(slot, key): &(usize, &ShortDigest)| {
            is_back(Loss::DigestNotCompared)
                || decoded.digest(*slot as u8).is_some_and(|found| key.matches(found))
        };
        let (right, wrong): (Vec<_>, Vec<_>) = entry.keys.iter().enumerate().partition(fits);
        report.objects += entry.keys.len() as u64;
        good.extend(right.into_iter().map(|(_, key)| *key));
        let keys: Vec<ShortDigest> = wrong.into_iter().map(|(_, key)| *key).collect();
        (!keys.is_empty())
            .then(|| damage(pack.path(), offset.into(), "the content has another digest", &keys))
    }

    fn verify_capsules(&self, good: &HashSet<ShortDigest>, report: &mut Report) -> Result<()> {
        // A damaged manifest is in the list of damage, and if a ref names it, also in the list of broken
        // capsules.
        let mut ids: HashSet<CapsuleId> = self.manifest_ids()?.into_iter().collect();
        let mut named = HashSet::new();
        match self.list_refs() {
            Ok(refs) => named.extend(refs.into_values()),
            Err(error) => report.damage.push(damage(String::from("refs"), 0, &with_sources(&error), &[])),
        }
        ids.extend(&named);
        let partials = self.partials()?;
        report.partial = ids.iter().copied().filter(|id| partials.contains(id)).collect();
        let mut known = HashMap::new();
        for id in ids.into_iter().filter(|id| !partials.contains(id)) {
            let missing = self.missing_in(&id, good, &mut known);
            if !missing.is_empty() && !named.contains(&id) && matches!(self.is_complete(&id), Ok(false)) {
                // A collection that was killed has removed some of its objects, which nothing needs.
                continue;
            }
            report.broken.extend(missing.into_iter().map(|(image, missing)| BrokenCapsule {
                id,
                image,
                missing,
            }));
        }
        Ok(())
    }

    /// Missing objects of a capsule, by image. `known` has the results of images checked before.
    fn missing_in(
        &self,
        id: &CapsuleId,
        good: &HashSet<ShortDigest>,
        known: &mut HashMap<Digest, Vec<Digest>>,
    ) -> Vec<(Option<String>, Vec<Digest>)> {
        let Ok(manifest) = self.manifest(id) else { return vec![(None, vec![id.0])] };
        let blobs: Vec<Digest> =
            manifest.blobs().filter(|blob| !good.contains(&ShortDigest::from(blob))).collect();
        let mut missing = vec![(None, blobs)];
        for image in &manifest.images {
            let Some(root) = image.root else { continue };
            let lost = known.entry(root).or_insert_with(|| self.missing_below(root, image.pages, good));
            missing.push((Some(image.name.clone()), lost.clone()));
        }
        missing.retain(|(_, lost)| !lost.is_empty());
        missing
    }

    fn missing_below(&self, root: Digest, pages: u64, good: &HashSet<ShortDigest>) -> Vec<Digest> {
        let mut lost = Vec::new();
        let walked = walk(&self.inner.objects, Some(root), pages, &mut |visit| {
            let (Visit::Node { digest, .. } | Visit::Page { digest, .. }) = visit;
            let is_good = good.contains(&ShortDigest::from(&digest));
            if !is_good && lost.len() < MAX_LISTED {
                lost.push(digest);
            }
            Ok(is_good)
        });
        if walked.is_err() && lost.is_empty() {
            lost.push(root);
        }
        lost
    }

    fn orphans(&self) -> Result<Vec<String>> {
        let files = &self.inner.files;
        let names = files.list(PACKS).map_err(StoreError::io("list", PACKS))?;
        let sessions = live_leases(&**files, 0, false)?;
        let covered = self.inner.objects.indexes.packs();
        let orphan = |name: &String| {
            PackId::parse(name)
                .is_none_or(|id| !covered.contains_key(&id) && !sessions.ids.contains(&id.lease))
        };
        Ok(names.into_iter().filter(orphan).collect())
    }
}

fn damage(file: String, offset: u64, reason: &str, keys: &[ShortDigest]) -> Damage {
    Damage {
        file,
        offset,
        reason: reason.to_owned(),
        objects: keys.iter().map(ShortDigest::to_string).collect(),
    }
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(error.source(), |error| error.source());
    sources.fold(error.to_string(), |text, source| format!("{text}: {source}"))
}
