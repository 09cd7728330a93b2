//! Pins in pools: keeps versions there that partial capsules here need.
//!
//! A pin is held in the names of this host and of what needs it. One thread compares what is needed here with
//! what this host pins, as the pool has it, and corrects the difference; so no list of pins is stored here,
//! and pins that an earlier daemon left are released. A version is pinned before the record of its partial
//! capsule is written. What is needed follows from refs and machines: a record that none of them leads to is
//! removed, with its pin.

use super::{failed, partial_records::OpenPartial, pool_path::PoolPath};
use crate::{
    core::{
        error::DaemonError,
        refs::{self, store_error},
    },
    core::{history, state::Core},
    daemon::Daemon,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    thread,
    time::Duration,
};
use whimbrel_core::{CapsuleId, lock};
use whimbrel_pool::{
    client::{Pool, PoolError},
    protocol::code,
};

/// Interval of renewals; the shortest pin timeout that a manager accepts is far longer.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(600);
/// Delay before a pool that was unreachable is tried again.
const RETRY: Duration = Duration::from_secs(30);

type Pins = BTreeSet<(u64, String)>;

impl Daemon {
    /// Starts the thread that renews pins, including those of the previous daemon.
    pub(crate) fn start_pinning(self: &Arc<Self>) {
        let host = Arc::downgrade(self);
        thread::spawn(move || {
            while let Some(host) = host.upgrade().filter(|host| host.is_open()) {
                let all_said = host.reconcile_pins() & host.renew_holders();
                host.pools.notifier.wait(if all_said { RENEWAL_INTERVAL } else { RETRY });
            }
        });
    }

    /// Pins a version for `subject`, then records the pool of a partial capsule.
    pub(super) fn pin_and_record(
        &self,
        capsule: CapsuleId,
        noted: Arc<OpenPartial>,
        subject: &str,
    ) -> Result<(), DaemonError> {
        let _settled = lock(&self.pools.pin_lock);
        let (place, version) = (&noted.record.pool, noted.record.version);
        let pool = self.pool(place)?;
        lock(&self.pools.pinned_in).insert(place.pool_name(), place.clone());
        match pool.block(pool.hold(version, &self.holder(subject))) {
            Err(error) if error.code() == Some(code::NOT_FOUND) => {
                Err(DaemonError::NotFound { what: "version any more of", name: format!("{place}/{subject}") })
            }
            held => held.map(drop).map_err(|error| failed(place)(error.into())),
        }?;
        self.pools.records.add(capsule, noted)
    }

    /// Removes records that nothing needs, pins what is needed and releases other pins. Returns whether all
    /// pools were reached.
    fn reconcile_pins(&self) -> bool {
        let _settled = lock(&self.pools.pin_lock);
        let wanted = match self.wanted_pins() {
            Ok(wanted) => wanted,
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot determine which pins are needed"
                );
                return false;
            }
        };
        let places = lock(&self.pools.pinned_in).clone();
        let mut all_said = true;
        for (name, place) in places {
            let wanted = wanted.get(&name).cloned().unwrap_or_default();
            let settled = self.pool(&place).and_then(|pool| {
                pool.block(reconcile(&pool, &wanted)).map_err(|error| failed(&place)(error.into()))
            });
            match settled {
                Ok(()) if wanted.is_empty() => drop(lock(&self.pools.pinned_in).remove(&name)),
                Ok(()) => {}
                Err(error) => {
                    all_said = false;
                    tracing::debug!(error = &error as &dyn std::error::Error, "cannot renew pins yet");
                }
            }
        }
        all_said
    }

    /// The versions needed in each pool, and their holders.
    fn wanted_pins(&self) -> Result<BTreeMap<String, Pins>, DaemonError> {
        let mut needed = self.needed_records()?;
        let mut wanted: BTreeMap<String, Pins> = BTreeMap::new();
        for (capsule, noted) in self.pools.records.entries() {
            let mut holders = needed.remove(&capsule).unwrap_or_default();
            holders.extend(noted.new_subject().map(str::to_owned));
            if holders.is_empty() {
                self.pools.records.remove(&capsule);
                continue;
            }
            let place = &noted.record.pool;
            lock(&self.pools.pinned_in).entry(place.pool_name()).or_insert_with(|| place.clone());
            let pins = holders.iter().map(|subject| (noted.record.version, self.holder(subject)));
            wanted.entry(place.pool_name()).or_default().extend(pins);
        }
        Ok(wanted)
    }

    /// Recorded capsules that refs and machines lead to, with the names of those.
    fn needed_records(&self) -> Result<BTreeMap<CapsuleId, BTreeSet<String>>, DaemonError> {
        let mut needed: BTreeMap<CapsuleId, BTreeSet<String>> = BTreeMap::new();
        if self.pools.records.entries().is_empty() {
            return Ok(needed);
        }
        let partial = self.store.partials().map_err(store_error("list partial capsules"))?;
        let refs = self.store.list_refs().map_err(store_error("read the refs"))?;
        let name_of = |name: &str| history::machine_in(name).unwrap_or(name).to_owned();
        let mut roots: Vec<(String, CapsuleId)> =
            refs.iter().map(|(name, id)| (name_of(refs::known_as(name)), *id)).collect();
        for machine in self.machine_infos() {
            let stands_on = [machine.follows, machine.origin].into_iter().flatten();
            roots.extend(stands_on.map(|id| (machine.name.to_string(), id)));
        }
        for (name, root) in roots.into_iter().filter(|(_, root)| partial.contains(root)) {
            for capsule in self.records_under(root) {
                needed.entry(capsule).or_default().insert(name.clone());
            }
        }
        Ok(needed)
    }

    /// Recorded capsules of which a partial one may lack pages: the nearest among its ancestors. If not all
    /// of those are known, all recorded ones.
    fn records_under(&self, root: CapsuleId) -> Vec<CapsuleId> {
        let (mut open, mut seen, mut found) = (vec![root], BTreeSet::new(), Vec::new());
        while let Some(capsule) = open.pop() {
            if !seen.insert(capsule) {
                continue;
            }
            if self.pools.records.of(&capsule).is_some() {
                found.push(capsule);
                continue;
            }
            match self.store.manifest(&capsule) {
                Ok(manifest) => open.extend(manifest.parents),
                Err(_) => return self.pools.records.entries().into_iter().map(|(id, _)| id).collect(),
            }
        }
        found
    }
}

impl Core {
    fn holder(&self, subject: &str) -> String {
        format!("{}/{subject}", self.name)
    }
}

/// Pins the needed versions in a pool and releases all others of this host.
async fn reconcile(pool: &Pool, wanted: &Pins) -> Result<(), PoolError> {
    for (version, holder) in wanted {
        match pool.hold(*version, holder).await {
            Err(error) if error.code() == Some(code::NOT_FOUND) => {
                tracing::error!(version, holder, "a pool no longer has a version that a machine here needs");
            }
            held => drop(held?),
        }
    }
    for pin in pool.pins(true).await? {
        let Some(held) = pin.held.filter(|held| !wanted.contains(&(pin.id, held.holder.clone()))) else {
            continue;
        };
        match pool.release_pin(pin.id, &held.holder, false).await {
            Err(error) if error.code() == Some(code::NOT_FOUND) => {}
            gone => gone?,
        }
    }
    Ok(())
}

impl PoolPath {
    /// The pool without the folder.
    pub(super) fn pool_name(&self) -> String {
        Self { folder: String::new(), ..self.clone() }.to_string()
    }
}
