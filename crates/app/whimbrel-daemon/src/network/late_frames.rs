//! Late frames: network frames for a machine that arrive while no host runs it. Its ports buffer them; they
//! are sent after the machine, or delivered here if it stays.
//!
//! A host buffers frames from the pause on. After the handover they go to the target, which delivers them
//! once the machine runs. Group frames reach the target's port too, so those that arrive after the commit are
//! not sent.

use std::{
    collections::VecDeque,
    sync::{Mutex, Weak},
    time::{Duration, Instant},
};
use whimbrel_core::lock;
use whimbrel_migrate::{late_frames::LateFrame, protocol::HandoverId};
use whimbrel_net::{Gates, Port};
use whimbrel_vm::NetworkPort;

/// Machines whose ports are remembered, and for how long: late frames come within milliseconds of the
/// arrival, and later the source has no more.
const ARRIVALS_MAX: usize = 1024;
const ARRIVAL_AGE_MAX: Duration = Duration::from_secs(60);

/// Delivers the buffered frames to a machine that runs on here.
pub(crate) fn deliver_locally(ports: &[NetworkPort]) {
    ports.iter().for_each(|port| port.port_ref().deliver_late_frames());
}

/// Buffered frames of a machine that was just handed over.
pub(crate) fn take_buffered(ports: &[NetworkPort]) -> Vec<LateFrame> {
    let of = |(index, port): (u16, &NetworkPort)| {
        let frames = port.port_ref().take_late_frames();
        frames.into_iter().map(move |frame| LateFrame { port: index, frame })
    };
    (0..).zip(ports).flat_map(of).collect()
}

/// Last late frames of a machine that runs elsewhere, without group frames. Nothing arrives here for it any
/// more.
pub(crate) fn take_last(ports: &[NetworkPort]) -> Vec<LateFrame> {
    let is_to_a_group = |stray: &LateFrame| stray.frame.first().is_some_and(|first| first & 1 == 1);
    let last = take_buffered(ports).into_iter().filter(|stray| !is_to_a_group(stray)).collect();
    ports.iter().for_each(|port| port.port_ref().set_gates(Gates::BLOCKED));
    last
}

/// Ports of incoming and recently arrived machines, for their late frames.
#[derive(Default)]
pub(crate) struct RecentArrivals(Mutex<VecDeque<RecentArrival>>);

struct RecentArrival {
    handover: HandoverId,
    since: Instant,
    ports: Vec<Weak<Port>>,
}

impl RecentArrivals {
    /// Adds a machine that is about to run here.
    pub(crate) fn insert(&self, handover: HandoverId, ports: &[NetworkPort]) {
        let mut newcomers = lock(&self.0);
        newcomers.retain(|newcomer| newcomer.since.elapsed() < ARRIVAL_AGE_MAX);
        if newcomers.len() >= ARRIVALS_MAX {
            newcomers.pop_front();
        }
        let ports = ports.iter().map(NetworkPort::port).collect();
        newcomers.push_back(RecentArrival { handover, since: Instant::now(), ports });
    }

    /// Delivers late frames to their machine. Drops them if it is unknown, no longer recent, or gone.
    pub(crate) fn deliver(&self, handover: HandoverId, strays: &[LateFrame]) {
        let newcomers = lock(&self.0);
        let is_it = |newcomer: &&RecentArrival| {
            newcomer.handover == handover && newcomer.since.elapsed() < ARRIVAL_AGE_MAX
        };
        let ports =
            newcomers.iter().rev().find(is_it).map_or_else(Vec::new, |newcomer| newcomer.ports.clone());
        drop(newcomers);
        for (index, port) in (0..).zip(ports) {
            let its = strays.iter().filter(|stray| stray.port == index).map(|stray| &*stray.frame);
            port.upgrade().into_iter().for_each(|port| port.add_late_frames(its.clone()));
        }
    }
}
