//! Pools as one of their managers sees each, for people. A pool is known if its settings name it, a schedule
//! pushes to it, or it was used since the daemon started.

use super::PoolPath;
use crate::{core::error::DaemonError, daemon::Daemon};
use std::{collections::BTreeMap, thread};
use whimbrel_api::{PoolBenefactor, PoolInfo, PoolScrub, PoolState, ScheduledWork};
use whimbrel_core::{error_chain, lock};
use whimbrel_pool::{
    client::{Pool, PoolError},
    protocol::{BenefactorInfo, MemberReport, ScrubReport},
};
use whimbrel_schedule::Schedules;
use whimbrel_wire::Code;

impl Daemon {
    /// Adds pools of the settings to those that are known.
    pub(crate) fn add_pools(&self, pools: &[String]) -> Result<(), DaemonError> {
        for text in pools {
            let place: PoolPath = text.parse()?;
            self.pools.remember(&place);
        }
        Ok(())
    }

    /// Every pool that is known. All are asked at once.
    pub(crate) fn pool_infos(&self) -> Vec<PoolInfo> {
        let mut places = lock(&self.pools.known).clone();
        places.extend(scheduled(&self.schedules).map(|place| (place.pool_name(), place)));
        thread::scope(|scope| {
            let asked: Vec<_> =
                places.values().map(|place| scope.spawn(move || self.pool_info(place))).collect();
            asked.into_iter().filter_map(|info| info.join().ok()).collect()
        })
    }

    fn pool_info(&self, place: &PoolPath) -> PoolInfo {
        let asked = self.pool(place).map_err(|error| error_chain(&error));
        let state = asked.and_then(|pool| state_of(&pool).map_err(|error| error_chain(&error)));
        let (state, problem) = match state {
            Ok(state) => (Some(state), None),
            Err(problem) => (None, Some(problem)),
        };
        let managers = place.managers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        PoolInfo { managers, problem, state }
    }
}

/// Pools that schedules push to.
fn scheduled(schedules: &Schedules) -> impl Iterator<Item = PoolPath> + use<> {
    let target = |work| match work {
        ScheduledWork::Push { pool, .. } => pool,
        _ => None,
    };
    // A target that is no pool is a bucket.
    schedules.works().into_iter().filter_map(move |work| target(work)?.parse().ok())
}

fn state_of(pool: &Pool) -> Result<PoolState, PoolError> {
    let status = pool.block(pool.status())?;
    let members: MemberReport = known_to_manager(pool.block(pool.members()))?;
    let scrubs: Vec<_> = known_to_manager(pool.block(pool.scrubs()))?;
    let scrubs: BTreeMap<String, ScrubReport> = scrubs.into_iter().collect();
    let benefactors = status.benefactors.into_iter().map(|one| benefactor(one, &scrubs)).collect();
    Ok(PoolState {
        files: status.files,
        versions: status.versions,
        logical: status.logical,
        unique: status.unique,
        short_of_copies: status.repair,
        repaired_in_s: status.repair_eta,
        lost: status.lost,
        writing: status.sessions,
        pinned: status.pinned,
        backup_age_s: members.backup_age,
        benefactors,
    })
}

/// The answer, or nothing if the manager is of a version that does not know the question.
fn known_to_manager<T: Default>(answer: Result<T, PoolError>) -> Result<T, PoolError> {
    match answer {
        Err(error) if error.code() == Some(Code::UNKNOWN_KIND) => Ok(T::default()),
        answer => answer,
    }
}

fn benefactor(one: BenefactorInfo, scrubs: &BTreeMap<String, ScrubReport>) -> PoolBenefactor {
    let scrub = scrubs.get(&one.name).map(|scrub| PoolScrub {
        checked: scrub.bytes,
        of: scrub.of,
        ended_s: scrub.ended,
        damaged: scrub.damaged.max(scrub.last_damaged),
        late: scrub.late,
    });
    let BenefactorInfo { name, address, state, capacity, used, free, faults, silent, .. } = one;
    PoolBenefactor { name, address, state, capacity, used, free, faults, silent_s: silent, scrub }
}
