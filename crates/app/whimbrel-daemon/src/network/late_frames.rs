//! What comes for a machine while nobody runs it: its ports keep it, and it goes after the machine, or to it
//! if it stays.
//!
//! A host keeps it from the moment at which it stops the machine. Once the machine is handed over it goes to
//! the target, which gives it to the machine when that runs. Frames to a group reach the target's port too:
//! of those that come after the commit none goes after the machine.

use crate::running::NetworkPort;
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};
use whimbrel_migrate::{late_frames::LateFrame, protocol::HandoverId};
use whimbrel_net::{Gates, Port};

/// Machines whose ports are remembered, and for how long: what comes for one comes within milliseconds of its
/// arrival, and later its old host has nothing more to give to it.
const NEWCOMERS_MAX: usize = 1024;
const NEW_FOR: Duration = Duration::from_secs(60);

/// Keeps what comes for a machine that is about to stand still.
pub(crate) fn start_buffering(ports: &[NetworkPort]) {
    ports.iter().for_each(|port| port.port_here().keep_strays());
}

/// Gives a machine that goes on here what was kept.
pub(crate) fn deliver_locally(ports: &[NetworkPort]) {
    ports.iter().for_each(|port| port.port_here().let_strays_in());
}

/// What was kept of a machine that was just handed over.
pub(crate) fn all(ports: &[NetworkPort]) -> Vec<LateFrame> {
    let of = |(index, port): (u16, &NetworkPort)| {
        let frames = port.port_here().take_strays();
        frames.into_iter().map(move |frame| LateFrame { port: index, frame })
    };
    (0..).zip(ports).flat_map(of).collect()
}

/// What has come for one that runs elsewhere, and reached nobody else. Nothing comes here for it any more.
pub(crate) fn last(ports: &[NetworkPort]) -> Vec<LateFrame> {
    let is_to_a_group = |stray: &LateFrame| stray.frame.first().is_some_and(|first| first & 1 == 1);
    let last = all(ports).into_iter().filter(|stray| !is_to_a_group(stray)).collect();
    ports.iter().for_each(|port| port.port_here().set_gates(Gates::BLOCKED));
    last
}

/// Ports of machines that arrive or have arrived lately, for what is sent after them.
#[derive(Default)]
pub(crate) struct RecentArrivals(Mutex<VecDeque<Newcomer>>);

struct Newcomer {
    handover: HandoverId,
    since: Instant,
    ports: Vec<Weak<Port>>,
}

impl RecentArrivals {
    /// A machine is about to be run here.
    pub(crate) fn insert(&self, handover: HandoverId, ports: &[NetworkPort]) {
        let mut newcomers = self.lock();
        newcomers.retain(|newcomer| newcomer.since.elapsed() < NEW_FOR);
        if newcomers.len() >= NEWCOMERS_MAX {
            newcomers.pop_front();
        }
        let ports = ports.iter().map(NetworkPort::port).collect();
        newcomers.push_back(Newcomer { handover, since: Instant::now(), ports });
    }

    /// Gives a machine what came for it. Of one that is not known, not new any more, or gone, it is dropped.
    pub(crate) fn deliver(&self, handover: HandoverId, strays: &[LateFrame]) {
        let newcomers = self.lock();
        let is_it =
            |newcomer: &&Newcomer| newcomer.handover == handover && newcomer.since.elapsed() < NEW_FOR;
        let ports =
            newcomers.iter().rev().find(is_it).map_or_else(Vec::new, |newcomer| newcomer.ports.clone());
        drop(newcomers);
        for (index, port) in (0..).zip(ports) {
            let its = strays.iter().filter(|stray| stray.port == index).map(|stray| &*stray.frame);
            port.upgrade().into_iter().for_each(|port| port.add_strays(its.clone()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Newcomer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
