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
    Row { loss: Loss::DeadDeltaDamaged, scene: "store" },
    Row { loss: Loss::DigestNotCompared, scene: "damage" },
    Row { loss: Loss::RecordNotReverted, scene: "handover" },
    Row { loss: Loss::CommitTakenBack, scene: "handover" },
    Row { loss: Loss::TargetRunsEarly, scene: "handover" },
    Row { loss: Loss::TargetGivesUp, scene: "handover" },
    Row { loss: Loss::RecordNotDurable, scene: "handover" },
    Row { loss: Loss::GoneMachineForgotten, scene: "handover" },
    Row { loss: Loss::RetiredUnheard, scene: "lease" },
    Row { loss: Loss::PromiseBroken, scene: "lease" },
    Row { loss: Loss::LeasesForgotten, scene: "lease" },
    Row { loss: Loss::StandbyGivesUp, scene: "lease" },
    Row { loss: Loss::RestartNotFenced, scene: "lease" },
    Row { loss: Loss::NewCopyLooksOld, scene: "schedules" },
    Row { loss: Loss::RetainedCopyReplaced, scene: "schedules" },
    Row { loss: Loss::ScheduleFolderNotSynced, scene: "schedules" },
];

/// Losses that nearly every seed finds: every test run brings them back.
pub(crate) const QUICK: &[Loss] =
    &[Loss::FullDiskLatches, Loss::ParentNotSynced, Loss::SmallFileNotSynced, Loss::PackNotSynced];

/// The loss of this name.
pub(crate) fn find(name: &str) -> Option<Loss> {
    Loss::ALL.iter().find(|(_, other, _)| *other == name).map(|(loss, ..)| *loss)
}

/// Name and description of a loss.
pub(crate) fn describe(loss: Loss) -> (&'static str, &'static str) {
    let row = Loss::ALL.iter().find(|(other, ..)| *other == loss);
    row.map_or(("", ""), |(_, name, text)| (*name, text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::Path};

    fn sources(folder: &Path, texts: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let is_ours = path.ends_with("whimbrel-simulation") || path.ends_with("loss.rs");
            if path.is_dir() && !is_ours {
                sources(&path, texts);
            } else if path.extension().is_some_and(|ending| ending == "rs") && !is_ours {
                texts.push(fs::read_to_string(&path).unwrap());
            }
        }
    }

    #[test]
    fn every_loss_has_one_row_and_one_site() {
        let mut texts = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../crates"), &mut texts);
        for (loss, name, _) in Loss::ALL {
            assert_eq!(TABLE.iter().filter(|row| row.loss == *loss).count(), 1, "rows of {name}");
            let site = format!("is_back(Loss::{name})");
            assert_eq!(
                texts.iter().map(|text| text.matches(&site).count()).sum::<usize>(),
                1,
                "sites of {name}"
            );
        }
    }
}
