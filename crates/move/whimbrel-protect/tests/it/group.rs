//! Rounds of a group under every kind of order: who comes, who leaves, who is slow.
//!
//! The fears: output of a member that leaves before another one's standby has the epoch, a machine that goes
//! on while another still runs, a member that is waited for after it has left.

use proptest::prelude::*;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::collections::BTreeMap;
use whimbrel_protect::consistency_group::{ConsistencyGroup, GroupMember, GroupPhase, GroupRound};

/// Progress of a member's thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// The machine runs, its epoch is not due.
    Runs,
    /// Has reported that its epoch is due, and waits.
    Due(GroupRound),
    /// May pause, and stops its machine.
    Stopping,
    Stands(GroupRound),
    /// Runs on, and sends its epoch of this round.
    Sending(u64),
    Sent(GroupRound),
}

struct World {
    group: ConsistencyGroup,
    members: BTreeMap<GroupMember, At>,
    /// The last round that each member's standby has committed.
    there: BTreeMap<GroupMember, u64>,
    /// Members that were paused or stopping when the round's pause began.
    cut: Vec<GroupMember>,
    next: GroupMember,
    released: u64,
}

impl World {
    /// One step of a member's thread.
    fn step(&mut self, member: GroupMember) {
        let at = self.members[&member];
        let past = |place: GroupRound, group: &ConsistencyGroup| group.round() > place;
        let next = match at {
            At::Runs => self.group.done(member, GroupPhase::Gather).map_or(at, At::Due),
            At::Due(place) if past(place, &self.group) => At::Stopping,
            At::Stopping => At::Stands(self.group.done(member, GroupPhase::Pause).expect("it is waited for")),
            At::Stands(place) if past(place, &self.group) => {
                self.all_stood(place.round);
                At::Sending(place.round)
            }
            At::Sending(round) => {
                self.there.insert(member, round);
                At::Sent(self.group.done(member, GroupPhase::Send).expect("it is waited for"))
            }
            At::Sent(place) if past(place, &self.group) => {
                self.all_there(place.round);
                self.released += 1;
                At::Runs
            }
            at => at,
        };
        self.members.insert(member, next);
    }

    /// No machine runs on before all of the round are paused.
    fn all_stood(&mut self, round: u64) {
        for (other, at) in &self.members {
            let fine = match at {
                At::Stands(_) | At::Sending(_) | At::Sent(_) => true,
                // The member may be done with the round already, or not belong to it.
                At::Runs | At::Due(_) => !self.cut.contains(other) || self.there.get(other) >= Some(&round),
                At::Stopping => self.group.round().round > round,
            };
            assert!(fine, "{other} is at {at:?} while the others of round {round} go on");
        }
    }

    /// No output of a round leaves before every standby has that round.
    fn all_there(&self, round: u64) {
        for member in self.members.keys().filter(|member| self.cut.contains(member)) {
            assert!(self.there.get(member) >= Some(&round), "{member} has not sent round {round}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn nothing_leaves_before_all_standbys_have_the_round(seed: u64, comes in 1..8u32, leaves in 0..8u32) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut world = World {
            group: ConsistencyGroup::default(), members: BTreeMap::new(), there: BTreeMap::new(), cut: Vec::new(), next: 0, released: 0,
        };
        for _ in 0..2000 {
            let before = world.group.round();
            match random.random_range(0..200) {
                chance if chance < comes && world.members.len() < 5 => {
                    world.group.join(world.next);
                    world.members.insert(world.next, At::Runs);
                    world.next += 1;
                }
                chance if chance >= 200 - leaves && !world.members.is_empty() => {
                    let which = random.random_range(0..world.members.len());
                    let member = *world.members.keys().nth(which).unwrap();
                    // A member may leave at any point.
                    world.members.remove(&member);
                    world.group.leave(member);
                }
                _ if !world.members.is_empty() => {
                    let which = random.random_range(0..world.members.len());
                    let member = *world.members.keys().nth(which).unwrap();
                    world.step(member);
                }
                _ => {}
            }
            let after = world.group.round();
            prop_assert!(after >= before);
            if (before.phase, after.phase) == (GroupPhase::Gather, GroupPhase::Pause) {
                world.cut = world.members.keys().copied().filter(|member| world.group.is_member(*member)).collect();
            }
        }
        // However it went, whoever is left gets on.
        let released = world.released;
        for _ in 0..10 {
            let all: Vec<GroupMember> = world.members.keys().copied().collect();
            for member in all.into_iter().flat_map(|member| [member; 6]) {
                let before = world.group.round();
                world.step(member);
                if before.phase == GroupPhase::Gather && world.group.round().phase == GroupPhase::Pause {
                    world.cut = world.members.keys().copied().filter(|member| world.group.is_member(*member)).collect();
                }
            }
        }
        prop_assert!(world.members.is_empty() || world.released > released, "they wait for ever: {:?}", world.group);
    }
}

#[test]
fn who_is_late_is_expelled_and_the_others_get_on() {
    let mut group = ConsistencyGroup::default();
    [1, 2, 3].into_iter().for_each(|member| group.join(member));
    assert!(group.done(1, GroupPhase::Pause).is_none(), "that is not waited for");
    assert!([1, 2, 3].into_iter().all(|member| group.done(member, GroupPhase::Gather).is_some()));
    let waits = group.done(1, GroupPhase::Pause).unwrap();
    group.done(3, GroupPhase::Pause).unwrap();
    assert_eq!(group.round(), waits);
    assert_eq!(group.expel(), [2]);
    assert!(group.round() > waits && group.round().phase == GroupPhase::Send);
    assert!(group.done(2, GroupPhase::Send).is_none(), "it is no member");
    group.join(2);
    group.leave(3);
    group.done(1, GroupPhase::Send).unwrap();
    assert_eq!(group.round(), GroupRound { round: 1, phase: GroupPhase::Gather });
    assert!(group.is_member(2), "from the next round on");
    group.done(1, GroupPhase::Gather).unwrap();
    group.not_yet(1);
    group.done(2, GroupPhase::Gather).unwrap();
    assert_eq!(group.round().phase, GroupPhase::Gather, "one of them has something else to do first");
    group.leave(1);
    assert_eq!(group.round().phase, GroupPhase::Pause);
    group.leave(2);
    assert!(group.is_empty() && group.round() == GroupRound { round: 2, phase: GroupPhase::Gather });
}
