//! Images of capsules that machines read, from the store here or partly from other hosts.

use crate::{
    core::state::Core,
    core::{error::DaemonError, refs},
    daemon::Daemon,
    machine::record::Record,
};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::{Manifest, PrefetchList};
use whimbrel_store::{CapsuleWriter, StoredImage};
use whimbrel_vm::{CapsuleImages, PagerView};

/// Slightly longer than the pager records touched pages.
const FIRST_SECONDS: Duration = Duration::from_millis(10_500);

impl Daemon {
    /// Saves the prefetch list of a machine that was just resumed, once its first seconds are over.
    pub(crate) fn save_prefetch_list_later(self: &Arc<Self>, capsule: CapsuleId, view: PagerView) {
        let host = Arc::downgrade(self);
        thread::spawn(move || {
            let until = Instant::now() + FIRST_SECONDS;
            while Instant::now() < until {
                match host.upgrade() {
                    Some(host) if host.sleep_unless_closing(Duration::from_millis(200)) => {}
                    _ => return,
                }
            }
            let (Some(host), Some(set)) = (host.upgrade(), view.prefetch_list()) else { return };
            if let Err(error) = host.save_prefetch_list(&capsule, &set) {
                tracing::warn!(error = &error as &dyn std::error::Error, "could not save a prefetch list");
            }
        });
    }
}

impl Core {
    /// The image `name` of a capsule. Objects that a partial capsule lacks are fetched when they are read.
    pub(crate) fn image(
        &self,
        capsule: Option<CapsuleId>,
        (name, root, pages): (&str, Option<Digest>, u64),
    ) -> StoredImage {
        CapsuleImages { store: self.store.clone(), capsule }.image(name, root, pages)
    }

    /// Whether objects of a capsule are missing here.
    pub(crate) fn is_partial(&self, capsule: &CapsuleId) -> bool {
        whimbrel_vm::is_partial(&self.store, capsule)
    }

    /// Fetches the pages on the prefetch list of a capsule in few large requests. A failure does no harm:
    /// these pages are fetched when they are touched.
    pub(crate) fn prefetch(&self, capsule: CapsuleId, manifest: &Manifest) {
        if !self.is_partial(&capsule) {
            return;
        }
        let Some(set) = self.prefetch_list(&capsule, manifest) else { return };
        for image in &manifest.images {
            let Some(pages) = set.of(&image.name, image.pages) else { continue };
            let source = self.image(Some(capsule), (&image.name, image.root, image.pages));
            if let Err(error) = source.fetch(pages) {
                let error = &error as &dyn std::error::Error;
                tracing::info!(image = image.name, error, "could not prefetch pages");
                return;
            }
        }
    }

    /// The prefetch list of a capsule, recorded at its last resume here or by the host that made it.
    pub(crate) fn prefetch_list(&self, capsule: &CapsuleId, manifest: &Manifest) -> Option<PrefetchList> {
        let noted = std::fs::read(self.directories.prefetch_list(capsule)).ok();
        let blob = || self.store.blob(&manifest.working_set?).ok();
        PrefetchList::decode(&noted.or_else(blob)?).ok()
    }

    pub(crate) fn save_prefetch_list(
        &self,
        capsule: &CapsuleId,
        set: &PrefetchList,
    ) -> Result<(), DaemonError> {
        let path = self.directories.prefetch_list(capsule);
        whimbrel_wire::atomic_file::replace(&path, &set.encode())
            .map_err(|source| DaemonError::io("write", &path, source))
    }

    /// The prefetch list of the machine's last resume here, as a blob for its next capsule.
    pub(crate) fn prefetch_list_blob(&self, record: &Record, writer: &CapsuleWriter) -> Option<Digest> {
        let noted = std::fs::read(self.directories.prefetch_list(&record.origin?)).ok()?;
        PrefetchList::decode(&noted).ok()?;
        writer.put_blob(&noted).ok()
    }

    /// Removes the prefetch lists of capsules that are gone.
    pub(crate) fn sweep_prefetch_lists(&self) -> Result<(), DaemonError> {
        let dir = self.directories.prefetch_lists();
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(|name| name.parse::<CapsuleId>().ok()) else { continue };
            let here = self.store.has(&[id.0]) == [true];
            if !here {
                std::fs::remove_file(entry.path())
                    .map_err(|source| DaemonError::io("remove", &entry.path(), source))?;
            }
        }
        Ok(())
    }

    pub(crate) fn find(
        &self,
        capsule: &whimbrel_api::CapsuleRef,
    ) -> Result<(CapsuleId, Manifest), DaemonError> {
        let capsule = refs::resolve(&self.store, capsule)?;
        let manifest = self.store.manifest(&capsule).map_err(refs::store_error("read the capsule"))?;
        Ok((capsule, manifest))
    }
}
