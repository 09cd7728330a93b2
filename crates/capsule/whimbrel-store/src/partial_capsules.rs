//! Partial capsules: their manifest is here, and some of their objects are on other hosts.
//!
//! An empty file `partial/ID` marks a capsule of which objects may be missing. It is published before the
//! first ref that names the capsule and removed when all objects are here. Garbage collection retains what is
//! here of such a capsule, verification does not report it as broken, and a capsule written over one of its
//! images is partial too.

use crate::{
    error::{Result, StoreError},
    file_names::{PARTIAL, publish, with_checksum},
    gc_lease::gate,
    reachability,
    refs::Expected,
    store::Store,
    vfs::LockMode,
};
use std::collections::BTreeSet;
use whimbrel_core::{CapsuleId, Digest, RefName};

impl Store {
    /// Sets refs to a partial capsule whose manifest is here. Objects fetched before are durable on return.
    pub fn adopt_partial(&self, id: &CapsuleId, refs: &[RefName]) -> Result<()> {
        self.fetched_objects_writer().flush()?;
        let _gate = gate(&*self.inner.files, LockMode::Shared)?;
        self.manifest(id)?;
        self.mark_partial(id)?;
        refs.iter().try_for_each(|name| self.write_ref(name, id, Expected::Anything))
    }

    /// Marks a capsule as partial before its objects arrive, so that its manifest never counts as that of a
    /// complete capsule, however the transfer ends.
    pub fn expect_partial(&self, id: &CapsuleId) -> Result<()> {
        let _gate = gate(&*self.inner.files, LockMode::Shared)?;
        if self.is_partial(id)? { Ok(()) } else { self.mark_partial(id) }
    }

    /// Whether all objects of a capsule are here, by the index. Checks every node and page of it.
    pub fn is_complete(&self, id: &CapsuleId) -> Result<bool> {
        if self.is_partial(id)? {
            return Ok(false);
        }
        match reachability::check_capsule(self, id) {
            Ok(()) => Ok(true),
            Err(StoreError::Missing { .. } | StoreError::Incomplete { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether a ref names a complete capsule. Refs name only complete and partial capsules, so no object is
    /// checked. Objects of a capsule without a ref may have been collected.
    pub fn has_complete_ref(&self, id: &CapsuleId) -> Result<bool> {
        Ok(!self.is_partial(id)? && self.readable_refs()?.0.values().any(|named| named == id))
    }

    /// Whether objects of the capsule may be missing here.
    pub fn is_partial(&self, id: &CapsuleId) -> Result<bool> {
        match self.inner.files.open(&path(id)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(StoreError::io("open", &path(id))(error)),
        }
    }

    /// All capsules of which objects may be missing here.
    pub fn partials(&self) -> Result<BTreeSet<CapsuleId>> {
        match self.inner.files.list(PARTIAL) {
            Ok(names) => Ok(names.iter().filter_map(|name| name.parse().ok()).collect()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
            Err(error) => Err(StoreError::io("list", PARTIAL)(error)),
        }
    }

    /// Removes the partial mark of a capsule whose objects are all here; fails if some are missing.
    pub fn complete(&self, id: &CapsuleId) -> Result<()> {
        self.fetched_objects_writer().flush()?;
        let _gate = gate(&*self.inner.files, LockMode::Shared)?;
        reachability::check_arrived(self, id)?;
        self.unmark_partial(id)?;
        self.record_complete(id)
    }

    pub(crate) fn mark_partial(&self, id: &CapsuleId) -> Result<()> {
        let files = &*self.inner.files;
        self.inner.check_latch()?;
        match files.make_dir(PARTIAL) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(StoreError::io("create", PARTIAL)(error));
            }
            _ => {}
        }
        self.inner.latching(publish(files, PARTIAL, &id.to_string(), &with_checksum("partial\n")))
    }

    pub(crate) fn unmark_partial(&self, id: &CapsuleId) -> Result<()> {
        let files = &*self.inner.files;
        match files.remove(&path(id)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(StoreError::io("remove", &path(id))(error)),
            Ok(()) => files.sync_dir(PARTIAL).map_err(StoreError::io("sync", PARTIAL)),
        }
    }

    pub(crate) fn is_partial_image(&self, root: Digest, pages: u64) -> Result<bool> {
        for id in self.partials()? {
            let manifest = match self.manifest(&id) {
                Err(StoreError::Missing { .. }) => continue,
                other => other?,
            };
            if manifest.images.iter().any(|image| image.root == Some(root) && image.pages == pages) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn path(id: &CapsuleId) -> String {
    format!("{PARTIAL}/{id}")
}
