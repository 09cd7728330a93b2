//! Rule: once the faults have ended, work is accepted again without a restart: nothing stays refused.

use crate::{
    report::violation,
    world::{log, with},
};
use std::{fmt::Debug, time::Duration};

/// Faults end, disks have room.
pub(crate) fn end_faults() {
    with(|world| {
        world.faults.rates = Default::default();
        world.hosts.iter_mut().for_each(|host| {
            host.disk.capacity = u64::MAX;
            host.cut_from = 0;
        });
    });
    log("the faults end");
}

/// Tries `work` for a minute of simulated time.
pub(crate) fn check<T, E: Debug>(what: &str, mut work: impl FnMut() -> Result<T, E>) -> T {
    let mut last = None;
    for _ in 0..12 {
        match work() {
            Ok(done) => return done,
            Err(error) => last = Some(error),
        }
        std::thread::sleep(Duration::from_secs(5));
    }
    violation("comes_back", &format!("a minute after the faults ended: {what}: {last:?}"))
}
