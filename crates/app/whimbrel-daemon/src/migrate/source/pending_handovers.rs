//! Handovers that this host has begun, written down until the target cannot misunderstand them any more.
//!
//! A target that is prepared waits for word, however long. So a handover is written down before the target
//! hears of it, and struck out once the target has confirmed that the machine runs there, or that it has
//! forgotten it. What is found here by a later daemon, and is not committed by a machine's record, was given
//! up by the crash.
//!
//! One JSON file, replaced whole and durable before a target is asked. A handover that is told twice to be
//! given up does no harm; one that is forgotten would keep a paused machine on the target for ever.

use crate::{
    core::{directories::Directories, error::DaemonError},
    daemon::Daemon,
    server::peer_rpc::PeerLink,
};
use serde::{Deserialize, Serialize};
use std::{
    path::PathBuf,
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
use whimbrel_wire::atomic_file;

const FORMAT: u32 = 1;
/// Pauses between attempts to reach targets that have not heard: the first and the longest.
const TELL_AGAIN: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// The handovers of a host.
pub(crate) struct PendingHandovers {
    path: PathBuf,
    begun: Mutex<Vec<Begun>>,
    /// Whether a thread goes round the targets.
    telling: AtomicBool,
}

#[derive(Debug, Clone)]
struct Begun {
    handover: HandoverId,
    to: HostName,
    stand: Stand,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    /// A migration works on it, or its machine's record says that it was committed.
    UnderWay,
    /// The machine stays here. The target may not know.
    GivenUp,
}

impl Stand {
    fn of(state: Source) -> Self {
        match state {
            Source::Copying | Source::Stopped | Source::Committed => Self::UnderWay,
            Source::Aborted | Source::Done => Self::GivenUp,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Kept {
    format: u32,
    begun: Vec<KeptOne>,
}

#[derive(Serialize, Deserialize)]
struct KeptOne {
    handover: HandoverId,
    to: HostName,
}

impl PendingHandovers {
    /// Those of the daemon before. Nothing is told to anyone until [`Daemon::tell_given_up`].
    pub(crate) fn load(layout: &Directories) -> Result<Self, DaemonError> {
        let path = layout.data().join("handovers.json");
        let kept = match std::fs::read(&path) {
            Ok(text) => parse(&text).map_err(|source| DaemonError::io("read", &path, source))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(DaemonError::io("read", &path, error)),
        };
        // Whether the machine is still here or has left with a later one makes no difference to these.
        let stand = Stand::of(Source::recovered(SourceRecord::Ours).0);
        let found = |one: KeptOne| Begun { handover: one.handover, to: one.to, stand };
        let begun = Mutex::new(kept.into_iter().map(found).collect());
        Ok(Self { path, begun, telling: AtomicBool::new(false) })
    }

    /// Writes down, durably, that a machine is about to be offered.
    pub(crate) fn start(&self, handover: HandoverId, to: &HostName) -> Result<(), DaemonError> {
        let mut begun = self.begun();
        begun.push(Begun { handover, to: to.clone(), stand: Stand::UnderWay });
        self.save(&begun).inspect_err(|_| drop(begun.pop()))
    }

    /// The machine's record says that this one was committed: it is not to be given up.
    pub(crate) fn is_committed(&self, handover: HandoverId) {
        self.set(handover, Stand::of(Source::recovered(SourceRecord::HandedOver).0));
    }

    /// The machine stays here.
    pub(crate) fn abandon(&self, handover: HandoverId) {
        self.set(handover, Stand::GivenUp);
    }

    /// The target knows how it ended.
    pub(crate) fn end(&self, handover: HandoverId) {
        let mut begun = self.begun();
        begun.retain(|one| one.handover != handover);
        if let Err(error) = self.save(&begun) {
            tracing::warn!(%handover, error = &error as &dyn std::error::Error, "the end of a handover is not written down");
        }
    }

    fn set(&self, handover: HandoverId, stand: Stand) {
        self.begun().iter_mut().filter(|one| one.handover == handover).for_each(|one| one.stand = stand);
    }

    fn abandoned(&self) -> Vec<(HandoverId, HostName)> {
        let begun = self.begun();
        let given_up = begun.iter().filter(|one| one.stand == Stand::GivenUp);
        given_up.map(|one| (one.handover, one.to.clone())).collect()
    }

    fn save(&self, begun: &[Begun]) -> Result<(), DaemonError> {
        let begun = begun.iter().map(|one| KeptOne { handover: one.handover, to: one.to.clone() }).collect();
        let text = serde_json::to_vec_pretty(&Kept { format: FORMAT, begun }).expect("ids and names");
        atomic_file::replace(&self.path, &text).map_err(|source| DaemonError::io("write", &self.path, source))
    }

    fn begun(&self) -> MutexGuard<'_, Vec<Begun>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse(text: &[u8]) -> std::io::Result<Vec<KeptOne>> {
    let kept: Kept = serde_json::from_slice(text)?;
    if kept.format != FORMAT {
        let reason = format!("format {} is not {FORMAT}, which this version reads", kept.format);
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, reason));
    }
    Ok(kept.begun)
}

impl Daemon {
    /// Tells a target, over a connection there is, of what was given up towards it.
    pub(crate) fn tell_over(&self, to: &HostName, link: &dyn Link) {
        for (handover, _) in self.handovers.abandoned().into_iter().filter(|(_, host)| host == to) {
            match abort(link, handover) {
                Ok(()) => self.handovers.end(handover),
                Err(error) => tracing::debug!(%handover, %error, "a target did not hear what was given up"),
            }
        }
    }

    /// Tells targets of what was given up, in the background, until all have heard or the daemon ends.
    pub(crate) fn tell_given_up(self: &Arc<Self>) {
        if self.handovers.abandoned().is_empty() || self.handovers.telling.swap(true, Ordering::AcqRel) {
            return;
        }
        let host = self.clone();
        let tell = move || {
            let mut pause = TELL_AGAIN[0];
            while host.tell_all() && host.sleep_unless_closing(pause) {
                pause = (pause * 2).min(TELL_AGAIN[1]);
            }
            host.handovers.telling.store(false, Ordering::Release);
        };
        if let Err(error) = std::thread::Builder::new().name("given-up".into()).spawn(tell) {
            tracing::error!(%error, "no thread to tell targets what was given up");
            self.handovers.telling.store(false, Ordering::Release);
        }
    }

    /// Whether any target is still to be told.
    fn tell_all(&self) -> bool {
        let targets: std::collections::BTreeSet<_> =
            self.handovers.abandoned().into_iter().map(|(_, to)| to).collect();
        for to in &targets {
            match PeerLink::connect(self, to) {
                Ok(link) => self.tell_over(to, &link),
                Err(error) => {
                    tracing::debug!(%to, error = &error as &dyn std::error::Error, "a target is still to be told");
                }
            }
        }
        !self.handovers.abandoned().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handovers(dir: &std::path::Path) -> PendingHandovers {
        let layout = Directories::create(&dir.join("data"), &dir.join("run")).expect("a host's directories");
        PendingHandovers::load(&layout).expect("handovers")
    }

    #[test]
    fn what_a_dead_daemon_had_begun_is_given_up_unless_it_was_committed_or_ended() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let id = |byte| HandoverId([byte; 16]);
        let beta: HostName = "beta".parse().expect("a name");
        let before = handovers(dir.path());
        (1..=3).for_each(|byte| before.start(id(byte), &beta).expect("a durable note"));
        assert!(before.abandoned().is_empty(), "a migration that goes on was given up");
        before.end(id(1));
        drop(before);

        let after = handovers(dir.path());
        after.is_committed(id(2));
        assert_eq!(after.abandoned(), [(id(3), beta.clone())]);
        after.end(id(3));
        drop(after);
        assert_eq!(
            handovers(dir.path()).abandoned(),
            [(id(2), beta)],
            "nobody said yet that it was committed"
        );
    }

    #[test]
    fn a_handover_that_cannot_be_written_down_is_not_begun() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let handovers = handovers(dir.path());
        std::fs::remove_dir_all(dir.path().join("data")).expect("no directory to write to");
        let beta: HostName = "beta".parse().expect("a name");
        assert!(handovers.start(HandoverId([1; 16]), &beta).is_err());
        handovers.abandon(HandoverId([1; 16]));
        assert!(handovers.abandoned().is_empty());
    }
}
