//! Guest requests: a guest asks for its migration or for a checkpoint.
//!
//! A guest request has the same checks and guarantees as one of the machine's owner, and is limited to what
//! the owner allowed when the machine was created. The guest is not trusted: names that it sends are parsed
//! and compared, never executed; its tags are `guest.MACHINE.TAG`, so it overwrites no other name. It has one
//! request at a time, which is checked before a thread is started for it.

use super::spawn;
use crate::{
    capsule::checkpoint::CheckpointOptions,
    core::{error::DaemonError, refs},
    daemon::Daemon,
};
use std::sync::{Arc, Weak};
use whimbrel_api::{CheckpointRequest, Operation, OperationResult, OperationState, SelfService};
use whimbrel_core::{HostName, MachineName, RefName, error_chain};
use whimbrel_guest_protocol::{GuestRequest, RequestOutcome};
use whimbrel_vm::{AgentCommands, GuestRequests};

/// Carries out what the guest of one machine requests.
pub(crate) struct GuestRequestHandler {
    pub(crate) host: Weak<Daemon>,
    pub(crate) machine: MachineName,
}

impl GuestRequests for GuestRequestHandler {
    /// Checks a request at once, and carries it out on a thread of its own.
    fn handle(&self, guest: AgentCommands, id: u32, request: GuestRequest) {
        if let Some(host) = self.host.upgrade() {
            handle_request(&host, &self.machine, guest, id, request);
        }
    }
}

/// What a guest may request of its host, after the check of its permissions.
#[derive(Debug, PartialEq, Eq)]
enum PermittedRequest {
    Migrate { to: HostName },
    Checkpoint { tag: Option<RefName> },
}

impl PermittedRequest {
    fn of(name: &MachineName, ask: &GuestRequest, allowed: &SelfService) -> Result<Self, DaemonError> {
        match ask {
            GuestRequest::Migrate { host } => {
                let to: HostName =
                    host.parse().map_err(|_| DaemonError::invalid("that is not a valid host name"))?;
                match allowed.migrate.contains(&to) {
                    true => Ok(Self::Migrate { to }),
                    false => Err(forbidden(name, &format!("migrate={to}"))),
                }
            }
            GuestRequest::Checkpoint { .. } if !allowed.checkpoint => Err(forbidden(name, "checkpoint")),
            GuestRequest::Checkpoint { tag } if tag.is_empty() => Ok(Self::Checkpoint { tag: None }),
            GuestRequest::Checkpoint { tag } => {
                Ok(Self::Checkpoint { tag: Some(refs::guest_ref(name, tag)?) })
            }
        }
    }
}

fn handle_request(
    host: &Arc<Daemon>,
    machine: &MachineName,
    guest: AgentCommands,
    id: u32,
    ask: GuestRequest,
) {
    let Some(slot) = guest.begin_request() else {
        let busy = "another request of this guest is being carried out".to_owned();
        return guest.send_result(id, RequestOutcome::Refused(busy));
    };
    tracing::info!(%machine, ?ask, "a guest request");
    let refused = |error: &DaemonError| {
        tracing::info!(error = error as &dyn std::error::Error, "a guest request was refused");
        RequestOutcome::Refused(error_chain(error))
    };
    let permitted = match host.permit_guest_request(machine, &ask) {
        Ok(permitted) => permitted,
        Err(error) => return guest.send_result(id, refused(&error)),
    };
    let (host, machine) = (host.clone(), machine.clone());
    spawn("guest-request", move || {
        match host.start_guest_request(&machine, permitted) {
            Ok(operation) => {
                guest.send_result(id, RequestOutcome::Started);
                let outcome = host.wait_for_result(&operation);
                // Before the result is sent, after which the guest may ask for more.
                drop(slot);
                // The guest of a machine that has left is not told here; its new host sends a hello.
                guest.send_result(id, outcome);
            }
            Err(error) => {
                drop(slot);
                guest.send_result(id, refused(&error));
            }
        }
    });
}

impl Daemon {
    fn permit_guest_request(
        &self,
        name: &MachineName,
        ask: &GuestRequest,
    ) -> Result<PermittedRequest, DaemonError> {
        let machine = self.machines.get(name)?;
        let allowed = machine.try_lock("request of its guest", None)?.record.self_service.clone();
        PermittedRequest::of(name, ask, &allowed)
    }

    fn start_guest_request(
        self: &Arc<Self>,
        name: &MachineName,
        permitted: PermittedRequest,
    ) -> Result<Operation, DaemonError> {
        match permitted {
            PermittedRequest::Migrate { to } => {
                self.migrate(name, default_request(serde_json::json!({ "host": to }))?)
            }
            PermittedRequest::Checkpoint { tag } => {
                let request: CheckpointRequest = default_request(serde_json::json!({}))?;
                let wanted = CheckpointOptions { tag, ..CheckpointOptions::without_tag(request.balloon) };
                self.start_checkpoint(name, wanted)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(tag: &str) -> Result<PermittedRequest, DaemonError> {
        let (web, allowed) = ("web".parse().unwrap(), SelfService { migrate: vec![], checkpoint: true });
        PermittedRequest::of(&web, &GuestRequest::Checkpoint { tag: tag.to_owned() }, &allowed)
    }

    #[test]
    fn a_tag_of_a_guest_is_below_its_machine_whatever_it_says() {
        let tag = |tag| match checkpoint(tag) {
            Ok(PermittedRequest::Checkpoint { tag }) => tag.map(|tag| tag.to_string()),
            other => panic!("{other:?}"),
        };
        assert_eq!(tag("golden").as_deref(), Some("guest.web.golden"));
        assert_eq!(tag("machine").as_deref(), Some("guest.web.machine"));
        assert_eq!(tag(""), None);
        // The guest of `web.db` has `guest.web.db.TAG`.
        for bad in ["db.mine", ".", "../x", "a b", &"a".repeat(64)] {
            assert!(checkpoint(bad).is_err(), "{bad:?}");
        }
        let user: RefName = "guest.web.golden".parse().unwrap();
        assert!(refs::check_tag(Some(&user)).is_err(), "nobody else gives such a tag");
    }

    #[test]
    fn a_guest_requests_what_its_owner_allowed_and_nothing_else() {
        let web = "web".parse().unwrap();
        let allowed = SelfService { migrate: vec!["beta".parse().unwrap()], checkpoint: false };
        let migrate = |host: &str| {
            PermittedRequest::of(&web, &GuestRequest::Migrate { host: host.to_owned() }, &allowed)
        };
        assert_eq!(migrate("beta").unwrap(), PermittedRequest::Migrate { to: "beta".parse().unwrap() });
        assert!(migrate("gamma").is_err() && migrate("").is_err() && migrate("*").is_err());
        let save = GuestRequest::Checkpoint { tag: String::new() };
        assert!(PermittedRequest::of(&web, &save, &allowed).is_err());
    }
}
