//! Breaks of a capture, in which another consumer of the dirty logs gets its turn while the machine runs.
//!
//! A checkpoint of a protected machine lasts for many epochs. The standby gets each of them in a break of the
//! checkpoint, so that output waits no longer than usual.

use super::{NetworkPort, PausableMachine, RunningMachine};
use std::{thread, time::Duration};
use whimbrel_capture::{CaptureSource, Consumer};
use whimbrel_migrate::source::BoxError;

/// Longest time between two breaks while nothing is captured.
const BREAK_INTERVAL: Duration = Duration::from_millis(5);

/// A consumer that needs the machine from time to time.
pub trait CaptureBreaks {
    /// Uses the machine and its dirty logs if that is due. Leaves the machine running.
    ///
    /// # Errors
    /// If the capture is to end.
    fn take_break(&mut self, source: &mut CaptureSource<'_>, ports: &[NetworkPort]) -> Result<(), BoxError>;
}

impl RunningMachine {
    /// Runs `work`, which does not need the machine, and takes breaks meanwhile. A break that fails
    /// ends them,
    /// and not the work.
    pub fn take_breaks_during<T: Send>(
        &mut self,
        breaks: &mut dyn CaptureBreaks,
        work: impl FnOnce() -> T + Send,
    ) -> T {
        let Self { qemu, dirty_logs, disks, ports, .. } = self;
        let mut machine = PausableMachine { qemu, disks, keep_paused: false, buffering_ports: &[] };
        let mut source = CaptureSource { machine: &mut machine, dirty_logs, consumer: Consumer::Store };
        thread::scope(|scope| {
            let work = scope.spawn(work);
            while !work.is_finished() && breaks.take_break(&mut source, ports).is_ok() {
                thread::sleep(BREAK_INTERVAL);
            }
            work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}
