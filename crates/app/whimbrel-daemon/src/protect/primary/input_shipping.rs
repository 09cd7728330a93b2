//! Protection by inputs, at the primary: what reaches the machine is told to the standby every millisecond or
//! so, and what the machine sends leaves once all that came before it is known there.
//!
//! The order of a turn is [`turn`]'s. One thread a machine, over a connection of its own, so that nothing
//! waits behind pages. While there is no whole epoch at the standby nothing leaves. Whatever fails cuts the
//! link of pages, which ends the protection.

use super::heartbeat::Heartbeat;
use crate::daemon::Daemon;
use crate::protect::link::{ControlLink, PageLink};
use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_net::{Epoch, InputLog, Port};
use whimbrel_protect::{
    input_replay::{InputChannel, turn},
    protocol::{self, INPUTS_BYTES_MAX, INPUTS_FRAMES_MAX},
};

/// From the end of a turn to the next one.
const TURNS: Duration = Duration::from_millis(1);

/// The inputs of one protected machine.
pub(in crate::protect) struct InputShipper<'a> {
    beats: &'a Heartbeat,
    link: &'a PageLink,
    line: ControlLink,
    inputs: Arc<InputLog>,
    /// Held for a whole turn: whoever wants nothing to be released waits for that.
    stand: Mutex<Stand>,
    /// An epoch that was cut, and the first input that may not be in it: until the standby knows. Never held
    /// for long.
    image: Mutex<Option<(u64, u64)>>,
    told: Condvar,
    /// Microseconds of the longest turn since somebody looked.
    slowest: AtomicU64,
}

/// What is to be done with inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    /// Nothing: no epoch is whole, or about to be.
    Idle,
    /// Tell.
    Telling,
    /// Tell, and let go what waits for that.
    Releasing,
    /// The protection ends.
    Over,
}

/// The standby could not be told.
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

    /// The work of the thread, until it is over.
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
                tracing::warn!(standby = %self.line.to(), "the standby does not take what reaches a machine");
                *stand = Stand::Over;
                self.link.cut();
            }
            drop(stand);
            std::thread::sleep(TURNS);
        }
    }

    /// The standby is about to be of no one instant: nothing leaves from now on.
    pub(in crate::protect) fn nothing_is_whole(&self) {
        let mut stand = lock(&self.stand);
        if *stand != Stand::Over {
            *stand = Stand::Idle;
            self.inputs.restart();
        }
    }

    /// An epoch is cut: the machine stands still, for good if it is the `last` one. From which input on that
    /// epoch needs them.
    pub(in crate::protect) fn cut(&self, epoch: u64, last: bool) -> u64 {
        let began = self.inputs.start();
        let needed = if last { self.inputs.next() } else { began };
        *lock(&self.image) = Some((epoch, needed));
        // Nobody has a turn for long before the first one.
        if epoch == 0 {
            let mut stand = lock(&self.stand);
            if *stand == Stand::Idle {
                *stand = Stand::Telling;
            }
        }
        needed
    }

    /// Waits until the standby knows which inputs the epoch that was cut needs. Not for longer than it may be
    /// silent.
    pub(in crate::protect) fn wait_told(&self) {
        let waits =
            self.told.wait_timeout_while(lock(&self.image), self.beats.patience(), |image| image.is_some());
        if waits.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            self.link.cut();
        }
    }

    /// The epoch that needs inputs from this one on is whole: how long output waited at most since the last
    /// one.
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

    /// Ends the thread, and the recording.
    pub(in crate::protect) fn end(&self) {
        *lock(&self.stand) = Stand::Over;
        self.beats.ports().for_each(|port| port.record(None));
    }
}

/// One turn.
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
