//! What a guest asks for from inside: to be moved, or to have its state kept.
//!
//! A wish is a request like its owner's, with the same checks and the same guarantees, and only what the owner allowed this machine
//! when it was made. Whoever is inside the guest is not trusted: what it names is parsed and compared, never run.

use super::port::{Orders, spawn};
use crate::{error::HostError, host::Host};
use std::sync::{Arc, Weak};
use whimbrel_api::{Operation, OperationResult, OperationState};
use whimbrel_core::{HostName, MachineName};
use whimbrel_guest::{Ask, Outcome};

/// Sees to a wish, in a thread of its own.
pub(super) fn consider(host: &Weak<Host>, machine: &MachineName, guest: Orders, id: u32, ask: Ask) {
    let (host, machine) = (host.clone(), machine.clone());
    spawn("guest-wish", move || {
        let Some(host) = host.upgrade() else { return };
        tracing::info!(%machine, ?ask, "a guest asks");
        match host.begin_wish(&machine, &ask) {
            Ok(operation) => {
                guest.told(id, Outcome::Begun);
                // Of a machine that has gone there is no one left here to tell; its new host says hello.
                guest.told(id, host.end_of_wish(&operation));
            }
            Err(error) => {
                tracing::info!(%machine, error = &error as &dyn std::error::Error, "a guest's wish is refused");
                guest.told(id, Outcome::Refused(crate::peers::chain(&error)));
            }
        }
    });
}

impl Host {
    fn begin_wish(self: &Arc<Self>, name: &MachineName, ask: &Ask) -> Result<Operation, HostError> {
        let machine = self.machine(name)?;
        let allowed = machine.begin("request of its guest", None)?.record.self_service.clone();
        match ask {
            Ask::Migrate { host } => {
                let to: HostName =
                    host.parse().map_err(|_| HostError::invalid("that is no name of a host"))?;
                if !allowed.migrate.contains(&to) {
                    return Err(forbidden(name, &format!("migrate={to}")));
                }
                self.migrate(name, asked(serde_json::json!({ "host": to }))?)
            }
            Ask::Checkpoint { tag } => {
                if !allowed.checkpoint {
                    return Err(forbidden(name, "checkpoint"));
                }
                let tag = Some(tag).filter(|tag| !tag.is_empty());
                self.checkpoint(name, asked(serde_json::json!({ "tag": tag }))?)
            }
        }
    }

    /// Waits for the end.
    fn end_of_wish(&self, operation: &Operation) -> Outcome {
        let state = self.operations().watch(operation.id).map(|mut watch| {
            let ended =
                async { watch.wait_for(|now| now.state.is_ended()).await.map(|now| now.state.clone()) };
            self.runtime.block_on(ended)
        });
        match state {
            Ok(Ok(OperationState::Succeeded { result })) => Outcome::Done(told(&result)),
            Ok(Ok(OperationState::Failed { error })) => Outcome::Failed(error.message),
            Ok(Ok(OperationState::Cancelled { left })) => Outcome::Failed(format!("cancelled: {left}")),
            _ => Outcome::Failed("nobody knows how it ended".to_owned()),
        }
    }
}

fn forbidden(name: &MachineName, wish: &str) -> HostError {
    HostError::invalid(format!(
        "the owner of {name} did not allow this: `whimbrel run --self-service {wish}` does"
    ))
}

/// A request as a caller of the API makes it who says no more than this.
fn asked<T: serde::de::DeserializeOwned>(request: serde_json::Value) -> Result<T, HostError> {
    serde_json::from_value(request).map_err(|error| HostError::invalid(error.to_string()))
}

fn told(result: &OperationResult) -> String {
    match result {
        OperationResult::Checkpoint(report) => report.capsule.to_string(),
        OperationResult::Migrate { host, .. } => format!("on {host}"),
        _ => String::new(),
    }
}
