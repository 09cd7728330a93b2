//! The experiments. One file a family, one function a row or a few rows that need the same preparation.
//!
//! To add one: a function from [`Context`] to rows, and an entry in a set of `sets`.

mod campaign;
mod checkpoint;
mod clients;
mod clock;
mod clone;
mod control;
mod day;
mod debian_images;
mod disk_time;
mod downtime;
mod file_peer;
mod images;
mod keeper;
mod kept;
mod machine_process;
mod migrate;
mod move_cost;
mod move_rate;
mod moved_server;
mod moved_stores;
mod muncher;
mod nbd;
mod operate;
mod operate_web;
mod ours;
mod over_control;
pub(crate) mod patch;
mod peers;
mod pool;
mod precopy;
mod process_cost;
mod profiles;
mod protect;
mod qemu_nbd;
mod rates;
mod resting;
mod resume;
mod scan;
mod scan_kvm;
mod session;
mod sets;
mod smp;
mod store;
mod stores;
mod throughput;
mod to_and_fro;
mod trust;
mod web_mix;
mod wws_error;

use crate::capsule;
use crate::harness::Row;
use anyhow::{Context as _, Result, bail};
use std::path::PathBuf;

pub(crate) use sets::SETS;

/// What an experiment is told.
pub(crate) struct Context {
    /// Fewer repetitions, smaller inputs.
    pub(crate) quick: bool,
    /// Repetitions of each case whatever a row would do itself.
    pub(crate) times: Option<usize>,
    /// Minutes and seed of a campaign.
    pub(crate) minutes: Option<u64>,
    pub(crate) seed: Option<u64>,
    /// Two images to keep instead of made ones, the second a later version of the first.
    pub(crate) images: Option<(PathBuf, PathBuf)>,
}

impl Context {
    /// How often to measure.
    pub(crate) fn times(&self, full: usize, quick: usize) -> usize {
        self.times.unwrap_or(if self.quick { quick } else { full })
    }
}

/// One experiment.
pub(crate) struct Experiment {
    /// The rows it makes, `family.row`: one, or those that come of the same preparation.
    pub(crate) rows: &'static [&'static str],
    /// One line for people.
    pub(crate) about: &'static str,
    pub(crate) run: fn(&Context) -> Result<Vec<Row>>,
}

/// The experiments that `name` means: a set by its name, one by a row of its, a family by what stands before
/// the dot.
pub(crate) fn select(name: &str) -> Result<Vec<&'static Experiment>> {
    if let Some((_, set)) = SETS.iter().find(|(set, _)| *set == name) {
        return Ok(set.iter().collect());
    }
    let is_meant = |row: &&str| *row == name || row.split_once('.').is_some_and(|(family, _)| family == name);
    let all = SETS.iter().flat_map(|(_, experiments)| experiments.iter());
    let chosen: Vec<_> = all.filter(|experiment| experiment.rows.iter().any(is_meant)).collect();
    if chosen.is_empty() {
        bail!("no experiment {name:?}; `list` shows them");
    }
    Ok(chosen)
}

/// The set whose record is to hold what `name` means: the first that has all of it.
pub(crate) fn set_of(name: &str) -> Result<&'static str> {
    let chosen = select(name)?;
    let has = |experiments: &[Experiment], one: &Experiment| experiments.iter().any(|e| std::ptr::eq(e, one));
    let set = SETS.iter().find(|(_, experiments)| chosen.iter().all(|one| has(experiments, one)));
    set.map(|(set, _)| *set).with_context(|| format!("{name} means experiments of several sets"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_an_experiment_goes_to_its_set() {
        assert_eq!(set_of("pool").unwrap(), "pool");
        assert_eq!(set_of("checkpoint.bytes").unwrap(), "run");
        assert_eq!(set_of("vm.threads").unwrap(), "vm");
        assert!(set_of("migrate.downtime.idle").is_err(), "long ones have it too");
    }

    #[test]
    fn a_name_means_a_row_a_family_or_all() {
        assert_eq!(select("scan.idle").unwrap().len(), 1);
        assert_eq!(select("scan").unwrap().len(), 4);
        assert_eq!(select("checkpoint").unwrap().len(), 1);
        assert_eq!(select("checkpoint.bytes").unwrap().len(), 1);
        assert_eq!(select("run").unwrap().len(), SETS[0].1.len());
        assert_eq!(select("capsule").unwrap().len(), capsule::EXPERIMENTS.len());
        assert!(select("sca").is_err());
    }
}
