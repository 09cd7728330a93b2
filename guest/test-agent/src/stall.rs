//! Stall meter: writes blocks to the disk all the time, and knows how long the longest write took.

use crate::{answer::lock, disk::Disk};
use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// Pause between two writes: a guest that only writes would leave its host no processor.
const PAUSE: Duration = Duration::from_millis(1);

/// Meter whose thread ends with the guest.
pub(crate) struct StallMeter(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Longest write since it was last asked for.
    longest: Duration,
    /// Start of the write under way.
    since: Option<Instant>,
    failure: Option<String>,
}

impl StallMeter {
    /// Writes to `disk` from now on.
    pub(crate) fn start(disk: Arc<Mutex<Disk>>, nonce: u64) -> Self {
        let state = Arc::<Mutex<State>>::default();
        let theirs = state.clone();
        thread::spawn(move || {
            loop {
                lock(&theirs).since = Some(Instant::now());
                let written = lock(&disk).write(nonce, 1);
                let mut state = lock(&theirs);
                let took = state.since.take().map_or(Duration::ZERO, |since| since.elapsed());
                state.longest = state.longest.max(took);
                if let Err(error) = written {
                    state.failure = Some(error.to_string());
                    return;
                }
                drop(state);
                thread::sleep(PAUSE);
            }
        });
        Self(state)
    }

    /// Longest write since the last call, or the reason why nothing is written any more.
    pub(crate) fn longest(&self) -> Result<Duration, String> {
        let mut state = lock(&self.0);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let under_way = state.since.map_or(Duration::ZERO, |since| since.elapsed());
        Ok(std::mem::take(&mut state.longest).max(under_way))
    }
}
