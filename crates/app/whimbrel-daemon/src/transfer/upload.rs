//! Uploads: a background push of every new capsule of a machine to another host or a pool.
//!
//! The uploaded machines are one JSON file, replaced atomically. A thread for each machine uploads: it runs
//! when a capsule is made and, while something is left to do, every few seconds; it continues after a restart
//! of the daemon.
//! Only the newest capsule of a machine is sent: earlier ones are its ancestors, and their pages come with it
//! where they are still needed. A pool also gets the epoch capsules of a protected machine in order of time,
//! each as a version, from the primary and the standby alike.

use crate::{
    core::{error::DaemonError, history, notifier::Notifier, refs},
    daemon::Daemon,
    transfer::pool::{PoolPath, SkipIf},
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    ops::ControlFlow,
    path::Path,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};
use whimbrel_api::{CapsuleRef, MachineInfo, Operation, OperationKind, OperationResult, Uploads};
use whimbrel_core::{CapsuleId, HostName, MachineName, error_chain, lock};
use whimbrel_transfer::{
    WireLink, call,
    protocol::{RemotePull, RemotePullRequest},
};
use whimbrel_wire::json_file;

/// Delay before a failed upload is tried again.
const RETRY: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum UploadTarget {
    Host(HostName),
    Pool(PoolPath),
}

impl fmt::Display for UploadTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(host) => host.fmt(f),
            Self::Pool(place) => place.fmt(f),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct UploadRecord {
    to: UploadTarget,
    /// The last capsule that is complete there.
    sent: Option<CapsuleId>,
    /// Time of the last epoch capsule that is there.
    #[serde(default)]
    kept_ms: u64,
}

/// Reads the uploaded machines; none if there is no file.
fn read_uploads(path: &Path) -> io::Result<BTreeMap<MachineName, UploadRecord>> {
    match json_file::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        read => read,
    }
}

/// Why the file of uploaded machines cannot be read, if it cannot.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    read_uploads(path).map(drop)
}

struct Due {
    time_ms: u64,
    capsule: CapsuleId,
    /// Whether it is an epoch capsule; otherwise it is the machine's newest.
    is_epoch_capsule: bool,
}

/// The uploaded machines, and the notifier of the upload thread.
#[derive(Default)]
pub(crate) struct UploadService {
    notifier: Notifier,
    table: Mutex<BTreeMap<MachineName, UploadRecord>>,
    /// Why the file of the table cannot be read. It is left alone then.
    unreadable: OnceLock<String>,
    /// Error of the last failed attempt of each machine. Locked last.
    errors: Mutex<BTreeMap<MachineName, String>>,
    /// Machines that have an upload thread.
    under_way: Mutex<BTreeSet<MachineName>>,
}

/// The only upload thread of a machine, until dropped.
struct UploadTurn {
    host: Arc<Daemon>,
    name: MachineName,
}

impl UploadTurn {
    fn take(host: &Arc<Daemon>, name: MachineName) -> Option<Self> {
        let first = lock(&host.uploads.under_way).insert(name.clone());
        first.then(|| Self { host: host.clone(), name })
    }
}

impl Drop for UploadTurn {
    fn drop(&mut self) {
        lock(&self.host.uploads.under_way).remove(&self.name);
    }
}

impl UploadService {
    /// Adds the destination and errors of uploads to the information about machines.
    pub(crate) fn add_to(&self, machines: &mut [MachineInfo]) {
        let table = lock(&self.table);
        for machine in machines {
            machine.uploads = table.get(&machine.name).map(|followed| Uploads {
                to: followed.to.to_string(),
                stalled: lock(&self.errors).get(&machine.name).cloned(),
            });
        }
    }

    /// Wakes the upload thread.
    pub(crate) fn notify(&self) {
        self.notifier.notify();
    }
}

impl Daemon {
    /// Loads the uploaded machines and starts the upload thread.
    pub(crate) fn start_uploads(self: &Arc<Self>) {
        self.load_uploads();
        self.uploads.notify();
        let host = Arc::downgrade(self);
        std::thread::spawn(move || {
            while let Some(host) = host.upgrade() {
                let left = host.upload_what_is_new();
                host.uploads.notifier.wait(if left { RETRY } else { Duration::from_secs(60) });
                if !host.sleep_unless_closing(Duration::ZERO) {
                    return;
                }
            }
        });
    }

    /// Loads the uploaded machines. If they cannot be read, none is uploaded and the file stays as it is.
    pub(crate) fn load_uploads(&self) {
        let path = self.directories.uploads();
        match read_uploads(&path) {
            Ok(table) => *lock(&self.uploads.table) = table,
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "cannot read which capsules to upload; the file stays as it is, and nothing is uploaded until it is restored or moved away");
                self.uploads.unreadable.get_or_init(|| error.to_string());
            }
        }
    }

    /// Wakes the upload thread for a capsule that is new or complete now.
    pub(crate) fn announce_soon(&self) {
        self.uploads.notify();
    }

    /// Starts or stops the uploads of a machine.
    pub(crate) fn start_upload(
        self: &Arc<Self>,
        subject: &CapsuleRef,
        to: Option<UploadTarget>,
    ) -> Result<Operation, DaemonError> {
        let named = match subject {
            CapsuleRef::Name(name) => name.as_str().parse::<MachineName>().ok(),
            CapsuleRef::Id(_) | CapsuleRef::Past(_) => None,
        };
        // Uploads of a machine that has moved away can still be stopped.
        let is_ours = |name: &MachineName| {
            self.machines.get(name).is_ok() || lock(&self.uploads.table).contains_key(name)
        };
        let name = named.filter(is_ours);
        let name = name.ok_or_else(|| DaemonError::invalid("uploads are for machines of this host only"))?;
        if let Some(UploadTarget::Host(to)) = &to {
            self.route(to)?;
            self.check_machine_readable(&name, to)?;
        }
        let (host, subject, followed) = (self.clone(), name.to_string(), name.clone());
        Ok(self.operations().start(OperationKind::Push, subject, move |_| {
            {
                let mut table = lock(&host.uploads.table);
                let before = table.clone();
                match &to {
                    // Repeated with the same destination, it continues.
                    Some(to) if table.get(&name).is_some_and(|followed| followed.to == *to) => {}
                    Some(to) => {
                        drop(table.insert(name, UploadRecord { to: to.clone(), sent: None, kept_ms: 0 }));
                    }
                    None => drop(table.remove(&name)),
                }
                host.save_uploads(&table).inspect_err(|_| *table = before)?;
            }
            lock(&host.uploads.errors).remove(&followed);
            host.uploads.notify();
            Ok(OperationResult::Follow { host: to.map(|to| to.to_string()) })
        }))
    }

    /// Stops the uploads of a machine that has left this host. Existing capsules stay where they are.
    pub(crate) fn stop_upload(&self, name: &MachineName) {
        let mut table = lock(&self.uploads.table);
        if table.remove(name).is_some() {
            lock(&self.uploads.errors).remove(name);
            // If the write fails, the upload is tried again after the next start, and finds nothing new.
            let _ = self.save_uploads(&table);
        }
    }

    /// Uploads go on under a machine's new name.
    pub(crate) fn rename_upload(&self, from: &MachineName, to: &MachineName) -> Result<(), DaemonError> {
        let mut table = lock(&self.uploads.table);
        let Some(record) = table.get(from).cloned() else { return Ok(()) };
        let mut renamed = table.clone();
        renamed.remove(from);
        renamed.insert(to.clone(), record);
        self.save_uploads(&renamed)?;
        *table = renamed;
        lock(&self.uploads.errors).remove(from);
        drop(table);
        self.uploads.notify();
        Ok(())
    }

    fn save_uploads(&self, table: &BTreeMap<MachineName, UploadRecord>) -> Result<(), DaemonError> {
        let path = self.directories.uploads();
        if let Some(reason) = self.uploads.unreadable.get().cloned() {
            return Err(DaemonError::UnreadableFile { path, reason });
        }
        json_file::replace(&path, table).map_err(|source| DaemonError::io("write", &path, source))
    }

    /// Starts the uploads of new capsules, one thread for each machine, so that a slow host holds up no
    /// other. Returns whether some are not done.
    fn upload_what_is_new(self: &Arc<Self>) -> bool {
        let table = lock(&self.uploads.table).clone();
        lock(&self.uploads.errors).retain(|name, _| table.contains_key(name));
        for name in table.into_keys() {
            let Some(turn) = UploadTurn::take(self, name) else { continue };
            let work = move || turn.host.upload_machine(&turn.name);
            if let Err(error) = std::thread::Builder::new().name("upload".into()).spawn(work) {
                tracing::warn!(%error, "cannot start a thread for an upload yet");
            }
        }
        !lock(&self.uploads.errors).is_empty() || !lock(&self.uploads.under_way).is_empty()
    }

    /// Uploads what a machine has, and what is added meanwhile.
    fn upload_machine(&self, name: &MachineName) {
        loop {
            let Some(followed) = lock(&self.uploads.table).get(name).cloned() else { return };
            match self.upload_all(name, &followed) {
                Ok(true) => {}
                Ok(false) => return drop(lock(&self.uploads.errors).remove(name)),
                Err(error) => {
                    tracing::warn!(%name, to = %followed.to, error = &error as &dyn std::error::Error, "cannot upload a capsule yet");
                    lock(&self.uploads.errors).insert(name.clone(), error_chain(&error));
                    return;
                }
            }
        }
    }

    /// Uploads the due capsules of a machine in order. A later failure does not undo earlier ones. Returns
    /// whether there were any.
    fn upload_all(&self, name: &MachineName, followed: &UploadRecord) -> Result<bool, DaemonError> {
        let all = self.due(name, followed)?;
        let any = self.is_open() && !all.is_empty();
        for due in all {
            match &followed.to {
                UploadTarget::Host(to) => self.upload(name, to, due.capsule)?,
                UploadTarget::Pool(place) => self.upload_to_pool(name, place, &due)?,
            }
            self.record_sent(name, &followed.to, &due);
        }
        Ok(any)
    }

    /// Capsules of a machine that are missing at the destination, in order of time.
    fn due(&self, name: &MachineName, followed: &UploadRecord) -> Result<Vec<Due>, DaemonError> {
        let newest =
            self.store.get_ref(&refs::machine_ref(name)).map_err(refs::store_error("read the refs"))?;
        // A partial capsule cannot go to a pool yet; a host fetches the rest from where it is.
        let to_host = matches!(followed.to, UploadTarget::Host(_));
        let newest = newest.filter(|id| Some(*id) != followed.sent && (to_host || !self.is_partial(id)));
        let time_of = |id: &CapsuleId| self.store.manifest(id).map_or(u64::MAX, |manifest| manifest.time);
        let newest =
            newest.map(|capsule| Due { time_ms: time_of(&capsule), capsule, is_epoch_capsule: false });
        let kept = match followed.to {
            UploadTarget::Host(_) => Vec::new(),
            UploadTarget::Pool(_) => history::all_of(&self.store, name)?,
        };
        let kept = kept.into_iter().filter(|(time, _)| *time > followed.kept_ms);
        let kept = kept.map(|(time_ms, capsule)| Due { time_ms, capsule, is_epoch_capsule: true });
        let mut due: Vec<Due> = kept.chain(newest).collect();
        due.sort_by_key(|due| due.time_ms);
        Ok(due)
    }

    fn record_sent(&self, name: &MachineName, to: &UploadTarget, due: &Due) {
        let mut table = lock(&self.uploads.table);
        if let Some(entry) = table.get_mut(name).filter(|entry| entry.to == *to) {
            match due.is_epoch_capsule {
                true => entry.kept_ms = due.time_ms,
                false => entry.sent = Some(due.capsule),
            }
        }
        // If the write fails, the next attempt finds the capsule there.
        let _ = self.save_uploads(&table);
    }

    /// Makes a capsule a version of the machine's file. An epoch capsule that was deleted meanwhile is
    /// skipped; the list is read again before each attempt.
    fn upload_to_pool(&self, name: &MachineName, place: &PoolPath, due: &Due) -> Result<(), DaemonError> {
        if due.is_epoch_capsule && !history::all_of(&self.store, name)?.contains(&(due.time_ms, due.capsule))
        {
            return Ok(());
        }
        let manifest = self.store.manifest(&due.capsule).map_err(refs::store_error("read the capsule"))?;
        let unless = if due.is_epoch_capsule { SkipIf::Any } else { SkipIf::Newest };
        let going_on = &mut |_| match self.is_open() && self.goes_to_pool(name, place) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        };
        self.send_to_pool(place, name.as_str(), (due.capsule, &manifest), unless, going_on).map(drop)
    }

    fn goes_to_pool(&self, name: &MachineName, place: &PoolPath) -> bool {
        let table = lock(&self.uploads.table);
        table.get(name).is_some_and(|now| matches!(&now.to, UploadTarget::Pool(to) if to == place))
    }

    fn upload(&self, name: &MachineName, to: &HostName, capsule: CapsuleId) -> Result<(), DaemonError> {
        let link = WireLink(self.peer_connection(to)?);
        let ask = RemotePullRequest { capsule, refs: vec![refs::machine_ref(name)], bases: Vec::new() };
        let taken = call::<RemotePull>(&link, &ask, Bytes::new());
        taken.map(drop).map_err(|error| crate::transfer::pull::transfer_error(to, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_wire::PublicKey;

    #[test]
    fn what_is_followed_comes_back_and_what_was_before_there_were_pools_too() {
        let before = r#"{"web":{"to":"beta","sent":null}}"#;
        let table: BTreeMap<MachineName, UploadRecord> = serde_json::from_str(before).unwrap();
        let web = &table[&"web".parse().unwrap()];
        assert_eq!(
            *web,
            UploadRecord { to: UploadTarget::Host("beta".parse().unwrap()), sent: None, kept_ms: 0 }
        );
        let place: PoolPath = format!("10.0.0.1:7500/{}/vms", PublicKey([7; 32])).parse().unwrap();
        let now = UploadRecord { to: UploadTarget::Pool(place), sent: None, kept_ms: 7 };
        let text = serde_json::to_string(&now).unwrap();
        assert_eq!(serde_json::from_str::<UploadRecord>(&text).unwrap(), now);
    }
}
