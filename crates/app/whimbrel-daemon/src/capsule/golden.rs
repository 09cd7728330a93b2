//! Golden capsules: tagged capsules that are found by their attributes, here or on trusted hosts.
//!
//! From other hosts only manifests are fetched, many in one request, and none is stored. A host that cannot
//! be reached is skipped, unless the request names it.

use crate::{
    core::{error::DaemonError, refs},
    core::{history, state::Core},
    daemon::Daemon,
};
use std::{collections::HashMap, sync::Arc};
use whimbrel_api::{Attributes, GoldenMatch, MatchRequest};
use whimbrel_core::{ByteSize, CapsuleId, HostName, RefName};
use whimbrel_image::{Manifest, pack_frame::Kind};
use whimbrel_store::{ObjectWant, RemoteObjects};
use whimbrel_transfer::DemandFetcher;

/// Tags of one host that are examined, newest first.
const TAGS_MAX: usize = 4096;
const MANIFESTS_PER_REQUEST: usize = 256;

impl Daemon {
    /// The best match here. Other hosts are asked if nothing here matches, or if the request names one.
    pub(crate) fn match_golden(&self, request: &MatchRequest) -> Result<GoldenMatch, DaemonError> {
        let mut offered = match &request.host {
            Some(host) => self.golden_on(host)?,
            None => self.golden_here()?,
        };
        offered.retain(|golden| golden.attributes.fit(&request.terms));
        if offered.is_empty() && request.host.is_none() {
            for peer in self.reachable_peers() {
                match self.golden_on(&peer.peer().name) {
                    Ok(more) => offered.extend(more),
                    Err(error) => {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(host = %peer.peer().name, error, "could not ask a host for golden capsules");
                    }
                }
            }
            offered.retain(|golden| golden.attributes.fit(&request.terms));
        }
        let best = offered.into_iter().min_by_key(|golden| golden.attributes.rank());
        best.ok_or_else(|| DaemonError::NotFound { what: "capsule with", name: request.terms.to_string() })
    }

    fn golden_on(&self, host: &HostName) -> Result<Vec<GoldenMatch>, DaemonError> {
        let mut entries = self.catalog(host, "*")?;
        entries.retain(|entry| is_tag(&entry.name));
        entries.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.time));
        entries.truncate(TAGS_MAX);
        let mut wanted: Vec<CapsuleId> = entries.iter().map(|entry| entry.capsule).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let known = self.manifests_of(host, &wanted)?;
        let found = entries.into_iter().filter_map(|entry| {
            let attributes = known.get(&entry.capsule)?.clone();
            Some(GoldenMatch {
                host: Some(host.clone()),
                name: entry.name,
                capsule: entry.capsule,
                attributes,
            })
        });
        Ok(found.collect())
    }

    fn manifests_of(
        &self,
        host: &HostName,
        wanted: &[CapsuleId],
    ) -> Result<HashMap<CapsuleId, Attributes>, DaemonError> {
        let remote = DemandFetcher::new(Arc::new(self.store.clone()), self.source(host));
        let mut known = HashMap::new();
        for part in wanted.chunks(MANIFESTS_PER_REQUEST) {
            let wants: Vec<ObjectWant> =
                part.iter().map(|id| ObjectWant { digest: id.0, similar: None }).collect();
            let objects = remote.objects(Kind::Manifest, &wants);
            let objects = objects.map_err(|error| crate::transfer::pull::fetch_error(host, error))?;
            // A manifest that does not decode has another version or is damaged: it is skipped.
            let decoded = part
                .iter()
                .zip(&objects)
                .filter_map(|(id, bytes)| Some((*id, attributes(&Manifest::decode(bytes).ok()?))));
            known.extend(decoded);
        }
        Ok(known)
    }
}

impl Core {
    fn golden_here(&self) -> Result<Vec<GoldenMatch>, DaemonError> {
        let (tags, _) = self.store.readable_refs().map_err(refs::store_error("list the refs"))?;
        let tags = tags.into_iter().filter(|(name, _)| is_tag(name));
        let found = tags.filter_map(|(name, capsule)| {
            // A damaged manifest is for `verify` to report.
            let manifest = self.store.manifest(&capsule).ok()?;
            Some(GoldenMatch { host: None, name, capsule, attributes: attributes(&manifest) })
        });
        Ok(found.collect())
    }
}

/// Whether a user chose the ref: it names neither a machine's newest capsule nor an epoch snapshot.
fn is_tag(name: &RefName) -> bool {
    refs::machine_named(name).is_none() && !name.as_str().starts_with(history::PREFIX)
}

fn attributes(manifest: &Manifest) -> Attributes {
    let disks = manifest.images.iter().filter(|image| image.name != "memory").map(|image| image.size());
    Attributes {
        ram: manifest.machine.memory,
        disk: ByteSize(disks.fold(0, u64::saturating_add)),
        cpus: manifest.machine.cpus,
        active: !manifest.device.is_empty(),
        time_ms: manifest.time,
        labels: manifest.labels.clone(),
    }
}
