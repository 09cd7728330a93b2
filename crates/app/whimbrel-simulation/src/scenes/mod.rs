//! Scenes: what is run, on which hosts, and what happens to it. A scene draws its faults first, then lets
//! processes work, kills them, lets hosts lose power, and in the end lets all faults end and checks the
//! rules.

pub(crate) mod capsules;
mod damage;
mod full_disk;
mod handover;
mod lease;
mod pull;
pub(crate) mod record;
mod schedules;
mod store;

/// A scene and its name.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) run: fn(),
}

/// All scenes, in the order in which seeds take turns.
pub(crate) const ALL: &[Scene] = &[
    Scene {
        name: "store",
        about: "writers, a collector and readers of one store, killed and without power at any call",
        run: store::run,
    },
    Scene { name: "full-disk", about: "a disk that is full for a while", run: full_disk::run },
    Scene {
        name: "pull",
        about: "versions of a machine pulled to another store, beside a collector, over a bad link",
        run: pull::run,
    },
    Scene { name: "damage", about: "bytes of a store change, and are repaired", run: damage::run },
    Scene {
        name: "handover",
        about: "a machine moves to another host, by the program's state machines",
        run: handover::run,
    },
    Scene {
        name: "lease",
        about: "a protected machine, its standby and a witness, by the program's leases",
        run: lease::run,
    },
    Scene {
        name: "schedules",
        about: "weeks of checkpoints and copies with rules, with clock steps, by the program's schedules",
        run: schedules::run,
    },
];

/// The scene of this name.
pub(crate) fn find(name: &str) -> Option<&'static Scene> {
    ALL.iter().find(|scene| scene.name == name)
}
