//! Input shipping at the primary: sends inputs to the standby every millisecond or so, and releases output.
//!
//! Output leaves once the standby has all inputs that came before it; [`turn`] has the order of steps. One
//! thread for each machine, over a connection of its own, so that nothing waits behind pages. While the
//! standby has no complete epoch, no output leaves. Any failure closes the page link, which ends the
//! protection.

use super::heartbeat::Heartbeat;
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
use whimbrel_net::{Epoch, InputLog, Port};
use whimbrel_protect::{
    input_replay::{InputChannel, turn},
    protocol::{self, INPUTS_BYTES_MAX, INPUTS_FRAMES_MAX},
};

/// Pause between two rounds of shipping.
const TURNS: Duration = Duration::from_millis(1);

/// The inputs of one protected machine.
pub(in crate::protect) struct InputShipper<'a> {
    beats: &'a Heartbeat,
    link: &'a PageLink,
    line: ControlLink,
    inputs: Arc<InputLog>,
    /// Locked during a whole round: taking the lock waits until nothing is being released.
    stand: Mutex<Stand>,
    /// A captured epoch and the first input that it may lack, until the standby knows. Locked only briefly.
    image: Mutex<Option<(u64, u64)>>,
    told: Condvar,
    /// Microseconds of the longest round since the last epoch.
    slowest: AtomicU64,
}

/// State of the shipping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    /// No epoch is complete or captured: nothing is sent.
    Idle,
    /// Send inputs, release nothing.
    Telling,
    /// Send inputs, then release output.
    Releasing,
    /// The protection ends.
    Over,
}

/// Error: the standby was not reached.
struct Untold;

impl<'a> InputShipper<'a> {
    pub(in crate::protect) fn new(host: &Arc<Daemon>, beats: &'a Heartbeat, link: &'a PageLink) -> Self {
        let (line, inputs) = (ControlLink::new(host, beats.standby.to()), Arc::new(InputLog::default()));
        for (index, port) in beats.ports().enumerate() {
            port.record(Some((inputs.clone(), index as u16)));
        }
        let (stand, image) = (Mutex::new(Stand::Idle), Mutex::default());
        Self { beats, link, line, inputs, stand, image, told: Condvar::new(), slowest: AtomicU64::new(0) }
    }

    /// Runs the thread until the shipping ends.
    pub(in crate::protect) fn run(&self) {
        loop {
            let mut stand = lock(&self.stand);
            let begun = Instant::now();
            let told = match *stand {
                Stand::Over => return,
                Stand::Idle => Ok(()),
                Stand::Telling => Turn(self).ship_inputs().map(drop),
                Stand::Releasing => turn(&mut Turn(self)),
            };
            self.slowest.fetch_max(begun.elapsed().as_micros() as u64, Ordering::Relaxed);
            if told.is_err() {
                tracing::warn!(standby = %self.line.to(), "cannot send the inputs of a machine to its standby");
                *stand = Stand::Over;
                self.link.cut();
            }
            drop(stand);
            std::thread::sleep(TURNS);
        }
    }

    /// Stops all release of output: seeding makes the standby incomplete.
    pub(in crate::protect) fn nothing_is_whole(&self) {
        let mut stand = lock(&self.stand);
        if *stand != Stand::Over {
            *stand = Stand::Idle;
            self.inputs.restart();
        }
    }

    /// Handles the capture of an epoch, during its pause; `last` if the machine stays paused. Returns the
    /// first input that the epoch lacks.
    pub(in crate::protect) fn cut(&self, epoch: u64, last: bool) -> u64 {
        let began = self.inputs.start();
        let needed = if last { self.inputs.next() } else { began };
        *lock(&self.image) = Some((epoch, needed));
        // Before the first epoch no round takes long.
        if epoch == 0 {
            let mut stand = lock(&self.stand);
            if *stand == Stand::Idle {
                *stand = Stand::Telling;
            }
        }
        needed
    }

    /// Waits until the standby knows which inputs the captured epoch lacks; at most as long as it may be
    /// silent.
    pub(in crate::protect) fn wait_told(&self) {
        let waits =
            self.told.wait_timeout_while(lock(&self.image), self.beats.patience(), |image| image.is_some());
        if waits.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            self.link.cut();
        }
    }

    /// Handles the commit of an epoch that lacks inputs from `needed` on. Returns the longest time that
    /// output waited since the last one.
    pub(in crate::protect) fn wait_until_shipped(&self, needed: u64) -> Duration {
        self.inputs.release(needed);
        let mut stand = lock(&self.stand);
        if *stand == Stand::Telling {
            *stand = Stand::Releasing;
        }
        TURNS + Duration::from_micros(self.slowest.swap(0, Ordering::Relaxed))
    }

    /// Whether the next epoch should not wait.
    pub(in crate::protect) fn is_urgent(&self) -> bool {
        self.inputs.is_filling()
    }

    /// Ends the thread and the recording of inputs.
    pub(in crate::protect) fn end(&self) {
        *lock(&self.stand) = Stand::Over;
        self.beats.ports().for_each(|port| port.record(None));
    }
}

/// One round of shipping.
struct Turn<'s, 'a>(&'s InputShipper<'a>);

impl InputChannel for Turn<'_, '_> {
    type Cut = Vec<(Arc<Port>, Epoch)>;
    type Error = Untold;

    fn cut(&mut self) -> Self::Cut {
        super::epochs::barriers(self.0.beats)
    }

    fn recorded(&mut self) -> u64 {
        self.0.inputs.next()
    }

    fn ship_inputs(&mut self) -> Result<u64, Untold> {
        let InputShipper { beats, line, inputs, .. } = self.0;
        let told = inputs.take(INPUTS_BYTES_MAX, INPUTS_FRAMES_MAX);
        let upto = told.first + told.inputs.len() as u64;
        let image = *lock(&self.0.image);
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
        line.ask_with::<_, ()>(protocol::INPUTS, &header, payload.into(), beats.patience()).ok_or(Untold)?;
        let mut now = lock(&self.0.image);
        if *now == image {
            *now = None;
            self.0.told.notify_all();
        }
        Ok(upto)
    }

    fn release(&mut self, cut: Self::Cut) {
        super::epochs::release_all(self.0.beats, cut);
    }
}
