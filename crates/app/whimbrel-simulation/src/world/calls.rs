//! Entry of every call of the program under test: it is counted, may be the last one of its process, and
//! lets others go on.

use super::{baton, disk::Errno, faults::DiskCall, hosts::HostId, me, with};
use crate::report;

/// Calls after which a seed counts as endless.
const STEPS_MAX: u64 = 3_000_000;

/// Records a call. Does not return if the process is killed at it.
pub(crate) fn enter(call: &'static str, detail: u64) {
    let me = me();
    let (killed, steps) = with(|world| {
        let now = world.schedule.now;
        world.story.call(now, me, call, detail);
        let process = world.process(me);
        let doom = world.processes.count_call(process, call);
        if let Some(power) = doom {
            world.log(&format!("is killed at {call}"));
            world.end_process(process, None);
            let host = world.processes.host(process).filter(|_| power);
            host.into_iter().for_each(|host| world.lose_power(host));
        }
        (doom.is_some(), world.story.steps)
    });
    if killed {
        baton::die(me);
    }
    if steps > STEPS_MAX {
        report::violation("ends_or_says", &format!("no end after {STEPS_MAX} calls"));
    }
}

/// A call on a disk: takes its time, lets others go on, may fail.
pub(crate) fn enter_disk(
    host: HostId,
    kind: DiskCall,
    call: &'static str,
    detail: u64,
    cost: u64,
) -> Result<(), Errno> {
    enter(call, detail ^ (host as u64) << 56);
    let fate = with(|world| {
        let mut fate = world.faults.fate(kind, cost);
        if kind == DiskCall::Sync && world.processes.fails_sync(world.process(me())) {
            fate.error = Some(libc::EIO);
        }
        if let Some(error) = fate.error {
            world.log(&format!("{call} fails with error {error}"));
        }
        if fate.pause > 40_000_000 {
            world.log(&format!("{call} takes {} ms", fate.pause / 1_000_000));
        }
        if fate.pause == 0 {
            world.schedule.now += cost;
        }
        fate
    });
    if fate.pause > 0 {
        baton::sleep(fate.pause)
    } else {
        baton::point()
    }
    fate.error.map_or(Ok(()), Err)
}
