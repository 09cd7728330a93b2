//! Queries about capsules for the API: list, show, log, compare, name.

use crate::{
    core::state::Core,
    core::{error::DaemonError, refs},
    daemon::Daemon,
    machine::entry::Machine,
};
use std::{collections::BTreeMap, path::Path, sync::Arc};
use whimbrel_api::{
    CapsuleDiff, CapsuleInfo, CapsuleRef, ConfigChange, ImageDiff, ImageInfo, PreviousCapsule, Tagged,
};
use whimbrel_core::{ByteSize, CapsuleId, Digest, HostName, RefName};
use whimbrel_image::Manifest;
use whimbrel_store::Expected;

/// Digest shown for an image of zeros.
const ALL_ZERO: Digest = Digest([0; 32]);

impl Daemon {
    /// Every capsule that a ref leads to, newest first.
    pub(crate) fn capsules(&self) -> Result<Vec<CapsuleInfo>, DaemonError> {
        let all = self.store.capsules().map_err(refs::store_error("list its capsules"))?;
        Ok(all
            .iter()
            .filter(|c| c.reachable)
            .map(|c| self.capsule_info(c.id, &c.manifest, &c.refs))
            .collect())
    }

    pub(crate) fn capsule(&self, capsule: &CapsuleRef) -> Result<CapsuleInfo, DaemonError> {
        let id = refs::resolve(&self.store, capsule)?;
        let manifest = self.store.manifest(&id).map_err(refs::store_error("read the capsule"))?;
        let names = self.names()?.remove(&id).unwrap_or_default();
        Ok(self.capsule_info(id, &manifest, &names))
    }

    /// A capsule and its ancestors, newest first.
    pub(crate) fn log(&self, capsule: &CapsuleRef) -> Result<Vec<CapsuleInfo>, DaemonError> {
        let id = refs::resolve(&self.store, capsule)?;
        let log = self.store.log(&id).map_err(refs::store_error("read the ancestors of the capsule"))?;
        let names = self.names()?;
        let none = Vec::new();
        Ok(log
            .iter()
            .map(|(id, manifest)| self.capsule_info(*id, manifest, names.get(id).unwrap_or(&none)))
            .collect())
    }

    /// Points `tag` at a capsule, whatever it named before.
    pub(crate) fn tag(&self, tag: &RefName, capsule: &CapsuleRef) -> Result<Tagged, DaemonError> {
        refs::check_tag(Some(tag))?;
        let id = refs::resolve(&self.store, capsule)?;
        // A damaged tag names no capsule to report, and is replaced.
        let before = self.store.get_ref(tag).ok().flatten().filter(|before| *before != id);
        self.store.set_ref(tag, &id, Expected::Anything).map_err(refs::store_error("write the tag"))?;
        let left = before.map(|before| self.remaining_references(before)).transpose()?;
        Ok(Tagged { capsule: self.capsule(&id.into())?, left })
    }

    /// Removes a tag or the ref of a machine's newest capsule. `gc` frees what no ref reaches.
    pub(crate) fn remove_ref(&self, name: &RefName) -> Result<PreviousCapsule, DaemonError> {
        let capsule = CapsuleRef::Name(name.clone());
        let not_found = || DaemonError::NotFound { what: "capsule", name: name.to_string() };
        let stored = match refs::named(&self.store, &capsule) {
            Ok(stored) => stored.ok_or_else(not_found)?,
            // An unreadable ref is removed as well.
            Err(_) => name.clone(),
        };
        let id = self.store.get_ref(&stored).ok().flatten();
        self.store.delete_ref(&stored, Expected::Anything).map_err(refs::store_error("remove the tag"))?;
        id.map_or_else(|| Err(not_found()), |id| self.remaining_references(id))
    }

    /// The refs and children that a capsule still has after a ref to it was removed.
    fn remaining_references(&self, id: CapsuleId) -> Result<PreviousCapsule, DaemonError> {
        let names = self.names()?.remove(&id).unwrap_or_default();
        let family = self.capsule_graph()?;
        let children = family.children(&id).to_vec();
        let machine = self.store.manifest(&id).ok().and_then(|manifest| refs::machine_of(&manifest).ok());
        let shown = |name: &RefName| match &machine {
            Some(machine) => refs::display_name(name, machine),
            None => Some(name.clone()),
        };
        let names = names.iter().filter_map(shown).collect();
        let needs = |machine: &Arc<Machine>| machine.needed_capsules().contains(&id);
        let machines = self.machines.all().into_iter().filter(needs).map(|one| one.name().clone());
        Ok(PreviousCapsule { capsule: id, names, children, machines: machines.collect() })
    }

    pub(crate) fn capsule_info(&self, id: CapsuleId, manifest: &Manifest, names: &[RefName]) -> CapsuleInfo {
        let images = manifest.images.iter().map(|image| ImageInfo {
            name: image.name.clone(),
            pages: image.pages,
            size: ByteSize(image.size()),
            root: image.root.unwrap_or(ALL_ZERO),
        });
        let unnamed = || "unnamed".parse().expect("a valid name");
        let machine = refs::machine_of(manifest).unwrap_or_else(|_| unnamed());
        let host = manifest.host.parse().unwrap_or_else(|_| self.name.clone() as HostName);
        let mut labels = manifest.labels.clone();
        labels.remove(refs::MACHINE_LABEL);
        labels.remove(refs::LINEAGE_LABEL);
        CapsuleInfo {
            id,
            names: names.iter().filter_map(|name| refs::display_name(name, &machine)).collect(),
            machine,
            active: !manifest.device.is_empty(),
            whole: !self.is_partial(&id),
            time_ms: manifest.time,
            host,
            memory: manifest.machine.memory,
            images: images.collect(),
            parents: manifest.parents.clone(),
            labels,
        }
    }
}

impl Core {
    pub(crate) fn diff(&self, a: &CapsuleRef, b: &CapsuleRef) -> Result<CapsuleDiff, DaemonError> {
        let (a, b) = (refs::resolve(&self.store, a)?, refs::resolve(&self.store, b)?);
        let read = |id| self.store.manifest(id).map_err(refs::store_error("read the capsule"));
        let (old, new) = (read(&a)?, read(&b)?);
        let changes = self.store.diff(&a, &b).map_err(refs::store_error("compare the capsules"))?;
        let pages = |manifest: &Manifest, name: &str| manifest.image(name).map_or(0, |image| image.pages);
        let images = changes.into_iter().map(|change| ImageDiff {
            pages_a: pages(&old, &change.name),
            pages_b: pages(&new, &change.name),
            changed: change.pages,
            new_contents: change.new_contents,
            name: change.name,
        });
        Ok(CapsuleDiff { a, b, images: images.collect(), config: config_changes(&old, &new) })
    }

    /// Bytes that the store uses on disk, without those set aside for garbage collection.
    pub(crate) fn stored_bytes(&self) -> u64 {
        disk_usage(&self.directories.store()).saturating_sub(self.store.reserved_bytes().unwrap_or(0))
    }

    fn names(&self) -> Result<BTreeMap<CapsuleId, Vec<RefName>>, DaemonError> {
        let mut names: BTreeMap<_, Vec<RefName>> = BTreeMap::new();
        for (name, id) in self.store.readable_refs().map_err(refs::store_error("list the refs"))?.0 {
            names.entry(id).or_default().push(name);
        }
        Ok(names)
    }
}

/// Settings that differ, compared as JSON so that none is forgotten here.
fn config_changes(old: &Manifest, new: &Manifest) -> Vec<ConfigChange> {
    let json = |manifest: &Manifest| serde_json::to_value(&manifest.machine).unwrap_or_default();
    let (mut a, mut b) = (BTreeMap::new(), BTreeMap::new());
    flatten("", &json(old), &mut a);
    flatten("", &json(new), &mut b);
    let fields: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).cloned().collect();
    let change = |field: String| {
        let (a, b) = (a.get(&field).cloned(), b.get(&field).cloned());
        (a != b).then_some(ConfigChange { field, a, b })
    };
    fields.into_iter().filter_map(change).collect()
}

fn flatten(path: &str, value: &serde_json::Value, into: &mut BTreeMap<String, String>) {
    use serde_json::Value;
    match value {
        Value::Null => {}
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            let dot = if path.is_empty() { "" } else { "." };
            flatten(&format!("{path}{dot}{name}"), value, into);
        }),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(at, value)| flatten(&format!("{path}[{at}]"), value, into));
        }
        Value::String(text) => drop(into.insert(path.to_owned(), text.clone())),
        other => drop(into.insert(path.to_owned(), other.to_string())),
    }
}

/// Bytes of all files below `dir`. Files that vanish meanwhile do not count.
fn disk_usage(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => disk_usage(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.map(size).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_settings_become_paths() {
        let mut flat = BTreeMap::new();
        flatten("", &serde_json::json!({"a": 1, "b": [{"c": "x"}, null]}), &mut flat);
        let expected = [("a".to_owned(), "1".to_owned()), ("b[0].c".to_owned(), "x".to_owned())];
        assert_eq!(flat, BTreeMap::from(expected));
    }
}
