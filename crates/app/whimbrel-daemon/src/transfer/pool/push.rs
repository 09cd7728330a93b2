//! Push to a pool: finds the file, checks whether the capsule is there already, writes it, and counts the
//! bytes.

use super::{
    capsule_file,
    capsule_reader::PooledCapsule,
    capsule_writer::{self, CapsuleWriteError},
    failed,
    pool_path::PoolPath,
    previous_version::PreviousVersion,
};
use crate::{
    core::{
        error::DaemonError,
        refs::{self, store_error},
    },
    daemon::Daemon,
    transfer::upload::UploadTarget,
};
use std::{ops::ControlFlow, sync::Arc, time::Instant};
use whimbrel_api::{
    CapsuleRef, Operation, OperationKind, OperationResult, PushRequest, TransferReport, Unit,
};
use whimbrel_core::CapsuleId;
use whimbrel_image::Manifest;
use whimbrel_pool::{
    chunk::Chunking,
    client::{Pool, PoolError, WriteFile, WriteOptions},
    protocol::{NewNode, Node as File, code},
};

pub(crate) struct PushProgress {
    stage: &'static str,
    unit: Unit,
    done: u64,
    whole: Option<u64>,
}

impl PushProgress {
    fn stage(stage: &'static str) -> Self {
        Self { stage, unit: Unit::Items, done: 0, whole: None }
    }
}

/// Receives the progress of a push, and decides whether to continue.
pub(crate) type PushObserver<'a> = dyn FnMut(PushProgress) -> ControlFlow<()> + 'a;

/// Condition under which a capsule that is a version of the file already is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SkipIf {
    /// The capsule is the newest version: an older one that is pushed again becomes the newest.
    Newest,
    /// The capsule is any version of the file.
    Any,
}

impl Daemon {
    /// Starts the operation that copies a capsule to a pool.
    pub(crate) fn push_to_pool(
        self: &Arc<Self>,
        place: &str,
        request: &PushRequest,
    ) -> Result<Operation, DaemonError> {
        let place: PoolPath = place.parse()?;
        if request.host.is_some() {
            return Err(DaemonError::invalid("a push goes either to a host or to a pool"));
        }
        if request.follow || request.unfollow {
            return self.start_upload(&request.subject, request.follow.then_some(UploadTarget::Pool(place)));
        }
        let (capsule, manifest) = self.find(&request.subject)?;
        if self.is_partial(&capsule) {
            return Err(DaemonError::invalid("the capsule is only partial here: pull all of it first"));
        }
        let name = name_in_pool(&request.subject, &capsule, &manifest);
        let (host, subject) = (self.clone(), request.subject.to_string());
        Ok(self.operations().start(OperationKind::Push, subject, move |reporter| {
            let begun = Instant::now();
            let (wire_bytes, pages) =
                host.send_to_pool(&place, &name, (capsule, &manifest), SkipIf::Newest, &mut |told| {
                    reporter.progress(told.stage, told.unit, told.done, told.whole);
                    reporter.flow()
                })?;
            let total_ms = begun.elapsed().as_secs_f64() * 1e3;
            let host = place.to_string();
            let report = TransferReport { capsule, host, wire_bytes, pages, whole: true, total_ms };
            Ok(OperationResult::Push { report, machine: None })
        }))
    }

    /// Makes a capsule the newest version of a file. Returns bytes sent, and pages that the previous version
    /// lacks.
    pub(crate) fn send_to_pool(
        &self,
        place: &PoolPath,
        name: &str,
        (capsule, manifest): (CapsuleId, &Manifest),
        unless: SkipIf,
        tell: &mut PushObserver<'_>,
    ) -> Result<(u64, u64), DaemonError> {
        let _ = tell(PushProgress::stage("checking the pool"));
        let pool = self.pool(place)?;
        let _pin = self.store.pin(&capsule).map_err(store_error("pin the capsule"))?;
        let ours = |error: PoolError| failed(place)(error.into());
        let folder = pool.block(make_folders(&pool, &place.folder)).map_err(ours)?;
        let there = pool.block(child(&pool, folder, name)).map_err(ours)?;
        let newest = there.as_ref().filter(|file| file.version > 0);
        let held = newest.and_then(|file| PooledCapsule::open(&pool, file.version).ok());
        let time = i64::try_from(manifest.time).unwrap_or(0).saturating_mul(1_000_000);
        if let Some(file) = newest
            && is_version(&pool, file, held.as_ref(), (capsule, time), unless).map_err(ours)?
        {
            return Ok((0, 0));
        }
        let older = held.as_ref().and_then(|held| PreviousVersion::of(held, &self.store, pool.encrypts()));
        let make = make(folder, name, false);
        let file =
            pool.block(WriteFile::open(&pool, make, there, true, WriteOptions::default())).map_err(ours)?;
        let file =
            file.with_chunking(Chunking::Fixed { size: capsule_file::CHUNK as u32 }).with_content_time(time);
        let whole: u64 = manifest.images.iter().map(|image| image.size()).sum();
        let written = capsule_writer::write(&self.store, &capsule, &file, older.as_ref(), &mut |done| {
            tell(PushProgress { stage: "sending", unit: Unit::Bytes, done, whole: Some(whole) })
        });
        let pages = written.inspect_err(|_| file.abandon()).map_err(|error| write_error(place, error))?;
        let _ = tell(PushProgress::stage("waiting until all chunks are safe"));
        let node = file.commit().map_err(ours)?;
        Ok((bytes_sent(&pool, node).map_err(ours)?, pages))
    }
}

fn bytes_sent(pool: &Pool, file: Option<File>) -> Result<u64, PoolError> {
    let versions = file.map(|file| pool.block(pool.versions(file.id))).transpose()?;
    Ok(versions.and_then(|versions| versions.first().map(|version| version.sent)).unwrap_or(0))
}

/// Whether a capsule of this time is the newest version of a file, or any version.
fn is_version(
    pool: &Pool,
    file: &File,
    newest: Option<&PooledCapsule>,
    (capsule, time): (CapsuleId, i64),
    which: SkipIf,
) -> Result<bool, PoolError> {
    let is_it = |held: &PooledCapsule| held.capsule() == capsule;
    if newest.is_some_and(is_it) || which == SkipIf::Newest {
        return Ok(newest.is_some_and(is_it));
    }
    let versions = pool.block(pool.versions(file.id))?;
    let mut same_time = versions.iter().filter(|version| version.modified == time);
    Ok(same_time.any(|version| PooledCapsule::open(pool, version.id).as_ref().is_ok_and(is_it)))
}

fn write_error(place: &PoolPath, error: CapsuleWriteError) -> DaemonError {
    match error {
        CapsuleWriteError::Store(error) => store_error("read the capsule")(error),
        CapsuleWriteError::Cancelled => {
            DaemonError::Cancelled { left: "the pool shows no part of it".into() }
        }
        error @ CapsuleWriteError::Pool(_) => failed(place)(error.into()),
    }
}

/// Name of a capsule's file: that of the machine or tag; for a capsule named otherwise, the machine and the
/// short id.
pub(crate) fn name_in_pool(subject: &CapsuleRef, capsule: &CapsuleId, manifest: &Manifest) -> String {
    match subject {
        CapsuleRef::Name(name) => refs::known_as(name).to_owned(),
        CapsuleRef::Id(_) | CapsuleRef::Past(_) => {
            let machine =
                refs::machine_of(manifest).map_or_else(|_| "capsule".to_owned(), |name| name.to_string());
            format!("{machine}.{}", capsule.short())
        }
    }
}

fn make(parent: u64, name: &str, folder: bool) -> NewNode {
    // Memory of machines is private to its owner.
    let mode = if folder { 0o700 } else { 0o600 };
    NewNode { parent, name: name.to_owned(), folder, mode, uid: 0, gid: 0 }
}

async fn child(pool: &Pool, folder: u64, name: &str) -> Result<Option<File>, PoolError> {
    match pool.lookup(folder, name).await {
        Err(error) if error.code() == Some(code::NOT_FOUND) => Ok(None),
        found => found.map(Some),
    }
}

/// Finds the folder of a path, and creates missing folders.
async fn make_folders(pool: &Pool, path: &str) -> Result<u64, PoolError> {
    let mut folder = pool.find("").await?.id;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        folder = match child(pool, folder, name).await? {
            Some(found) => found.id,
            None => match pool.make(&make(folder, name, true)).await {
                // Another client has created it.
                Err(error) if error.code() == Some(code::EXISTS) => pool.lookup(folder, name).await?.id,
                made => made?.id,
            },
        };
    }
    Ok(folder)
}
