//! Repair: fetches the damaged and missing objects of capsules from other hosts, a pool or a
//! bucket.
//!
//! The store decides what is asked for and when a damaged copy may go (`whimbrel_store::Store::repair`).
//! Other hosts answer as for a pull: each gives what its trust entry for this host allows.

use crate::{
    capsule::maintenance::reading,
    core::{error::DaemonError, refs},
    daemon::Daemon,
};
use std::{collections::BTreeMap, sync::Arc};
use whimbrel_api::{
    Operation, OperationKind, OperationResult, RepairRequest, RepairedCapsule as Repaired, is_bucket,
};
use whimbrel_core::{CapsuleId, Digest, RefName, error_chain};
use whimbrel_image::{ShortDigest, pack_frame::Kind};
use whimbrel_store::{RemoteObjects, RepairReport, Store};
use whimbrel_transfer::{BoxError, DemandFetcher, Holders, LocalObjects};

impl Daemon {
    /// Fetches damaged and missing objects of one capsule, or of all.
    pub(crate) fn repair(self: &Arc<Self>, request: RepairRequest) -> Result<Operation, DaemonError> {
        let only = request.capsule.as_ref().map(|capsule| refs::resolve(&self.store, capsule)).transpose()?;
        let subject = request.capsule.as_ref().map_or_else(|| "the store".to_owned(), ToString::to_string);
        if request.pool.as_deref().is_some_and(|pool| !is_bucket(pool)) && request.capsule.is_none() {
            return Err(DaemonError::invalid("name the capsule whose file in the pool is to be used"));
        }
        let host = self.clone();
        Ok(self.operations().start(OperationKind::Repair, subject, move |reporter| {
            let (source, asked) = host.source_for_repair(&request)?;
            let report = host.store.repair(only, &host.needed_capsules(), &*source, reading(reporter));
            let report = report.map_err(refs::cancellable("repair", "what was fetched stays"))?;
            host.repaired(report, asked)
        }))
    }

    /// The source of good copies, and the names of those that are asked.
    fn source_for_repair(
        self: &Arc<Self>,
        request: &RepairRequest,
    ) -> Result<(Box<dyn RemoteObjects>, Vec<String>), DaemonError> {
        if let Some(bucket) = request.pool.as_deref().filter(|place| is_bucket(place)) {
            return Ok((self.bucket_objects(bucket)?, vec![bucket.to_owned()]));
        }
        if let (Some(pool), Some(capsule)) = (&request.pool, &request.capsule) {
            return Ok((self.pooled_objects(pool, capsule)?, vec![format!("pool:{pool}")]));
        }
        let holders: Arc<Holders> = match &request.host {
            Some(name) => self.source(name),
            None => self.sources(),
        };
        let asked = (0..holders.len()).map(|at| holders.name(at).to_owned()).collect();
        let local = Arc::new(IntactObjects(self.store.clone()));
        Ok((Box::new(DemandFetcher::new(local, holders)), asked))
    }

    fn repaired(&self, report: RepairReport, asked: Vec<String>) -> Result<OperationResult, DaemonError> {
        let mut names = BTreeMap::<CapsuleId, Vec<RefName>>::new();
        for (name, id) in self.store.list_refs().map_err(refs::store_error("read the refs"))? {
            names.entry(id).or_default().push(name);
        }
        let capsules = report.capsules.into_iter().map(|capsule| Repaired {
            capsule: capsule.id,
            names: names.remove(&capsule.id).unwrap_or_default(),
            healed: capsule.healed,
            missing: capsule.missing,
        });
        Ok(OperationResult::Repair {
            capsules: capsules.collect(),
            dropped: report.frames,
            asked,
            failure: report.failure.map(|error| error_chain(&error)),
        })
    }
}

/// Objects of the store that can be read: a damaged one is not here, although the index has it.
struct IntactObjects(Store);

impl LocalObjects for IntactObjects {
    fn has(&self, digests: &[Digest]) -> Vec<bool> {
        digests.iter().map(|digest| self.object(digest).is_some()).collect()
    }

    fn object(&self, digest: &Digest) -> Option<Vec<u8>> {
        LocalObjects::object(&self.0, digest)
    }

    fn digest_of(&self, key: &ShortDigest) -> Option<Digest> {
        LocalObjects::digest_of(&self.0, key)
    }

    fn store(&self, kind: Kind, objects: &[&[u8]]) -> Result<(), BoxError> {
        LocalObjects::store(&self.0, kind, objects)
    }

    fn flush(&self) -> Result<(), BoxError> {
        LocalObjects::flush(&self.0)
    }

    fn is_complete(&self, capsule: &CapsuleId) -> bool {
        LocalObjects::is_complete(&self.0, capsule)
    }
}
