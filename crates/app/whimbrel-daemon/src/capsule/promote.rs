//! Promotion: a copy of a capsule without parents.
//!
//! Where disks are chains of differences, promoting a capsule copies into it all that it lacks, and a capsule
//! can be deleted only after its children were promoted. Here every capsule names complete trees, so deleting
//! needs no promotion, and promoting writes one manifest: the same images, no parents, and so another id. It
//! serves to pass on a capsule without its history. Children of the old capsule do not change.

use crate::{
    core::state::Core,
    core::{error::DaemonError, refs},
    daemon::Daemon,
    machine::{entry::MachineLock, record::Phase},
};
use std::time::Instant;
use whimbrel_api::{PromoteReport, PromoteRequest};
use whimbrel_core::{CapsuleId, RefName};
use whimbrel_image::Manifest;
use whimbrel_store::Expected;

impl Daemon {
    /// Makes a capsule of the same images without parents, and moves refs to it.
    pub(crate) fn promote(&self, request: PromoteRequest) -> Result<PromoteReport, DaemonError> {
        refs::check_tag(request.tag.as_ref())?;
        let (begun, before) = (Instant::now(), self.stored_bytes());
        let (was, manifest) = self.find(&request.capsule)?;
        let moving = self.refs_to_move(&request, &was)?;
        // Locks the machines first: a machine could take its next capsule meanwhile.
        let machines = self.machines.all();
        let mut turns = Vec::new();
        for machine in machines.iter().filter(|machine| moving.contains(&refs::machine_ref(machine.name()))) {
            turns.push(machine.try_lock("promotion", None)?);
        }
        let parents = manifest.parents.clone();
        let capsule = self.commit_orphan(manifest, request.tag.as_ref(), (was, &moving))?;
        turns.iter_mut().try_for_each(|turn| self.repoint(turn, was, capsule))?;
        let known = |name: &RefName| refs::known_as(name).parse().unwrap_or_else(|_| name.clone());
        Ok(PromoteReport {
            capsule,
            was,
            parents,
            refs: moving.iter().map(known).chain(request.tag).collect(),
            bytes_copied: 0,
            bytes_added: self.stored_bytes().saturating_sub(before),
            ms: begun.elapsed().as_secs_f64() * 1e3,
        })
    }
}

impl Core {
    /// Refs, by their names in the store, that are to name the new capsule.
    fn refs_to_move(&self, request: &PromoteRequest, was: &CapsuleId) -> Result<Vec<RefName>, DaemonError> {
        let all = self.store.list_refs().map_err(refs::store_error("list the refs"))?;
        if request.all_refs {
            return Ok(all.into_iter().filter(|(_, id)| id == was).map(|(name, _)| name).collect());
        }
        if request.tag.is_some() {
            return Ok(Vec::new());
        }
        match refs::named(&self.store, &request.capsule)? {
            Some(name) => Ok(vec![name]),
            None => {
                let reason = "the new capsule needs a name, or it is garbage: add --tag NAME or --all-refs";
                Err(DaemonError::invalid(reason))
            }
        }
    }

    /// Commits the manifest without parents. No image is opened, so nothing can be copied.
    fn commit_orphan(
        &self,
        manifest: Manifest,
        tag: Option<&RefName>,
        (was, moving): (CapsuleId, &[RefName]),
    ) -> Result<CapsuleId, DaemonError> {
        let failed = refs::store_error("write the capsule");
        let _whole = self.store.pin(&was).map_err(refs::store_error("read the capsule"))?;
        let mut orphan = Manifest { parents: Vec::new(), ..manifest };
        orphan.labels.remove(refs::LINEAGE_LABEL);
        let writer = self.store.writer().map_err(&failed)?;
        let tags: Vec<RefName> = tag.into_iter().cloned().collect();
        let capsule = writer.commit(&orphan, &tags).map_err(&failed)?;
        for name in moving {
            let moved = self.store.set_ref(name, &capsule, Expected::Capsule(was));
            moved.map_err(refs::store_error("move a ref"))?;
        }
        Ok(capsule)
    }

    /// Bases a machine that was based on the old capsule on the new one.
    fn repoint(
        &self,
        turn: &mut MachineLock<'_>,
        was: CapsuleId,
        capsule: CapsuleId,
    ) -> Result<(), DaemonError> {
        let record = &mut turn.record;
        if record.last == Some(was) {
            record.last = Some(capsule);
        }
        if let Phase::Suspended { capsule: suspended } = &mut record.phase
            && *suspended == was
        {
            *suspended = capsule;
        }
        record.save(&self.directories)
    }
}
