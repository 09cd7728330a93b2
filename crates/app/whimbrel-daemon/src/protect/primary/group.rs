//! Consistency groups on this host: lets the protection threads of several machines wait for each other.
//!
//! The rounds are those of [`ConsistencyGroup`]. A machine is a member while it is protected epoch by epoch:
//! not during seeding or once its standby is lost, when the others do not wait for it. A wait ends when the
//! caller has something else to do; during a pause no member is waited for longer than [`PAUSE_TIMEOUT`].

use crate::protect::lock;
use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};
use whimbrel_protect::consistency_group::{ConsistencyGroup, GroupMember, GroupPhase};

/// How long paused machines wait for a member that does not pause.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which a waiting thread checks whether it still has to wait.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// All groups of this host, by name. A group without members is deleted.
#[derive(Default)]
pub(in crate::protect) struct Groups(Mutex<BTreeMap<String, Arc<GroupState>>>);

#[derive(Default)]
struct GroupState {
    group: Mutex<ConsistencyGroup>,
    changed: Condvar,
    members: Mutex<GroupMember>,
}

/// Membership of a machine in a group, until it is dropped.
pub(in crate::protect) struct Membership {
    shared: Arc<GroupState>,
    member: GroupMember,
    name: String,
}

impl Groups {
    /// Joins a group, which is created if needed.
    pub(in crate::protect) fn join(&self, name: &str) -> Membership {
        let mut groups = lock(&self.0);
        groups.retain(|known, shared| known == name || !lock(&shared.group).is_empty());
        let shared = groups.entry(name.to_owned()).or_default().clone();
        let member = {
            let mut last = lock(&shared.members);
            *last += 1;
            *last
        };
        lock(&shared.group).join(member);
        Membership { shared, member, name: name.to_owned() }
    }
}

impl Membership {
    /// Waits until the epochs of all members are due. Returns false if `go_on` does before.
    pub(in crate::protect) fn wait_due(&self, go_on: &mut dyn FnMut() -> bool) -> bool {
        loop {
            match self.wait(GroupPhase::Gather, None, go_on) {
                Waited::Past => return true,
                Waited::Stopped => return false,
                // Joined or was late in the middle of a round.
                Waited::NotExpected => {
                    if !go_on() {
                        return false;
                    }
                    std::thread::sleep(POLL_INTERVAL);
                }
            }
        }
    }

    /// Waits until all members are paused and captured.
    pub(in crate::protect) fn wait_paused(&self) {
        let until = Instant::now() + PAUSE_TIMEOUT;
        self.wait(GroupPhase::Pause, Some(until), &mut || true);
    }

    /// Waits until the epochs of all members are committed, or `go_on` returns false. Returns whether all
    /// have the epoch: of a member that was late for the pause they have another one.
    pub(in crate::protect) fn wait_committed(&self, go_on: &mut dyn FnMut() -> bool) -> bool {
        matches!(self.wait(GroupPhase::Send, None, go_on), Waited::Past)
    }

    fn wait(&self, phase: GroupPhase, until: Option<Instant>, go_on: &mut dyn FnMut() -> bool) -> Waited {
        let mut group = lock(&self.shared.group);
        let Some(place) = group.done(self.member, phase) else { return Waited::NotExpected };
        self.shared.changed.notify_all();
        while group.round() <= place {
            if !go_on() {
                group.not_yet(self.member);
                return Waited::Stopped;
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                let late = group.expel();
                tracing::warn!(
                    group = self.name,
                    late = late.len(),
                    "machines of a group continued without those that did not pause"
                );
                late.into_iter().for_each(|member| group.join(member));
                self.shared.changed.notify_all();
                continue;
            }
            let waited = self.shared.changed.wait_timeout(group, POLL_INTERVAL);
            group = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Waited::Past
    }
}

enum Waited {
    Past,
    Stopped,
    NotExpected,
}

impl Drop for Membership {
    fn drop(&mut self) {
        lock(&self.shared.group).leave(self.member);
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn threads_of_a_group_go_in_step_and_one_that_leaves_is_not_waited_for() {
        let groups = Groups::default();
        let rounds: [AtomicU64; 3] = Default::default();
        let members: Vec<Membership> = (0..3).map(|_| groups.join("shop")).collect();
        let alone = groups.join("another");
        assert!(alone.wait_due(&mut || true));
        std::thread::scope(|scope| {
            for (at, membership) in members.into_iter().enumerate() {
                let rounds = &rounds;
                scope.spawn(move || {
                    for round in 1..=if at == 0 { 20 } else { 50 } {
                        assert!(membership.wait_due(&mut || true));
                        membership.wait_paused();
                        rounds[at].store(round, Ordering::SeqCst);
                        assert!(membership.wait_committed(&mut || true));
                        let least = rounds[usize::from(round > 20)..]
                            .iter()
                            .map(|round| round.load(Ordering::SeqCst));
                        assert!(least.min() >= Some(round), "output of {round} leaves too early");
                    }
                });
            }
        });
        let (one, slow) = (groups.join("till"), groups.join("till"));
        std::thread::scope(|scope| {
            let both = [&one, &slow].map(|member| {
                scope.spawn(|| {
                    assert!(member.wait_due(&mut || true));
                    member.wait_paused();
                })
            });
            both.into_iter().for_each(|member| member.join().unwrap());
        });
        assert!(!one.wait_committed(&mut || false), "the other one's epoch is not committed");
        let last = groups.join("shop");
        let waits = groups.join("shop");
        assert!(!last.wait_due(&mut || false), "it has something better to do");
        drop(last);
        assert!(waits.wait_due(&mut || true));
    }
}
