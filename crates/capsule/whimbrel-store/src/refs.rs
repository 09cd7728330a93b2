//! Refs: names of capsules, the only mutable objects of a store, each with its history.
//!
//! Each is one small file, replaced atomically under a lock that all processes share, so a reader sees the
//! old or the new one. The history of a ref is in its file, so both change and vanish together. A history
//! names capsules but does not retain them.

use crate::{
    error::{Result, StoreError},
    file_names::{REFS, publish, read_checked, with_checksum},
    gc_lease::gate,
    store::Store,
    vfs::{Lock, LockMode, LockWait},
};
use std::{
    collections::BTreeMap,
    time::{SystemTime, UNIX_EPOCH},
};
use whimbrel_core::{CapsuleId, Digest, RefName};

const REFS_LOCK: &str = "refs.lock";
/// Most versions in the history of a ref; older ones are dropped.
const HISTORY_MAX: usize = 64;

/// One version of a ref.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefChange {
    /// Capsule that it named from then on.
    pub id: CapsuleId,
    /// Capsule that it named before; none for its first version, or if that was dropped.
    pub old: Option<CapsuleId>,
    /// Time of the change in milliseconds since 1970; 0 if unknown.
    pub time: u64,
}

/// Expected state of a ref before a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Any state is fine.
    Anything,
    /// The ref does not exist.
    Absent,
    /// The ref names this capsule.
    Capsule(CapsuleId),
}

impl Store {
    /// Capsule that a ref names, none if there is no such ref.
    pub fn get_ref(&self, name: &RefName) -> Result<Option<CapsuleId>> {
        Ok(self.read_ref(name)?.first().map(|(id, _)| *id))
    }

    /// History of a ref, newest version first; empty if there is no such ref.
    pub fn ref_history(&self, name: &RefName) -> Result<Vec<RefChange>> {
        let versions = self.read_ref(name)?;
        let old = versions.iter().skip(1).map(|(id, _)| Some(*id)).chain([None]);
        Ok(versions
            .iter()
            .zip(old)
            .map(|((id, time), old)| RefChange { id: *id, old, time: *time })
            .collect())
    }

    /// Versions of a ref and their times, newest first; empty if there is no such ref.
    fn read_ref(&self, name: &RefName) -> Result<Vec<(CapsuleId, u64)>> {
        let path = format!("{REFS}/{name}");
        let Some(text) = read_checked(&*self.inner.files, &path)? else { return Ok(Vec::new()) };
        parse(&text).ok_or(StoreError::SmallFile { path })
    }

    /// All refs that can be read, and the names of those that are damaged: for listings. Whatever removes
    /// something needs all refs, so it uses [`Store::list_refs`].
    pub fn readable_refs(&self) -> Result<(BTreeMap<RefName, CapsuleId>, Vec<RefName>)> {
        let (mut refs, mut damaged) = (BTreeMap::new(), Vec::new());
        for name in self.inner.files.list(REFS).map_err(StoreError::io("list", REFS))? {
            let Ok(name) = name.parse::<RefName>() else { continue };
            match self.get_ref(&name) {
                Ok(Some(id)) => drop(refs.insert(name, id)),
                Ok(None) => {}
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(%name, error, "the name of a capsule cannot be read");
                    damaged.push(name);
                }
            }
        }
        Ok((refs, damaged))
    }

    /// All refs and the capsules that they name; fails if one of them is damaged.
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

    /// Points `name` at a capsule that is complete in this store, or marked partial.
    pub fn set_ref(&self, name: &RefName, id: &CapsuleId, expected: Expected) -> Result<()> {
        let _gate = gate(&*self.inner.files, LockMode::Shared)?;
        if !self.is_partial(id)? {
            self.require_complete(id)?;
        }
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

    /// Sets a ref. The caller has the gate and knows the capsule to be complete or marked partial.
    pub(crate) fn write_ref(&self, name: &RefName, id: &CapsuleId, expected: Expected) -> Result<()> {
        self.inner.check_latch()?;
        let _lock = self.lock_refs()?;
        self.expect(name, expected)?;
        // A damaged ref is replaced, and its history starts again.
        let mut versions = self.read_ref(name).unwrap_or_default();
        if versions.first().is_none_or(|(newest, _)| newest != id) {
            versions.insert(0, (*id, now_ms()));
            versions.truncate(HISTORY_MAX);
        }
        let bytes = with_checksum(&encode(&versions));
        self.inner.latching(publish(&*self.inner.files, REFS, name.as_str(), &bytes))
    }

    fn lock_refs(&self) -> Result<Option<Lock>> {
        self.inner
            .files
            .lock(REFS_LOCK, LockMode::Exclusive, LockWait::Wait)
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

    /// Whether a capsule that a ref names directly has this image, which then needs no check.
    pub(crate) fn refs_hold_image(&self, root: Digest, pages: u64) -> Result<bool> {
        for id in self.readable_refs()?.0.values() {
            let manifest = self.manifest(id)?;
            if manifest.images.iter().any(|image| image.root == Some(root) && image.pages == pages) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Lines of a ref's file: the id it names, then the time and the id of every version, newest first.
fn encode(versions: &[(CapsuleId, u64)]) -> String {
    let newest = versions.iter().take(1).map(|(id, _)| format!("{id}\n"));
    newest.chain(versions.iter().map(|(id, time)| format!("{time} {id}\n"))).collect()
}

/// Decodes the output of [`encode`], and the single line without history of earlier versions.
pub(crate) fn parse(text: &str) -> Option<Vec<(CapsuleId, u64)>> {
    let mut lines = text.lines();
    let newest: CapsuleId = lines.next()?.parse().ok()?;
    let version = |line: &str| {
        let (time, id) = line.split_once(' ')?;
        Some((id.parse().ok()?, time.parse().ok()?))
    };
    let versions = lines.map(version).collect::<Option<Vec<(CapsuleId, u64)>>>()?;
    match versions.first() {
        None => Some(vec![(newest, 0)]),
        Some((first, _)) => (*first == newest && versions.len() <= HISTORY_MAX).then_some(versions),
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(byte: u8) -> CapsuleId {
        CapsuleId(Digest([byte; 32]))
    }

    #[test]
    fn a_ref_without_a_history_is_read_and_a_history_of_something_else_is_not() {
        assert_eq!(parse(&format!("{}\n", id(1))), Some(vec![(id(1), 0)]));
        assert_eq!(parse(&format!("{}\n7 {}\n", id(1), id(2))), None);
        assert_eq!(parse(&format!("{}\n7 {}\n5\n", id(1), id(1))), None);
        assert_eq!(parse(""), None);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(versions in prop::collection::vec((any::<u8>(), any::<u64>()), 1..HISTORY_MAX)) {
            let versions: Vec<_> = versions.into_iter().map(|(byte, time)| (id(byte), time)).collect();
            prop_assert_eq!(parse(&encode(&versions)), Some(versions));
        }
    }
}
