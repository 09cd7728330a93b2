//! Evacuation plan: the target of each machine. Pure.
//!
//! Machines are sorted by their writable working set, smallest first (section 7.1 of Clark et al., NSDI
//! 2005): each that has left frees processor and network for those that need them most. Each goes to the host
//! with the most memory left that has room for all of it: memory as large as its guest may make it, disks as
//! large as they may become.

use std::collections::BTreeMap;
use whimbrel_core::{ByteSize, HostName, MachineName};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MovableMachine {
    pub(crate) name: MachineName,
    pub(crate) memory: u64,
    pub(crate) disks: u64,
    /// Pages that it dirtied during the measurement.
    pub(crate) dirtied: u64,
}

/// A host that may take machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CandidateHost {
    pub(crate) host: HostName,
    /// Spare capacity of the host, or why it takes none.
    pub(crate) capacity: Result<SpareCapacity, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SpareCapacity {
    pub(crate) memory: u64,
    pub(crate) disk: u64,
    /// Machines that it refuses in any case, and why.
    pub(crate) refused: BTreeMap<MachineName, String>,
}

/// A machine and its target, or the reason of each host that does not take it.
pub(crate) type Placed = (MovableMachine, Result<HostName, Vec<String>>);

/// Sorts the machines and finds a host for each.
pub(crate) fn plan(mut machines: Vec<MovableMachine>, mut targets: Vec<CandidateHost>) -> Vec<Placed> {
    machines.sort_by(|a, b| (a.dirtied, a.memory, &a.name).cmp(&(b.dirtied, b.memory, &b.name)));
    machines
        .into_iter()
        .map(|machine| {
            let place = place(&machine, &mut targets);
            (machine, place)
        })
        .collect()
}

fn place(machine: &MovableMachine, targets: &mut [CandidateHost]) -> Result<HostName, Vec<String>> {
    let mut reasons = Vec::new();
    let mut best: Option<(&HostName, &mut SpareCapacity)> = None;
    for target in targets {
        match target.capacity.as_mut().map_err(|reason| reason.clone()).and_then(|room| {
            room.takes(machine)?;
            Ok(room)
        }) {
            Ok(room) if best.as_ref().is_none_or(|(_, other)| room.memory > other.memory) => {
                best = Some((&target.host, room));
            }
            Ok(_) => {}
            Err(reason) => reasons.push(format!("{}: {reason}", target.host)),
        }
    }
    let Some((host, room)) = best else { return Err(reasons) };
    room.memory -= machine.memory;
    room.disk -= machine.disks;
    Ok(host.clone())
}

impl SpareCapacity {
    /// Whether there is room for the machine, or why not.
    fn takes(&self, machine: &MovableMachine) -> Result<(), String> {
        let short = |what: &str, needs: u64, has: u64| {
            let (needs, has) = (ByteSize(needs), ByteSize(has));
            Err(format!("it needs {needs} of {what}, {has} are free"))
        };
        match self.refused.get(&machine.name) {
            Some(reason) => Err(reason.clone()),
            None if machine.memory > self.memory => short("memory", machine.memory, self.memory),
            None if machine.disks > self.disk => short("disk", machine.disks, self.disk),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn machine(name: &str, memory: u64, dirtied: u64) -> MovableMachine {
        MovableMachine { name: name.parse().unwrap(), memory, disks: 10, dirtied }
    }

    fn target(host: &str, memory: u64) -> CandidateHost {
        let room = SpareCapacity { memory, disk: 1000, refused: BTreeMap::new() };
        CandidateHost { host: host.parse().unwrap(), capacity: Ok(room) }
    }

    fn places(placed: &[Placed]) -> Vec<(&str, Option<&str>)> {
        placed.iter().map(|(m, to)| (m.name.as_str(), to.as_ref().ok().map(HostName::as_str))).collect()
    }

    #[test]
    fn those_that_dirty_least_go_first_and_to_where_most_is_free() {
        let machines = vec![machine("busy", 40, 900), machine("idle", 40, 3), machine("calm", 40, 70)];
        let placed = plan(machines, vec![target("beta", 100), target("gamma", 70)]);
        assert_eq!(
            places(&placed),
            [("idle", Some("beta")), ("calm", Some("gamma")), ("busy", Some("beta"))]
        );
    }

    #[test]
    fn a_machine_that_fits_nowhere_is_told_why_by_each_host_and_those_after_it_still_go() {
        let mut full = target("full", 1 << 30);
        full.capacity.as_mut().unwrap().refused.insert("big".parse().unwrap(), "the name is taken".into());
        let lost =
            CandidateHost { host: "lost".parse().unwrap(), capacity: Err("it cannot be reached".into()) };
        let machines = vec![machine("big", 1 << 20, 1), machine("small", 1 << 10, 2)];
        let placed = plan(machines, vec![target("beta", 1 << 12), full, lost]);
        assert_eq!(places(&placed), [("big", None), ("small", Some("full"))]);
        assert_eq!(
            placed[0].1.as_ref().unwrap_err(),
            &[
                "beta: it needs 1 MiB of memory, 4 KiB are free",
                "full: the name is taken",
                "lost: it cannot be reached",
            ]
        );
    }

    proptest! {
        #[test]
        fn no_host_gets_more_than_it_has_and_none_is_left_that_would_have_fitted(
            machines in proptest::collection::vec((1..60u64, 0..60u64, 0..9u64), 0..12),
            rooms in proptest::collection::vec((0..120u64, 0..120u64), 0..4),
        ) {
            let candidate = |(number, (memory, disks, dirtied)): (usize, &(u64, u64, u64))| MovableMachine {
                name: format!("m{number}").parse().unwrap(), memory: *memory, disks: *disks, dirtied: *dirtied,
            };
            let machines: Vec<_> = machines.iter().enumerate().map(candidate).collect();
            let targets: Vec<_> = rooms.iter().enumerate().map(|(number, (memory, disk))| CandidateHost {
                host: format!("h{number}").parse().unwrap(),
                capacity: Ok(SpareCapacity { memory: *memory, disk: *disk, refused: BTreeMap::new() }),
            }).collect();
            let placed = plan(machines.clone(), targets.clone());
            prop_assert_eq!(placed.len(), machines.len());
            prop_assert!(placed.windows(2).all(|pair| pair[0].0.dirtied <= pair[1].0.dirtied));
            let mut left: BTreeMap<_, _> = targets.iter().map(|t| (t.host.clone(), t.capacity.clone().unwrap())).collect();
            for (machine, place) in placed {
                match place {
                    Ok(host) => {
                        let room = left.get_mut(&host).unwrap();
                        prop_assert!(room.memory >= machine.memory && room.disk >= machine.disks);
                        (room.memory, room.disk) = (room.memory - machine.memory, room.disk - machine.disks);
                    }
                    Err(reasons) => {
                        prop_assert_eq!(reasons.len(), targets.len());
                        prop_assert!(left.values().all(|room| room.takes(&machine).is_err()));
                    }
                }
            }
        }
    }
}
