//! Refs: names of capsules, the only thing in a store that changes.
//!
//! One small file each, replaced whole under a lock that all processes share, so a reader sees the old or the new one.

use crate::{
    closure,
    error::{Result, StoreError},
    files::{Lock, LockMode, Patience},
    layout::{REFS, publish, read_sealed, seal},
    lease::gate,
    store::Store,
};
use std::collections::BTreeMap;
use whimbrel_core::{CapsuleId, Digest, RefName};

const REFS_LOCK: &str = "refs.lock";

/// What a ref must be for a change to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// No matter what.
    Anything,
    /// Absent.
    Absent,
    /// This capsule.
    Capsule(CapsuleId),
}

impl Store {
    /// What `name` refers to, none if there is no such ref.
    pub fn get_ref(&self, name: &RefName) -> Result<Option<CapsuleId>> {
        let path = format!("{REFS}/{name}");
        let Some(text) = read_sealed(&*self.inner.files, &path)? else { return Ok(None) };
        let id = text.trim_end().parse().map_err(|_| StoreError::SmallFile { path })?;
        Ok(Some(id))
    }

    /// All refs.
    pub fn list_refs(&self) -> Result<BTreeMap<RefName, CapsuleId>> {
        let mut refs = BTreeMap::new();
        for name in self.inner.files.list(REFS).map_err(StoreError::io("list", REFS))? {
            let Ok(name) = name.parse::<RefName>() else { continue };
            if let Some(id) = self.get_ref(&name)? {
                refs.insert(name, id);
            }
        }
        Ok(refs)
    }

    /// Points `name` at a capsule that is whole in this store.
    pub fn set_ref(&self, name: &RefName, id: &CapsuleId, expected: Expected) -> Result<()> {
        let _gate = gate(&*self.inner.files, LockMode::Shared)?;
        closure::check_capsule(self, id)?;
        self.write_ref(name, id, expected)
    }

    /// Removes a ref. The capsule stays until it is collected.
    pub fn delete_ref(&self, name: &RefName, expected: Expected) -> Result<()> {
        let inner = &self.inner;
        inner.check_latch()?;
        let _lock = self.lock_refs()?;
        let found = self.expect(name, expected)?;
        if found.is_none() {
            return Err(StoreError::Unknown { text: name.to_string() });
        }
        let path = format!("{REFS}/{name}");
        inner.latching(inner.files.remove(&path).map_err(StoreError::io("remove", &path)))?;
        inner.latching(inner.files.sync_dir(REFS).map_err(StoreError::io("sync", REFS)))
    }

    /// The caller holds the gate and knows the capsule to be whole.
    pub(crate) fn write_ref(&self, name: &RefName, id: &CapsuleId, expected: Expected) -> Result<()> {
        self.inner.check_latch()?;
        let _lock = self.lock_refs()?;
        self.expect(name, expected)?;
        let bytes = seal(&format!("{id}\n"));
        self.inner.latching(publish(&*self.inner.files, REFS, name.as_str(), &bytes))
    }

    fn lock_refs(&self) -> Result<Option<Lock>> {
        self.inner
            .files
            .lock(REFS_LOCK, LockMode::Exclusive, Patience::Wait)
            .map_err(StoreError::io("lock", REFS_LOCK))
    }

    fn expect(&self, name: &RefName, expected: Expected) -> Result<Option<CapsuleId>> {
        let found = match self.get_ref(name) {
            // A damaged ref must be replaceable, or it could never be repaired.
            Err(StoreError::SmallFile { .. }) if expected == Expected::Anything => None,
            other => other?,
        };
        let fits = match expected {
            Expected::Anything => true,
            Expected::Absent => found.is_none(),
            Expected::Capsule(id) => found == Some(id),
        };
        if fits { Ok(found) } else { Err(StoreError::RefChanged { name: name.to_string(), found }) }
    }

    /// Whether a capsule that a ref names directly has this image, which is then whole.
    pub(crate) fn refs_hold_image(&self, root: Digest, pages: u64) -> Result<bool> {
        for id in self.list_refs()?.values() {
            let manifest = self.manifest(id)?;
            if manifest.images.iter().any(|image| image.root == Some(root) && image.pages == pages) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
