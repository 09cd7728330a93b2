//! What reached a machine that waits here, if it is protected by that: kept while its host lives, given to it
//! once more when it is this host's.
//!
//! What is kept and for how long is [`whimbrel_protect::input_replay::Log`]'s. It fails when the host's
//! connection or the machine's ports do.

use super::hosted::{HostedStandby, lock};
use crate::core::error::DaemonError;
use std::{collections::BTreeMap, time::Duration};
use whimbrel_net::Input;
use whimbrel_protect::{
    StandbyError,
    input_replay::LoggedInput,
    protocol::{InputFrames, StandbyOutcome},
};

impl HostedStandby {
    pub(in crate::protect) fn keep_inputs(
        &self,
        inputs: &InputFrames,
        payload: &[u8],
    ) -> Result<(), StandbyError> {
        let mut log = lock(&self.log);
        // Looked at with the log in hand: whoever takes over looks into it afterwards.
        if lock(&self.rules).fate() != StandbyOutcome::Standing {
            return Err(StandbyError::NotFollowing);
        }
        log.add(inputs, payload, self.current.epoch().0)
    }

    /// What reached the machine after the epoch that it goes on from reaches it once more, before anything
    /// else does.
    pub(in crate::protect) fn replay(&self, from: Option<u64>) -> Result<(), DaemonError> {
        let (frames, left) = lock(&self.log).take(from);
        if frames.is_empty() {
            return Ok(());
        }
        tracing::info!(machine = %self.name, frames = frames.len(), "what reached it since its last epoch is given to it once more");
        let machine = self.host.machine(&self.name)?;
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
