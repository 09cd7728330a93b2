//! Commands in a guest that may not answer yet, through qemu-ga.

use crate::{context::Context, error::CliError};
use std::time::{Duration, Instant};
use whimbrel_api::{ErrorCode, ExecRequest, ExecResult};
use whimbrel_client::ClientError;
use whimbrel_core::MachineName;

/// Pause before a guest is asked again that does not answer yet.
const RETRY: Duration = Duration::from_secs(1);

/// Runs a command in the guest; waits until `deadline` for a guest that does not answer.
pub(crate) async fn exec_when_up(
    context: &Context,
    machine: &MachineName,
    request: &ExecRequest,
    deadline: Instant,
) -> Result<ExecResult, CliError> {
    loop {
        match context.client.exec(machine, request).await {
            Err(ClientError::Api(error))
                if error.code == ErrorCode::Unreachable && Instant::now() < deadline =>
            {
                tokio::time::sleep(RETRY).await;
            }
            ended => return Ok(ended?),
        }
    }
}
