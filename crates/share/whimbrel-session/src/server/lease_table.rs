//! Lease table: who may answer what itself, and who has to be told of a change. Pure: the time is a
//! parameter.
//!
//! A lease of a file covers its attributes and content, one of a directory its attributes and names. Any
//! number of sessions may share a lease; an exclusive one is for a session that has changed the file and not
//! sent it yet. A change waits until every other holder has given its lease back, or is gone: its time is
//! over, and it was told to count on nothing after that.
//!
//! An answer grants leases after its attributes were read. What was changed in between is in the log of the
//! latest changes, and is recalled at once.

use super::change_log::ChangeLog;
use crate::proto::{Ident, MAX_LEASES, Standing, Watched};
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::{Duration, Instant},
};

/// Number of a session in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct HolderId(u64);

/// Bounds of a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeaseLimits {
    /// Time that leases last after they were renewed, and that a recall waits.
    pub(super) term: Duration,
    /// Most leases of a session. With more, it starts anew.
    pub(super) per_holder: usize,
    /// Most leases in all. With more, the session that has the most starts anew.
    pub(super) total: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lease {
    Shared,
    Exclusive,
    /// Recalled at this time, and not given back yet; exclusive until then, or not.
    Recalled(Instant, bool),
}

impl Lease {
    fn is_exclusive(self) -> bool {
        matches!(self, Self::Exclusive | Self::Recalled(_, true))
    }
}

/// Leases that a change or a read concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    All,
    /// Leases of sessions that have changes which they have not sent.
    Exclusive,
}

#[derive(Debug)]
struct Held {
    holder: HolderId,
    lease: Lease,
}

#[derive(Debug)]
struct Holder {
    generation: u64,
    /// End of its leases.
    until: Instant,
    held: HashSet<Ident>,
    /// Recalls that it was not told of yet.
    untold: BTreeSet<Ident>,
    /// Whether it once kept a recalled lease for the whole term: nobody waits for it any more.
    slow: bool,
}

impl Holder {
    fn is_live(&self, now: Instant) -> bool {
        now < self.until
    }
}

/// The leases of a server.
#[derive(Debug)]
pub(super) struct LeaseTable {
    limits: LeaseLimits,
    holders: HashMap<HolderId, Holder>,
    files: HashMap<Ident, Vec<Held>>,
    /// Number of leases, and of exclusive ones.
    count: usize,
    exclusive: usize,
    log: ChangeLog,
    next: u64,
    /// Number of times that a session came, or came back after its term.
    arrivals: u64,
    generations: u64,
    /// Whether there is news for somebody.
    moved: bool,
}

/// What a change or a read has to do first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing: nobody else relies on the state before.
    Free,
    /// Wait until leases come back.
    Wait,
}

impl LeaseTable {
    /// An empty table. Generations count from `first`, which should differ between servers.
    pub(super) fn new(limits: LeaseLimits, first: u64) -> Self {
        Self {
            limits,
            holders: HashMap::new(),
            files: HashMap::new(),
            count: 0,
            exclusive: 0,
            log: ChangeLog::default(),
            next: 0,
            arrivals: 0,
            generations: first,
            moved: false,
        }
    }

    /// Whether there was news for somebody since the last call.
    pub(super) fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    fn generation(&mut self) -> u64 {
        self.generations = self.generations.wrapping_add(1).max(1);
        self.generations
    }

    /// Adds a session, which is its first renewal.
    pub(super) fn join(&mut self, now: Instant) -> HolderId {
        self.next += 1;
        self.arrivals += 1;
        let (id, generation) = (HolderId(self.next), self.generation());
        let until = now + self.limits.term;
        let holder = Holder { generation, until, held: HashSet::new(), untold: BTreeSet::new(), slow: false };
        self.holders.insert(id, holder);
        self.moved = true;
        id
    }

    /// Removes a session that has ended, with its leases.
    pub(super) fn leave(&mut self, id: HolderId) {
        self.drop_all(id);
        self.holders.remove(&id);
        self.moved = true;
    }

    /// Number of times that a session came, or came back after its term.
    pub(super) fn arrivals(&self) -> u64 {
        self.arrivals
    }

    /// Whether no other session can have leases.
    pub(super) fn is_alone(&self, by: Option<HolderId>, now: Instant) -> bool {
        self.holders.iter().all(|(id, holder)| Some(*id) == by || !holder.is_live(now))
    }

    /// Renews the leases of a session; none if it has left.
    pub(super) fn renew(&mut self, id: HolderId, now: Instant) -> Option<()> {
        if !self.holders.get(&id)?.is_live(now) {
            self.start_anew(id);
            self.arrivals += 1;
        }
        self.holders.get_mut(&id)?.until = now + self.limits.term;
        Some(())
    }

    /// State of a session and recalls that it was not told of; none if it has left.
    pub(super) fn news(&mut self, id: HolderId, now: Instant) -> Option<Watched> {
        let alone = self.is_alone(Some(id), now);
        let holder = self.holders.get_mut(&id)?;
        let mut recalled = Vec::new();
        while recalled.len() < MAX_LEASES
            && let Some(ident) = holder.untold.pop_first()
        {
            recalled.push(ident);
        }
        let standing = Standing { generation: holder.generation, covers_outside: false, alone };
        Some(Watched { standing, term: self.limits.term.as_millis() as u32, recalled })
    }

    /// Number to pass to [`LeaseTable::grant`]; to be taken before what is to be leased is read.
    pub(super) fn moment(&self) -> u64 {
        self.log.latest()
    }

    /// Whether a session has a lease that was not recalled.
    pub(super) fn holds(&self, id: HolderId, file: &Ident) -> bool {
        let held = self.files.get(file).into_iter().flatten().find(|held| held.holder == id);
        held.is_some_and(|held| !matches!(held.lease, Lease::Recalled(..)))
    }

    /// Whether nobody waits for a session any more.
    #[cfg(test)]
    pub(super) fn is_slow(&self, id: HolderId) -> bool {
        self.holders.get(&id).is_some_and(|holder| holder.slow)
    }

    /// Whether anybody has a lease.
    pub(super) fn is_held(&self, file: &Ident) -> bool {
        self.files.contains_key(file)
    }

    /// Grants leases of what an answer says that was read since `moment`.
    pub(super) fn grant(&mut self, id: HolderId, files: &[Ident], moment: u64, now: Instant) {
        if !self.holders.get(&id).is_some_and(|holder| holder.is_live(now)) {
            return;
        }
        let changed = self.log.since(moment, id);
        for file in files {
            self.add(id, *file);
            if changed.contains(file) || self.is_claimed_by_other(id, file) {
                self.recall(file, id, now);
            }
        }
        self.bound(id);
    }

    fn is_claimed_by_other(&self, id: HolderId, file: &Ident) -> bool {
        let exclusive = |held: &&Held| held.holder != id && held.lease.is_exclusive();
        self.exclusive > 0 && self.files.get(file).into_iter().flatten().any(|held| exclusive(&held))
    }

    fn add(&mut self, id: HolderId, file: Ident) {
        let held = self.files.entry(file).or_default();
        if held.iter().all(|held| held.holder != id)
            && let Some(holder) = self.holders.get_mut(&id)
        {
            held.push(Held { holder: id, lease: Lease::Shared });
            holder.held.insert(file);
            self.count += 1;
        }
    }

    fn bound(&mut self, id: HolderId) {
        if self.holders.get(&id).is_some_and(|holder| holder.held.len() > self.limits.per_holder) {
            self.start_anew(id);
        }
        while self.count > self.limits.total {
            let largest = self.holders.iter().max_by_key(|(id, holder)| (holder.held.len(), **id));
            let Some(id) = largest.map(|(id, _)| *id) else { return };
            self.start_anew(id);
        }
    }

    /// Makes leases of a session exclusive. Other holders are recalled, and nobody waits for them: that these
    /// files have changed becomes visible when they ask.
    pub(super) fn claim(&mut self, id: HolderId, generation: u64, files: &[Ident], now: Instant) {
        let current = self.holders.get(&id).filter(|holder| holder.generation == generation);
        if !current.is_some_and(|holder| holder.is_live(now)) {
            return;
        }
        for file in files {
            self.add(id, *file);
            for held in self.files.get_mut(file).into_iter().flatten().filter(|held| held.holder == id) {
                if held.lease == Lease::Shared {
                    held.lease = Lease::Exclusive;
                    self.exclusive += 1;
                }
            }
            self.recall_others(Some(id), file, now, Which::All);
        }
        self.bound(id);
    }

    /// A session wants to change these files: recalls the leases of all others.
    pub(super) fn before_change(&mut self, by: Option<HolderId>, files: &[Ident], now: Instant) -> Turn {
        self.ask_back(by, files, now, Which::All)
    }

    /// A session wants to know the state of these files: recalls exclusive leases of others.
    pub(super) fn before_read(&mut self, by: Option<HolderId>, files: &[Ident], now: Instant) -> Turn {
        if self.exclusive == 0 {
            return Turn::Free;
        }
        self.ask_back(by, files, now, Which::Exclusive)
    }

    fn ask_back(&mut self, by: Option<HolderId>, files: &[Ident], now: Instant, which: Which) -> Turn {
        let mut turn = Turn::Free;
        for file in files {
            if self.recall_others(by, file, now, which) {
                turn = Turn::Wait;
            }
        }
        turn
    }

    /// Records that files were changed: whoever got a lease meanwhile is recalled.
    pub(super) fn changed(&mut self, by: Option<HolderId>, files: &[Ident], now: Instant) {
        for file in files {
            self.log.add(*file, by);
            self.recall_others(by, file, now, Which::All);
        }
    }

    /// Recalls leases of others; true if one of them is still out. Leases of sessions that are gone end.
    fn recall_others(&mut self, by: Option<HolderId>, file: &Ident, now: Instant, which: Which) -> bool {
        let others = self.files.get(file).into_iter().flatten().filter(|held| Some(held.holder) != by);
        let others = others.filter(|held| which == Which::All || held.lease.is_exclusive());
        let others: Vec<_> = others.map(|held| (held.holder, held.lease)).collect();
        let mut out = false;
        for (id, lease) in others {
            let Some(holder) = self.holders.get(&id).filter(|holder| holder.is_live(now)) else {
                self.remove(id, file);
                continue;
            };
            let waits = !holder.slow;
            match lease {
                Lease::Recalled(at, _) if now >= at + self.limits.term => self.revoke(id, file),
                Lease::Recalled(..) => out |= waits,
                Lease::Shared | Lease::Exclusive => {
                    self.recall(file, id, now);
                    out |= waits;
                }
            }
        }
        out
    }

    /// Ends a lease that was not given back in time. A session that knows of the recall relies on the file no
    /// more; another one is told that it has no leases.
    fn revoke(&mut self, id: HolderId, file: &Ident) {
        if let Some(holder) = self.holders.get_mut(&id) {
            holder.slow = true;
        }
        match self.holders.get(&id).is_some_and(|holder| holder.untold.contains(file)) {
            true => self.start_anew(id),
            false => self.remove(id, file),
        }
    }

    fn recall(&mut self, file: &Ident, id: HolderId, now: Instant) {
        let Some(held) = self.files.get_mut(file).into_iter().flatten().find(|held| held.holder == id) else {
            return;
        };
        if matches!(held.lease, Lease::Recalled(..)) {
            return;
        }
        held.lease = Lease::Recalled(now, held.lease.is_exclusive());
        self.moved = true;
        if let Some(holder) = self.holders.get_mut(&id) {
            holder.untold.insert(*file);
        }
    }

    fn remove(&mut self, id: HolderId, file: &Ident) {
        let Some(held) = self.files.get_mut(file) else { return };
        if let Some(at) = held.iter().position(|held| held.holder == id) {
            self.exclusive -= usize::from(held.swap_remove(at).lease.is_exclusive());
            self.count -= 1;
            self.moved = true;
        }
        if held.is_empty() {
            self.files.remove(file);
        }
        if let Some(holder) = self.holders.get_mut(&id) {
            holder.held.remove(file);
            holder.untold.remove(file);
        }
    }

    /// A session gives leases back.
    pub(super) fn returned(&mut self, id: HolderId, generation: u64, files: &[Ident]) {
        if self.holders.get(&id).is_some_and(|holder| holder.generation == generation) {
            files.iter().for_each(|file| self.remove(id, file));
        }
    }

    /// Ends the leases of a session, which is told that it has none any more.
    fn start_anew(&mut self, id: HolderId) {
        self.drop_all(id);
        let generation = self.generation();
        if let Some(holder) = self.holders.get_mut(&id) {
            holder.generation = generation;
        }
        self.moved = true;
    }

    /// Ends the leases of all sessions but one.
    pub(super) fn start_all_anew(&mut self, but: Option<HolderId>) {
        let others: Vec<_> = self.holders.keys().copied().filter(|id| Some(*id) != but).collect();
        others.into_iter().for_each(|id| self.start_anew(id));
        self.log.forget();
    }

    fn drop_all(&mut self, id: HolderId) {
        let held = self.holders.get_mut(&id).map(|holder| std::mem::take(&mut holder.held));
        held.into_iter().flatten().for_each(|file| self.remove(id, &file));
    }
}
