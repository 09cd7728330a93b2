//! Capsules of this host into a pool: where the file is, whether it is there already, what it cost.

use super::{failed, held::Held, layout, place::PoolPlace, send, send::SendError};
use crate::{
    error::HostError,
    host::Host,
    operation::Reporter,
    refs::{self, store_error},
};
use std::{sync::Arc, time::Instant};
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

impl Host {
    /// Copies a capsule into a pool.
    pub(crate) fn push_to_pool(
        self: &Arc<Self>,
        place: &str,
        request: &PushRequest,
    ) -> Result<Operation, HostError> {
        let place: PoolPlace = place.parse()?;
        if request.host.is_some() || request.follow || request.unfollow {
            return Err(HostError::invalid(
                "a pool takes a capsule at a time: push it when there is a new one",
            ));
        }
        let (capsule, manifest) = self.find(&request.subject)?;
        if self.is_partial(&capsule) {
            return Err(HostError::invalid("the capsule is here in part only: pull all of it first"));
        }
        let name = name_in_pool(&request.subject, &capsule, &manifest);
        let (host, subject) = (self.clone(), request.subject.to_string());
        Ok(self.operations().start(OperationKind::Push, subject, move |reporter| {
            let begun = Instant::now();
            let (wire_bytes, pages) = host.send_to_pool(&place, &name, capsule, &manifest, reporter)?;
            let total_ms = begun.elapsed().as_secs_f64() * 1e3;
            let host = place.to_string();
            let report = TransferReport { capsule, host, wire_bytes, pages, whole: true, total_ms };
            Ok(OperationResult::Push { report, machine: None })
        }))
    }

    fn send_to_pool(
        &self,
        place: &PoolPlace,
        name: &str,
        capsule: CapsuleId,
        manifest: &Manifest,
        reporter: &Reporter,
    ) -> Result<(u64, u64), HostError> {
        reporter.progress("looking what is there", Unit::Items, 0, None);
        let pool = self.pool(place)?;
        let _pin = self.store.pin(&capsule).map_err(store_error("keep the capsule"))?;
        let ours = |error: PoolError| failed(place)(error.into());
        let folder = pool.block(make_folders(&pool, &place.folder)).map_err(ours)?;
        let there = pool.block(child(&pool, folder, name)).map_err(ours)?;
        if let Some(file) = &there
            && file.version > 0
            && Held::open(&pool, file.version).is_ok_and(|held| held.capsule() == capsule)
        {
            return Ok((0, 0));
        }
        let make = make(folder, name, false);
        let file =
            pool.block(WriteFile::open(&pool, make, there, true, WriteOptions::default())).map_err(ours)?;
        let file = file.cut_by(Cutting::Fixed { size: layout::CHUNK as u32 });
        let whole: u64 = manifest.images.iter().map(|image| image.size()).sum();
        let written = send::write(&self.store, &capsule, &file, &mut |done| {
            reporter.progress("sending", Unit::Bytes, done, Some(whole));
            reporter.flow()
        });
        let pages = written.inspect_err(|_| file.give_up()).map_err(|error| not_sent(place, error))?;
        reporter.progress("waiting until all of it is safe", Unit::Items, 0, None);
        let node = file.commit().map_err(ours)?;
        let versions = node.map(|node| pool.block(pool.versions(node.id))).transpose().map_err(ours)?;
        let sent = versions.and_then(|versions| versions.first().map(|version| version.sent));
        Ok((sent.unwrap_or(0), pages))
    }
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
