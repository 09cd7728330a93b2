//! Machines that are cut together: the rounds of a group, pure.
//!
//! ```text
//!   Gather: each says that its next epoch is due        when all have: everybody pauses
//!   Pause:  each says that it stands still, taken       when all have: everybody goes on and sends
//!   Send:   each says that its standby has the epoch    when all have: everybody's output leaves; the next round
//! ```
//!
//! So no machine goes on before all stand still, which is the one instant; and nobody outside sees output of
//! an epoch before every standby has that epoch. Who leaves is not waited for. Who comes in the middle of a
//! round takes part from the next one on. `tests/group.rs` checks that over orders of events, comings and
//! leavings.

use std::collections::{BTreeMap, BTreeSet};

/// A member: whoever makes these numbers makes each once.
pub type GroupMember = u64;

/// What a group waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum GroupPhase {
    /// That every member's epoch is due.
    #[default]
    Gather,
    /// That every member stands still.
    Pause,
    /// That every member's standby has the epoch.
    Send,
}

/// Where a group is: later is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GroupRound {
    /// Rounds before this one.
    pub round: u64,
    /// What is waited for.
    pub phase: GroupPhase,
}

/// The rounds of one group.
#[derive(Debug, Clone, Default)]
pub struct ConsistencyGroup {
    place: GroupRound,
    /// Who takes part in this round, and whether it has done what is waited for.
    members: BTreeMap<GroupMember, bool>,
    /// Who does from the next one on.
    joining: BTreeSet<GroupMember>,
}

impl ConsistencyGroup {
    /// Where it is.
    pub fn place(&self) -> GroupRound {
        self.place
    }

    /// Whether nobody is in it.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty() && self.joining.is_empty()
    }

    /// Whether it takes part in this round.
    pub fn is_member(&self, member: GroupMember) -> bool {
        self.members.contains_key(&member)
    }

    /// From the next round on, which is this one if nobody has begun to pause.
    pub fn join(&mut self, member: GroupMember) {
        match self.place.phase {
            GroupPhase::Gather => drop(self.members.insert(member, false)),
            GroupPhase::Pause | GroupPhase::Send => drop(self.joining.insert(member)),
        }
    }

    /// Nobody waits for it any more.
    pub fn leave(&mut self, member: GroupMember) {
        self.members.remove(&member);
        self.joining.remove(&member);
        self.advance();
    }

    /// It has done what `phase` waits for. The place to get past; none if that is not waited for of it.
    pub fn done(&mut self, member: GroupMember, phase: GroupPhase) -> Option<GroupRound> {
        let place = self.place;
        if place.phase != phase {
            return None;
        }
        *self.members.get_mut(&member)? = true;
        self.advance();
        Some(place)
    }

    /// Its epoch is not due any more: it waits for something else first.
    pub fn not_yet(&mut self, member: GroupMember) {
        if self.place.phase == GroupPhase::Gather
            && let Some(done) = self.members.get_mut(&member)
        {
            *done = false;
        }
    }

    /// Whoever has not done what is waited for is not waited for any longer. Who that was.
    pub fn expel(&mut self) -> Vec<GroupMember> {
        let late: Vec<GroupMember> =
            self.members.iter().filter(|(_, done)| !**done).map(|(member, _)| *member).collect();
        late.iter().for_each(|member| self.leave(*member));
        late
    }

    fn advance(&mut self) {
        if !self.members.values().all(|done| *done)
            || (self.members.is_empty() && self.place == self.resting())
        {
            return;
        }
        let next = match self.place.phase {
            _ if self.members.is_empty() => None,
            GroupPhase::Gather => Some(GroupPhase::Pause),
            GroupPhase::Pause => Some(GroupPhase::Send),
            GroupPhase::Send => None,
        };
        self.members.values_mut().for_each(|done| *done = false);
        match next {
            Some(phase) => self.place.phase = phase,
            None => {
                self.place = GroupRound { round: self.place.round + 1, phase: GroupPhase::Gather };
                self.members
                    .extend(std::mem::take(&mut self.joining).into_iter().map(|member| (member, false)));
            }
        }
    }

    /// Between two rounds.
    fn resting(&self) -> GroupRound {
        GroupRound { round: self.place.round, phase: GroupPhase::Gather }
    }
}
