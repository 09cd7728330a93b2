//! Network between hosts: messages that are delayed, overtake each other, arrive twice or not at all; links
//! that are cut in one direction or both.

use super::{baton, hosts::HostId, schedule::Wait, with};
use std::{any::Any, sync::Arc};

/// A message, as the scene made it.
pub(crate) type Mail = Arc<dyn Any + Send + Sync>;

/// Shortest time under way in nanoseconds, and what is added by chance.
const DELAY: u64 = 100_000;
const DELAY_MORE: u64 = 2_000_000;
/// Time under way of a message that is late.
const LATE: u64 = 4_000_000_000;

/// Sends a message. Nobody is told whether it arrives.
pub(crate) fn send(from: HostId, to: HostId, message: impl Any + Send + Sync) {
    let message: Mail = Arc::new(message);
    with(|world| {
        let cut = world.hosts[to].cut_from & 1 << from != 0;
        if world.faults.loses_message() || cut {
            return;
        }
        let copies = if world.faults.repeats_message() { 2 } else { 1 };
        for _ in 0..copies {
            let late = if world.faults.delays_message() { LATE } else { DELAY_MORE };
            let at = world.schedule.now + DELAY + world.faults.random.below(late);
            let key = (at, world.faults.random.next());
            world.hosts[to].mail.insert(key, message.clone());
        }
        world.schedule.wake_all(Wait::Mail(to));
    });
    baton::point();
}

/// The next message for this host; none if none arrives until `deadline`.
pub(crate) fn receive(host: HostId, deadline: u64) -> Option<Mail> {
    loop {
        let first = with(|world| {
            let now = world.schedule.now;
            let (&key, _) = world.hosts[host].mail.first_key_value()?;
            if key.0 > now {
                return Some(Err(key.0));
            }
            world.hosts[host].mail.remove(&key).map(Ok)
        });
        let until = match first {
            Some(Ok(message)) => {
                baton::point();
                return Some(message);
            }
            Some(Err(arrives)) => arrives.min(deadline),
            None => deadline,
        };
        if until <= with(|world| world.schedule.now) {
            return None;
        }
        baton::wait(Wait::Mail(host), Some(until));
    }
}

/// Cuts the way from one host to another, or mends it.
pub(crate) fn cut(from: HostId, to: HostId, is_cut: bool) {
    with(|world| {
        let bit = 1 << from;
        let host = &mut world.hosts[to];
        host.cut_from = if is_cut { host.cut_from | bit } else { host.cut_from & !bit };
    });
}

/// Everything that is under way to a host is lost.
pub(crate) fn drop_mail(host: HostId) {
    with(|world| world.hosts[host].mail.clear());
}
