//! Pending handovers: a durable record of those that this host started and that a target may still wait for.
//!
//! A prepared target waits for the source's decision, however long. So a handover is recorded before the
//! target hears of it, and removed once the target has confirmed that the machine runs there, or that it has
//! discarded it. A handover that a restarted daemon finds here, and that no machine's record commits, was
//! aborted by the crash.
//!
//! One JSON file, replaced atomically and durable before a target is contacted. Aborting a handover twice
//! does no harm; forgetting one would leave a paused machine on the target for ever.

use crate::{
    core::{directories::Directories, error::DaemonError},
    daemon::Daemon,
    server::peer_rpc::PeerLink,
};
use serde::{Deserialize, Serialize};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use whimbrel_core::HostName;
use whimbrel_migrate::{
    abort,
    handover::{Source, SourceRecord},
    link::Link,
    protocol::HandoverId,
};
use whimbrel_wire::json_file;

const FORMAT: u32 = 1;
/// Delays between attempts to reach targets: the first and the longest.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// The pending handovers of a host.
pub(crate) struct PendingHandovers {
    path: PathBuf,
    /// Why the file cannot be read. It is left alone then, and nothing is begun.
    unreadable: Option<String>,
    handovers: Mutex<Vec<PendingHandover>>,
    /// Whether a thread is notifying targets.
    notifying: AtomicBool,
}

#[derive(Debug, Clone)]
struct PendingHandover {
    handover: HandoverId,
    to: HostName,
    /// Only whether it is aborted matters here.
    state: Source,
}

#[derive(Serialize, Deserialize)]
struct StoredHandovers {
    format: u32,
    begun: Vec<StoredHandover>,
}

#[derive(Serialize, Deserialize)]
struct StoredHandover {
    handover: HandoverId,
    to: HostName,
}

impl PendingHandovers {
    /// Loads the handovers of the previous daemon. Targets are notified only by [`Daemon::notify_aborted`].
    /// If they cannot be read, no target is told anything, and no machine leaves this host.
    pub(crate) fn load(layout: &Directories) -> Self {
        let path = layout.handovers();
        let read = read(&path);
        let unreadable = read.as_ref().err().map(ToString::to_string);
        if let Some(reason) = &unreadable {
            tracing::error!(path = %path.display(), reason, "cannot read the pending handovers; the file stays as it is, and no machine leaves this host until it is restored or moved away");
        }
        let kept = read.unwrap_or_default();
        // The result is the same whether the machine is still here or has left by a later handover. Recovery
        // of its record makes it run on.
        let (state, _) = Source::recovered(SourceRecord::Ours);
        let found = |one: StoredHandover| PendingHandover { handover: one.handover, to: one.to, state };
        let begun = Mutex::new(kept.into_iter().map(found).collect());
        Self { path, unreadable, handovers: begun, notifying: AtomicBool::new(false) }
    }

    /// Records durably that a machine is about to be offered.
    pub(crate) fn start(&self, handover: HandoverId, to: &HostName) -> Result<(), DaemonError> {
        let mut begun = self.begun();
        begun.push(PendingHandover { handover, to: to.clone(), state: Source::initial().0 });
        self.save(&begun).inspect_err(|_| drop(begun.pop()))
    }

    /// The machine's record says that this handover was committed, so it must not be aborted.
    pub(crate) fn mark_committed(&self, handover: HandoverId) {
        self.set(handover, Source::recovered(SourceRecord::HandedOver).0);
    }

    /// Aborts a handover: the machine stays here.
    pub(crate) fn abort(&self, handover: HandoverId) {
        self.set(handover, Source::Aborted);
    }

    /// Leaves all handovers undecided: a record that could not be read may have committed one. The next
    /// daemon decides.
    pub(crate) fn hold(&self) {
        self.begun().iter_mut().for_each(|one| one.state = Source::initial().0);
    }

    /// Removes a handover whose outcome the target knows.
    pub(crate) fn end(&self, handover: HandoverId) {
        let mut begun = self.begun();
        begun.retain(|one| one.handover != handover);
        if let Err(error) = self.save(&begun) {
            tracing::warn!(%handover, error = &error as &dyn std::error::Error, "cannot remove the record of a handover");
        }
    }

    fn set(&self, handover: HandoverId, state: Source) {
        self.begun().iter_mut().filter(|one| one.handover == handover).for_each(|one| one.state = state);
    }

    fn aborted(&self) -> Vec<(HandoverId, HostName)> {
        let begun = self.begun();
        let given_up = begun.iter().filter(|one| one.state == Source::Aborted);
        given_up.map(|one| (one.handover, one.to.clone())).collect()
    }

    fn save(&self, begun: &[PendingHandover]) -> Result<(), DaemonError> {
        if let Some(reason) = self.unreadable.clone() {
            return Err(DaemonError::UnreadableFile { path: self.path.clone(), reason });
        }
        let begun =
            begun.iter().map(|one| StoredHandover { handover: one.handover, to: one.to.clone() }).collect();
        json_file::replace(&self.path, &StoredHandovers { format: FORMAT, begun })
            .map_err(|source| DaemonError::io("write", &self.path, source))
    }

    fn begun(&self) -> MutexGuard<'_, Vec<PendingHandover>> {
        self.handovers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(path: &Path) -> io::Result<Vec<StoredHandover>> {
    match json_file::read_format::<StoredHandovers>(path, FORMAT) {
        Ok(kept) => Ok(kept.begun),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Why the file of pending handovers cannot be read, if it cannot.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    read(path).map(drop)
}

impl Daemon {
    /// Notifies a target of aborted handovers over an existing connection.
    pub(crate) fn notify_aborted_over(&self, to: &HostName, link: &dyn Link) {
        for (handover, _) in self.handovers.aborted().into_iter().filter(|(_, host)| host == to) {
            if let Err(error) = abort(link, handover, || self.handovers.end(handover)) {
                tracing::debug!(%handover, %error, "a target missed an aborted handover");
            }
        }
    }

    /// Notifies targets of aborted handovers in the background, until all know or the daemon ends.
    pub(crate) fn notify_aborted(self: &Arc<Self>) {
        if self.handovers.aborted().is_empty() || self.handovers.notifying.swap(true, Ordering::AcqRel) {
            return;
        }
        let host = self.clone();
        let tell = move || {
            let mut pause = RETRY_DELAYS[0];
            while host.notify_all_aborted() && host.sleep_unless_closing(pause) {
                pause = (pause * 2).min(RETRY_DELAYS[1]);
            }
            host.handovers.notifying.store(false, Ordering::Release);
        };
        if let Err(error) = std::thread::Builder::new().name("given-up".into()).spawn(tell) {
            tracing::error!(%error, "cannot start the thread that notifies targets of aborted handovers");
            self.handovers.notifying.store(false, Ordering::Release);
        }
    }

    /// Returns whether a target still has to be notified.
    fn notify_all_aborted(&self) -> bool {
        let targets: std::collections::BTreeSet<_> =
            self.handovers.aborted().into_iter().map(|(_, to)| to).collect();
        for to in &targets {
            match PeerLink::connect(self, to) {
                Ok(link) => self.notify_aborted_over(to, &link),
                Err(error) => {
                    tracing::debug!(%to, error = &error as &dyn std::error::Error, "cannot reach a target to notify it of an aborted handover");
                }
            }
        }
        !self.handovers.aborted().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handovers(dir: &std::path::Path) -> PendingHandovers {
        let layout = Directories::create(&dir.join("data"), &dir.join("run")).expect("a host's directories");
        PendingHandovers::load(&layout)
    }

    #[test]
    fn what_a_dead_daemon_had_begun_is_given_up_unless_it_was_committed_or_ended() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let id = |byte| HandoverId([byte; 16]);
        let beta: HostName = "beta".parse().expect("a name");
        let before = handovers(dir.path());
        (1..=3).for_each(|byte| before.start(id(byte), &beta).expect("a durable note"));
        assert!(before.aborted().is_empty(), "a migration that goes on was given up");
        before.end(id(1));
        drop(before);

        let after = handovers(dir.path());
        after.mark_committed(id(2));
        assert_eq!(after.aborted(), [(id(3), beta.clone())]);
        after.end(id(3));
        drop(after);
        assert_eq!(handovers(dir.path()).aborted(), [(id(2), beta)], "nobody said yet that it was committed");
    }

    #[test]
    fn a_handover_that_cannot_be_written_down_is_not_begun() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let handovers = handovers(dir.path());
        std::fs::remove_dir_all(dir.path().join("data")).expect("no directory to write to");
        let beta: HostName = "beta".parse().expect("a name");
        assert!(handovers.start(HandoverId([1; 16]), &beta).is_err());
        handovers.abort(HandoverId([1; 16]));
        assert!(handovers.aborted().is_empty());
    }
}
