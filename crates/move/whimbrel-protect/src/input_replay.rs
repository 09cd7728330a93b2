//! Protection by inputs: whole epochs seldom, what reaches the guest often. Pure.
//!
//! What the guest sends leaves once the standby has every input that came before it ([`turn`]). The standby
//! keeps inputs until an epoch is whole that has them ([`InputLog`]); whoever takes over from that epoch is
//! given those that came after it once more.

use crate::{
    error::StandbyError,
    protocol::{INPUTS_BYTES_MAX, INPUTS_FRAMES_MAX, InputFrames},
};
use std::collections::{BTreeMap, VecDeque};

/// Most that a log holds. A primary lets nothing more in at three quarters of it.
const BYTES_MAX: usize = 96 << 20;
const FRAMES_MAX: usize = 3 << 17;
/// Most bytes of a frame, as of a port.
const FRAME_MAX: usize = 4096 + 65536;
/// Most fingerprints of frames that have left, since an epoch.
const LEFT_MAX: usize = 1 << 18;
/// Epochs that may be said to come: one is under way at a time.
const IMAGES_MAX: usize = 16;

/// The primary's side of one turn.
pub trait InputChannel {
    /// What was sent until some moment.
    type Cut;
    /// Why the standby could not be told.
    type Error;

    /// Ends what was sent so far; it waits.
    fn cut(&mut self) -> Self::Cut;
    /// The number of the next input.
    fn recorded(&mut self) -> u64;
    /// Tells the standby of inputs it has not been told of; up to which number it has them.
    fn ship_inputs(&mut self) -> Result<u64, Self::Error>;
    /// Lets go what was sent until then.
    fn release(&mut self, cut: Self::Cut);
}

/// Tells the standby what it lacks, then lets go what was sent before that began.
pub fn turn<G: InputChannel>(gateway: &mut G) -> Result<(), G::Error> {
    let cut = gateway.cut();
    // Looked at second: an input is recorded before the guest has it, so all that led to what was cut is
    // recorded by now.
    let recorded = gateway.recorded();
    while gateway.ship_inputs()? < recorded {}
    gateway.release(cut);
    Ok(())
}

/// A frame that is to be given to a guest once more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedInput {
    /// By which port it came.
    pub port: u16,
    /// When, in microseconds since some moment.
    pub at_us: u64,
    /// The frame.
    pub frame: Vec<u8>,
}

/// Inputs that the standby has.
#[derive(Debug, Default)]
pub struct InputLog {
    /// Number of the first of the frames.
    first: Option<u64>,
    frames: VecDeque<LoggedInput>,
    bytes: usize,
    /// Of which epochs it is known from where on their inputs are needed.
    images: BTreeMap<u64, u64>,
    /// Fingerprints of what has left: since the last whole epoch, and since the one before that.
    left: [Vec<u64>; 2],
}

impl InputLog {
    /// Whether the machine is protected by its inputs.
    pub fn is_used(&self) -> bool {
        self.first.is_some()
    }

    /// Adds what the primary tells while `current` is the last whole epoch.
    pub fn add(
        &mut self,
        told: &InputFrames,
        payload: &[u8],
        current: Option<u64>,
    ) -> Result<(), StandbyError> {
        let invalid = |what| Err(StandbyError::Invalid { what });
        let lens = told.frames.iter().map(|(_, _, len)| *len as usize);
        let fits = told.frames.len() <= INPUTS_FRAMES_MAX
            && told.left.len() <= INPUTS_FRAMES_MAX
            && payload.len() <= INPUTS_BYTES_MAX + FRAME_MAX
            && lens.clone().all(|len| len <= FRAME_MAX)
            && lens.sum::<usize>() == payload.len();
        if told.image.is_some_and(|(epoch, _)| epoch == 0) {
            // The standby is filled anew, or for the first time.
            *self = Self::default();
        }
        let next = self.first.unwrap_or(told.first).checked_add(self.frames.len() as u64);
        let Some(next) = next.filter(|_| fits) else { return invalid("inputs that are not what they say") };
        if told.first > next {
            return invalid("inputs of which some are missing");
        }
        self.drop_committed(current);
        if self.frames.len() + told.frames.len() > FRAMES_MAX || self.bytes + payload.len() > BYTES_MAX {
            return invalid("more inputs than are kept");
        }
        self.first.get_or_insert(told.first);
        let mut rest = payload;
        for (number, (port, at_us, len)) in (told.first..).zip(&told.frames) {
            let (frame, more) = rest.split_at(*len as usize);
            rest = more;
            // What is told again is known.
            if number >= next {
                self.bytes += frame.len();
                self.frames.push_back(LoggedInput { port: *port, at_us: *at_us, frame: frame.to_vec() });
            }
        }
        let room = LEFT_MAX.saturating_sub(self.left[0].len());
        self.left[0].extend(told.left.iter().take(room));
        if let Some((epoch, from)) = told.image {
            self.images.insert(epoch, from);
            if self.images.len() > IMAGES_MAX {
                return invalid("epochs that never come");
            }
        }
        Ok(())
    }

    /// Lets go what is in the epoch that is whole.
    fn drop_committed(&mut self, current: Option<u64>) {
        let Some((epoch, from)) = current.and_then(|current| self.images.range(..=current).next_back())
        else {
            return;
        };
        let (epoch, from) = (*epoch, *from);
        let some = self.images.range(..epoch).next().is_some();
        self.images.retain(|image, _| *image >= epoch);
        while self.first.is_some_and(|first| first < from)
            && let Some(frame) = self.frames.pop_front()
        {
            self.bytes -= frame.frame.len();
            self.first = self.first.map(|first| first + 1);
        }
        if some {
            self.left[1] = std::mem::take(&mut self.left[0]);
        }
    }

    /// What a machine is to be given once more that goes on from this epoch, and the fingerprints of what has
    /// left.
    pub fn take(&mut self, current: Option<u64>) -> (Vec<LoggedInput>, Vec<u64>) {
        self.drop_committed(current);
        let log = std::mem::take(self);
        (log.frames.into(), log.left.concat())
    }
}
