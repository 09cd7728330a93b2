//! Cleanup of machines that left this host: their names are free at once, their resources in the background.
//!
//! A migration must not wait while gigabytes of memory and disks are freed, but the name must be free when
//! its result is reported. So the machine's folder is renamed into the trash. Then a thread ends the handover
//! durably, waits for the QEMU, and removes runtime directory and folder. Until the handover is ended, the
//! record that names it is in one of the two folders: a restarted daemon finds it there and does not take the
//! handover for an aborted one.
//!
//! A failure here leaves garbage, which a starting daemon removes.

use crate::{
    core::{directories::Directories, error::DaemonError},
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        folder::{erase, move_to_trash},
        record::{Phase, Record},
    },
};
use std::{
    fs,
    path::Path,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::Duration,
};
use whimbrel_core::lock;
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_vm::RunningMachine;

#[derive(Default)]
pub(crate) struct Cleanup {
    under_way: Mutex<usize>,
    changed: Condvar,
}

/// A cleanup under way, until this is dropped.
struct UnderWay(Arc<Cleanup>);

impl Cleanup {
    fn start(self: &Arc<Self>) -> UnderWay {
        *lock(&self.under_way) += 1;
        UnderWay(self.clone())
    }

    /// Waits until no cleanup is under way, at most for `patience`. Returns whether any was.
    pub(crate) fn wait(&self, patience: Duration) -> bool {
        let under_way = lock(&self.under_way);
        let any = *under_way > 0;
        let waited = self.changed.wait_timeout_while(under_way, patience, |under_way| *under_way > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        any
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        *lock(&self.0.under_way) -= 1;
        self.0.changed.notify_all();
    }
}

impl Daemon {
    /// Frees a machine that the target has completely.
    pub(crate) fn clean_up(
        self: &Arc<Self>,
        machine: &Machine,
        mut turn: MachineLock<'_>,
        handover: HandoverId,
    ) {
        let name = machine.name();
        let mut live = turn.running.take();
        live.iter_mut().for_each(RunningMachine::disconnect);
        match move_to_trash(&self.directories, name) {
            Ok(folder) => {
                let (host, under_way) = (self.clone(), self.cleanup.start());
                in_background(move || {
                    host.handovers.end(handover);
                    live.into_iter().for_each(RunningMachine::end);
                    remove(&host.directories, &folder);
                    drop(under_way);
                });
            }
            Err(error) => {
                tracing::warn!(%name, %error, "cannot move a folder to the trash; removing it in place");
                self.handovers.end(handover);
                live.into_iter().for_each(RunningMachine::end);
                remove(&self.directories, &self.directories.machine(name));
            }
        }
        drop(turn);
        self.machines.remove(name);
    }

    /// Removes the trash of an earlier daemon, whose QEMUs have ended. Handovers in the trash were committed,
    /// so this runs before aborted ones are reported. A folder whose record cannot be read stays; false if
    /// there is one, since its handover is not known.
    pub(crate) fn empty_trash(self: &Arc<Self>) -> bool {
        let entries = fs::read_dir(self.directories.trash()).into_iter().flatten().flatten();
        let (mut folders, mut all_known) = (Vec::new(), true);
        for path in entries.map(|entry| entry.path()) {
            match committed(&path) {
                Ok(handover) => folders.push((handover, path)),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(folder = %path.display(), error, "cannot read a record in the trash: remove the folder if its machine runs elsewhere");
                    all_known = false;
                }
            }
        }
        if folders.is_empty() {
            return all_known;
        }
        let known = folders.iter().filter_map(|(handover, _)| *handover);
        known.for_each(|handover| self.handovers.mark_committed(handover));
        let (host, under_way) = (self.clone(), self.cleanup.start());
        in_background(move || {
            for (handover, folder) in folders {
                handover.into_iter().for_each(|handover| host.handovers.end(handover));
                remove(&host.directories, &folder);
            }
            drop(under_way);
        });
        all_known
    }
}

/// The handover with which the machine of a folder left. A record is removed first, but only after its
/// handover was ended.
fn committed(folder: &Path) -> Result<Option<HandoverId>, DaemonError> {
    Ok(match Record::read(folder)? {
        Some(Record { phase: Phase::HandedOver { handover, .. }, .. }) => Some(handover),
        _ => None,
    })
}

fn remove(layout: &Directories, folder: &Path) {
    if let Err(error) = erase(layout, folder) {
        tracing::warn!(error = &error as &dyn std::error::Error, "could not remove a machine's files");
    }
}

/// Without a thread the work is left to the next daemon.
fn in_background(work: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name("retiring".into()).spawn(work) {
        tracing::warn!(%error, "could not start a thread to free a machine that left");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::{ByteSize, MachineConfig, MachineName};

    fn config() -> MachineConfig {
        MachineConfig::minimal(ByteSize(64 << 20))
    }

    #[test]
    fn who_waits_for_room_waits_for_what_is_given_back_and_no_longer_than_patience() {
        let retiring = Arc::new(Cleanup::default());
        assert!(!retiring.wait(Duration::from_secs(60)), "nothing was under way");
        let (first, second) = (retiring.start(), retiring.start());
        assert!(retiring.wait(Duration::from_millis(1)));
        drop(first);
        let other = thread::spawn(move || drop(second));
        assert!(retiring.wait(Duration::from_secs(60)) || other.is_finished());
        other.join().expect("a thread that gives back");
        assert!(!retiring.wait(Duration::from_secs(60)));
    }

    #[test]
    fn what_was_put_away_is_known_as_handed_over_until_it_is_removed() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let layout =
            Directories::create(&dir.path().join("data"), &dir.path().join("run")).expect("directories");
        let name: MachineName = "web".parse().expect("a name");
        assert!(move_to_trash(&layout, &name).is_err(), "there is nothing");
        let handover = HandoverId([7; 16]);
        let mut record = Record::new(name.clone(), config(), vec![]);
        record.phase = Phase::HandedOver { handover, to: "beta".parse().expect("a name"), keeps: false };
        record.save(&layout).expect("a record");
        fs::create_dir(layout.machine(&name).join("disk0")).expect("a disk");

        let folder = move_to_trash(&layout, &name).expect("a folder in the trash");
        assert!(!layout.machine(&name).exists(), "the name is not free");
        assert_eq!(committed(&folder).expect("a record"), Some(handover));
        remove(&layout, &folder);
        assert!(!folder.exists());
        assert_eq!(committed(&folder).expect("no record"), None);
    }
}
