//! Input replay: the input log of a standby whose machine has long epochs. Pure.
//!
//! Output leaves once the standby has every input that came before it ([`ship_and_release`]). The standby
//! stores inputs until it has a complete epoch that includes them ([`InputLog`]). After a takeover from that
//! epoch, the guest gets the later inputs again.

use crate::{
    error::StandbyError,
    protocol::{INPUTS_BYTES_MAX, INPUTS_FRAMES_MAX, InputFrames},
};
use std::collections::{BTreeMap, VecDeque};

/// Most that a log holds. A primary admits no more input at three quarters of it.
const BYTES_MAX: usize = 96 << 20;
const FRAMES_MAX: usize = 3 << 17;
/// Most bytes of a frame, as of a network port.
const FRAME_MAX: usize = 4096 + 65536;
/// Most fingerprints of sent frames that are stored for an epoch.
const FINGERPRINTS_MAX: usize = 1 << 18;
/// Most announced epochs: one is in flight at a time.
const EPOCHS_MAX: usize = 16;

/// The primary's operations for shipping inputs.
pub trait InputChannel {
    /// Marks a point in the output.
    type OutputMark;
    /// Error when the standby cannot be reached.
    type Error;

    /// Marks the end of the output so far; that output waits.
    fn mark_output(&mut self) -> Self::OutputMark;
    /// The number of the next input.
    fn recorded(&mut self) -> u64;
    /// Sends new inputs to the standby. Returns the number up to which it has them.
    fn ship_inputs(&mut self) -> Result<u64, Self::Error>;
    /// Releases the output up to that mark.
    fn release(&mut self, cut: Self::OutputMark);
}

/// Sends pending inputs to the standby, then releases the output that was marked before.
pub fn ship_and_release<G: InputChannel>(gateway: &mut G) -> Result<(), G::Error> {
    let cut = gateway.mark_output();
    // The order matters: an input is recorded before the guest gets it, so every input that led to the marked
    // output is recorded by now.
    let recorded = gateway.recorded();
    while gateway.ship_inputs()? < recorded {}
    gateway.release(cut);
    Ok(())
}

/// A frame to replay to a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedInput {
    /// Index of the network port.
    pub port: u16,
    /// Arrival time in microseconds since an arbitrary moment.
    pub at_us: u64,
    /// Bytes of the frame.
    pub frame: Vec<u8>,
}

/// Inputs that the standby has stored.
#[derive(Debug, Default)]
pub struct InputLog {
    /// Number of the first stored frame.
    first: Option<u64>,
    frames: VecDeque<LoggedInput>,
    bytes: usize,
    /// Epochs and the number of the first input that each may lack.
    epochs: BTreeMap<u64, u64>,
    /// Fingerprints of sent frames: since the last complete epoch, and since the one before.
    fingerprints: [Vec<u64>; 2],
}

impl InputLog {
    /// Whether the machine is protected by input replay.
    pub fn is_used(&self) -> bool {
        self.first.is_some()
    }

    /// Adds inputs from the primary while `current` is the last complete epoch.
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
            // Seeding has started, for the first time or again.
            *self = Self::default();
        }
        let next = self.first.unwrap_or(told.first).checked_add(self.frames.len() as u64);
        let Some(next) = next.filter(|_| fits) else { return invalid("inputs whose lengths do not match") };
        if told.first > next {
            return invalid("inputs with a gap");
        }
        self.drop_committed(current);
        if self.frames.len() + told.frames.len() > FRAMES_MAX || self.bytes + payload.len() > BYTES_MAX {
            return invalid("more inputs than may be stored");
        }
        self.first.get_or_insert(told.first);
        let mut rest = payload;
        for (number, (port, at_us, len)) in (told.first..).zip(&told.frames) {
            let (frame, more) = rest.split_at(*len as usize);
            rest = more;
            // Repeated inputs are skipped.
            if number >= next {
                self.bytes += frame.len();
                self.frames.push_back(LoggedInput { port: *port, at_us: *at_us, frame: frame.to_vec() });
            }
        }
        let room = FINGERPRINTS_MAX.saturating_sub(self.fingerprints[0].len());
        self.fingerprints[0].extend(told.left.iter().take(room));
        if let Some((epoch, from)) = told.image {
            self.epochs.insert(epoch, from);
            if self.epochs.len() > EPOCHS_MAX {
                return invalid("too many announced epochs");
            }
        }
        Ok(())
    }

    fn drop_committed(&mut self, current: Option<u64>) {
        let Some((epoch, from)) = current.and_then(|current| self.epochs.range(..=current).next_back())
        else {
            return;
        };
        let (epoch, from) = (*epoch, *from);
        let some = self.epochs.range(..epoch).next().is_some();
        self.epochs.retain(|image, _| *image >= epoch);
        while self.first.is_some_and(|first| first < from)
            && let Some(frame) = self.frames.pop_front()
        {
            self.bytes -= frame.frame.len();
            self.first = self.first.map(|first| first + 1);
        }
        if some {
            self.fingerprints[1] = std::mem::take(&mut self.fingerprints[0]);
        }
    }

    /// Returns the inputs to replay after this epoch, and the fingerprints of sent frames.
    pub fn take(&mut self, current: Option<u64>) -> (Vec<LoggedInput>, Vec<u64>) {
        self.drop_committed(current);
        let log = std::mem::take(self);
        (log.frames.into(), log.fingerprints.concat())
    }
}
