//! Capsules that are not whole here: the rest of them lies on other hosts.
//!
//! An empty file `partial/ID` says of a capsule that objects may be missing. It is published before the first
//! ref that names the capsule and removed when all of it is here. Collection keeps of such a capsule what
//! there is, verification does not call it broken, a capsule written on top of one of its images is partial
//! too.

use crate::{
    error::{Result, StoreError},
    file_names::{PARTIAL, publish, seal},
    gc_lease::gate,
    reachability,
    refs::Expected,
    store::Store,
    vfs::LockMode,
};
use std::collections::BTreeSet;
use whimbrel_core::{CapsuleId, Digest, RefName};

impl Store {
    /// Names a capsule of which the manifest is here, and the rest as far as it came. Objects kept before are
    /// durable when this returns.
    pub fn adopt_partial(&self, id: &CapsuleId, refs: &[RefName]) -> Result<()> {
        self.shadow_writer().flush()?;
        let _gate = gate(&*self.inner.files, LockMode::Shared)?;
        self.manifest(id)?;
        self.mark_partial(id)?;
        refs.iter().try_for_each(|name| self.write_ref(name, id, Expected::Anything))
    }

    /// Says of a capsule that is about to come that it is not whole here, so that its manifest is never taken
    /// for one of a whole capsule, however the coming ends.
    pub fn expect_partial(&self, id: &CapsuleId) -> Result<()> {
        let _gate = gate(&*self.inner.files, LockMode::Shared)?;
        if self.is_partial(id)? { Ok(()) } else { self.mark_partial(id) }
    }

    /// Whether all of a capsule is here, by the index. Looks at every node and page of it.
    pub fn is_complete(&self, id: &CapsuleId) -> Result<bool> {
        if self.is_partial(id)? {
            return Ok(false);
        }
        match reachability::check_capsule(self, id) {
            Ok(()) => Ok(true),
            Err(StoreError::Missing { .. } | StoreError::NotWhole { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether a ref names a capsule that is whole: known without looking at it, for a ref names only whole
    /// capsules and partial ones. Of one without a ref, parts may be collected already.
    pub fn is_named_whole(&self, id: &CapsuleId) -> Result<bool> {
        Ok(!self.is_partial(id)? && self.list_refs()?.values().any(|named| named == id))
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

    /// Looks whether a partial capsule is whole by now, and if so says that from here on.
    pub fn complete(&self, id: &CapsuleId) -> Result<()> {
        self.shadow_writer().flush()?;
        let _gate = gate(&*self.inner.files, LockMode::Shared)?;
        reachability::check_later(self, id)?;
        self.unmark_partial(id)?;
        self.found_whole(id)
    }

    /// The caller holds the gate.
    pub(crate) fn mark_partial(&self, id: &CapsuleId) -> Result<()> {
        let files = &*self.inner.files;
        self.inner.check_latch()?;
        match files.make_dir(PARTIAL) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(StoreError::io("create", PARTIAL)(error));
            }
            _ => {}
        }
        self.inner.latching(publish(files, PARTIAL, &id.to_string(), &seal("partial\n")))
    }

    pub(crate) fn unmark_partial(&self, id: &CapsuleId) -> Result<()> {
        let files = &*self.inner.files;
        match files.remove(&path(id)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(StoreError::io("remove", &path(id))(error)),
            Ok(()) => files.sync_dir(PARTIAL).map_err(StoreError::io("sync", PARTIAL)),
        }
    }

    /// Whether an image belongs to a capsule that is not whole here.
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
