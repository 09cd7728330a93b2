//! Signals by which a user or systemd ends a command that serves.

use crate::error::CliError;
use tokio::signal::unix::{SignalKind, signal};

/// Waits for the signal TERM or INT. Both are watched from this call on, whenever the wait begins.
pub(crate) fn told_to_end() -> Result<impl Future<Output = ()>, CliError> {
    let watch = |kind| signal(kind).map_err(CliError::io("watch for signals"));
    let (mut terminate, mut interrupt) = (watch(SignalKind::terminate())?, watch(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
