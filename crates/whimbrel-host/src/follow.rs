//! Uploading every capsule of a machine to another host, in the background, so that it survives the host that made it.
//!
//! What is followed is one JSON file, replaced whole. One thread does the uploading: it looks when a capsule was made and, as
//! long as something is left to do, every few seconds; it goes on after the daemon was restarted. Only the newest capsule of
//! a machine is sent: those it overtook are its ancestors, and their pages come with it where they are still needed.

use crate::{bell::Bell, error::HostError, host::Host, machine::Machine, refs};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use whimbrel_api::{Operation, OperationKind, OperationResult, PushRequest};
use whimbrel_core::{CapsuleId, HostName, MachineName};
use whimbrel_sync::{
    WireLink, announcements, call,
    protocol::{Announce, Holding, Take, TakeAsk},
};
use whimbrel_wire::durable;

/// How soon an upload that failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// A machine whose capsules go to another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Followed {
    to: HostName,
    /// The last capsule that is whole there.
    sent: Option<CapsuleId>,
}

/// What is followed, and the bell of the thread that does it.
#[derive(Default)]
pub(crate) struct Following {
    bell: Bell,
    table: Mutex<BTreeMap<MachineName, Followed>>,
}

impl Following {
    fn table(&self) -> MutexGuard<'_, BTreeMap<MachineName, Followed>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There may be something to do.
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }
}

impl Host {
    /// Reads what was followed before, and goes on with it.
    pub(crate) fn start_following(self: &Arc<Self>) {
        let path = self.layout.following();
        match std::fs::read(&path) {
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(table) => *self.following.table() = table,
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "it is not known which capsules to upload")
                }
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "it is not known which capsules to upload")
            }
        }
        self.following.ring();
        let host = Arc::downgrade(self);
        std::thread::spawn(move || {
            while let Some(host) = host.upgrade() {
                let left = host.upload_what_is_new();
                // Told again from time to time: a host that was away may have missed it.
                host.announce();
                host.following.bell.wait(if left { RETRY } else { Duration::from_secs(60) });
                if !host.sleep_unless_closing(Duration::ZERO) {
                    return;
                }
            }
        });
    }

    /// A capsule is new here, or whole now.
    pub(crate) fn announce_soon(&self) {
        self.following.ring();
    }

    /// Begins or ends following a machine.
    pub(crate) fn follow_or_not(
        self: &Arc<Self>,
        request: PushRequest,
        machine: Option<&Machine>,
    ) -> Result<Operation, HostError> {
        let name = machine.map(|machine| machine.name().clone());
        let name = name.ok_or_else(|| HostError::invalid("only a machine of this host can be followed"))?;
        let to = if request.follow { Some(self.other_host(request.host)?) } else { None };
        if let Some(to) = &to {
            self.route(to)?;
        }
        let (host, subject) = (self.clone(), name.to_string());
        Ok(self.operations().start(OperationKind::Push, subject, move |_| {
            {
                let mut table = host.following.table();
                let before = table.clone();
                match &to {
                    Some(to) => drop(table.insert(name, Followed { to: to.clone(), sent: None })),
                    None => drop(table.remove(&name)),
                }
                host.save_following(&table).inspect_err(|_| *table = before)?;
            }
            host.following.ring();
            Ok(OperationResult::Follow { host: to })
        }))
    }

    fn save_following(&self, table: &BTreeMap<MachineName, Followed>) -> Result<(), HostError> {
        let path = self.layout.following();
        let text = serde_json::to_vec_pretty(table).expect("names and ids are always encodable");
        durable::replace(&path, &text).map_err(|source| HostError::io("write", &path, source))
    }

    /// Uploads the newest capsule of every followed machine. Whether something is left to do.
    fn upload_what_is_new(&self) -> bool {
        let table = self.following.table().clone();
        let mut left = false;
        for (name, followed) in table {
            let newest = self.store.get_ref(&refs::of_machine(&name)).ok().flatten();
            let Some(capsule) = newest.filter(|id| Some(*id) != followed.sent) else { continue };
            match self.upload(&name, &followed.to, capsule) {
                Ok(()) => {
                    let mut table = self.following.table();
                    if let Some(entry) = table.get_mut(&name).filter(|entry| entry.to == followed.to) {
                        entry.sent = Some(capsule);
                    }
                    // Unwritten, it is found to be there the next time.
                    let _ = self.save_following(&table);
                }
                Err(error) => {
                    left = true;
                    tracing::warn!(%name, to = %followed.to, error = &error as &dyn std::error::Error, "not uploaded yet");
                }
            }
        }
        left
    }

    fn upload(&self, name: &MachineName, to: &HostName, capsule: CapsuleId) -> Result<(), HostError> {
        let link = WireLink(self.neighbour(to)?);
        let ask = TakeAsk { capsule, refs: vec![refs::of_machine(name)], bases: Vec::new() };
        let taken = call::<Take>(&link, &ask, Bytes::new());
        taken.map(drop).map_err(|error| crate::transfer::sync_error(to, error))
    }

    /// Tells the hosts that are connected what this one holds.
    fn announce(&self) {
        let connections = self.neighbours.all();
        if connections.is_empty() {
            return;
        }
        let Ok(capsules) = self.store.capsules() else { return };
        let partial = self.store.partials().unwrap_or_default();
        let mut held = Vec::new();
        for capsule in capsules.iter().filter(|capsule| capsule.reachable) {
            let whole = !partial.contains(&capsule.id);
            held.push(Holding { digest: capsule.id.0, whole });
            let roots = capsule.manifest.images.iter().filter_map(|image| image.root);
            held.extend(roots.map(|digest| Holding { digest, whole }));
        }
        for message in announcements(&held) {
            for connection in &connections {
                // Who does not hear it now hears the next one.
                let _ = call::<Announce>(&WireLink(connection.clone()), &message, Bytes::new());
            }
        }
    }
}
