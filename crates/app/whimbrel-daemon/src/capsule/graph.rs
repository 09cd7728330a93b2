//! The graph of capsules: their lineage, what each adds to its parents, the machines based on each, and the
//! history of refs.
//!
//! A capsule needs nothing of its parents, so garbage collection may remove the middle of a line. The
//! capsules after it are then drawn under the capsule that their machine was derived from, if that is still
//! here.

use crate::{
    core::state::Core,
    core::{error::DaemonError, refs},
    daemon::Daemon,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Mutex,
};
use whimbrel_api::{CapsuleRef, GraphNode, MachineOnCapsule, MachineState, RefVersion};
use whimbrel_core::{ByteSize, CapsuleId, RefName, lock};
use whimbrel_image::Manifest;
use whimbrel_store::CapsuleInfo as Stored;

/// Sizes that are cached; the cache is emptied when it is full.
const SIZES_MAX: usize = 100_000;

/// Bytes that each capsule adds to its parents, by capsule and number of parents that are here.
#[derive(Default)]
pub(crate) struct AddedSizes(Mutex<HashMap<(CapsuleId, usize), ByteSize>>);

pub(crate) struct CapsuleGraph {
    pub(crate) capsules: BTreeMap<CapsuleId, Stored>,
    /// Parents that are here, or else the capsule that the machine was derived from.
    parents: BTreeMap<CapsuleId, Vec<CapsuleId>>,
    children: BTreeMap<CapsuleId, Vec<CapsuleId>>,
}

impl CapsuleGraph {
    fn of(all: impl IntoIterator<Item = Stored>) -> Self {
        let capsules: BTreeMap<_, _> = all.into_iter().map(|capsule| (capsule.id, capsule)).collect();
        let (mut parents, mut children) = (BTreeMap::new(), BTreeMap::<CapsuleId, Vec<CapsuleId>>::new());
        for (id, capsule) in &capsules {
            let here: Vec<_> = drawn_parents(&capsule.manifest, |id| capsules.contains_key(&id));
            here.iter().for_each(|parent| children.entry(*parent).or_default().push(*id));
            parents.insert(*id, here);
        }
        for children in children.values_mut() {
            children.sort_by_key(|child| (capsules[child].manifest.time, *child));
        }
        Self { capsules, parents, children }
    }

    pub(crate) fn parents(&self, id: &CapsuleId) -> &[CapsuleId] {
        self.parents.get(id).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn children(&self, id: &CapsuleId) -> &[CapsuleId] {
        self.children.get(id).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn ancestors(&self, from: impl IntoIterator<Item = CapsuleId>) -> BTreeSet<CapsuleId> {
        closure(from, |id| self.parents(id))
    }

    pub(crate) fn descendants(&self, from: impl IntoIterator<Item = CapsuleId>) -> BTreeSet<CapsuleId> {
        closure(from, |id| self.children(id))
    }

    /// Sorts these capsules: each after its parents, each line of descent in one piece where possible.
    fn topological_order(&self, of: &BTreeSet<CapsuleId>) -> Vec<CapsuleId> {
        let above = |id: &CapsuleId| self.parents(id).iter().filter(|id| of.contains(id)).count();
        let mut waiting: BTreeMap<CapsuleId, usize> = of.iter().map(|id| (*id, above(id))).collect();
        let mut ready: Vec<CapsuleId> =
            waiting.iter().filter(|(_, count)| **count == 0).map(|(id, _)| *id).collect();
        ready.sort_by_key(|id| std::cmp::Reverse((self.capsules[id].manifest.time, *id)));
        let mut order = Vec::with_capacity(of.len());
        while let Some(id) = ready.pop() {
            order.push(id);
            for child in self.children(&id).iter().rev() {
                if let Some(count) = waiting.get_mut(child) {
                    *count -= 1;
                    if *count == 0 {
                        ready.push(*child);
                    }
                }
            }
        }
        order
    }
}

fn drawn_parents(manifest: &Manifest, is_here: impl Fn(CapsuleId) -> bool) -> Vec<CapsuleId> {
    let parents: Vec<_> = manifest.parents.iter().copied().filter(|id| is_here(*id)).collect();
    match parents.is_empty() {
        false => parents,
        true => refs::lineage_of(manifest).into_iter().filter(|id| is_here(*id)).collect(),
    }
}

/// `from` and all that is reachable through `next`.
pub(crate) fn closure<'a>(
    from: impl IntoIterator<Item = CapsuleId>,
    next: impl Fn(&CapsuleId) -> &'a [CapsuleId],
) -> BTreeSet<CapsuleId> {
    let (mut found, mut open) = (BTreeSet::new(), from.into_iter().collect::<Vec<_>>());
    while let Some(id) = open.pop() {
        if found.insert(id) {
            open.extend(next(&id));
        }
    }
    found
}

impl Daemon {
    /// Every capsule that a ref reaches or a machine is based on.
    pub(crate) fn capsule_graph(&self) -> Result<CapsuleGraph, DaemonError> {
        let all = self.store.capsules().map_err(refs::store_error("list its capsules"))?;
        let used: BTreeSet<_> =
            self.machine_infos().iter().flat_map(|m| [m.follows, m.origin]).flatten().collect();
        Ok(CapsuleGraph::of(
            all.into_iter().filter(|capsule| capsule.reachable || used.contains(&capsule.id)),
        ))
    }

    /// All capsules, or one with its ancestors and descendants, each after its parents.
    pub(crate) fn graph(&self, capsule: Option<&CapsuleRef>) -> Result<Vec<GraphNode>, DaemonError> {
        let family = self.capsule_graph()?;
        let of: BTreeSet<CapsuleId> = match capsule {
            None => family.capsules.keys().copied().collect(),
            Some(capsule) => {
                let id = refs::resolve(&self.store, capsule)?;
                let mut line = family.ancestors([id]);
                line.extend(family.descendants([id]));
                line.retain(|id| family.capsules.contains_key(id));
                line
            }
        };
        let machines = self.machines_on();
        let node = |id: CapsuleId| {
            let capsule = &family.capsules[&id];
            GraphNode {
                capsule: self.capsule_info(id, &capsule.manifest, &capsule.refs),
                adds: self.added_size(&family, &id),
                under: family.parents(&id).to_vec(),
                children: family.children(&id).to_vec(),
                machines: machines.get(&id).cloned().unwrap_or_default(),
            }
        };
        Ok(family.topological_order(&of).into_iter().map(node).collect())
    }

    fn machines_on(&self) -> BTreeMap<CapsuleId, Vec<MachineOnCapsule>> {
        let mut on = BTreeMap::<CapsuleId, Vec<MachineOnCapsule>>::new();
        for machine in self.machine_infos() {
            let live = machine.pid.is_some();
            // A suspended machine is its capsule and based on none.
            if let Some(id) = machine.follows.filter(|_| machine.state != MachineState::Suspended) {
                on.entry(id).or_default().push(MachineOnCapsule { name: machine.name, live });
            }
        }
        on
    }

    fn added_size(&self, family: &CapsuleGraph, id: &CapsuleId) -> Option<ByteSize> {
        let parents = &family.capsules[id].manifest.parents;
        let key = (*id, parents.iter().filter(|parent| family.capsules.contains_key(parent)).count());
        let known = || lock(&self.sizes.0);
        if let Some(size) = known().get(&key) {
            return Some(*size);
        }
        // The size is unknown if the capsule is partial or damaged.
        let size = self.store.added(id).ok()?;
        let mut sizes = known();
        if sizes.len() >= SIZES_MAX {
            sizes.clear();
        }
        sizes.insert(key, size);
        Some(size)
    }
}

impl Core {
    /// The capsules that a ref names and named before, newest first.
    pub(crate) fn ref_history(&self, name: &RefName) -> Result<Vec<RefVersion>, DaemonError> {
        let stored = refs::named(&self.store, &CapsuleRef::Name(name.clone()))?;
        let stored = stored.ok_or_else(|| DaemonError::NotFound { what: "ref", name: name.to_string() })?;
        self.versions(&stored)
    }

    pub(crate) fn versions(&self, stored: &RefName) -> Result<Vec<RefVersion>, DaemonError> {
        let history =
            self.store.ref_history(stored).map_err(refs::store_error("read the history of a ref"))?;
        let version = |change: &whimbrel_store::RefChange| RefVersion {
            capsule: change.id,
            previous: change.old,
            time_ms: change.time,
            here: self.store.manifest(&change.id).is_ok(),
        };
        Ok(history.iter().map(version).collect())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use whimbrel_core::{Digest, MachineConfig};

    pub(crate) fn id(name: &str) -> CapsuleId {
        CapsuleId(Digest::of(name.as_bytes()))
    }

    fn capsule(name: &str, time: u64, parents: &[&str], derived_from: Option<&str>) -> Stored {
        let machine = MachineConfig::minimal(ByteSize(1 << 20));
        let label = derived_from.map(|from| (refs::LINEAGE_LABEL.to_owned(), id(from).to_string()));
        let manifest = Manifest {
            format: whimbrel_image::FORMAT,
            machine,
            device: vec![],
            images: vec![],
            parents: parents.iter().map(|parent| id(parent)).collect(),
            time,
            host: "test".into(),
            labels: label.into_iter().collect(),
            working_set: None,
        };
        Stored { id: id(name), manifest, refs: vec![], reachable: true }
    }

    pub(crate) fn family() -> CapsuleGraph {
        CapsuleGraph::of([
            capsule("kid-b", 5, &["golden"], Some("golden")),
            capsule("golden", 1, &[], None),
            capsule("kid-a", 3, &["golden"], Some("golden")),
            capsule("kid-a2", 6, &["kid-a"], Some("golden")),
            capsule("golden-2", 4, &["golden"], Some("golden")),
            capsule("orphan", 7, &["collected"], Some("golden-2")),
            capsule("stranger", 2, &["collected-too"], None),
        ])
    }

    #[test]
    fn lines_of_descent_stay_together_and_parents_come_first() {
        let family = family();
        let all: BTreeSet<_> = family.capsules.keys().copied().collect();
        let wanted = ["golden", "kid-a", "kid-a2", "golden-2", "orphan", "kid-b", "stranger"].map(id);
        assert_eq!(family.topological_order(&all), wanted);
    }

    #[test]
    fn a_line_with_its_middle_collected_hangs_under_what_it_was_derived_from() {
        let family = family();
        assert_eq!(family.parents(&id("orphan")), [id("golden-2")]);
        assert!(family.parents(&id("stranger")).is_empty());
        assert!(family.descendants([id("golden")]).contains(&id("orphan")));
        assert_eq!(family.ancestors([id("kid-a2")]), ["kid-a2", "kid-a", "golden"].map(id).into());
    }
}
