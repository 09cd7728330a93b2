//! What comes for a machine while nobody runs it: its ports keep it, and it goes after the machine, or to it if it stays.
//!
//! A host keeps it from the moment at which it stops the machine. Once the machine is handed over it goes to the target, which gives it
//! to the machine when that runs. Frames to a group reach the target's port too: of those that come after the commit none goes
//! after the machine.

use crate::live::LivePort;
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError, Weak},
};
use whimbrel_migrate::{protocol::HandoverId, strays::Stray};
use whimbrel_net::Port;

/// Machines whose ports are remembered: what comes for one comes within milliseconds of its arrival.
const NEWCOMERS_MAX: usize = 1024;

/// Keeps what comes for a machine that is about to stand still.
pub(crate) fn keep(ports: &[LivePort]) {
    ports.iter().for_each(|port| port.port_here().keep_strays());
}

/// Gives a machine that goes on here what was kept.
pub(crate) fn let_in(ports: &[LivePort]) {
    ports.iter().for_each(|port| port.port_here().let_strays_in());
}

/// What was kept of a machine that was just handed over.
pub(crate) fn all(ports: &[LivePort]) -> Vec<Stray> {
    let of = |(index, port): (u16, &LivePort)| {
        let frames = port.port_here().take_strays();
        frames.into_iter().map(move |frame| Stray { port: index, frame })
    };
    (0..).zip(ports).flat_map(of).collect()
}

/// What has come for one that runs elsewhere, and reached nobody else.
pub(crate) fn late(ports: &[LivePort]) -> Vec<Stray> {
    let is_to_a_group = |stray: &Stray| stray.frame.first().is_some_and(|first| first & 1 == 1);
    all(ports).into_iter().filter(|stray| !is_to_a_group(stray)).collect()
}

/// Ports of machines that arrive or have arrived lately, for what is sent after them.
#[derive(Default)]
pub(crate) struct Newcomers(Mutex<VecDeque<(HandoverId, Vec<Weak<Port>>)>>);

impl Newcomers {
    /// A machine is about to be run here.
    pub(crate) fn enter(&self, handover: HandoverId, ports: &[LivePort]) {
        let mut newcomers = self.lock();
        if newcomers.len() >= NEWCOMERS_MAX {
            newcomers.pop_front();
        }
        newcomers.push_back((handover, ports.iter().map(LivePort::port).collect()));
    }

    /// Gives a machine what came for it. Of one that is not known, or is gone, it is dropped.
    pub(crate) fn deliver(&self, handover: HandoverId, strays: Vec<Stray>) {
        let newcomers = self.lock();
        let ports = newcomers.iter().rev().find(|(of, _)| *of == handover).map(|(_, ports)| ports.clone());
        drop(newcomers);
        for (index, port) in (0..).zip(ports.into_iter().flatten()) {
            let its = strays.iter().filter(|stray| stray.port == index).map(|stray| stray.frame.clone());
            port.upgrade().into_iter().for_each(|port| port.add_strays(its.clone()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(HandoverId, Vec<Weak<Port>>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
