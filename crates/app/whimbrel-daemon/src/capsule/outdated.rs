//! Outdated report: after an update of a capsule, the machines and capsules that are based on an old version
//! of it.
//!
//! The report changes nothing. Disks are compared page by page, three ways: old version, child, update. A
//! user has to examine the pages that both sides changed in different ways; files are not known here.

use crate::{
    capsule::disk_alignment::image_pages,
    capsule::graph::{CapsuleGraph, closure},
    core::state::Core,
    core::{error::DaemonError, refs},
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::{DiskBase, Phase},
    },
};
use std::collections::{BTreeMap, BTreeSet};
use whimbrel_api::{CapsuleRef, DiskRebase, OutdatedChild, OutdatedReport, RefVersion};
use whimbrel_core::{CapsuleId, PageSet};
use whimbrel_image::Manifest;
use whimbrel_vm::StoppedDisk;

/// Runs of conflicting pages that are reported for each disk.
const RUNS_MAX: usize = 16;
const MEMORY: &str = "memory";

struct OutdatedCapsules {
    family: CapsuleGraph,
    old: Vec<CapsuleId>,
    /// Descendants of an old version that are neither a version themselves, nor an ancestor or descendant of
    /// the new one.
    outdated: BTreeSet<CapsuleId>,
}

impl Daemon {
    /// Reports what is based on old versions of `capsule`: those that its ref named before `onto`, or itself.
    pub(crate) fn outdated_report(
        &self,
        capsule: &CapsuleRef,
        onto: Option<&CapsuleRef>,
    ) -> Result<OutdatedReport, DaemonError> {
        let current = refs::resolve(&self.store, capsule)?;
        let onto = onto.map_or(Ok(current), |onto| refs::resolve(&self.store, onto))?;
        let mut old: Vec<RefVersion> = match refs::named(&self.store, capsule)? {
            Some(name) => self.versions(&name)?,
            None => vec![RefVersion { capsule: current, previous: None, time_ms: 0, here: true }],
        };
        let mut seen = BTreeSet::from([onto]);
        old.retain(|version| seen.insert(version.capsule));
        let lines = OutdatedCapsules::of(
            self.capsule_graph()?,
            old.iter().map(|version| version.capsule).collect(),
            onto,
        );
        let update = self.store.manifest(&onto).map_err(refs::store_error("read the capsule"))?;
        let mut standing = Vec::new();
        for id in lines.listed() {
            standing.push(self.outdated_capsule(&lines, id, &update));
        }
        for machine in self.machines.all() {
            standing.extend(self.outdated_machine(&lines, &machine, &update)?);
        }
        Ok(OutdatedReport { onto, old, standing })
    }

    /// A capsule based on an old version. If it is partial or damaged and cannot be compared, its entry has
    /// the reason, and the report goes on.
    fn outdated_capsule(&self, lines: &OutdatedCapsules, id: CapsuleId, update: &Manifest) -> OutdatedChild {
        let capsule = &lines.family.capsules[&id];
        let told = self.capsule_info(id, &capsule.manifest, &capsule.refs);
        let old = lines.nearest_old(id);
        let compared = match self.store.manifest(&old) {
            Ok(base) => self.compare(&base, &capsule.manifest, update).map_err(|error| error.to_string()),
            Err(_) => Err(GONE.to_owned()),
        };
        let (disks, unknown) = match compared {
            Ok(disks) => (disks, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        OutdatedChild { capsule: id, names: told.names, machine: None, old, disks, unknown }
    }

    /// A machine based on an old version, or on a descendant of one.
    fn outdated_machine(
        &self,
        lines: &OutdatedCapsules,
        machine: &Machine,
        update: &Manifest,
    ) -> Result<Option<OutdatedChild>, DaemonError> {
        let info = machine.info();
        let Some(capsule) = info.follows.filter(|id| lines.is_old_or_outdated(id)) else { return Ok(None) };
        let old = lines.nearest_old(capsule);
        let names = match lines.family.capsules.get(&capsule) {
            Some(stored) => self.capsule_info(capsule, &stored.manifest, &stored.refs).names,
            None => Vec::new(),
        };
        let mut standing =
            OutdatedChild { capsule, names, machine: Some(info.name), old, disks: Vec::new(), unknown: None };
        let turn = match machine.try_lock("disk comparison", None) {
            Ok(turn) => turn,
            Err(busy) => {
                standing.unknown = Some(busy.to_string());
                return Ok(Some(standing));
            }
        };
        if !matches!(turn.record.phase, Phase::Here | Phase::Stopped | Phase::Crashed { .. }) {
            // A suspended or handed-off machine is its capsule, which is in the list.
            return Ok(None);
        }
        match self.store.manifest(&old) {
            Ok(base) => match self.machine_disks(&turn, &base, update) {
                Ok(disks) => standing.disks = disks,
                Err(error) => standing.unknown = Some(error.to_string()),
            },
            Err(_) => standing.unknown = Some(GONE.to_owned()),
        }
        Ok(Some(standing))
    }
}

impl Core {
    /// The pages of each disk that a capsule and the update changed since the old version.
    fn compare(
        &self,
        base: &Manifest,
        child: &Manifest,
        update: &Manifest,
    ) -> Result<Vec<DiskRebase>, DaemonError> {
        let mut disks = Vec::new();
        for image in child.images.iter().filter(|image| image.name != MEMORY) {
            let divergence = self.store.divergence(&image.name, base, child, update);
            if let Some(found) = divergence.map_err(refs::store_error("compare the capsules"))? {
                disks.push(describe(found.name, &found.ours, &found.theirs, &found.conflicts));
            }
        }
        Ok(disks)
    }

    /// The pages of each disk that a machine and the update changed. Pages of a machine have no digests, so
    /// every page that it wrote counts as changed.
    fn machine_disks(
        &self,
        turn: &MachineLock<'_>,
        base: &Manifest,
        update: &Manifest,
    ) -> Result<Vec<DiskRebase>, DaemonError> {
        let failed = refs::store_error("compare the disks");
        let mut disks = Vec::new();
        for (index, disk_base) in turn.record.bases.iter().enumerate() {
            let name = format!("disk{index}");
            let (Some(old), Some(new)) = (base.image(&name), update.image(&name)) else { continue };
            let begun_as = match (disk_base, disk_base.whole_image()) {
                (_, Some((root, cuts))) if cuts == old.cuts.as_ref() => Some(*root),
                (DiskBase::Blank, _) => None,
                (DiskBase::Image { .. } | DiskBase::File { .. }, _) => continue,
            };
            let owned = image_pages(old.cuts.as_ref(), self.allocated_pages(turn, index)?);
            let alike =
                |owned: &PageSet| old.pages == new.pages && old.cuts == new.cuts && old.pages == owned.len();
            let Some(owned) = owned.filter(alike) else { continue };
            let mut changed = self.store.changed_pages(old.root, begun_as, old.pages).map_err(&failed)?;
            changed.union(&owned);
            let updated = self.store.changed_pages(old.root, new.root, old.pages).map_err(&failed)?;
            let mut conflicts = changed.clone();
            conflicts.intersect(&updated);
            disks.push(describe(name, &changed, &updated, &conflicts));
        }
        Ok(disks)
    }

    fn allocated_pages(&self, turn: &MachineLock<'_>, index: usize) -> Result<PageSet, DaemonError> {
        if let Some(disk) = turn.running.as_ref().and_then(|live| live.disks.get(index)) {
            return Ok(disk.allocated_pages());
        }
        let (record, size) = (&turn.record, turn.record.config.disks[index].size.0);
        let dirs = self.directories.machine_dirs(&record.name);
        let at = (&dirs, &self.store);
        Ok(StoppedDisk::open(at, (index, size), &record.bases[index])?.allocated_pages())
    }
}

/// Reason why nothing can be compared.
const GONE: &str = "the old version is no longer in the store; a version with its own tag is kept";

fn describe(name: String, changed: &PageSet, updated: &PageSet, conflicts: &PageSet) -> DiskRebase {
    DiskRebase {
        name,
        changed: changed.count(),
        updated: updated.count(),
        conflicts: conflicts.count(),
        conflict_runs: conflicts.runs().take(RUNS_MAX).map(|run| (run.start, run.len)).collect(),
    }
}

impl OutdatedCapsules {
    fn of(family: CapsuleGraph, old: Vec<CapsuleId>, onto: CapsuleId) -> Self {
        let mut settled = family.ancestors([onto]);
        settled.extend(family.descendants([onto]));
        settled.extend(&old);
        // Uses declared parents: an old version may be gone, and all between it and a child.
        let mut below = BTreeMap::<CapsuleId, Vec<CapsuleId>>::new();
        for (id, capsule) in &family.capsules {
            for above in declared_parents(&capsule.manifest) {
                below.entry(above).or_default().push(*id);
            }
        }
        let standing = closure(old.iter().copied(), |id| below.get(id).map_or(&[], Vec::as_slice));
        let outdated = standing.into_iter().filter(|id| !settled.contains(id)).collect();
        Self { family, old, outdated }
    }

    fn is_old_or_outdated(&self, id: &CapsuleId) -> bool {
        self.outdated.contains(id) || self.old.contains(id)
    }

    /// Descendants of an old version that have a name or no descendants.
    fn listed(&self) -> Vec<CapsuleId> {
        let is_last = |id: &CapsuleId| !self.family.children(id).iter().any(|id| self.outdated.contains(id));
        let is_named = |id: &CapsuleId| !self.family.capsules[id].refs.is_empty();
        let mut listed: Vec<CapsuleId> =
            self.outdated.iter().copied().filter(|id| is_last(id) || is_named(id)).collect();
        listed.sort_by_key(|id| (self.family.capsules[id].manifest.time, *id));
        listed
    }

    /// The old version that `id` is or is based on: the first on the way up.
    fn nearest_old(&self, id: CapsuleId) -> CapsuleId {
        let (mut level, mut seen) = (vec![id], BTreeSet::new());
        while !level.is_empty() {
            if let Some(old) = level.iter().find(|id| self.old.contains(id)) {
                return *old;
            }
            let known = level.iter().filter_map(|id| self.family.capsules.get(id));
            let above = known.flat_map(|capsule| declared_parents(&capsule.manifest));
            level = above.filter(|id| seen.insert(*id)).collect();
        }
        id
    }
}

/// Parents that a capsule declares, here or not.
fn declared_parents(manifest: &Manifest) -> Vec<CapsuleId> {
    manifest.parents.iter().copied().chain(refs::lineage_of(manifest)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capsule::graph::tests::{family, id};

    fn lines(old: &str, onto: &str) -> OutdatedCapsules {
        OutdatedCapsules::of(family(), vec![id(old)], id(onto))
    }

    #[test]
    fn the_ends_of_lines_that_branched_off_before_the_update_are_listed() {
        let lines = lines("golden", "golden-2");
        assert_eq!(lines.listed(), ["kid-b", "kid-a2"].map(id));
        assert!(lines.listed().iter().all(|child| lines.nearest_old(*child) == id("golden")));
        assert!(!lines.is_old_or_outdated(&id("orphan")), "it descends from the update");
        assert!(lines.is_old_or_outdated(&id("golden")) && lines.is_old_or_outdated(&id("kid-a")));
    }

    #[test]
    fn children_of_a_version_that_is_gone_are_found_by_what_they_say() {
        let lines = lines("collected-too", "golden-2");
        assert_eq!(lines.listed(), [id("stranger")]);
        assert_eq!(lines.nearest_old(id("stranger")), id("collected-too"));
    }

    #[test]
    fn a_capsule_with_a_name_is_listed_though_something_came_after_it() {
        let mut family = family();
        let named = family.capsules.get_mut(&id("kid-a")).unwrap();
        named.refs.push("monday".parse().unwrap());
        let lines = OutdatedCapsules::of(family, vec![id("golden")], id("golden-2"));
        assert_eq!(lines.listed(), ["kid-a", "kid-b", "kid-a2"].map(id));
    }
}
