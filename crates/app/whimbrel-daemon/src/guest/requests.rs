//! What a guest asks for from inside: to be moved, or to have its state kept.
//!
//! A wish is a request like its owner's, with the same checks and the same guarantees, and only what the
//! owner allowed this machine when it was made. Whoever is inside the guest is not trusted: what it names is
//! parsed and compared, never run.

use super::agent::{AgentCommands, spawn};
use crate::{core::error::DaemonError, daemon::Daemon};
use std::sync::{Arc, Weak};
use whimbrel_api::{Operation, OperationResult, OperationState};
use whimbrel_core::{HostName, MachineName};
use whimbrel_guest_protocol::{GuestRequest, RequestOutcome};

/// Sees to a wish, in a thread of its own.
pub(super) fn consider(
    host: &Weak<Daemon>,
    machine: &MachineName,
    guest: AgentCommands,
    id: u32,
    ask: GuestRequest,
) {
    let (host, machine) = (host.clone(), machine.clone());
    spawn("guest-wish", move || {
        let Some(host) = host.upgrade() else { return };
        tracing::info!(%machine, ?ask, "a guest asks");
        match host.start_guest_request(&machine, &ask) {
            Ok(operation) => {
                guest.send_result(id, RequestOutcome::Begun);
                // Of a machine that has gone there is no one left here to tell; its new host says hello.
                guest.send_result(id, host.end_of_wish(&operation));
            }
            Err(error) => {
                tracing::info!(%machine, error = &error as &dyn std::error::Error, "a guest's wish is refused");
                guest.send_result(id, RequestOutcome::Refused(crate::server::peer_rpc::chain(&error)));
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
        let machine = self.machine(name)?;
        let allowed = machine.try_lock("request of its guest", None)?.record.self_service.clone();
        match ask {
            GuestRequest::Migrate { host } => {
                let to: HostName =
                    host.parse().map_err(|_| DaemonError::invalid("that is no name of a host"))?;
                if !allowed.migrate.contains(&to) {
                    return Err(forbidden(name, &format!("migrate={to}")));
                }
                self.migrate(name, asked(serde_json::json!({ "host": to }))?)
            }
            GuestRequest::Checkpoint { tag } => {
                if !allowed.checkpoint {
                    return Err(forbidden(name, "checkpoint"));
                }
                let tag = Some(tag).filter(|tag| !tag.is_empty());
                self.checkpoint(name, asked(serde_json::json!({ "tag": tag }))?)
            }
        }
    }

    /// Waits for the end.
    fn end_of_wish(&self, operation: &Operation) -> RequestOutcome {
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
            _ => RequestOutcome::Failed("nobody knows how it ended".to_owned()),
        }
    }
}

fn forbidden(name: &MachineName, wish: &str) -> DaemonError {
    DaemonError::invalid(format!(
        "the owner of {name} did not allow this: `whimbrel run --self-service {wish}` does"
    ))
}

/// A request as a caller of the API makes it who says no more than this.
fn asked<T: serde::de::DeserializeOwned>(request: serde_json::Value) -> Result<T, DaemonError> {
    serde_json::from_value(request).map_err(|error| DaemonError::invalid(error.to_string()))
}

fn describe(result: &OperationResult) -> String {
    match result {
        OperationResult::Checkpoint(report) => report.capsule.to_string(),
        OperationResult::Migrate { host, .. } => format!("on {host}"),
        _ => String::new(),
    }
}
