//! Table of losses: in which scene each must be found, and where it comes from.

use whimbrel_core::loss::Loss;

/// Seeds within which a loss must be found.
pub(crate) const SEEDS_MAX: u64 = 5_000;

/// One loss that a test can bring back.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) loss: Loss,
    pub(crate) scene: &'static str,
}

/// Every loss, with the scene that shows it.
pub(crate) const TABLE: &[Row] = &[
    Row { loss: Loss::FullDiskLatches, scene: "full-disk" },
    Row { loss: Loss::NameBeforePages, scene: "pull" },
    Row { loss: Loss::PartialMarkedOnce, scene: "pull" },
    Row { loss: Loss::OrphanNotSynced, scene: "store" },
    Row { loss: Loss::NamesNotSynced, scene: "store" },
    Row { loss: Loss::ParentNotSynced, scene: "store" },
    Row { loss: Loss::PackNotSynced, scene: "store" },
    Row { loss: Loss::PackNameNotSynced, scene: "store" },
    Row { loss: Loss::SmallFileNotSynced, scene: "store" },
    Row { loss: Loss::RefNameNotSynced, scene: "store" },
    Row { loss: Loss::PinsIgnored, scene: "store" },
    Row { loss: Loss::MarkedOnce, scene: "store" },
    Row { loss: Loss::WritersIgnored, scene: "store" },
    Row { loss: Loss::NewPacksCondemned, scene: "store" },
    Row { loss: Loss::DeadDeltaDamaged, scene: "store" },
];

/// Name and description of a loss.
pub(crate) fn describe(loss: Loss) -> (&'static str, &'static str) {
    let row = Loss::ALL.iter().find(|(other, ..)| *other == loss);
    row.map_or(("", ""), |(_, name, text)| (*name, text.trim()))
}
