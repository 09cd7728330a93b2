//! Hosts: what this host and those that it trusts run, asked when somebody looks (docs/protocols/migrate.md).

use crate::{
    core::{
        error::DaemonError,
        refs,
        rights::{self, Access, Caller},
    },
    daemon::Daemon,
    machine::memory_room,
    transfer::pull::transfer_error,
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};
use whimbrel_api::{HostMachines, HostMemory, MachineInfo};
use whimbrel_core::{HostName, MachineName, error_chain, lock};
use whimbrel_transfer::{WireLink, call};
use whimbrel_wire::{Call, range};

/// Most machines in one answer: with long notes and many ports they still fit into a payload.
const PART: usize = 256;
/// Most answers of a host that are read, and most bytes of them.
const PARTS_MAX: usize = 64;
const BYTES_MAX: usize = 32 << 20;
/// Longest wait for the answers of all hosts.
const WAIT: Duration = Duration::from_secs(5);
/// Longest wait for hosts that did not answer the last time: a page that is looked at asks every few seconds.
const WAIT_FOR_SILENT: Duration = Duration::from_millis(300);

/// Asks a host for its memory, and for its machines whose names come after one.
pub(crate) struct QueryMachines;

impl Call for QueryMachines {
    const KIND: u16 = range::MIGRATE + 0x64;
    type Header = Option<MachineName>;
    type Reply = ();
}

/// Payload of the answer, in JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Part {
    memory: Option<HostMemory>,
    machines: Vec<MachineInfo>,
}

/// Hosts that are being asked, and those that did not answer when they were asked last.
#[derive(Default)]
pub(crate) struct AskedHosts(Mutex<BTreeMap<HostName, Asked>>);

#[derive(Default)]
struct Asked {
    is_under_way: bool,
    /// Why the host did not answer the last time.
    silence: Option<String>,
}

impl AskedHosts {
    /// Begins to ask a host; false if a silent one is still being asked.
    fn begin(&self, host: &HostName) -> bool {
        let mut asked = lock(&self.0);
        let asked = asked.entry(host.clone()).or_default();
        !std::mem::replace(&mut asked.is_under_way, true) || asked.silence.is_none()
    }

    /// Records that a host was asked, and why it did not answer if it did not.
    fn end(&self, host: &HostName, silence: Option<String>) {
        let mut asked = lock(&self.0);
        match silence {
            Some(_) => drop(asked.insert(host.clone(), Asked { is_under_way: false, silence })),
            None => drop(asked.remove(host)),
        }
    }

    /// Records that a host has not answered in time, unless the answer is there by now.
    fn late(&self, host: &HostName, reason: &str) {
        if let Some(asked) = lock(&self.0).get_mut(host).filter(|asked| asked.is_under_way) {
            asked.silence.get_or_insert_with(|| reason.to_owned());
        }
    }

    /// Why a host did not answer the last time.
    fn silence(&self, host: &HostName) -> Option<String> {
        lock(&self.0).get(host)?.silence.clone()
    }
}

/// A question to a host, which ends in any case: a host that was being asked for ever would never be asked
/// again.
struct Question {
    daemon: Arc<Daemon>,
    to: HostName,
    silence: Option<String>,
}

impl Question {
    fn ask(mut self) -> HostAnswer {
        let said = self.daemon.machines_of(&self.to).map_err(|error| error_chain(&error));
        self.silence = said.as_ref().err().cloned();
        (self.to.clone(), said)
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.daemon.asked_hosts.end(&self.to, self.silence.take());
    }
}

/// A host, and what it says or why it says nothing.
type HostAnswer = (HostName, Result<Part, String>);

impl Daemon {
    /// Machines of this host and of all hosts that it trusts, this one first. A host that does not answer in
    /// time is there with the cause. One that did not answer the last time is hardly waited for, and not
    /// asked a second time meanwhile.
    pub(crate) fn hosts(self: &Arc<Self>) -> Result<Vec<HostMachines>, DaemonError> {
        self.hosts_within(WAIT)
    }

    fn hosts_within(self: &Arc<Self>, wait: Duration) -> Result<Vec<HostMachines>, DaemonError> {
        let trusted = self.trust_list()?.into_iter().filter(|entry| entry.address.is_some());
        let names: Vec<HostName> =
            trusted.map(|entry| entry.name).filter(|name| *name != self.name).collect();
        let answers = self.ask_hosts(&names)?;
        let mut machines = self.machine_infos();
        self.add_away(&mut machines);
        let memory = memory_room::host_memory(&self.memory);
        let mut all = vec![HostMachines { name: self.name.clone(), memory, machines, failure: None }];
        let late = format!("no answer within {} s", wait.as_secs());
        let known: BTreeMap<_, _> =
            names.iter().filter_map(|name| Some((name.clone(), self.asked_hosts.silence(name)?))).collect();
        all.extend(names.iter().map(|name| {
            let failure = known.get(name).cloned().unwrap_or_else(|| late.clone());
            HostMachines { name: name.clone(), memory: None, machines: Vec::new(), failure: Some(failure) }
        }));
        let (begun, mut missing) = (Instant::now(), names.into_iter().collect::<BTreeSet<_>>());
        while !missing.is_empty() {
            let only_silent = missing.iter().all(|name| known.contains_key(name));
            let most = if only_silent { wait.min(WAIT_FOR_SILENT) } else { wait };
            let Ok((name, said)) = answers.recv_timeout(most.saturating_sub(begun.elapsed())) else { break };
            missing.remove(&name);
            let Some(place) = all.iter_mut().find(|host| host.name == name) else { continue };
            match said {
                Ok(Part { memory, machines }) => {
                    *place = HostMachines { name, memory, machines, failure: None }
                }
                Err(reason) => place.failure = Some(reason),
            }
        }
        missing.iter().for_each(|name| self.asked_hosts.late(name, &late));
        Ok(all)
    }

    /// Asks hosts, each on a thread of its own. Their answers come as they are there.
    fn ask_hosts(self: &Arc<Self>, names: &[HostName]) -> Result<mpsc::Receiver<HostAnswer>, DaemonError> {
        let (answer, answers) = mpsc::channel();
        for to in names.iter().filter(|name| self.asked_hosts.begin(name)) {
            let silence = Some("it could not be asked".to_owned());
            let question = Question { daemon: self.clone(), to: to.clone(), silence };
            let answer = answer.clone();
            let ask = move || drop(answer.send(question.ask()));
            let thread = std::thread::Builder::new().name("hosts".into()).spawn(ask);
            thread.map_err(|source| DaemonError::Thread { source })?;
        }
        Ok(answers)
    }

    fn machines_of(&self, host: &HostName) -> Result<Part, DaemonError> {
        let link = WireLink(self.peer_connection(host)?);
        let mut whole = Part { memory: None, machines: Vec::new() };
        let mut bytes = 0;
        for _ in 0..PARTS_MAX {
            let after = whole.machines.last().map(|machine| machine.name.clone());
            let answer = call::<QueryMachines>(&link, &after, Bytes::new());
            let ((), payload) = answer.map_err(|error| transfer_error(host, error))?;
            bytes += payload.len();
            if bytes > BYTES_MAX {
                return Err(DaemonError::invalid(format!("{host} says more than a list of machines has")));
            }
            let part: Part = serde_json::from_slice(&payload).map_err(|error| {
                DaemonError::invalid(format!("{host} does not say what it runs: {error}"))
            })?;
            let is_last = part.machines.len() < PART;
            whole.memory = part.memory;
            whole.machines.extend(part.machines);
            if is_last {
                break;
            }
        }
        Ok(whole)
    }

    /// Machines that `caller` may read, without what they are made of on this host.
    pub(crate) fn answer_machines(
        &self,
        caller: &Caller,
        after: Option<&MachineName>,
    ) -> Result<Bytes, DaemonError> {
        let mut machines = self.machine_infos();
        machines.retain(|machine| {
            after.is_none_or(|after| machine.name > *after)
                && rights::may_use(caller, Access::Read, &refs::machine_ref(&machine.name))
        });
        machines.sort_by(|one, other| one.name.cmp(&other.name));
        machines.truncate(PART);
        machines.iter_mut().flat_map(|machine| &mut machine.disks).for_each(|disk| disk.base.clear());
        let part = Part { memory: memory_room::host_memory(&self.memory), machines };
        let json = serde_json::to_vec(&part);
        json.map(Bytes::from).map_err(|error| DaemonError::invalid(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::sample;
    use std::io::ErrorKind;

    /// Names of hosts and why they do not answer.
    fn asked(host: &Arc<Daemon>, wait: Duration) -> Vec<(String, Option<String>)> {
        let all = host.hosts_within(wait).unwrap();
        all.into_iter().map(|host| (host.name.to_string(), host.failure)).collect()
    }

    #[test]
    fn hosts_are_asked_again_until_they_answer_and_one_that_hangs_is_not_asked_twice() {
        let ([alpha, beta], _folders) = sample::hosts(["alpha", "beta"]);
        let hung = sample::trust_hung(&alpha, "hung");
        let seen = asked(&alpha, Duration::from_secs(1));
        let names: Vec<&str> = seen.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["alpha", "beta", "absent", "hung"]);
        assert!(seen[0].1.is_none() && seen[1].1.is_none() && seen[2].1.is_some(), "{seen:?}");
        assert_eq!(seen[3].1.as_deref(), Some("no answer within 1 s"));
        for _ in 0..3 {
            assert_eq!(asked(&alpha, WAIT), seen, "what is known of it");
        }
        hung.accept().unwrap();
        hung.set_nonblocking(true).unwrap();
        assert_eq!(hung.accept().err().map(|error| error.kind()), Some(ErrorKind::WouldBlock));

        // A host that answers again is known as one that answers.
        alpha.asked_hosts.end(&beta.name, Some("it was away".into()));
        while alpha.asked_hosts.silence(&beta.name).is_some() {
            asked(&alpha, WAIT);
        }
    }

    #[test]
    fn an_answer_that_comes_just_after_the_wait_leaves_no_silent_host() {
        let (hosts, beta) = (AskedHosts::default(), "beta".parse().unwrap());
        assert!(hosts.begin(&beta));
        hosts.end(&beta, None);
        hosts.late(&beta, "no answer");
        assert_eq!(hosts.silence(&beta), None);
        assert!(hosts.begin(&beta) && hosts.begin(&beta), "two look at once");
        hosts.late(&beta, "no answer");
        assert!(!hosts.begin(&beta), "it is being asked");
        hosts.end(&beta, Some("it is away".into()));
        assert!(hosts.begin(&beta), "it is asked again");
        assert_eq!(hosts.silence(&beta).as_deref(), Some("it is away"));
    }

    #[test]
    fn a_question_that_is_never_asked_ends() {
        let (alpha, _folders) = sample::daemon();
        let to: HostName = "beta".parse().unwrap();
        assert!(alpha.asked_hosts.begin(&to));
        drop(Question { daemon: alpha.clone(), to: to.clone(), silence: Some("no thread".into()) });
        assert!(alpha.asked_hosts.begin(&to));
        assert_eq!(alpha.asked_hosts.silence(&to).as_deref(), Some("no thread"));
    }
}
