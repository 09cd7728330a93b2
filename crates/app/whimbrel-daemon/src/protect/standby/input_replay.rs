//! Input replay on this host: stores the inputs of a hosted standby, and replays them after a takeover.
//!
//! [`whimbrel_protect::input_replay::InputLog`] decides what is stored and for how long. Fails only if the
//! connection of the primary or the machine's ports fail.

use super::hosted::HostedStandby;
use crate::core::error::DaemonError;
use std::{collections::BTreeMap, time::Duration};
use whimbrel_core::lock;
use whimbrel_net::Input;
use whimbrel_protect::{
    StandbyError,
    input_replay::LoggedInput,
    protocol::{InputFrames, StandbyOutcome},
};

impl HostedStandby {
    pub(in crate::protect) fn store_inputs(
        &self,
        inputs: &InputFrames,
        payload: &[u8],
    ) -> Result<(), StandbyError> {
        let mut log = lock(&self.inputs);
        // Checked with the log locked: a takeover reads the log afterwards.
        if lock(&self.lease).outcome() != StandbyOutcome::Standing {
            return Err(StandbyError::Ended);
        }
        log.add(inputs, payload, self.committed.epoch().0)
    }

    /// Replays the inputs after the epoch of the takeover, before any other input reaches the machine.
    pub(in crate::protect) fn replay(&self, from: Option<u64>) -> Result<(), DaemonError> {
        let (frames, left) = lock(&self.inputs).take(from);
        if frames.is_empty() {
            return Ok(());
        }
        tracing::info!(machine = %self.name, frames = frames.len(), "replaying the inputs since the last epoch");
        let machine = self.host.machines.get(&self.name)?;
        let mut turn = machine.lock("replay");
        let (_, live) = turn.parts()?;
        let mut of_port: BTreeMap<u16, Vec<Input>> = BTreeMap::new();
        for LoggedInput { port, at_us, frame } in frames {
            of_port.entry(port).or_default().push(Input { port, at: Duration::from_micros(at_us), frame });
        }
        for (port, index) in live.ports.iter().filter_map(|port| port.port().upgrade()).zip(0..) {
            port.replay(of_port.remove(&index).unwrap_or_default(), &left);
        }
        Ok(())
    }
}
