//! Guest requests: a guest asks for its migration or for a checkpoint.
//!
//! A guest request has the same checks and guarantees as one of the machine's owner, and is limited to what
//! the owner allowed when the machine was created. The guest is not trusted: names that it sends are parsed
//! and compared, never executed.

use super::agent::{AgentCommands, spawn};
use crate::{core::error::DaemonError, daemon::Daemon};
use std::sync::{Arc, Weak};
use whimbrel_api::{Operation, OperationResult, OperationState};
use whimbrel_core::{HostName, MachineName, error_chain};
use whimbrel_guest_protocol::{GuestRequest, RequestOutcome};

/// Handles a guest request on a thread of its own.
pub(super) fn handle_request(
    host: &Weak<Daemon>,
    machine: &MachineName,
    guest: AgentCommands,
    id: u32,
    ask: GuestRequest,
) {
    let (host, machine) = (host.clone(), machine.clone());
    spawn("guest-wish", move || {
        let Some(host) = host.upgrade() else { return };
        tracing::info!(%machine, ?ask, "a guest request");
        match host.start_guest_request(&machine, &ask) {
            Ok(operation) => {
                guest.send_result(id, RequestOutcome::Started);
                // The guest of a machine that has left is not told here; its new host sends a hello.
                guest.send_result(id, host.wait_for_result(&operation));
            }
            Err(error) => {
                tracing::info!(%machine, error = &error as &dyn std::error::Error, "a guest request was refused");
                guest.send_result(id, RequestOutcome::Refused(error_chain(&error)));
            }
        }
    });
}

impl Daemon {
    fn start_guest_request(
        self: &Arc<Self>,
        name: &MachineName,
        ask: &GuestRequest,
    ) -> Result<Operation, DaemonError> {
        let machine = self.machines.get(name)?;
        let allowed = machine.try_lock("request of its guest", None)?.record.self_service.clone();
        match ask {
            GuestRequest::Migrate { host } => {
                let to: HostName =
                    host.parse().map_err(|_| DaemonError::invalid("that is not a valid host name"))?;
                if !allowed.migrate.contains(&to) {
                    return Err(forbidden(name, &format!("migrate={to}")));
                }
                self.migrate(name, default_request(serde_json::json!({ "host": to }))?)
            }
            GuestRequest::Checkpoint { tag } => {
                if !allowed.checkpoint {
                    return Err(forbidden(name, "checkpoint"));
                }
                let tag = Some(tag).filter(|tag| !tag.is_empty());
                self.checkpoint(name, default_request(serde_json::json!({ "tag": tag }))?)
            }
        }
    }

    fn wait_for_result(&self, operation: &Operation) -> RequestOutcome {
        let state = self.operations().watch(operation.id).map(|mut watch| {
            let ended =
                async { watch.wait_for(|now| now.state.is_ended()).await.map(|now| now.state.clone()) };
            self.runtime.block_on(ended)
        });
        match state {
            Ok(Ok(OperationState::Succeeded { result })) => RequestOutcome::Done(describe(&result)),
            Ok(Ok(OperationState::Failed { error })) => RequestOutcome::Failed(error.message),
            Ok(Ok(OperationState::Cancelled { left })) => {
                RequestOutcome::Failed(format!("cancelled: {left}"))
            }
            _ => RequestOutcome::Failed("the result is unknown".to_owned()),
        }
    }
}

fn forbidden(name: &MachineName, wish: &str) -> DaemonError {
    DaemonError::invalid(format!(
        "the owner of {name} did not allow this: `whimbrel run --guest-requests {wish}` allows it"
    ))
}

/// A request with defaults, as if a caller of the API had made it.
fn default_request<T: serde::de::DeserializeOwned>(request: serde_json::Value) -> Result<T, DaemonError> {
    serde_json::from_value(request).map_err(|error| DaemonError::invalid(error.to_string()))
}

fn describe(result: &OperationResult) -> String {
    match result {
        OperationResult::Checkpoint(report) => report.capsule.to_string(),
        OperationResult::Migrate { host, .. } => format!("on {host}"),
        _ => String::new(),
    }
}
