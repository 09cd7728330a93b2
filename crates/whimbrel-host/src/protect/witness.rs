//! This host as a witness: who may run the machines that two other hosts protect.
//!
//! The rules are those of [`Witness`]. Here is the table, who may ask what, and what is durable: that a protection is registered, and
//! how it ended, each before anybody is told. When leases run out is not; a restarted witness waits for a whole term first.

use super::notes;
use crate::error::HostError;
use serde::{Deserialize, Serialize};
use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use whimbrel_core::HostName;
use whimbrel_protect::{
    clock::Moment,
    lease::{Question, Stand, Verdict, Witness},
    protocol::{Asked, ProtectionId},
};

const FORMAT: u32 = 1;
/// Protections at once. One that has ended is forgotten when its hosts say so.
const REGISTERED_MAX: usize = 4096;
/// How long those of a protection were silent when it may be forgotten to make room: one that is decided, and one that is not. Who asks
/// about it after all hears that it is unknown, which lets nobody run anything: the hosts ask each other, as without a witness.
const SILENT: [Duration; 2] = [Duration::from_secs(7 * 86_400), Duration::from_secs(30 * 86_400)];
/// Terms that are taken, in milliseconds.
const TERMS: std::ops::RangeInclusive<u32> = 50..=600_000;

/// All that is registered here.
pub(crate) struct Leases {
    dir: PathBuf,
    table: Mutex<HashMap<ProtectionId, Entry>>,
    /// What was given away since this daemon began, also if it is forgotten by now.
    taken: Mutex<HashSet<ProtectionId>>,
}

struct Entry {
    kept: Kept,
    rules: Witness,
    /// When one of its hosts last asked. Of one that is found again, when it was found.
    heard: Moment,
}

impl Entry {
    fn new(kept: Kept) -> Self {
        Self { rules: kept.rules(), kept, heard: Moment::now() }
    }

    fn may_be_forgotten(&self, now: Moment) -> bool {
        let [decided, open] = SILENT;
        now > self.heard.after(if self.kept.stand == Stand::Open { open } else { decided })
    }
}

#[derive(Clone, Serialize, Deserialize)]
struct Kept {
    format: u32,
    id: ProtectionId,
    primary: HostName,
    standby: HostName,
    term_ms: u32,
    stand: Stand,
}

impl Kept {
    fn rules(&self) -> Witness {
        Witness::new(self.stand, Duration::from_millis(self.term_ms.into()), Moment::now())
    }
}

impl Leases {
    /// Those of the daemon before.
    pub(crate) fn open(dir: PathBuf) -> Result<Self, HostError> {
        std::fs::create_dir_all(&dir).map_err(|source| HostError::io("create", &dir, source))?;
        let kept: Vec<Kept> = notes::read_all(&dir, |kept: &Kept| kept.format)?;
        let table = kept.into_iter().map(|kept| (kept.id, Entry::new(kept))).collect();
        Ok(Self { dir, table: Mutex::new(table), taken: Mutex::default() })
    }

    fn path(&self, id: ProtectionId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    /// Answers a host called `asker`.
    pub(crate) fn answer(&self, asker: &HostName, asked: &Asked) -> Result<Verdict, HostError> {
        let mut table = self.table();
        if let Question::Register { standby, term_ms } = &asked.question {
            return self.register(&mut table, asker, asked.id, (standby, *term_ms));
        }
        let Some(entry) = table.get_mut(&asked.id) else { return Ok(Verdict::Unknown) };
        let may = match asked.question {
            Question::Renew | Question::Close => *asker == entry.kept.primary,
            Question::Take { .. } => *asker == entry.kept.standby,
            Question::Forget => *asker == entry.kept.primary || *asker == entry.kept.standby,
            Question::Register { .. } => false,
        };
        if !may {
            return Ok(Verdict::Unknown);
        }
        entry.heard = Moment::now();
        if asked.question == Question::Forget {
            if entry.kept.stand != Stand::Open {
                notes::remove(&self.path(asked.id));
                table.remove(&asked.id);
            }
            return Ok(Verdict::Yes);
        }
        let mut rules = entry.rules;
        let verdict = rules.step(&asked.question, Moment::now());
        if rules.stand() != entry.kept.stand {
            let kept = Kept { stand: rules.stand(), ..entry.kept.clone() };
            notes::write(&self.path(asked.id), &kept)?;
            tracing::info!(protection = %asked.id, by = %asker, stand = ?kept.stand, "a protection is decided");
            if kept.stand == Stand::Taken {
                self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(asked.id);
            }
            entry.kept = kept;
        }
        entry.rules = rules;
        Ok(verdict)
    }

    /// This host is the witness of a protection that `primary` has inherited from it. Known already, it stays as it is.
    pub(crate) fn take_up(
        &self,
        id: ProtectionId,
        primary: &HostName,
        standby: &HostName,
        term_ms: u32,
    ) -> Result<(), HostError> {
        match self.register(&mut self.table(), primary, id, (standby, term_ms))? {
            Verdict::Full => Err(HostError::invalid("no more protections can be registered here")),
            _ => Ok(()),
        }
    }

    /// Whether a protection is known here and not decided.
    pub(crate) fn is_open(&self, id: ProtectionId) -> bool {
        self.table().get(&id).is_some_and(|entry| entry.kept.stand == Stand::Open)
    }

    /// Whether the standby of a protection was given the machine.
    pub(crate) fn was_taken(&self, id: ProtectionId) -> bool {
        let taken = self.table().get(&id).is_some_and(|entry| entry.kept.stand == Stand::Taken);
        taken || self.taken.lock().unwrap_or_else(PoisonError::into_inner).contains(&id)
    }

    fn register(
        &self,
        table: &mut HashMap<ProtectionId, Entry>,
        asker: &HostName,
        id: ProtectionId,
        (standby, term_ms): (&HostName, u32),
    ) -> Result<Verdict, HostError> {
        if let Some(entry) = table.get(&id) {
            let same = entry.kept.primary == *asker && entry.kept.stand == Stand::Open;
            return Ok(if same { Verdict::Yes } else { Verdict::Unknown });
        }
        if table.len() >= REGISTERED_MAX {
            self.make_room(table, Moment::now());
        }
        if table.len() >= REGISTERED_MAX || !TERMS.contains(&term_ms) {
            return Ok(Verdict::Full);
        }
        let (primary, standby) = (asker.clone(), standby.clone());
        let kept = Kept { format: FORMAT, id, primary, standby, term_ms, stand: Stand::Open };
        notes::write(&self.path(id), &kept)?;
        table.insert(id, Entry::new(kept));
        Ok(Verdict::Yes)
    }

    /// Forgets protections whose hosts have not returned for long.
    fn make_room(&self, table: &mut HashMap<ProtectionId, Entry>, now: Moment) {
        table.retain(|id, entry| {
            let stays = !entry.may_be_forgotten(now);
            if !stays {
                tracing::warn!(protection = %id, primary = %entry.kept.primary, standby = %entry.kept.standby, stand = ?entry.kept.stand, "a protection whose hosts do not return is forgotten");
                notes::remove(&self.path(*id));
            }
            stays
        });
    }

    fn table(&self) -> MutexGuard<'_, HashMap<ProtectionId, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> HostName {
        text.parse().unwrap()
    }

    fn ask(leases: &Leases, who: &str, question: Question) -> Verdict {
        leases.answer(&name(who), &Asked { id: ProtectionId([7; 16]), question }).unwrap()
    }

    fn register(leases: &Leases, term_ms: u32) -> Verdict {
        ask(leases, "alpha", Question::Register { standby: name("beta"), term_ms })
    }

    #[test]
    fn only_those_who_take_part_are_answered_and_a_decision_outlives_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::open(dir.path().to_owned()).unwrap();
        assert_eq!(ask(&leases, "alpha", Question::Renew), Verdict::Unknown);
        assert_eq!(register(&leases, 60_000), Verdict::Yes);
        let take = |yielded| Question::Take { yielded };
        assert_eq!(ask(&leases, "beta", take(false)), Verdict::Held);
        assert_eq!(ask(&leases, "gamma", take(true)), Verdict::Unknown);
        assert_eq!(ask(&leases, "beta", Question::Close), Verdict::Unknown);
        assert_eq!(ask(&leases, "beta", take(true)), Verdict::Yes);
        let later = Leases::open(dir.path().to_owned()).unwrap();
        assert_eq!(ask(&later, "alpha", Question::Renew), Verdict::Taken);
        assert_eq!(ask(&later, "alpha", Question::Close), Verdict::Taken);
        assert_eq!(register(&later, 60_000), Verdict::Unknown, "it has ended");
        assert_eq!(ask(&later, "alpha", Question::Forget), Verdict::Yes);
        assert_eq!(ask(&Leases::open(dir.path().to_owned()).unwrap(), "beta", take(true)), Verdict::Unknown);
    }

    #[test]
    fn who_does_not_return_is_forgotten_when_there_is_no_room_and_hears_no_yes_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::open(dir.path().to_owned()).unwrap();
        assert_eq!(register(&leases, 60_000), Verdict::Yes);
        let silent = |days: u64| {
            leases.make_room(&mut leases.table(), Moment::now().after(Duration::from_secs(days * 86_400)));
            leases.table().len()
        };
        assert_eq!(silent(29), 1, "not decided: its primary may be switched off");
        assert_eq!(ask(&leases, "alpha", Question::Close), Verdict::Yes);
        assert_eq!((silent(6), silent(8)), (1, 0));
        for (who, question) in [("beta", Question::Take { yielded: false }), ("alpha", Question::Close)] {
            assert_eq!(ask(&leases, who, question), Verdict::Unknown);
        }
        assert!(Leases::open(dir.path().to_owned()).unwrap().table().is_empty(), "durably");
    }

    #[test]
    fn a_restarted_witness_waits_for_a_term_before_it_gives_a_machine_away() {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::open(dir.path().to_owned()).unwrap();
        assert_eq!(register(&leases, 60_000), Verdict::Yes);
        drop(leases);
        let later = Leases::open(dir.path().to_owned()).unwrap();
        assert_eq!(ask(&later, "beta", Question::Take { yielded: false }), Verdict::Held);
        assert_eq!(ask(&later, "alpha", Question::Close), Verdict::Yes);
        assert_eq!(ask(&later, "beta", Question::Take { yielded: true }), Verdict::Closed);
    }
}
