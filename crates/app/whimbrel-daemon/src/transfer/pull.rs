//! Pull: capsules of other hosts, found, named here and fetched.
//!
//! `whimbrel-transfer` decides which objects are sent; this module decides which host is asked, what is
//! recorded when, and what the user sees. A pull moves names when the whole capsule is here. A capsule that a
//! machine starts from at once is named before that, and is partial: pages that the machine touches are
//! fetched (see `capsule::images`). A whole capsule that loses its name to a partial one keeps another name
//! until that is whole, so that the loss of the other host never leaves neither (`core::refs::previous`).

use crate::{
    core::{error::DaemonError, history, operations::ProgressReporter, refs},
    daemon::Daemon,
    server::peer_rpc::{ClaimMachine, HandoffSubject},
};
use bytes::Bytes;
use std::{
    collections::BTreeSet,
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use whimbrel_api::{
    CapsuleRef, Operation, OperationKind, OperationResult, PullRequest, RemoteCapsule, TransferReport, Unit,
    is_bucket,
};
use whimbrel_core::{ByteSize, CapsuleId, HostName, MachineName, RefName};
use whimbrel_image::{Manifest, pack_frame::Kind};
use whimbrel_store::{Expected, ObjectWant, Pin, RemoteObjects};
use whimbrel_transfer::{
    DemandFetcher, Holders, LinkError, Options, PageLookup, Progress, TransferError, WireLink, call,
    protocol::{ListRefs, ListRefsRequest, RefEntry, RemotePullProgress, RemotePullRequest},
    pull, state_of,
};
use whimbrel_vm::PagerView;

/// Interval at which the progress of the other host is polled.
pub(super) const STATUS_INTERVAL: Duration = Duration::from_millis(500);
/// How long a pull waits for a host that does not answer: a cable may be replugged by then.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
/// Most ancestors that are offered as bases of the transfer.
const BASES: usize = 8;

pub(crate) struct LocatedCapsule {
    pub(crate) host: HostName,
    pub(crate) capsule: CapsuleId,
    pub(crate) name: Option<RefName>,
}

impl Daemon {
    pub(crate) fn remote_capsules(&self, host: &HostName) -> Result<Vec<RemoteCapsule>, DaemonError> {
        let entries = self.catalog(host, "*")?;
        let tell = |entry: RefEntry| RemoteCapsule {
            host: host.clone(),
            machine: refs::machine_named(&entry.name),
            name: entry.name,
            id: entry.capsule,
            time_ms: entry.time,
            memory: ByteSize(entry.memory),
            disks: ByteSize(entry.disks),
            whole: entry.whole,
        };
        Ok(entries.into_iter().map(tell).collect())
    }

    pub(crate) fn catalog(&self, host: &HostName, pattern: &str) -> Result<Vec<RefEntry>, DaemonError> {
        let link = WireLink(self.peer_connection(host)?);
        let (mut entries, mut after) = (Vec::<RefEntry>::new(), None);
        loop {
            let page = ListRefsRequest { pattern: pattern.to_owned(), after };
            let (answer, _) =
                call::<ListRefs>(&link, &page, Bytes::new()).map_err(|e| transfer_error(host, e))?;
            after = answer.refs.last().map(|entry| entry.name.clone());
            entries.extend(answer.refs);
            if !answer.more || after.is_none() || entries.len() > 100_000 {
                return Ok(entries);
            }
        }
    }

    /// Finds a capsule on a host, or on any trusted one.
    pub(crate) fn locate(
        &self,
        host: Option<&HostName>,
        capsule: &CapsuleRef,
    ) -> Result<LocatedCapsule, DaemonError> {
        if let Some(host) = host {
            let found = self.locate_on(host, capsule)?;
            return found.ok_or_else(|| not_found(capsule));
        }
        let mut refusal = not_found(capsule);
        for connection in self.reachable_peers() {
            match self.locate_on(&connection.peer().name, capsule) {
                Ok(Some(found)) => return Ok(found),
                // Some capsules match, but not clearly: a better message than that nothing was found.
                Err(error @ DaemonError::Invalid { .. }) => refusal = error,
                Ok(None) | Err(_) => {}
            }
        }
        Err(refusal)
    }

    fn locate_on(
        &self,
        host: &HostName,
        capsule: &CapsuleRef,
    ) -> Result<Option<LocatedCapsule>, DaemonError> {
        let found = |name, capsule| Some(LocatedCapsule { host: host.clone(), capsule, name });
        let name = match capsule {
            CapsuleRef::Id(id) => return Ok(found(None, *id)),
            CapsuleRef::Past(past) => {
                let kept = self.catalog(host, &history::pattern(&past.machine))?;
                let kept = kept.into_iter().map(|entry| (entry.name, entry.capsule));
                // Without its name: of the history there only this capsule is pulled.
                return history::newest_before(past, kept, crate::now_ms())
                    .map(|(_, capsule)| found(None, capsule));
            }
            CapsuleRef::Name(name) => name,
        };
        let machine = name.as_str().parse::<MachineName>().ok().map(|name| refs::machine_ref(&name));
        for wanted in [Some(name.clone()), machine].into_iter().flatten() {
            let entries = self.catalog(host, wanted.as_str())?;
            if let Some(entry) = entries.into_iter().find(|entry| entry.name == wanted) {
                return Ok(found(Some(entry.name), entry.capsule));
            }
        }
        // A prefix of an id, as `ls --from` shows it.
        let begins = |entry: &RefEntry| {
            name.as_str().len() >= 4 && entry.capsule.to_string().starts_with(name.as_str())
        };
        let entry = self.catalog(host, "*")?.into_iter().find(begins);
        Ok(entry.and_then(|entry| found(Some(entry.name), entry.capsule)))
    }

    pub(crate) fn pull(self: &Arc<Self>, request: PullRequest) -> Result<Operation, DaemonError> {
        if let Some(bucket) = request.pool.clone().filter(|place| is_bucket(place)) {
            return self.pull_from_bucket(&bucket, request);
        }
        if let Some(pool) = request.pool.clone() {
            return self.pull_from_pool(&pool, request);
        }
        refs::check_tag(request.tag.as_ref())?;
        let (host, subject) = (self.clone(), request.capsule.to_string());
        Ok(self.operations().start(OperationKind::Pull, subject, move |reporter| {
            let begun = Instant::now();
            reporter.progress("searching", Unit::Items, 0, None);
            let found = host.locate(request.host.as_ref(), &request.capsule)?;
            let name = request.tag.or(found.name.clone()).or_else(|| name_by_id("pulled", &found.capsule));
            let names: Vec<RefName> = name.into_iter().collect();
            names.iter().try_for_each(|name| host.check_name_for(name, &found.capsule))?;
            let sources = host.source(&found.host);
            let before = sources.bytes();
            let (_, _pin) = host.fetch_description(&sources, &found.host, &found.capsule)?;
            let (bytes, pages) = match request.lazy {
                true => {
                    host.name_partial(&found.capsule, names)?;
                    host.retain_on(&found.host, found.capsule)?;
                    (bytes_moved(before, sources.bytes()), 0)
                }
                false => host.pull_all(&sources, &found.host, (found.capsule, &names), &mut |progress| {
                    reporter.progress(
                        "fetching",
                        Unit::Bytes,
                        progress.received,
                        Some(progress.received + progress.left),
                    );
                    reporter.flow()
                })?,
            };
            Ok(OperationResult::Pull(TransferReport {
                capsule: found.capsule,
                whole: !host.is_partial(&found.capsule),
                host: found.host.to_string(),
                wire_bytes: bytes,
                pages,
                total_ms: begun.elapsed().as_secs_f64() * 1e3,
            }))
        }))
    }

    /// Fetches the manifest of a capsule and the objects that a resume needs. The pin retains them.
    pub(super) fn fetch_description(
        &self,
        sources: &Arc<Holders>,
        host: &HostName,
        capsule: &CapsuleId,
    ) -> Result<(Manifest, Pin), DaemonError> {
        let remote = DemandFetcher::new(Arc::new(self.store.clone()), sources.clone());
        let fetch = |kind: Kind, wants: Vec<ObjectWant>| {
            let missing: Vec<ObjectWant> =
                wants.into_iter().filter(|want| self.store.has(&[want.digest]) != [true]).collect();
            if missing.is_empty() {
                return Ok(());
            }
            let objects = remote.objects(kind, &missing).map_err(|error| fetch_error(host, error))?;
            let objects: Vec<&[u8]> = objects.iter().map(Vec::as_slice).collect();
            self.store
                .fetched_objects_writer()
                .store(kind, &objects)
                .map_err(refs::store_error("store the objects"))
        };
        // A manifest alone means nothing: a failed attempt may have left it.
        let was_whole = self.store.is_complete(capsule).map_err(refs::store_error("look up the capsule"))?;
        if !was_whole {
            self.store.expect_partial(capsule).map_err(refs::store_error("prepare the capsule"))?;
        }
        fetch(Kind::Manifest, vec![ObjectWant { digest: capsule.0, similar: None }])?;
        self.store.fetched_objects_writer().flush().map_err(refs::store_error("store the manifest"))?;
        let manifest = self.store.manifest(capsule).map_err(refs::store_error("read the capsule"))?;
        // The device state resembles that of the previous version.
        let older = manifest.parents.iter().find_map(|id| self.store.manifest(id).ok());
        let similar = |at: usize| older.as_ref().and_then(|older| older.device.get(at).copied());
        let device = manifest.device.iter().enumerate();
        let mut blobs: Vec<ObjectWant> =
            device.map(|(at, digest)| ObjectWant { digest: *digest, similar: similar(at) }).collect();
        let rest = manifest.blobs().filter(|blob| !manifest.device.contains(blob));
        blobs.extend(rest.map(|digest| ObjectWant { digest, similar: None }));
        fetch(Kind::Blob, blobs)?;
        self.store.fetched_objects_writer().flush().map_err(refs::store_error("store the objects"))?;
        if !was_whole {
            // Until it is pinned, garbage collection may take the mark.
            self.store.expect_partial(capsule).map_err(refs::store_error("prepare the capsule"))?;
        }
        let pin = self.store.pin(capsule).map_err(refs::store_error("pin the capsule"))?;
        Ok((manifest, pin))
    }

    /// Names a capsule whose description is here, whole or not. A whole capsule that loses a name to one that
    /// is not whole is called `previous.ID` from then on.
    pub(super) fn name_partial(&self, capsule: &CapsuleId, names: Vec<RefName>) -> Result<(), DaemonError> {
        let name_it = refs::store_error("name the capsule");
        for name in names.into_iter().filter(|name| self.may_have_name(name, capsule)) {
            let before = state_of(&self.store, &name).map_err(&name_it)?;
            if let Expected::Capsule(whole) = before
                && (whole != *capsule && !self.is_partial(&whole) && self.is_partial(capsule))
            {
                let kept = self.store.set_ref(&refs::previous(&whole), &whole, Expected::Anything);
                kept.map_err(&name_it)?;
            }
            self.store.set_ref(&name, capsule, before).map_err(&name_it)?;
        }
        Ok(())
    }

    /// Whether a capsule of another host may have this name here. The name of a machine's newest capsule
    /// belongs to that machine while it is here: with the name moved to an older version, or to that of a
    /// namesake, the newest could be garbage-collected.
    pub(crate) fn may_have_name(&self, name: &RefName, capsule: &CapsuleId) -> bool {
        let lives_here = |name: MachineName| match self.machines.get(&name) {
            Ok(machine) => !matches!(machine.info().state, whimbrel_api::MachineState::HandedOff { .. }),
            // With an unreadable record, it may.
            Err(error) => !matches!(error, DaemonError::NotFound { .. }),
        };
        let same = || self.store.get_ref(name).is_ok_and(|now| now == Some(*capsule));
        !refs::machine_named(name).is_some_and(lives_here) || same()
    }

    /// Fetches the rest of a partial capsule, then names it. Returns bytes on the wire and the pages in them.
    fn pull_all(
        &self,
        sources: &Arc<Holders>,
        host: &HostName,
        (capsule, names): (CapsuleId, &[RefName]),
        progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<(u64, u64), DaemonError> {
        let holders = self.holders();
        let holders: Vec<&dyn PageLookup> = holders.iter().map(|holder| &**holder).collect();
        let cancel = AtomicBool::new(false);
        let options = Options {
            bases: self.bases_of(&capsule),
            page_sources: &holders,
            cancel: &cancel,
            progress: &mut |now| cancel.store(progress(now).is_break(), Ordering::Release),
            holder_timeout: PATIENCE,
        };
        let report = pull(&self.store, sources, capsule, names, options);
        let report = report.map_err(|error| pull_error(host, error))?;
        Ok((report.sent + report.received, report.pages.delta + report.pages.plain))
    }

    /// Fetches the missing objects of a capsule, from any host that has them.
    pub(crate) fn fetch_complete(
        &self,
        capsule: CapsuleId,
        reporter: &ProgressReporter,
    ) -> Result<(), DaemonError> {
        self.fetch_from_all(capsule, &mut |progress| {
            let total = progress.received + progress.left;
            reporter.progress("fetching", Unit::Bytes, progress.received, Some(total));
            reporter.flow()
        })
    }

    /// Fetches a capsule in the background, then loads it into the machine's memory; pages that the machine
    /// touches meanwhile go first.
    pub(crate) fn fetch_complete_later(&self, capsule: CapsuleId, machine: PagerView) {
        let host = self.me.clone();
        thread::spawn(move || {
            let Some(host) = host.upgrade() else { return };
            let going_on = |_: &Progress| match host.sleep_unless_closing(Duration::ZERO) {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            };
            if let Err(error) = host.fetch_from_all(capsule, &mut { going_on }) {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(%capsule, error, "cannot fetch a capsule in the background; its pages are fetched when touched");
                return;
            }
            machine.prefetch_all();
        });
    }

    fn fetch_from_all(
        &self,
        capsule: CapsuleId,
        progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<(), DaemonError> {
        let mut going_on = |bytes, whole: u64| {
            progress(&Progress { received: bytes, left: whole.saturating_sub(bytes), ..Progress::default() })
        };
        let pooled = match self.is_partial(&capsule) {
            true => self.fetch_from_pools(capsule, &mut going_on),
            false => Ok(()),
        };
        let pooled = match self.is_partial(&capsule) {
            true => pooled.and_then(|()| self.fetch_from_buckets(capsule, &mut going_on)),
            false => pooled,
        };
        if matches!(pooled, Err(DaemonError::Cancelled { .. })) || !self.is_partial(&capsule) {
            return pooled;
        }
        let pulled = self.pull_all(&self.sources(), &self.name, (capsule, &[]), progress).map(drop);
        pulled.map_err(|error| pooled.err().unwrap_or(error))
    }

    /// Fails if a machine of this host has the name that a pulled capsule is to get.
    pub(super) fn check_name_for(&self, name: &RefName, capsule: &CapsuleId) -> Result<(), DaemonError> {
        match self.may_have_name(name, capsule) {
            true => Ok(()),
            false => Err(DaemonError::invalid(format!(
                "{} is a machine of this host: use --tag to give the capsule another name here",
                refs::known_as(name)
            ))),
        }
    }

    /// A capsule and its ancestors, of which it may lack pages.
    pub(super) fn with_ancestors(&self, capsule: CapsuleId) -> Result<BTreeSet<CapsuleId>, DaemonError> {
        let ancestors = self.store.log(&capsule).map_err(refs::store_error("read the capsule"))?;
        let parents = ancestors.iter().flat_map(|(_, manifest)| manifest.parents.iter().copied());
        Ok(parents.chain([capsule]).collect())
    }

    /// Marks a partial capsule as complete if nothing of it is missing any more.
    pub(super) fn complete_if_whole(&self, capsule: &CapsuleId) {
        if let Err(error) = self.store.complete(capsule) {
            let error = &error as &dyn std::error::Error;
            tracing::debug!(%capsule, error, "a capsule is still partial after a fetch");
        }
    }

    /// Other sources of pages on this host.
    pub(crate) fn holders(&self) -> Vec<Box<dyn PageLookup>> {
        let cache = self
            .hash_cache()
            .map(|cache| Box::new(crate::transfer::hash_cache::HashCachePages(cache)) as Box<dyn PageLookup>);
        cache.into_iter().collect()
    }

    /// Local capsules of which this one may be a later version.
    fn bases_of(&self, capsule: &CapsuleId) -> Vec<CapsuleId> {
        let ancestors = self.store.log(capsule).unwrap_or_default();
        let mut bases: Vec<CapsuleId> = ancestors.into_iter().map(|(id, _)| id).skip(1).take(BASES).collect();
        // The newest one of the same machine, if it is not among them.
        let machine = self.store.manifest(capsule).ok().and_then(|manifest| refs::machine_of(&manifest).ok());
        let newest = machine.and_then(|name| self.store.get_ref(&refs::machine_ref(&name)).ok().flatten());
        bases.extend(newest.filter(|id| id != capsule && !bases.contains(id)));
        bases
    }

    /// Handles a remote pull: another host asks this one to fetch a capsule from it. A repeated request waits
    /// for the first: a host whose link was lost asks again, and nothing is fetched twice.
    pub(crate) fn handle_remote_pull(
        self: &Arc<Self>,
        from: &HostName,
        ask: &RemotePullRequest,
    ) -> Result<(u64, u64), DaemonError> {
        let taking = self.transfers.start_pull(ask.capsule);
        let sources = self.source(from);
        self.fetch_description(&sources, from, &ask.capsule)?;
        let names = ask.refs.iter().filter(|name| self.may_have_name(name, &ask.capsule));
        let names: Vec<RefName> = names.cloned().collect();
        self.pull_all(&sources, from, (ask.capsule, &names), &mut |progress| {
            taking.set_progress(RemotePullProgress {
                received: progress.received,
                left: progress.left,
                rate: progress.rate.unwrap_or(0),
            });
            ControlFlow::Continue(())
        })
    }

    /// The host that the user named, or the only trusted one.
    pub(crate) fn other_host(&self, named: Option<HostName>) -> Result<HostName, DaemonError> {
        if let Some(name) = named {
            return Ok(name);
        }
        let trusted = self.trust.list().unwrap_or_default();
        match &trusted[..] {
            [one] => Ok(one.name.clone()),
            [] => Err(DaemonError::invalid("no host is trusted: add one with `whimbrel trust add`")),
            _ => Err(DaemonError::invalid("several hosts are trusted: name one")),
        }
    }

    /// Makes a capsule of another host ready to be resumed here, and claims the right to run its machine
    /// where that host has it.
    pub(crate) fn fetch_to_resume(
        self: &Arc<Self>,
        host: Option<&HostName>,
        capsule: &CapsuleRef,
        as_itself: impl FnOnce(&MachineName) -> bool,
    ) -> Result<(CapsuleId, Manifest, Pin), DaemonError> {
        let found = self.locate(host, capsule)?;
        let machine = found.name.as_ref().and_then(refs::machine_named).filter(as_itself);
        // Checked before anything is claimed: a machine granted to a host that cannot accept it would be
        // lost.
        machine
            .iter()
            .try_for_each(|machine| self.check_name_for_handoff(machine, &found.capsule).map(drop))?;
        let (manifest, pin) =
            self.fetch_description(&self.source(&found.host), &found.host, &found.capsule)?;
        self.name_partial(&found.capsule, found.name.into_iter().collect())?;
        self.retain_on(&found.host, found.capsule)?;
        if let Some(machine) = machine {
            let what = HandoffSubject { machine, capsule: found.capsule };
            let link = WireLink(self.peer_connection(&found.host)?);
            let (given, _) = call::<ClaimMachine>(&link, &what, Bytes::new())
                .map_err(|error| transfer_error(&found.host, error))?;
            if given {
                self.accept_handoff(&what)?;
            }
        }
        Ok((found.capsule, manifest, pin))
    }
}

pub(super) fn stop_if_cancelled(reporter: &ProgressReporter) -> Result<(), DaemonError> {
    match reporter.is_cancelled() {
        true => Err(DaemonError::Cancelled {
            left: "the other host continues to fetch; push again to see its progress".to_owned(),
        }),
        false => Ok(()),
    }
}

/// A name for a capsule that was requested by its id: without one it would not be listed, and would be
/// garbage-collected soon.
pub(super) fn name_by_id(how: &str, capsule: &CapsuleId) -> Option<RefName> {
    format!("{how}.{}", capsule.short()).parse().ok()
}

pub(super) fn bytes_moved(before: (u64, u64), after: (u64, u64)) -> u64 {
    (after.0 + after.1).saturating_sub(before.0 + before.1)
}

pub(super) fn not_found(capsule: &CapsuleRef) -> DaemonError {
    DaemonError::NotFound { what: "capsule", name: capsule.to_string() }
}

pub(crate) fn transfer_error(host: &HostName, source: LinkError) -> DaemonError {
    DaemonError::Transfer { host: host.clone(), source: source.into() }
}

pub(crate) fn fetch_error(host: &HostName, source: whimbrel_store::RemoteObjectsError) -> DaemonError {
    DaemonError::Transfer { host: host.clone(), source: source.into() }
}

pub(super) fn pull_error(host: &HostName, source: TransferError) -> DaemonError {
    match source {
        TransferError::Cancelled => {
            DaemonError::Cancelled { left: "fetched objects are kept; pull again to continue".to_owned() }
        }
        source => DaemonError::Transfer { host: host.clone(), source: source.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::sample;
    use whimbrel_store::GcRoots;

    #[test]
    fn a_whole_capsule_keeps_a_name_until_the_one_that_took_its_own_is_whole() {
        let (host, _folders) = sample::daemon();
        let store = &host.store;
        let (web, draft): (RefName, RefName) = ("web".parse().unwrap(), "draft".parse().unwrap());
        let old = sample::capsule(store, 1, vec![], "web");
        let new = sample::capsule(store, 2, vec![old], "draft");
        store.adopt_partial(&new, &[]).unwrap();
        host.name_partial(&new, vec![web.clone()]).unwrap();
        store.delete_ref(&draft, Expected::Capsule(new)).unwrap();
        // Again, as after a lost link: the old one is not what the name was at.
        host.name_partial(&new, vec![web.clone()]).unwrap();
        let collect = || {
            refs::remove_outdated_previous(store).unwrap();
            store.gc(GcRoots::Referenced).unwrap();
        };
        collect();
        assert_eq!(store.get_ref(&web).unwrap(), Some(new));
        assert_eq!(store.get_ref(&refs::previous(&old)).unwrap(), Some(old));
        assert!(store.is_complete(&old).unwrap());
        store.complete(&new).unwrap();
        collect();
        assert_eq!(store.get_ref(&refs::previous(&old)).unwrap(), None);
        assert!(!store.is_complete(&old).unwrap() && store.is_complete(&new).unwrap());
    }
}
