//! Reader pins: capsules that this host retains because machines of another host read them lazily.
//!
//! A host that has only a part of a capsule names it to the hosts that may have the rest, when a machine
//! starts from it and then every half minute. Each pins what it has by a ref `reader.HOST.ID`: durable, a
//! root of garbage collection, shown by `ls`, and removed when that host does not name the capsule any more.
//! The pins of a host that will never come back are removed by hand, with `untag`.

use crate::{
    core::{error::DaemonError, refs},
    daemon::Daemon,
};
use bytes::Bytes;
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};
use whimbrel_core::{CapsuleId, Digest, HostName, RefName, lock};
use whimbrel_store::{Expected, Store, StoreError};
use whimbrel_transfer::{
    Access, WireLink, call,
    protocol::{RETAINED_MAX, Retain, RetainRequest},
};

/// Interval at which a reader names what it reads.
const INTERVAL: Duration = Duration::from_secs(30);

/// State of the pins for other hosts.
#[derive(Default)]
pub(crate) struct ReaderPins {
    /// Pins that the last full list of their host lacked. A list may be older than a pin, so the next one
    /// decides.
    unnamed: Mutex<HashSet<RefName>>,
}

impl ReaderPins {
    /// Pins what `reader` names and may read, and removes pins that it did not name twice.
    pub(super) fn update(
        &self,
        store: &Store,
        reader: &HostName,
        ask: &RetainRequest,
        access: &dyn Access,
    ) -> Result<(), StoreError> {
        let mut unnamed = lock(&self.unnamed);
        let capsules = ask.capsules.iter().take(RETAINED_MAX);
        let wanted: BTreeMap<RefName, CapsuleId> = capsules.map(|id| (pin_name(reader, id), *id)).collect();
        unnamed.retain(|name| !wanted.contains_key(name));
        let refs = store.list_refs()?;
        let pins = refs.iter().filter(|(name, id)| **name == pin_name(reader, id));
        for (name, id) in pins.filter(|(name, _)| ask.all && !wanted.contains_key(*name)) {
            if !unnamed.insert(name.clone()) {
                unnamed.remove(name);
                store.delete_ref(name, Expected::Capsule(*id))?;
            }
        }
        for (name, id) in wanted.iter().filter(|(name, _)| !refs.contains_key(*name)) {
            if store.has(&[id.0]) == [true] && access.allowed(id) {
                match store.set_ref(name, id, Expected::Absent) {
                    // The rest of a deleted capsule is nothing to retain.
                    Err(StoreError::Missing { .. } | StoreError::Incomplete { .. }) => {}
                    set => set?,
                }
            }
        }
        Ok(())
    }
}

/// The ref that retains a capsule for another host. A host name that is too long is replaced by its digest.
fn pin_name(reader: &HostName, capsule: &CapsuleId) -> RefName {
    let name = |reader: &str| format!("{}{reader}.{}", refs::READER, capsule.short()).parse();
    let digest = || Digest::of(reader.as_str().as_bytes()).to_string();
    name(reader.as_str()).unwrap_or_else(|_| name(&digest()[..40]).expect("digits are a valid ref"))
}

/// Capsules whose missing objects are on other hosts: the partial ones, and those ancestors of them that are
/// not whole here, because only what a machine changed is in the newer ones.
fn read_elsewhere(store: &Store) -> Result<BTreeSet<CapsuleId>, StoreError> {
    let partial = store.partials()?;
    let named: HashSet<CapsuleId> = store.list_refs()?.into_values().collect();
    let mut wanted = BTreeSet::new();
    let mut level: Vec<CapsuleId> = partial.iter().copied().collect();
    while let Some(id) = level.pop().filter(|_| wanted.len() < RETAINED_MAX) {
        let whole = named.contains(&id) && !partial.contains(&id);
        if !whole && wanted.insert(id) {
            level.extend(store.manifest(&id).ok().into_iter().flat_map(|manifest| manifest.parents));
        }
    }
    Ok(wanted)
}

impl Daemon {
    /// Starts the thread that names what machines here read from other hosts.
    pub(crate) fn start_naming_read_capsules(self: &Arc<Self>) {
        let host = Arc::downgrade(self);
        let started = std::thread::Builder::new().name("reader-pins".into()).spawn(move || {
            while let Some(host) = host.upgrade() {
                host.name_read_capsules();
                if !host.sleep_unless_closing(INTERVAL) {
                    return;
                }
            }
        });
        if let Err(error) = started {
            tracing::error!(%error, "other hosts are not told which capsules machines here read");
        }
    }

    fn name_read_capsules(&self) {
        let capsules = match read_elsewhere(&self.store) {
            Ok(capsules) => capsules.into_iter().collect(),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                return tracing::warn!(error, "cannot tell which capsules are read from other hosts");
            }
        };
        let ask = RetainRequest { all: true, capsules };
        for connection in self.connections.all() {
            let to = connection.peer().name.clone();
            if let Err(error) = call::<Retain>(&WireLink(connection), &ask, Bytes::new()) {
                tracing::debug!(%to, error = &error as &dyn std::error::Error, "a host was not told what is read from it");
            }
        }
    }

    /// Has another host retain a capsule that a machine here is about to read lazily.
    pub(crate) fn retain_on(&self, host: &HostName, capsule: CapsuleId) -> Result<(), DaemonError> {
        if !self.is_partial(&capsule) {
            return Ok(());
        }
        let ask = RetainRequest { all: false, capsules: vec![capsule] };
        let link = WireLink(self.peer_connection(host)?);
        if let Err(error) = call::<Retain>(&link, &ask, Bytes::new()) {
            // An earlier version retains nothing, and serves all the same.
            tracing::warn!(%host, %capsule, error = &error as &dyn std::error::Error, "a host does not retain a capsule that is read from it");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::sample::capsule;
    use whimbrel_store::{GcRoots, Options};

    fn open() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), Options { workers: 1, ..Options::create() }).unwrap();
        (dir, store)
    }

    fn anyone(_: &CapsuleId) -> bool {
        true
    }

    #[test]
    fn what_a_machine_elsewhere_reads_outlives_its_last_name_until_its_host_releases_it() {
        let (_dir, store) = open();
        let (pins, beta) = (ReaderPins::default(), "beta".parse::<HostName>().unwrap());
        let id = capsule(&store, 1, vec![], "web");
        let tell = |all, capsules: &[CapsuleId]| {
            let ask = RetainRequest { all, capsules: capsules.to_vec() };
            pins.update(&store, &beta, &ask, &anyone).unwrap();
        };
        tell(false, &[id]);
        store.delete_ref(&"web".parse().unwrap(), Expected::Capsule(id)).unwrap();
        store.gc(GcRoots::Referenced).unwrap();
        assert!(store.is_complete(&id).unwrap());
        assert_eq!(store.list_refs().unwrap().into_keys().collect::<Vec<_>>(), [pin_name(&beta, &id)]);
        // A list that is older than the pin, the one that has it, and another host's.
        tell(true, &[]);
        tell(true, &[id]);
        tell(true, &[]);
        let none = RetainRequest { all: true, capsules: vec![] };
        let gamma = "gamma".parse().unwrap();
        (0..3).for_each(|_| pins.update(&store, &gamma, &none, &anyone).unwrap());
        assert_eq!(store.list_refs().unwrap().len(), 1);
        tell(true, &[]);
        assert!(store.list_refs().unwrap().is_empty());
    }

    #[test]
    fn nobody_pins_what_it_may_not_read_or_what_is_not_here_or_without_end() {
        let (_dir, store) = open();
        let (pins, beta) = (ReaderPins::default(), "b".repeat(63).parse::<HostName>().unwrap());
        let id = capsule(&store, 1, vec![], "web");
        let strange = (0..RETAINED_MAX as u32).map(|n| CapsuleId(Digest::of(&n.to_le_bytes())));
        let ask = RetainRequest { all: true, capsules: strange.chain([id]).collect() };
        pins.update(&store, &beta, &ask, &anyone).unwrap();
        assert_eq!(store.list_refs().unwrap().len(), 1, "one too many");
        let ask = RetainRequest { all: true, capsules: vec![id] };
        pins.update(&store, &beta, &ask, &|_: &CapsuleId| false).unwrap();
        assert_eq!(store.list_refs().unwrap().len(), 1, "not allowed");
        pins.update(&store, &beta, &ask, &anyone).unwrap();
        assert_eq!(store.list_refs().unwrap().len(), 2);
    }

    #[test]
    fn a_machine_reads_what_its_capsule_and_the_ones_before_it_lack() {
        let (_dir, store) = open();
        let whole = capsule(&store, 1, vec![], "whole");
        let elsewhere = CapsuleId(Digest::of(b"never was here"));
        let part = capsule(&store, 2, vec![whole, elsewhere], "part");
        let newest = capsule(&store, 3, vec![part], "newest");
        assert!(read_elsewhere(&store).unwrap().is_empty());
        store.adopt_partial(&part, &[]).unwrap();
        store.adopt_partial(&newest, &[]).unwrap();
        store.delete_ref(&"part".parse().unwrap(), Expected::Capsule(part)).unwrap();
        assert_eq!(read_elsewhere(&store).unwrap(), [part, newest, elsewhere].into());
    }
}
