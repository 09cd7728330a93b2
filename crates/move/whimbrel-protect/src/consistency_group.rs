//! Consistency group: rounds in which several machines capture their epochs at one instant. Pure.
//!
//! ```text
//!   Gather: each reports that its epoch is due          when all have: all pause
//!   Pause:  each reports that it is paused and captured when all have: all run on and send
//!   Send:   each reports that its epoch is committed    when all have: all output leaves; next round
//! ```
//!
//! No machine runs on before all are paused, which is the one instant. No output of an epoch leaves before
//! every standby has that epoch. A member that leaves is not waited for. One that joins during a round takes
//! part from the next round on. `tests/it/group.rs` checks that over orders of events, joins and leaves.

use std::collections::{BTreeMap, BTreeSet};

/// Number of a member, used once.
pub type GroupMember = u64;

/// Phases of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum GroupPhase {
    /// Until every member's epoch is due.
    #[default]
    Gather,
    /// Until every member is paused.
    Pause,
    /// Until every member's epoch is committed.
    Send,
}

/// Progress of a group: later is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GroupRound {
    /// Number of completed rounds.
    pub round: u64,
    /// Phase of the round.
    pub phase: GroupPhase,
}

/// The rounds of one group.
#[derive(Debug, Clone, Default)]
pub struct ConsistencyGroup {
    round: GroupRound,
    /// Members of this round, and whether each has completed the phase.
    members: BTreeMap<GroupMember, bool>,
    /// Members from the next round on.
    joining: BTreeSet<GroupMember>,
}

impl ConsistencyGroup {
    /// The present round and phase.
    pub fn round(&self) -> GroupRound {
        self.round
    }

    /// Whether the group has no members.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty() && self.joining.is_empty()
    }

    /// Whether this member takes part in the present round.
    pub fn is_member(&self, member: GroupMember) -> bool {
        self.members.contains_key(&member)
    }

    /// Adds a member from the next round on, or to this one if nobody has started to pause.
    pub fn join(&mut self, member: GroupMember) {
        match self.round.phase {
            GroupPhase::Gather => drop(self.members.insert(member, false)),
            GroupPhase::Pause | GroupPhase::Send => drop(self.joining.insert(member)),
        }
    }

    /// Removes a member; nobody waits for it any more.
    pub fn leave(&mut self, member: GroupMember) {
        self.members.remove(&member);
        self.joining.remove(&member);
        self.advance();
    }

    /// A member has completed `phase`. Returns the round and phase that must end before it continues; none if
    /// nothing is expected of it.
    pub fn done(&mut self, member: GroupMember, phase: GroupPhase) -> Option<GroupRound> {
        let place = self.round;
        if place.phase != phase {
            return None;
        }
        *self.members.get_mut(&member)? = true;
        self.advance();
        Some(place)
    }

    /// Withdraws that the member's epoch is due: it waits for something else first.
    pub fn not_yet(&mut self, member: GroupMember) {
        if self.round.phase == GroupPhase::Gather
            && let Some(done) = self.members.get_mut(&member)
        {
            *done = false;
        }
    }

    /// Removes all members that have not completed the phase, and returns them.
    pub fn expel(&mut self) -> Vec<GroupMember> {
        let late: Vec<GroupMember> =
            self.members.iter().filter(|(_, done)| !**done).map(|(member, _)| *member).collect();
        late.iter().for_each(|member| self.leave(*member));
        late
    }

    fn advance(&mut self) {
        if !self.members.values().all(|done| *done)
            || (self.members.is_empty() && self.round == self.between_rounds())
        {
            return;
        }
        let next = match self.round.phase {
            _ if self.members.is_empty() => None,
            GroupPhase::Gather => Some(GroupPhase::Pause),
            GroupPhase::Pause => Some(GroupPhase::Send),
            GroupPhase::Send => None,
        };
        self.members.values_mut().for_each(|done| *done = false);
        match next {
            Some(phase) => self.round.phase = phase,
            None => {
                self.round = GroupRound { round: self.round.round + 1, phase: GroupPhase::Gather };
                self.members
                    .extend(std::mem::take(&mut self.joining).into_iter().map(|member| (member, false)));
            }
        }
    }

    /// The place between two rounds.
    fn between_rounds(&self) -> GroupRound {
        GroupRound { round: self.round.round, phase: GroupPhase::Gather }
    }
}
