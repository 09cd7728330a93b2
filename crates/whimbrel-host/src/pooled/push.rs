//! Capsules of this host into a pool: where the file is, whether it is there already, what it cost.

use super::{failed, held::Held, layout, older::Older, place::PoolPlace, send, send::SendError};
use crate::{
    error::HostError,
    follow::Goal,
    host::Host,
    refs::{self, store_error},
};
use std::{ops::ControlFlow, sync::Arc, time::Instant};
use whimbrel_api::{
    CapsuleRef, Operation, OperationKind, OperationResult, PushRequest, TransferReport, Unit,
};
use whimbrel_core::CapsuleId;
use whimbrel_image::Manifest;
use whimbrel_pool::{
    chunk::Cutting,
    client::{Pool, PoolError, WriteFile, WriteOptions},
    protocol::{Make, Node as File, code},
};

/// How far a transfer is.
pub(crate) struct Told {
    stage: &'static str,
    unit: Unit,
    done: u64,
    whole: Option<u64>,
}

impl Told {
    fn stage(stage: &'static str) -> Self {
        Self { stage, unit: Unit::Items, done: 0, whole: None }
    }
}

/// Hears how far a transfer is, and says whether to go on.
pub(crate) type Tell<'a> = dyn FnMut(Told) -> ControlFlow<()> + 'a;

/// When a capsule does not become a version of a file, since it is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unless {
    /// The newest: an older one that is pushed again becomes the newest.
    Newest,
    /// Any.
    Any,
}

impl Host {
    /// Copies a capsule into a pool.
    pub(crate) fn push_to_pool(
        self: &Arc<Self>,
        place: &str,
        request: &PushRequest,
    ) -> Result<Operation, HostError> {
        let place: PoolPlace = place.parse()?;
        if request.host.is_some() {
            return Err(HostError::invalid("either to a host or to a pool"));
        }
        if request.follow || request.unfollow {
            return self.follow_or_not(&request.subject, request.follow.then_some(Goal::Pool(place)));
        }
        let (capsule, manifest) = self.find(&request.subject)?;
        if self.is_partial(&capsule) {
            return Err(HostError::invalid("the capsule is here in part only: pull all of it first"));
        }
        let name = name_in_pool(&request.subject, &capsule, &manifest);
        let (host, subject) = (self.clone(), request.subject.to_string());
        Ok(self.operations().start(OperationKind::Push, subject, move |reporter| {
            let begun = Instant::now();
            let (wire_bytes, pages) =
                host.send_to_pool(&place, &name, (capsule, &manifest), Unless::Newest, &mut |told| {
                    reporter.progress(told.stage, told.unit, told.done, told.whole);
                    reporter.flow()
                })?;
            let total_ms = begun.elapsed().as_secs_f64() * 1e3;
            let host = place.to_string();
            let report = TransferReport { capsule, host, wire_bytes, pages, whole: true, total_ms };
            Ok(OperationResult::Push { report, machine: None })
        }))
    }

    /// Makes a capsule the newest version of a file; bytes that travelled, and pages that the version before lacks.
    pub(crate) fn send_to_pool(
        &self,
        place: &PoolPlace,
        name: &str,
        (capsule, manifest): (CapsuleId, &Manifest),
        unless: Unless,
        tell: &mut Tell<'_>,
    ) -> Result<(u64, u64), HostError> {
        let _ = tell(Told::stage("looking what is there"));
        let pool = self.pool(place)?;
        let _pin = self.store.pin(&capsule).map_err(store_error("keep the capsule"))?;
        let ours = |error: PoolError| failed(place)(error.into());
        let folder = pool.block(make_folders(&pool, &place.folder)).map_err(ours)?;
        let there = pool.block(child(&pool, folder, name)).map_err(ours)?;
        let newest = there.as_ref().filter(|file| file.version > 0);
        let held = newest.and_then(|file| Held::open(&pool, file.version).ok());
        let time = i64::try_from(manifest.time).unwrap_or(0).saturating_mul(1_000_000);
        if let Some(file) = newest
            && is_version(&pool, file, held.as_ref(), (capsule, time), unless).map_err(ours)?
        {
            return Ok((0, 0));
        }
        let older = held.as_ref().and_then(|held| Older::of(held, &self.store, pool.seals()));
        let make = make(folder, name, false);
        let file =
            pool.block(WriteFile::open(&pool, make, there, true, WriteOptions::default())).map_err(ours)?;
        let file = file.cut_by(Cutting::Fixed { size: layout::CHUNK as u32 }).made_at(time);
        let whole: u64 = manifest.images.iter().map(|image| image.size()).sum();
        let written = send::write(&self.store, &capsule, &file, older.as_ref(), &mut |done| {
            tell(Told { stage: "sending", unit: Unit::Bytes, done, whole: Some(whole) })
        });
        let pages = written.inspect_err(|_| file.give_up()).map_err(|error| not_sent(place, error))?;
        let _ = tell(Told::stage("waiting until all of it is safe"));
        let node = file.commit().map_err(ours)?;
        Ok((sent_for(&pool, node).map_err(ours)?, pages))
    }
}

/// What travelled for the newest version of a file.
fn sent_for(pool: &Pool, file: Option<File>) -> Result<u64, PoolError> {
    let versions = file.map(|file| pool.block(pool.versions(file.id))).transpose()?;
    Ok(versions.and_then(|versions| versions.first().map(|version| version.sent)).unwrap_or(0))
}

/// Whether a capsule of this time is the newest version of a file, or any.
fn is_version(
    pool: &Pool,
    file: &File,
    newest: Option<&Held>,
    (capsule, time): (CapsuleId, i64),
    which: Unless,
) -> Result<bool, PoolError> {
    let is_it = |held: &Held| held.capsule() == capsule;
    if newest.is_some_and(is_it) || which == Unless::Newest {
        return Ok(newest.is_some_and(is_it));
    }
    let versions = pool.block(pool.versions(file.id))?;
    let mut same_time = versions.iter().filter(|version| version.modified == time);
    Ok(same_time.any(|version| Held::open(pool, version.id).as_ref().is_ok_and(is_it)))
}

fn not_sent(place: &PoolPlace, error: SendError) -> HostError {
    match error {
        SendError::Store(error) => store_error("read the capsule")(error),
        SendError::Cancelled => HostError::Cancelled { left: "nothing is seen of it in the pool".into() },
        error @ SendError::Pool(_) => failed(place)(error.into()),
    }
}

/// The name of a capsule's file: that of the machine or tag; of one that was named otherwise, the machine and the id's begin.
fn name_in_pool(subject: &CapsuleRef, capsule: &CapsuleId, manifest: &Manifest) -> String {
    match subject {
        CapsuleRef::Name(name) => refs::known_as(name).to_owned(),
        CapsuleRef::Id(_) | CapsuleRef::Past(_) => {
            let machine =
                refs::machine_of(manifest).map_or_else(|_| "capsule".to_owned(), |name| name.to_string());
            format!("{machine}.{}", capsule.short())
        }
    }
}

fn make(parent: u64, name: &str, folder: bool) -> Make {
    // Memory of machines: for nobody but their owner.
    let mode = if folder { 0o700 } else { 0o600 };
    Make { parent, name: name.to_owned(), folder, mode, uid: 0, gid: 0 }
}

async fn child(pool: &Pool, folder: u64, name: &str) -> Result<Option<File>, PoolError> {
    match pool.lookup(folder, name).await {
        Err(error) if error.code() == Some(code::NOT_FOUND) => Ok(None),
        found => found.map(Some),
    }
}

/// The folder at a path, made where it is missing.
async fn make_folders(pool: &Pool, path: &str) -> Result<u64, PoolError> {
    let mut folder = pool.find("").await?.id;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        folder = match child(pool, folder, name).await? {
            Some(found) => found.id,
            None => match pool.make(&make(folder, name, true)).await {
                // Somebody was faster.
                Err(error) if error.code() == Some(code::EXISTS) => pool.lookup(folder, name).await?.id,
                made => made?.id,
            },
        };
    }
    Ok(folder)
}
