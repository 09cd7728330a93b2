//! Garbage collection, concurrent with readers and writers of any process.
//!
//! One collection runs at a time (`gc.lock`). It marks what refs and pins need, moves the live frames out of
//! packs that are mostly dead, *condemns* those packs, and removes condemned packs that no process can rely
//! on any more. The next collection handles packs that have to wait. Reasons why no needed object is removed:
//!
//! - A writer's new packs look dead, since nothing refers to them yet: packs of a live GC lease are never
//!   condemned, and the list of packs is read before the list of leases.
//! - A writer finds an object whose pack is then condemned and removed before the commit: a pack is removed
//!   only when every live lease is younger than its condemnation, and younger writers know the list of
//!   condemned packs and store the object again.
//! - A writer never touches some subtrees of its base image: it pins the base under the gate before it uses
//!   it, and pins are roots.
//! - A commit or `set_ref` comes after the marking: both hold the gate shared; the last step (mark what is
//!   new, spare, condemn, remove) holds it exclusively.
//! - A partial capsule becomes complete after the marking, with objects that looked dead: the last step marks
//!   all capsules again that were partial.
//! - A deleted ref: its capsule stays until the next collection.
//! - A reader has an old index and the pack is gone: live objects were moved before. It finds the file
//!   missing, reads the indexes again and finds the copy.
//! - The ref is deleted while a machine reads its capsule lazily: the machine has a `Pin`.
//! - A merge of indexes could restore one with removed packs: both hold `index.lock`.
//! - An index file that cannot be read now would name a removed pack once it can: then nothing is removed.
//! - A crash at any point: copies are durable before the condemnation, the condemnation before the removal.
//!   Indexes drop packs before these are removed. Leases end with their process.
//! - A delta's base is moved into a delta of its own: bases are only looked up at less depth, in marking and
//!   in reading.
//! - A writer finds a dead delta: deltas in packs that stay retain their bases, dead or not.
//! - The base that a writer chose for a delta is removed, and another copy of it is too deep: writers take
//!   bases only from packs that were not condemned when they started.

use crate::{
    encryption::batch,
    error::{Result, StoreError},
    file_names::{PACKS, PackId, REFS, TEMP},
    gc_lease::{Condemned, GcLease, LiveGcLeases, Pinned, Purpose, gate, live_leases},
    index::PackLocation,
    mark::Mark,
    pack_writer::{self, Failure, Message, NewFrame},
    reserve,
    store::Store,
    vfs::{LockMode, LockWait},
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::mpsc::sync_channel,
};
use whimbrel_core::{
    ByteSize, CapsuleId,
    loss::{Loss, is_back},
};
use whimbrel_image::pack_frame::{Kind, PackFrame};

pub(crate) const GC_LOCK: &str = "gc.lock";
/// Size below which packs are merged into one, once there are [`MANY`].
const SMALL: u64 = 4 << 20;
const MANY: usize = 16;

/// Capsules that a collection retains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcRoots {
    /// Capsules that a ref names. A capsule needs no object of its parents.
    Referenced,
    /// Referenced capsules and their ancestors that are still in the store.
    Ancestors,
}

/// Capsules that a collection retains, and those that the caller named.
#[derive(Clone, Copy)]
struct Roots<'a> {
    keep: GcRoots,
    also: &'a [CapsuleId],
}

/// Work of a collection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effort {
    /// Move live frames out of packs that are mostly dead.
    Compact,
    /// Remove dead packs, which needs hardly any room.
    RemoveOnly,
}

/// Result of a collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GcReport {
    /// Number of capsules retained.
    pub capsules: usize,
    /// Bytes of packs before the collection.
    pub before: ByteSize,
    /// Live bytes moved to new packs.
    pub moved: ByteSize,
    /// Bytes of the removed packs.
    pub removed: ByteSize,
    /// Condemned packs that wait for writers to end.
    pub waiting: usize,
}

impl Store {
    /// Collects garbage: removes objects that no ref, pin or live writer needs. A store that was latched is
    /// reopened first.
    pub fn gc(&self, keep: GcRoots) -> Result<GcReport> {
        self.gc_retaining(keep, &[])
    }

    /// Like [`Self::gc`], but retains what is here of these capsules as well. On a full disk it uses the
    /// reserve, and only removes packs that nothing needs.
    pub fn gc_retaining(&self, keep: GcRoots, also: &[CapsuleId]) -> Result<GcReport> {
        self.reopen()?;
        let report = match self.collect(keep, also, Effort::Compact) {
            Err(error) if error.is_full_disk() => {
                reserve::release(&*self.inner.files)?;
                self.collect(keep, also, Effort::RemoveOnly)
            }
            other => other,
        };
        self.refill_reserve();
        report
    }

    fn collect(&self, keep: GcRoots, also: &[CapsuleId], effort: Effort) -> Result<GcReport> {
        let inner = &self.inner;
        let lock = inner.files.lock(GC_LOCK, LockMode::Exclusive, LockWait::Wait);
        let _one = lock.map_err(StoreError::io("lock", GC_LOCK))?;
        inner.layout.check(&*inner.files)?;
        self.reindex()?;
        let (lease, condemned) = {
            let _gate = gate(&*inner.files, LockMode::Shared)?;
            let condemned = Condemned::read(&*inner.files)?;
            (GcLease::new(inner.files.clone(), Purpose::Write, condemned.generation)?, condemned)
        };
        inner.objects.indexes.refresh_whole()?;
        let packs = inner.objects.indexes.packs();
        let sessions = live_leases(&*inner.files, lease.id, false)?;
        let mut mark = Mark::new(self, condemned.ids());
        let roots = Roots { keep, also };
        self.mark_roots(&mut mark, roots, &sessions)?;
        mark.avoid = victims(&packs, &mark.live, &sessions, &condemned);
        let is_settled = |pack: &PackId| !sessions.ids.contains(&pack.lease) && !mark.avoid.contains(pack);
        let plain = self.plain_packs().into_iter().filter(|(pack, _)| is_settled(pack));
        let plain: Vec<PackId> =
            batch(plain.map(|(pack, len)| (pack, u64::from(len))), inner.options.seal_bytes).collect();
        mark.avoid.extend(plain);
        match effort {
            Effort::Compact => mark.mark_bases_of_remaining()?,
            Effort::RemoveOnly => mark.spare_live()?,
        }
        let mut victims = mark.avoid.clone();
        let moved = self.move_live(&lease, &mark.live, &mut victims)?;
        let before = ByteSize(packs.values().map(|len| u64::from(*len)).sum());
        mark.avoid = victims;
        let report = self.condemn_and_remove(&lease, mark, roots, condemned, &packs)?;
        Ok(GcReport { before, moved, ..report })
    }

    fn mark_roots(&self, mark: &mut Mark<'_>, roots: Roots<'_>, sessions: &LiveGcLeases) -> Result<()> {
        let refs: Vec<_> = self.list_refs()?.into_values().collect();
        refs.iter().try_for_each(|id| mark.capsule(id))?;
        roots.also.iter().try_for_each(|id| mark.present_part(id))?;
        if roots.keep == GcRoots::Ancestors {
            self.ancestors(refs)?.iter().try_for_each(|(id, _)| mark.capsule(id))?;
        }
        let mut pins = sessions.pins.iter().filter(|_| !is_back(Loss::PinsIgnored));
        pins.try_for_each(|pinned| mark.pinned(pinned))
    }

    /// Copies live frames out of `victims`; a pack with a frame that cannot be copied is spared. Returns the
    /// number of bytes.
    fn move_live(
        &self,
        lease: &GcLease,
        live: &HashSet<PackLocation>,
        victims: &mut HashSet<PackId>,
    ) -> Result<ByteSize> {
        let objects = &self.inner.objects;
        let (pack, thread) = pack_writer::start(self.inner.clone(), lease.id, Failure::default())?;
        let mut moved = HashMap::new();
        for index in objects.indexes.snapshot().iter() {
            if !index.packs().iter().any(|(id, _)| victims.contains(id)) {
                continue;
            }
            let path = || index.name.clone();
            let contents = index
                .contents()
                .ok_or_else(|| StoreError::Index { path: path(), reason: "body checksum" })?;
            for entry in contents {
                if !live.contains(&entry.frame) || !victims.contains(&entry.frame.pack) {
                    continue;
                }
                let bytes = match objects.encoded(&entry.frame) {
                    Ok(bytes) if PackFrame::parse(&bytes).is_ok() => bytes,
                    Ok(_) | Err(StoreError::Damaged { .. }) => {
                        victims.remove(&entry.frame.pack);
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                if moved.insert(entry.frame, bytes.len() as u64).is_none() {
                    let PackLocation { kind, depth, .. } = entry.frame;
                    let frame = NewFrame { kind, depth, keys: entry.keys, bytes };
                    pack.send(Message::Frame(frame)).map_err(|_| StoreError::Latched { action: "append" })?;
                }
            }
        }
        let (reply, answer) = sync_channel(1);
        pack.send(Message::Flush(reply)).map_err(|_| StoreError::Latched { action: "append" })?;
        let flushed = answer.recv().map_err(|_| StoreError::Latched { action: "append" });
        drop(pack);
        let _ = thread.join();
        flushed??;
        Ok(ByteSize(moved.values().sum()))
    }

    /// Condemns and removes packs: the last step, under the exclusive gate.
    fn condemn_and_remove(
        &self,
        lease: &GcLease,
        mut mark: Mark<'_>,
        roots: Roots<'_>,
        mut condemned: Condemned,
        packs: &BTreeMap<PackId, u32>,
    ) -> Result<GcReport> {
        let (inner, files) = (&self.inner, &*self.inner.files);
        let _gate = gate(files, LockMode::Exclusive)?;
        let sessions = live_leases(files, lease.id, true)?;
        inner.objects.indexes.refresh_whole()?;
        let known = std::mem::take(&mut mark.live);
        if !is_back(Loss::MarkedOnce) {
            self.mark_roots(&mut mark, roots, &sessions)?;
        }
        // Frames that became needed while others were moved stay where they are, as do their packs and the
        // bases of those packs' deltas.
        mark.spare_live()?;

        condemned.generation += 1;
        let mut sentenced: BTreeMap<PackId, u64> =
            mark.avoid.iter().map(|pack| (*pack, condemned.generation)).collect();
        sentenced.extend(condemned.packs.iter().copied().filter(|(pack, _)| mark.avoid.contains(pack)));
        condemned.packs = sentenced.into_iter().collect();
        inner.latching(condemned.write(files))?;

        let gone: HashSet<PackId> = condemned
            .packs
            .iter()
            .filter(|(_, birth)| *birth <= sessions.oldest || is_back(Loss::WritersIgnored))
            .map(|(pack, _)| *pack)
            .collect();
        // A loss of power brings back a name that somebody is still removing or moving, and with it what it
        // named: not from here on.
        inner.latching(files.sync_dir(REFS).map_err(StoreError::io("sync", REFS)))?;
        mark.live.extend(known);
        let dead = dead_manifests(self, &mark, &sessions);
        inner.latching(self.remove_packs(&gone, &dead))?;
        condemned.packs.retain(|(pack, _)| !gone.contains(pack));
        inner.latching(condemned.write(files))?;
        if sessions.ids.len() == 1 {
            remove_leftovers(self)?;
        }
        // A machine may run from a capsule without a ref; its missing objects are still on other hosts.
        let held =
            |id: &CapsuleId| mark.capsules.contains(id) || sessions.pins.contains(&Pinned::Object(id.0));
        for id in self.partials()?.iter().filter(|id| !held(id)) {
            inner.latching(self.unmark_partial(id))?;
        }
        let removed =
            ByteSize(gone.iter().filter_map(|pack| packs.get(pack)).map(|len| u64::from(*len)).sum());
        Ok(GcReport {
            capsules: mark.capsules.len(),
            removed,
            waiting: condemned.packs.len(),
            ..GcReport::default()
        })
    }

    fn remove_packs(&self, gone: &HashSet<PackId>, dead: &HashSet<PackLocation>) -> Result<()> {
        let inner = &self.inner;
        if gone.is_empty() && dead.is_empty() {
            return Ok(());
        }
        inner.objects.indexes.remove(gone, dead)?;
        inner.objects.close(gone.iter().copied());
        for pack in gone {
            match inner.files.remove(&pack.path()) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                other => other.map_err(StoreError::io("remove", &pack.path()))?,
            }
        }
        inner.files.sync_dir(PACKS).map_err(StoreError::io("sync", PACKS))
    }
}

/// Packs to empty: those without a live writer that are more dead than live, small ones once there are many,
/// and those condemned by earlier collections.
fn victims(
    packs: &BTreeMap<PackId, u32>,
    live: &HashSet<PackLocation>,
    sessions: &LiveGcLeases,
    condemned: &Condemned,
) -> HashSet<PackId> {
    let mut used = HashMap::<PackId, u64>::new();
    for place in live {
        *used.entry(place.pack).or_default() += u64::from(place.len);
    }
    let settled: Vec<(PackId, u64)> = packs
        .iter()
        .filter(|(pack, _)| !sessions.ids.contains(&pack.lease))
        .map(|(pack, len)| (*pack, u64::from(*len)))
        .collect();
    let small: Vec<PackId> = settled.iter().filter(|(_, len)| *len < SMALL).map(|(pack, _)| *pack).collect();
    let sparse = settled.iter().filter(|(pack, len)| used.get(pack).copied().unwrap_or(0) * 2 < *len);
    let mut victims: HashSet<PackId> = sparse.map(|(pack, _)| *pack).collect();
    if small.len() >= MANY {
        victims.extend(small);
    }
    victims.extend(condemned.ids());
    victims
}

/// Unneeded manifests in packs that stay. The index drops them, or capsules would be listed whose pages are
/// gone. Only while there is no live writer that may have found one.
fn dead_manifests(store: &Store, mark: &Mark<'_>, sessions: &LiveGcLeases) -> HashSet<PackLocation> {
    if sessions.oldest != u64::MAX {
        return HashSet::new();
    }
    let indexes = store.inner.objects.indexes.snapshot();
    let manifests =
        indexes.iter().flat_map(|index| index.places()).filter(|place| place.kind == Kind::Manifest);
    manifests
        .filter(|place| !mark.live.contains(place) && !sessions.ids.contains(&place.pack.lease))
        .collect()
}

/// Removes temporary files of dead processes; the caller knows that nothing is being published.
fn remove_leftovers(store: &Store) -> Result<()> {
    let files = &store.inner.files;
    for name in files.list(TEMP).map_err(StoreError::io("list", TEMP))? {
        let _ = files.remove(&format!("{TEMP}/{name}"));
    }
    Ok(())
}
