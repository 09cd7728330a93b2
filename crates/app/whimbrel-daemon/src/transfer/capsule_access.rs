//! Access to capsules: which capsules and objects of this host's store a caller may fetch.
//!
//! A caller that may read everything is asked nothing more. For a limited one, the refs that it may read
//! and the older versions of the same machines are its capsules; an object is served only if one of these
//! leads to it. A clone needs all objects of its own trees, so they are served, but not the capsules of its
//! parents, which belong to other machines. The objects of a capsule never change: they are listed once, by
//! short digest.

use crate::{
    core::{
        refs,
        rights::{self, Access, Caller},
    },
    daemon::Daemon,
};
use std::{
    cell::OnceCell,
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use whimbrel_core::{CapsuleId, Digest, HostName, RefName, lock};
use whimbrel_image::{Manifest, Node, ShortDigest};
use whimbrel_store::Store;
use whimbrel_transfer::LocalObjects;
use whimbrel_wire::TrustedPeer;

/// How long the list of readable capsules serves without a look at the refs. A change of the trust list
/// counts at once, and so does a new capsule: what is not found is looked for again.
const FRESH: Duration = Duration::from_secs(1);
/// How long the list of objects of a partial capsule serves: more of them may have arrived.
const PARTIAL_FRESH: Duration = Duration::from_secs(5);
/// Most objects in all lists together, at about 24 bytes each.
const OBJECTS_MAX: usize = 4 << 20;

/// The objects of one capsule.
type ObjectSet = Arc<HashSet<ShortDigest>>;

/// Lists of objects, by capsule, and the capsules that limited hosts may read.
#[derive(Default)]
pub(crate) struct CapsuleAccessCache {
    objects: Mutex<HashMap<CapsuleId, (ObjectSet, Option<Instant>)>>,
    readable: Mutex<BTreeMap<HostName, Arc<Readable>>>,
}

/// What a limited host may read.
struct Readable {
    entry: TrustedPeer,
    since: Instant,
    capsules: BTreeMap<CapsuleId, ObjectSet>,
}

impl Readable {
    fn has(&self, digest: &Digest) -> bool {
        let key = ShortDigest::from(digest);
        self.capsules.values().any(|objects| objects.contains(&key))
    }
}

/// How much of the store a caller may read.
enum Scope<'a> {
    Everything,
    Named(&'a TrustedPeer),
    Nothing,
}

/// The access of one caller.
pub(crate) struct CapsuleAccess<'a> {
    store: &'a Store,
    cache: &'a CapsuleAccessCache,
    caller: &'a Caller,
    scope: Scope<'a>,
    /// What this access has looked up itself, once for all objects of one request.
    looked_up: OnceCell<Arc<Readable>>,
}

impl Daemon {
    /// The access of `caller` to the capsules of this host, for one request.
    pub(crate) fn capsule_access<'a>(&'a self, caller: &'a Caller) -> CapsuleAccess<'a> {
        CapsuleAccess::new(&self.store, &self.transfers.access, caller)
    }
}

impl<'a> CapsuleAccess<'a> {
    fn new(store: &'a Store, cache: &'a CapsuleAccessCache, caller: &'a Caller) -> Self {
        let scope = match caller {
            _ if caller.reads_everything() => Scope::Everything,
            Caller::Peer(entry) => Scope::Named(entry),
            Caller::Owner | Caller::Stranger => Scope::Nothing,
        };
        Self { store, cache, caller, scope, looked_up: OnceCell::new() }
    }

    /// Whether the caller may read everything, or `found` holds for what it may read now.
    fn reads_any(&self, found: impl Fn(&Readable) -> bool) -> bool {
        let entry = match self.scope {
            Scope::Everything => return true,
            Scope::Nothing => return false,
            Scope::Named(entry) => entry,
        };
        if let Some(readable) = self.looked_up.get() {
            return found(readable);
        }
        let known = lock(&self.cache.readable).get(&entry.name).cloned();
        let fresh = known.filter(|known| known.entry == *entry && known.since.elapsed() < FRESH);
        if fresh.is_some_and(|known| found(&known)) {
            return true;
        }
        let readable = self.looked_up.get_or_init(|| Arc::new(self.read(entry)));
        lock(&self.cache.readable).insert(entry.name.clone(), readable.clone());
        found(readable)
    }

    /// Whether the caller may read the machine that a capsule was taken from. A machine may run from a
    /// capsule that has lost its name here, and is pinned for that host.
    fn reads_machine_of(&self, capsule: &CapsuleId) -> bool {
        let machine = self.store.manifest(capsule).ok().and_then(|manifest| refs::machine_of(&manifest).ok());
        machine.is_some_and(|name| rights::may_use(self.caller, Access::Read, &refs::machine_ref(&name)))
    }

    fn read(&self, entry: &TrustedPeer) -> Readable {
        let store = self.store;
        let since = Instant::now();
        let (refs, _) = store.readable_refs().unwrap_or_default();
        let pins = format!("{}{}.", refs::READER, entry.name);
        let named = refs.into_iter().filter(|(name, id)| {
            let pinned = || name.as_str().starts_with(&pins) && self.reads_machine_of(id);
            rights::may_use(self.caller, Access::Read, name) || pinned()
        });
        let mut left: Vec<CapsuleId> = named.map(|(_, id)| id).collect();
        let mut capsules = BTreeMap::new();
        while let Some(id) = left.pop() {
            if capsules.contains_key(&id) {
                continue;
            }
            let Ok(manifest) = store.manifest(&id) else { continue };
            left.extend(older_versions(store, &manifest));
            capsules.insert(id, self.cache.objects_of(store, &id, &manifest));
        }
        Readable { entry: entry.clone(), since, capsules }
    }
}

/// Parents of the same machine: a host may still be fetching them, although a newer one has the name.
fn older_versions(store: &Store, manifest: &Manifest) -> Vec<CapsuleId> {
    let Ok(machine) = refs::machine_of(manifest) else { return Vec::new() };
    let same = |id: &&CapsuleId| {
        let parent = store.manifest(id).ok().and_then(|parent| refs::machine_of(&parent).ok());
        parent.is_some_and(|parent| parent == machine)
    };
    manifest.parents.iter().filter(same).copied().collect()
}

impl CapsuleAccessCache {
    fn objects_of(&self, store: &Store, id: &CapsuleId, manifest: &Manifest) -> ObjectSet {
        if let Some((objects, partial_since)) = lock(&self.objects).get(id)
            && partial_since.is_none_or(|since| since.elapsed() < PARTIAL_FRESH)
        {
            return objects.clone();
        }
        let (objects, whole) = objects_of(store, manifest);
        let objects = Arc::new(objects);
        let mut lists = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        if lists.values().map(|(objects, _)| objects.len()).sum::<usize>() + objects.len() > OBJECTS_MAX {
            lists.clear();
        }
        lists.insert(*id, (objects.clone(), (!whole).then(Instant::now)));
        objects
    }
}

/// Nodes and blobs of a capsule as far as they are here, and whether all are. Pages are served by their leaf.
fn objects_of(store: &Store, manifest: &Manifest) -> (HashSet<ShortDigest>, bool) {
    let mut found: HashSet<ShortDigest> = manifest.blobs().map(|blob| ShortDigest::from(&blob)).collect();
    let (mut left, mut whole) = (Vec::new(), true);
    left.extend(manifest.images.iter().filter_map(|image| image.root));
    while let Some(digest) = left.pop() {
        if !found.insert(ShortDigest::from(&digest)) {
            continue;
        }
        match LocalObjects::object(store, &digest).and_then(|bytes| Node::decode(&bytes).ok()) {
            Some(node) if node.level() > 0 => left.extend(node.children().map(|(_, child)| child)),
            Some(_) => {}
            None => whole = false,
        }
    }
    (found, whole)
}

impl whimbrel_transfer::Access for CapsuleAccess<'_> {
    fn allowed(&self, capsule: &CapsuleId) -> bool {
        self.reads_any(|readable| readable.capsules.contains_key(capsule))
    }

    fn may_have(&self, digest: &Digest) -> bool {
        self.reads_any(|readable| readable.has(digest))
    }

    fn may_list(&self, name: &RefName, _: &CapsuleId) -> bool {
        rights::may_use(self.caller, Access::Read, name)
    }
}

#[cfg(test)]
#[path = "capsule_access_tests.rs"]
mod tests;
