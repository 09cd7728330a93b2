//! Witness service: decides for two other hosts which one may run a machine that they protect.
//!
//! The rules are those of [`WitnessLease`]. This module holds the table, checks who may ask, and makes
//! durable that a protection is registered and how it ended, each before anybody is told. Expiry times are
//! not durable; a restarted witness waits for a whole term first.

use crate::core::error::DaemonError;
use crate::protect::{records, unreadable::UnreadableRecords};
use serde::{Deserialize, Serialize};
use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};
use whimbrel_core::{HostName, lock};
use whimbrel_protect::{
    clock::BootTime,
    lease::{WitnessAction, WitnessLease, WitnessQuery, WitnessReply, WitnessState},
    protocol::{ProtectionId, WitnessRequest},
};

const FORMAT: u32 = 1;
/// Most protections at once. An ended one is deleted when its hosts say so.
const REGISTERED_MAX: usize = 4096;
/// How long the hosts of a protection must be silent before it may be deleted to free space: a decided one,
/// and an open one. A later query is answered with unknown, which allows nobody to run anything: the hosts
/// ask each other, as without a witness.
const SILENCE_MAX: [Duration; 2] = [Duration::from_secs(7 * 86_400), Duration::from_secs(30 * 86_400)];
/// Terms that are accepted, in milliseconds.
const TERMS: std::ops::RangeInclusive<u32> = 50..=600_000;

type Table = HashMap<ProtectionId, Arc<Mutex<Entry>>>;

/// All protections registered here. No lock of an entry is waited for with the table locked.
pub(crate) struct WitnessTable {
    dir: PathBuf,
    /// Protections of which it is not known how they were decided: nobody is answered about them.
    unreadable: UnreadableRecords,
    table: Mutex<Table>,
    /// Protections decided for the standby since this daemon started, also deleted ones.
    taken: Mutex<HashSet<ProtectionId>>,
}

struct Entry {
    stored: StoredLease,
    lease: WitnessLease,
    /// Last query of one of its hosts; after a restart, the time of the restart.
    last_query: BootTime,
}

impl Entry {
    fn new(stored: StoredLease) -> Self {
        Self { lease: stored.rules(), stored, last_query: BootTime::now() }
    }

    fn may_be_deleted(&self, now: BootTime) -> bool {
        let [decided, open] = SILENCE_MAX;
        now > self.last_query.after(if self.stored.stand == WitnessState::Open { open } else { decided })
    }
}

#[derive(Clone, Serialize, Deserialize)]
struct StoredLease {
    format: u32,
    id: ProtectionId,
    primary: HostName,
    standby: HostName,
    term_ms: u32,
    stand: WitnessState,
}

impl StoredLease {
    fn rules(&self) -> WitnessLease {
        WitnessLease::new(self.stand, Duration::from_millis(self.term_ms.into()), BootTime::now())
    }
}

impl WitnessTable {
    /// Loads the protections of the previous daemon.
    pub(crate) fn open(dir: PathBuf) -> Result<Self, DaemonError> {
        std::fs::create_dir_all(&dir).map_err(|source| DaemonError::io("create", &dir, source))?;
        let (kept, unreadable) = records::read_all::<StoredLease>(&dir)?;
        let table = kept.into_iter().map(|kept| (kept.id, Arc::new(Mutex::new(Entry::new(kept))))).collect();
        let unreadable = UnreadableRecords(unreadable);
        Ok(Self { dir, unreadable, table: Mutex::new(table), taken: Mutex::default() })
    }

    fn path(&self, id: ProtectionId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    /// Answers a query of the host `asker`. A write for one protection, which may take long, holds up no
    /// query of another one.
    pub(crate) fn answer(
        &self,
        asker: &HostName,
        asked: &WitnessRequest,
    ) -> Result<WitnessReply, DaemonError> {
        self.unreadable.check(asked.id)?;
        let Some(entry) = self.entry(asked.id) else {
            return match &asked.question {
                WitnessQuery::Register { standby, term_ms } => {
                    self.register(asker, asked.id, (standby, *term_ms))
                }
                _ => Ok(WitnessReply::Unknown),
            };
        };
        let mut entry = lock(&entry);
        let may = match asked.question {
            WitnessQuery::Register { .. } | WitnessQuery::Renew | WitnessQuery::Close => {
                *asker == entry.stored.primary
            }
            WitnessQuery::TakeOver { .. } => *asker == entry.stored.standby,
            WitnessQuery::Forget => *asker == entry.stored.primary || *asker == entry.stored.standby,
        };
        if !may {
            return Ok(WitnessReply::Unknown);
        }
        entry.last_query = BootTime::now();
        let mut lease = entry.lease;
        let action = lease.step(&asked.question, BootTime::now());
        match action {
            WitnessAction::Reply(_) => {}
            WitnessAction::Record(state) => self.record(&mut entry, state, asker)?,
            WitnessAction::Delete => self.delete(asked.id),
        }
        entry.lease = lease;
        Ok(action.reply())
    }

    /// Makes a decision durable. The space was reserved when the protection was registered.
    fn record(&self, entry: &mut Entry, state: WitnessState, asker: &HostName) -> Result<(), DaemonError> {
        let stored = StoredLease { stand: state, ..entry.stored.clone() };
        records::write_prepared(&self.path(stored.id), ending(state), &stored)?;
        tracing::info!(protection = %stored.id, by = %asker, stand = ?state, "the witness has decided a protection");
        if state == WitnessState::Taken {
            lock(&self.taken).insert(stored.id);
        }
        entry.stored = stored;
        Ok(())
    }

    fn delete(&self, id: ProtectionId) {
        self.remove_files(id);
        lock(&self.table).remove(&id);
    }

    fn remove_files(&self, id: ProtectionId) {
        let path = self.path(id);
        for state in [WitnessState::Taken, WitnessState::Closed] {
            records::remove(&records::prepared_path(&path, ending(state)));
        }
        records::remove(&path);
    }

    fn entry(&self, id: ProtectionId) -> Option<Arc<Mutex<Entry>>> {
        lock(&self.table).get(&id).cloned()
    }

    /// Makes this host the witness of a protection that `primary` has inherited from it. A known one stays
    /// unchanged.
    pub(crate) fn register_inherited(
        &self,
        id: ProtectionId,
        primary: &HostName,
        standby: &HostName,
        term_ms: u32,
    ) -> Result<(), DaemonError> {
        match self.register(primary, id, (standby, term_ms))? {
            WitnessReply::Full => Err(DaemonError::invalid("this witness has no space left")),
            _ => Ok(()),
        }
    }

    /// Whether a protection is registered here and undecided.
    pub(crate) fn is_open(&self, id: ProtectionId) -> bool {
        self.entry(id).is_some_and(|entry| lock(&entry).stored.stand == WitnessState::Open)
    }

    /// Whether a protection was decided for the standby.
    pub(crate) fn was_taken(&self, id: ProtectionId) -> bool {
        let taken = self.entry(id).is_some_and(|entry| lock(&entry).stored.stand == WitnessState::Taken);
        taken || lock(&self.taken).contains(&id)
    }

    /// Registers a protection; a known one stays unchanged.
    fn register(
        &self,
        asker: &HostName,
        id: ProtectionId,
        (standby, term_ms): (&HostName, u32),
    ) -> Result<WitnessReply, DaemonError> {
        self.unreadable.check(id)?;
        let (primary, standby) = (asker.clone(), standby.clone());
        let stored = StoredLease { format: FORMAT, id, primary, standby, term_ms, stand: WitnessState::Open };
        let entry = Arc::new(Mutex::new(Entry::new(stored.clone())));
        // Locked until it is durable, so that nobody is answered before.
        let locked = lock(&entry);
        {
            let mut table = lock(&self.table);
            if table.contains_key(&id) {
                return Ok(WitnessReply::Unknown);
            }
            if table.len() >= REGISTERED_MAX {
                self.delete_silent(&mut table, BootTime::now());
            }
            if table.len() >= REGISTERED_MAX || !TERMS.contains(&term_ms) {
                return Ok(WitnessReply::Full);
            }
            table.insert(id, entry.clone());
        }
        let written = self.write_new(&stored);
        drop(locked);
        if let Err(error) = written {
            self.delete(id);
            return Err(error);
        }
        Ok(WitnessReply::Yes)
    }

    /// Writes a new protection, and first both decisions that there may be about it.
    fn write_new(&self, stored: &StoredLease) -> Result<(), DaemonError> {
        let path = self.path(stored.id);
        for state in [WitnessState::Taken, WitnessState::Closed] {
            let decided = StoredLease { stand: state, ..stored.clone() };
            records::write(&records::prepared_path(&path, ending(state)), &decided)?;
        }
        records::write(&path, stored)
    }

    /// Deletes protections whose hosts were silent for too long.
    fn delete_silent(&self, table: &mut Table, now: BootTime) {
        table.retain(|id, entry| {
            // One that is in use is not silent.
            let Ok(entry) = entry.try_lock() else { return true };
            let stays = !entry.may_be_deleted(now);
            if !stays {
                tracing::warn!(protection = %id, primary = %entry.stored.primary, standby = %entry.stored.standby, stand = ?entry.stored.stand, "deleting a protection whose hosts are silent");
                self.remove_files(*id);
            }
            stays
        });
    }
}

/// Ending of the file that was prepared for a decision.
fn ending(state: WitnessState) -> &'static str {
    match state {
        WitnessState::Open => "open",
        WitnessState::Taken => "taken",
        WitnessState::Closed => "closed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> HostName {
        text.parse().unwrap()
    }

    #[test]
    fn a_decision_that_cannot_be_written_holds_up_no_other_machine() {
        let dir = tempfile::tempdir().unwrap();
        let leases = WitnessTable::open(dir.path().to_owned()).unwrap();
        assert_eq!(register(&leases, 60_000), WitnessReply::Yes);
        let hangs = leases.entry(ProtectionId([7; 16])).unwrap();
        let _writing = lock(&hangs);
        let other = WitnessRequest {
            id: ProtectionId([8; 16]),
            question: WitnessQuery::Register { standby: name("beta"), term_ms: 60_000 },
        };
        assert_eq!(leases.answer(&name("alpha"), &other).unwrap(), WitnessReply::Yes);
        let take = WitnessRequest { question: WitnessQuery::TakeOver { yielded: true }, ..other };
        assert_eq!(leases.answer(&name("beta"), &take).unwrap(), WitnessReply::Yes);
    }

    #[test]
    fn a_full_disk_prevents_no_decision() {
        let full = crate::protect::records::FullDisk::new();
        let leases = WitnessTable::open(full.path().to_owned()).unwrap();
        assert_eq!(register(&leases, 60_000), WitnessReply::Yes);
        full.fill();
        assert_eq!(ask(&leases, "beta", WitnessQuery::TakeOver { yielded: true }), WitnessReply::Yes);
        let later = WitnessTable::open(full.path().to_owned()).unwrap();
        assert_eq!(ask(&later, "alpha", WitnessQuery::Renew), WitnessReply::Taken);
        assert_eq!(ask(&later, "alpha", WitnessQuery::Forget), WitnessReply::Yes);
        assert_eq!(std::fs::read_dir(full.path()).unwrap().count(), 1, "only what fills it");
    }

    fn ask(leases: &WitnessTable, who: &str, question: WitnessQuery) -> WitnessReply {
        leases.answer(&name(who), &WitnessRequest { id: ProtectionId([7; 16]), question }).unwrap()
    }

    fn register(leases: &WitnessTable, term_ms: u32) -> WitnessReply {
        ask(leases, "alpha", WitnessQuery::Register { standby: name("beta"), term_ms })
    }

    #[test]
    fn only_those_who_take_part_are_answered_and_a_decision_outlives_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let leases = WitnessTable::open(dir.path().to_owned()).unwrap();
        assert_eq!(ask(&leases, "alpha", WitnessQuery::Renew), WitnessReply::Unknown);
        assert_eq!(register(&leases, 60_000), WitnessReply::Yes);
        let take = |yielded| WitnessQuery::TakeOver { yielded };
        assert_eq!(ask(&leases, "beta", take(false)), WitnessReply::Held);
        assert_eq!(ask(&leases, "gamma", take(true)), WitnessReply::Unknown);
        assert_eq!(ask(&leases, "beta", WitnessQuery::Close), WitnessReply::Unknown);
        assert_eq!(ask(&leases, "beta", take(true)), WitnessReply::Yes);
        let later = WitnessTable::open(dir.path().to_owned()).unwrap();
        assert_eq!(ask(&later, "alpha", WitnessQuery::Renew), WitnessReply::Taken);
        assert_eq!(ask(&later, "alpha", WitnessQuery::Close), WitnessReply::Taken);
        assert_eq!(register(&later, 60_000), WitnessReply::Unknown, "it has ended");
        assert_eq!(ask(&later, "alpha", WitnessQuery::Forget), WitnessReply::Yes);
        assert_eq!(
            ask(&WitnessTable::open(dir.path().to_owned()).unwrap(), "beta", take(true)),
            WitnessReply::Unknown
        );
    }

    #[test]
    fn who_does_not_return_is_forgotten_when_there_is_no_room_and_hears_no_yes_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let leases = WitnessTable::open(dir.path().to_owned()).unwrap();
        assert_eq!(register(&leases, 60_000), WitnessReply::Yes);
        let silent = |days: u64| {
            leases.delete_silent(
                &mut lock(&leases.table),
                BootTime::now().after(Duration::from_secs(days * 86_400)),
            );
            lock(&leases.table).len()
        };
        assert_eq!(silent(29), 1, "not decided: its primary may be switched off");
        assert_eq!(ask(&leases, "alpha", WitnessQuery::Close), WitnessReply::Yes);
        assert_eq!((silent(6), silent(8)), (1, 0));
        for (who, question) in
            [("beta", WitnessQuery::TakeOver { yielded: false }), ("alpha", WitnessQuery::Close)]
        {
            assert_eq!(ask(&leases, who, question), WitnessReply::Unknown);
        }
        assert!(
            WitnessTable::open(dir.path().to_owned()).unwrap().table.lock().unwrap().is_empty(),
            "durably"
        );
    }

    #[test]
    fn a_restarted_witness_waits_for_a_term_before_it_gives_a_machine_away() {
        let dir = tempfile::tempdir().unwrap();
        let leases = WitnessTable::open(dir.path().to_owned()).unwrap();
        assert_eq!(register(&leases, 60_000), WitnessReply::Yes);
        drop(leases);
        let later = WitnessTable::open(dir.path().to_owned()).unwrap();
        assert_eq!(ask(&later, "beta", WitnessQuery::TakeOver { yielded: false }), WitnessReply::Held);
        assert_eq!(ask(&later, "alpha", WitnessQuery::Close), WitnessReply::Yes);
        assert_eq!(ask(&later, "beta", WitnessQuery::TakeOver { yielded: true }), WitnessReply::Closed);
    }
}
