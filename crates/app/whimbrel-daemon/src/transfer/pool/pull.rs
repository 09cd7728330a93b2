//! Pull from a pool: finds a capsule, fetches its manifest so that machines can start from it, or all of it.

use super::{
    capsule_file::NodePlace,
    capsule_reader::PooledCapsule,
    failed,
    partial_records::{OpenPartial, PartialRecord},
    pool_path::PoolPath,
};
use crate::{
    core::{
        error::DaemonError,
        refs::{self, store_error},
    },
    daemon::Daemon,
};
use std::{ops::ControlFlow, sync::Arc, time::Instant};
use whimbrel_api::{
    CapsuleRef, Operation, OperationKind, OperationResult, PullRequest, TransferReport, Unit,
};
use whimbrel_core::{CapsuleId, Digest, MachineName, PAGE_SIZE, RefName};
use whimbrel_image::{Manifest, pack_frame::Kind};
use whimbrel_pool::{
    client::PoolError,
    protocol::{VersionInfo, code},
};

pub(super) struct FoundCapsule {
    record: PartialRecord,
    pub(super) capsule: Arc<PooledCapsule>,
    name: RefName,
}

impl Daemon {
    pub(super) fn find_in_pool(
        &self,
        place: &PoolPath,
        capsule: &CapsuleRef,
    ) -> Result<FoundCapsule, DaemonError> {
        let pool = self.pool(place)?;
        let (name, until) = match capsule {
            CapsuleRef::Name(name) => (name.clone(), None),
            CapsuleRef::Past(past) => {
                let name = past.machine.as_str().parse();
                let name = name.map_err(|error| DaemonError::invalid(format!("{error}")))?;
                (name, Some(crate::now_ms().saturating_sub(past.ago_ms)))
            }
            CapsuleRef::Id(_) => {
                return Err(DaemonError::invalid("a capsule in a pool is named by its file, not by its id"));
            }
        };
        let nothing = || DaemonError::NotFound { what: "capsule", name: format!("{place}/{name}") };
        let find = async {
            let file = pool.find(&format!("{}/{name}", place.folder)).await?;
            let Some(until) = until else { return Ok(Some(file.version)) };
            let versions = pool.versions(file.id).await?;
            let until = i64::try_from(until).unwrap_or(i64::MAX);
            // Ordered by the time of the capsule, not of the upload, which may be late.
            let time = |version: &VersionInfo| match version.modified {
                0 => version.created / 1_000_000,
                taken => taken / 1_000_000,
            };
            let old = versions.into_iter().filter(|version| time(version) <= until);
            Ok(old.max_by_key(|version| (time(version), version.number)).map(|version| version.id))
        };
        let version = match pool.block(find) {
            Err(error @ PoolError::Refused { .. }) if error.code() == Some(code::NOT_FOUND) => None,
            found => found.map_err(|error: PoolError| failed(place)(error.into()))?,
        };
        let version = version.filter(|version| *version > 0).ok_or_else(nothing)?;
        let held = Arc::new(PooledCapsule::open(&pool, version).map_err(failed(place))?);
        Ok(FoundCapsule { record: PartialRecord { pool: place.clone(), version }, capsule: held, name })
    }

    pub(crate) fn pull_from_pool(
        self: &Arc<Self>,
        place: &str,
        request: PullRequest,
    ) -> Result<Operation, DaemonError> {
        refs::check_tag(request.tag.as_ref())?;
        let place: PoolPath = place.parse()?;
        let (host, subject) = (self.clone(), request.capsule.to_string());
        Ok(self.operations().start(OperationKind::Pull, subject, move |reporter| {
            let begun = Instant::now();
            reporter.progress("searching", Unit::Items, 0, None);
            let found = host.find_in_pool(&place, &request.capsule)?;
            let called = request.tag.as_ref().unwrap_or(&found.name).to_string();
            let (capsule, _) = host.describe_pooled(&found, Some(called), |manifest| {
                host.name_here(&found, &request, manifest)
            })?;
            let (wire_bytes, pages) = match request.lazy {
                true => (0, 0),
                false => host.fetch_pooled(capsule, &mut |done, whole| {
                    reporter.progress("fetching", Unit::Bytes, done, Some(whole));
                    reporter.flow()
                })?,
            };
            let total_ms = begun.elapsed().as_secs_f64() * 1e3;
            let (whole, host) = (!host.is_partial(&capsule), place.to_string());
            Ok(OperationResult::Pull(TransferReport { capsule, host, wire_bytes, pages, whole, total_ms }))
        }))
    }

    /// Names of a pulled capsule here.
    fn name_here(
        &self,
        found: &FoundCapsule,
        request: &PullRequest,
        manifest: &Manifest,
    ) -> Result<Vec<RefName>, DaemonError> {
        let name = request.tag.clone().unwrap_or_else(|| own_name(&found.name, manifest));
        self.check_name_for(&name, &found.capsule.capsule())?;
        Ok(vec![name])
    }

    pub(crate) fn fetch_pooled_to_resume(
        &self,
        place: &str,
        capsule: &CapsuleRef,
        called: Option<&MachineName>,
    ) -> Result<(CapsuleId, Manifest), DaemonError> {
        let found = self.find_in_pool(&place.parse()?, capsule)?;
        let called = called.map(ToString::to_string);
        self.describe_pooled(&found, called, |manifest| Ok(vec![own_name(&found.name, manifest)]))
    }

    /// Fetches the manifest of a capsule and what a resume needs, and names it here. Its pin is for `called`,
    /// or for its machine's name.
    fn describe_pooled(
        &self,
        found: &FoundCapsule,
        called: Option<String>,
        names: impl FnOnce(&Manifest) -> Result<Vec<RefName>, DaemonError>,
    ) -> Result<(CapsuleId, Manifest), DaemonError> {
        let (capsule, held) = (found.capsule.capsule(), &found.capsule);
        let was_whole = self.store.is_complete(&capsule).map_err(store_error("look up the capsule"))?;
        if !was_whole {
            self.store.expect_partial(&capsule).map_err(store_error("prepare the capsule"))?;
        }
        let place = &found.record.pool;
        self.fetch_object(place, held, Kind::Manifest, &capsule.0)?;
        let manifest = self.store.manifest(&capsule).map_err(store_error("read the capsule"))?;
        manifest.blobs().try_for_each(|blob| self.fetch_object(place, held, Kind::Blob, &blob))?;
        let names = names(&manifest)?;
        if !was_whole {
            let machine = || refs::machine_of(&manifest).map(|name| name.to_string());
            let subject = called.or_else(|| machine().ok()).unwrap_or_else(|| found.name.to_string());
            let noted = Arc::new(OpenPartial::new(found.record.clone(), held.clone(), subject.clone()));
            self.pin_and_record(capsule, noted, &subject)?;
        }
        self.store.fetched_objects_writer().flush().map_err(store_error("store the manifest"))?;
        self.name_partial(&capsule, names)?;
        Ok((capsule, manifest))
    }

    /// Fetches what pools have of a capsule and of its ancestors, of which it may lack pages.
    pub(crate) fn fetch_from_pools(
        &self,
        capsule: CapsuleId,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(), DaemonError> {
        let all = self.with_ancestors(capsule)?;
        let pooled = all.into_iter().filter(|id| self.pools.records.of(id).is_some());
        let brought = pooled.map(|id| self.fetch_pooled(id, progress)).collect::<Result<Vec<_>, _>>()?;
        if !brought.is_empty() {
            self.complete_if_whole(&capsule);
        }
        Ok(())
    }

    /// Fetches all of a partial capsule; `progress` gets bytes. Returns the bytes and pages fetched.
    fn fetch_pooled(
        &self,
        capsule: CapsuleId,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(u64, u64), DaemonError> {
        let Some(noted) = self.pools.records.of(&capsule) else { return Ok((0, 0)) };
        let held = self.open_partial(&noted)?;
        let (mut bytes, mut pages) = (0, 0);
        for (at, place) in held.nodes().iter().enumerate() {
            let came = self.fetch_node(&noted.record.pool, &held, place)?;
            (bytes, pages) = (bytes + came * PAGE_SIZE as u64, pages + came);
            let whole = (bytes + 1) * held.nodes().len() as u64 / (at as u64 + 1);
            if progress(bytes, whole.max(bytes)).is_break() {
                let left = "fetched objects are kept; pull again to continue".to_owned();
                return Err(DaemonError::Cancelled { left });
            }
        }
        // Fetched when the capsule was named here, but perhaps garbage-collected with its name.
        for blob in held.blobs() {
            let kind = if *blob == capsule.0 { Kind::Manifest } else { Kind::Blob };
            self.fetch_object(&noted.record.pool, &held, kind, blob)?;
        }
        self.store.complete(&capsule).map_err(store_error("complete the capsule"))?;
        self.pools.records.remove(&capsule);
        self.pools.notifier.notify();
        Ok((bytes, pages))
    }

    /// Fetches an object that is not here.
    fn fetch_object(
        &self,
        pool: &PoolPath,
        held: &PooledCapsule,
        kind: Kind,
        digest: &Digest,
    ) -> Result<(), DaemonError> {
        if self.store.has(&[*digest]) == [true] {
            return Ok(());
        }
        let what = "part of the capsule";
        let nothing = || DaemonError::NotFound { what, name: digest.to_string() };
        let object = held.object(digest).ok_or_else(nothing)?;
        let object = object.map_err(|error| failed(pool)(error.into()))?;
        // Stored under the digest computed here: with a wrong object, the requested one is still missing.
        let kept = self.store.fetched_objects_writer().store(kind, &[&object[..]]);
        kept.map_err(store_error("store the objects"))
    }

    /// Fetches a node and, if it is a leaf, its missing pages. Returns how many pages were fetched.
    fn fetch_node(
        &self,
        pool: &PoolPath,
        held: &PooledCapsule,
        place: &NodePlace,
    ) -> Result<u64, DaemonError> {
        self.fetch_object(pool, held, Kind::Nodes, &place.digest)?;
        if place.pages.is_none() {
            return Ok(0);
        }
        let failed = failed(pool);
        let leaf = self.local_node(&place.digest);
        let leaf = leaf.ok_or_else(|| failed("a node is damaged".into()))?;
        let missing = |digest: &Digest| self.store.has(&[*digest]) != [true];
        let pages = held.pages_of(place, &leaf, missing).map_err(failed)?;
        let all: Vec<&[u8]> = pages.iter().map(|page| &page[..]).collect();
        let kept = self.store.fetched_objects_writer().store(Kind::Pages, &all);
        kept.map(|()| all.len() as u64).map_err(store_error("store the objects"))
    }
}

/// The ref for a capsule of this name: its machine's newest, if it has the machine's name.
pub(crate) fn own_name(name: &RefName, manifest: &Manifest) -> RefName {
    let machine = refs::machine_of(manifest).ok().filter(|machine| machine.as_str() == name.as_str());
    machine.map_or_else(|| name.clone(), |machine| refs::machine_ref(&machine))
}
