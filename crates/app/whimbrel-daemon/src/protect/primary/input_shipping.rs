//! Input shipping at the primary: sends inputs to the standby every millisecond or so, and releases output.
//!
//! Output leaves once the standby has all inputs that came before it; [`ship_and_release`] has the order of
//! steps. One thread for each machine, over a connection of its own, so that nothing waits behind pages.
//! While the standby has no complete epoch, no output leaves. Any failure closes the page link, which ends
//! the protection.

use super::{
    epochs::{OutputMarks, barriers, release_all},
    heartbeat::Heartbeat,
};
use crate::daemon::Daemon;
use crate::protect::link::{ControlLink, PageLink};
use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_core::lock;
use whimbrel_net::InputLog;
use whimbrel_protect::{
    input_replay::{InputChannel, ship_and_release},
    protocol::{self, INPUTS_BYTES_MAX, INPUTS_FRAMES_MAX},
};

/// Pause between two rounds of shipping.
const ROUND_PAUSE: Duration = Duration::from_millis(1);

/// The inputs of one protected machine.
pub(in crate::protect) struct InputShipper<'a> {
    heartbeat: &'a Heartbeat,
    link: &'a PageLink,
    control_link: ControlLink,
    inputs: Arc<InputLog>,
    /// Locked during a whole round: taking the lock waits until nothing is being released.
    state: Mutex<ShippingState>,
    /// A captured epoch and the first input that it may lack, until the standby knows. Locked only briefly.
    captured: Mutex<Option<(u64, u64)>>,
    captured_known: Condvar,
    /// Microseconds of the longest round since the last epoch.
    longest_round_us: AtomicU64,
}

/// State of the shipping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShippingState {
    /// No epoch is complete or captured: nothing is sent.
    Idle,
    /// Send inputs, release nothing.
    Sending,
    /// Send inputs, then release output.
    Releasing,
    /// The protection ends.
    Over,
}

/// Error: the standby was not reached.
struct NotSent;

impl<'a> InputShipper<'a> {
    pub(in crate::protect) fn new(host: &Arc<Daemon>, heartbeat: &'a Heartbeat, link: &'a PageLink) -> Self {
        let (control_link, inputs) =
            (ControlLink::new(host, heartbeat.standby.to()), Arc::new(InputLog::default()));
        for (index, port) in heartbeat.ports().enumerate() {
            port.record(Some((inputs.clone(), index as u16)));
        }
        let (state, captured) = (Mutex::new(ShippingState::Idle), Mutex::default());
        Self {
            heartbeat,
            link,
            control_link,
            inputs,
            state,
            captured,
            captured_known: Condvar::new(),
            longest_round_us: AtomicU64::new(0),
        }
    }

    /// Runs the thread until the shipping ends.
    pub(in crate::protect) fn run(&self) {
        loop {
            let mut stand = lock(&self.state);
            let begun = Instant::now();
            let told = match *stand {
                ShippingState::Over => return,
                ShippingState::Idle => Ok(()),
                ShippingState::Sending => ShippingRound(self).ship_inputs().map(drop),
                ShippingState::Releasing => ship_and_release(&mut ShippingRound(self)),
            };
            self.longest_round_us.fetch_max(begun.elapsed().as_micros() as u64, Ordering::Relaxed);
            if told.is_err() {
                tracing::warn!(standby = %self.control_link.to(), "cannot send the inputs of a machine to its standby");
                *stand = ShippingState::Over;
                self.link.close();
            }
            drop(stand);
            std::thread::sleep(ROUND_PAUSE);
        }
    }

    /// Stops all release of output: seeding makes the standby incomplete.
    pub(in crate::protect) fn stop_release(&self) {
        let mut stand = lock(&self.state);
        if *stand != ShippingState::Over {
            *stand = ShippingState::Idle;
            self.inputs.restart();
        }
    }

    /// Handles the capture of an epoch, during its pause; `last` if the machine stays paused. Returns the
    /// first input that the epoch lacks.
    pub(in crate::protect) fn epoch_captured(&self, epoch: u64, last: bool) -> u64 {
        let began = self.inputs.start();
        let needed = if last { self.inputs.next() } else { began };
        *lock(&self.captured) = Some((epoch, needed));
        // Before the first epoch no round takes long.
        if epoch == 0 {
            let mut stand = lock(&self.state);
            if *stand == ShippingState::Idle {
                *stand = ShippingState::Sending;
            }
        }
        needed
    }

    /// Waits until the standby knows which inputs the captured epoch lacks; at most as long as it may be
    /// silent.
    pub(in crate::protect) fn wait_captured_known(&self) {
        let waits =
            self.captured_known
                .wait_timeout_while(lock(&self.captured), self.heartbeat.timeout(), |image| image.is_some());
        if waits.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            self.link.close();
        }
    }

    /// Handles the commit of an epoch that lacks inputs from `needed` on. Returns the longest time that
    /// output waited since the last one.
    pub(in crate::protect) fn epoch_committed(&self, needed: u64) -> Duration {
        self.inputs.release(needed);
        let mut stand = lock(&self.state);
        if *stand == ShippingState::Sending {
            *stand = ShippingState::Releasing;
        }
        ROUND_PAUSE + Duration::from_micros(self.longest_round_us.swap(0, Ordering::Relaxed))
    }

    /// Whether the next epoch should not wait.
    pub(in crate::protect) fn is_urgent(&self) -> bool {
        self.inputs.is_filling()
    }

    /// Ends the thread and the recording of inputs.
    pub(in crate::protect) fn end(&self) {
        *lock(&self.state) = ShippingState::Over;
        self.heartbeat.ports().for_each(|port| port.record(None));
    }
}

/// One round of shipping.
struct ShippingRound<'s, 'a>(&'s InputShipper<'a>);

impl InputChannel for ShippingRound<'_, '_> {
    type OutputMark = OutputMarks;
    type Error = NotSent;

    fn mark_output(&mut self) -> Self::OutputMark {
        barriers(self.0.heartbeat)
    }

    fn recorded(&mut self) -> u64 {
        self.0.inputs.next()
    }

    fn ship_inputs(&mut self) -> Result<u64, NotSent> {
        let InputShipper { heartbeat: beats, control_link: line, inputs, .. } = self.0;
        let told = inputs.take(INPUTS_BYTES_MAX, INPUTS_FRAMES_MAX);
        let upto = told.first + told.inputs.len() as u64;
        let image = *lock(&self.0.captured);
        if told.inputs.is_empty() && told.sent.is_empty() && image.is_none() {
            return Ok(upto);
        }
        let frames = told
            .inputs
            .iter()
            .map(|input| (input.port, input.at.as_micros() as u64, input.frame.len() as u32));
        let header = protocol::InputFrames {
            id: beats.id,
            first: told.first,
            frames: frames.collect(),
            left: told.sent,
            image,
        };
        let payload: Vec<u8> = told.inputs.into_iter().flat_map(|input| input.frame).collect();
        line.ask_with::<_, ()>(protocol::INPUTS, &header, payload.into(), beats.timeout()).ok_or(NotSent)?;
        let mut now = lock(&self.0.captured);
        if *now == image {
            *now = None;
            self.0.captured_known.notify_all();
        }
        Ok(upto)
    }

    fn release(&mut self, cut: Self::OutputMark) {
        release_all(self.0.heartbeat, cut);
    }
}
