//! Processes: threads that are killed together, with their descriptors and their locks.

use super::{
    World, baton,
    hosts::HostId,
    me, observe,
    schedule::{ProcessId, ThreadId, Wait},
    with,
};
use std::{collections::BTreeMap, time::Duration};

#[derive(Debug)]
struct Process {
    host: HostId,
    name: String,
    has_ended: bool,
    /// Calls after which it is killed, and whether its host loses power then.
    doom: Option<(u64, bool)>,
    after_rename: Option<AfterRename>,
}

/// What strikes a process between the rename of a file and the sync of the folder.
#[derive(Debug, Clone, Copy)]
struct AfterRename {
    /// Renames that are left until it strikes.
    renames: u64,
    /// None if it is killed; else the sync fails, and it is killed so many calls later.
    failed_sync: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Processes {
    all: BTreeMap<ProcessId, Process>,
    /// Process of the thread that is created next.
    starting: Option<ProcessId>,
}

impl Processes {
    pub(crate) fn name(&self, id: ProcessId) -> String {
        self.all.get(&id).map_or_else(|| String::from("world"), |process| process.name.clone())
    }

    pub(crate) fn take_starting(&mut self) -> Option<ProcessId> {
        self.starting.take()
    }

    pub(crate) fn host(&self, id: ProcessId) -> Option<HostId> {
        self.all.get(&id).map(|process| process.host)
    }

    /// Counts a call of a process. Whether it is killed at it, and its host without power.
    pub(crate) fn count_call(&mut self, id: ProcessId, call: &str) -> Option<bool> {
        let process = self.all.get_mut(&id)?;
        if let Some(strike) = &mut process.after_rename {
            if strike.renames == 0 && strike.failed_sync.is_none() {
                return Some(false);
            }
            strike.renames = strike.renames.saturating_sub(u64::from(call == "rename"));
        }
        let (left, power) = process.doom.as_mut()?;
        *left = left.checked_sub(1)?;
        let is_over = *left == 0;
        is_over.then_some(*power)
    }

    /// Whether the sync that a process begins fails because of the rename before.
    pub(crate) fn fails_sync(&mut self, id: ProcessId) -> bool {
        let Some(process) = self.all.get_mut(&id) else { return false };
        let Some(AfterRename { renames: 0, failed_sync: Some(calls) }) = process.after_rename else {
            return false;
        };
        (process.after_rename, process.doom) = (None, Some((calls.max(1), false)));
        true
    }
}

/// A process that was started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    id: ProcessId,
    host: HostId,
}

/// Starts a process on a host. It ends when `body` does, with all its threads.
pub(crate) fn start(host: HostId, name: &str, body: impl FnOnce() + Send + 'static) -> Running {
    let id = with(|world| {
        let id = world.processes.all.len() as ProcessId + 1;
        let process =
            Process { host, name: name.to_owned(), has_ended: false, doom: None, after_rename: None };
        world.processes.all.insert(id, process);
        world.processes.starting = Some(id);
        id
    });
    drop(std::thread::spawn(move || {
        body();
        with(|world| world.end_process(id, Some(me())));
    }));
    Running { id, host }
}

impl Running {
    /// Lets it be killed at its `calls`th call from now, and its host lose power if `power`.
    pub(crate) fn doom(self, calls: u64, power: bool) {
        with(|world| {
            let process = world.processes.all.get_mut(&self.id).expect("a process that was started");
            process.doom = Some((calls.max(1), power));
        });
    }

    /// Lets it be killed when it has renamed a file and not made the new name durable yet.
    pub(crate) fn doom_after_rename(self) {
        self.strike_after(AfterRename { renames: 1, failed_sync: None });
    }

    /// Lets it rename so many files, then fails the sync that makes the last name durable, and kills it
    /// `calls` calls later.
    pub(crate) fn fail_sync_of_rename(self, renames: u64, calls: u64) {
        self.strike_after(AfterRename { renames, failed_sync: Some(calls) });
    }

    fn strike_after(self, strike: AfterRename) {
        with(|world| {
            let process = world.processes.all.get_mut(&self.id).expect("a process that was started");
            process.after_rename = Some(strike);
        });
    }

    /// Lets it not be killed after all.
    pub(crate) fn spare(self) {
        with(|world| {
            world.processes.all.get_mut(&self.id).into_iter().for_each(|process| {
                (process.doom, process.after_rename) = (None, None);
            });
        });
    }

    pub(crate) fn has_ended(self) -> bool {
        with(|world| world.processes.all[&self.id].has_ended)
    }

    /// Waits for its end. Whether that came in time.
    pub(crate) fn await_end(self, most: Duration) -> bool {
        let deadline = with(|world| world.schedule.now) + most.as_nanos() as u64;
        while !self.has_ended() {
            if !baton::wait(Wait::Exit(self.id), Some(deadline)) {
                return self.has_ended();
            }
        }
        true
    }

    pub(crate) fn kill(self) {
        with(|world| {
            world.log(&format!("kill of {}", world.processes.name(self.id)));
            world.end_process(self.id, None);
        });
    }

    pub(crate) fn host(self) -> HostId {
        self.host
    }
}

/// A host loses power, and all its processes end.
pub(crate) fn lose_power(host: HostId) {
    with(|world| world.lose_power(host));
}

impl World {
    pub(crate) fn end_process(&mut self, id: ProcessId, spared: Option<ThreadId>) {
        self.schedule.kill(id, spared);
        if let Some(process) = self.processes.all.get_mut(&id) {
            (process.has_ended, process.doom) = (true, None);
        }
        self.close_all(id);
    }

    pub(crate) fn lose_power(&mut self, host: HostId) {
        self.log(&format!("host {host} loses power"));
        let on_host = |(_, process): &(&ProcessId, &Process)| process.host == host && !process.has_ended;
        let ids: Vec<ProcessId> = self.processes.all.iter().filter(on_host).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.end_process(id, None));
        self.hosts[host].disk.lose_power(&mut self.faults.random);
        self.hosts[host].mail.clear();
    }
}

/// Something that the processes of a scene share, and no real ones could: what the rules look at.
#[derive(Debug, Default)]
pub(crate) struct Shared<T>(std::sync::Arc<std::sync::Mutex<T>>);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Shared<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::sync::Arc::new(std::sync::Mutex::new(value)))
    }

    /// Looks at the value. The baton does not move meanwhile, so the lock is never contended.
    pub(crate) fn see<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        observe(|| look(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)))
    }
}
