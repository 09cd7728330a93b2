//! Guest whose machine process is replaced again and again. All that was started ends with the value.

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use std::{
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    os::fd::OwnedFd,
    path::Path,
    process::{ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};
use whimbrel_qemu::ControlGroup;
use whimbrel_testkit::{
    guest::{GuestFiles, GuestOptions, TestAgent},
    lab::{self, Namespace},
};

/// Far above any step, for a host that does much else.
const SOON: Duration = Duration::from_secs(240);
const MEMORY_MIB: u32 = 128;
const DISK_MIB: u32 = 64;

const GUEST: &str = "10.77.0.100";

/// Machine process, killed when dropped.
struct Process {
    child: lab::Process,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Process {
    fn start(network: &Namespace, args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_machine-process"));
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = network.start(command).unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { input: child.stdin.take(), child, lines }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Rest of the next line, which begins with `word`.
    fn hear(&self, word: &str) -> String {
        let line = self.lines.recv_timeout(SOON).unwrap_or_else(|error| panic!("no {word}: {error}"));
        let rest = line.strip_prefix(word).unwrap_or_else(|| panic!("{line:?} instead of {word}"));
        rest.trim().to_owned()
    }

    /// Starts the process that is to have the machine of `dir`, and waits until it has connected: it takes
    /// nothing from a process that died before.
    fn connected(network: &Namespace, dir: &Path, dies_at: &str) -> Self {
        let process = Self::start(network, &["take", dir.to_str().unwrap(), dies_at]);
        process.hear("CONNECTED");
        process
    }

    /// Waits for its end.
    fn wait(&mut self) {
        self.child.wait().unwrap();
    }
}

/// Process that has the machine once the one that offered it has ended.
pub(crate) struct Waiting(Process);

/// Guest, and the process that has its machine.
pub(crate) struct Lab {
    process: Process,
    qemu: OwnedFd,
    /// The control group of the machine, if this host has any.
    group: Option<ControlGroup>,
    network: Namespace,
    /// Files of the machine, its memory among them.
    dir: tempfile::TempDir,
}

/// Outcome of a swap that one side did not survive, or of a whole one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Whether the new process has the machine.
    pub(crate) passed: bool,
    /// Whether its dirty logs are complete.
    pub(crate) complete: bool,
    /// Time for which the guest was stopped; zero if nobody knows.
    pub(crate) stopped: Duration,
}

impl Lab {
    /// Boots a guest, and connects to the agent in it over its network port.
    pub(crate) fn boot() -> (Self, TestAgent) {
        let files = GuestFiles::get();
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let network = Namespace::new().unwrap();
        for words in ["link add br0 type bridge mcast_snooping 0", "addr add 10.77.0.11/24 dev br0"] {
            network.ip(words).unwrap();
        }
        network.ip("link set br0 up").unwrap();
        let address = Some(format!("{GUEST}/24"));
        let options = GuestOptions { buffer_mib: 16, address, ..GuestOptions::default() };
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let args = [
            "start",
            &text(dir.path()),
            &text(&files.kernel),
            &text(&files.initrd),
            &options.to_string(),
            &MEMORY_MIB.to_string(),
            &DISK_MIB.to_string(),
        ];
        let process = Process::start(&network, &args);
        let pid: i32 = process.hear("QEMU").parse().unwrap();
        let qemu = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        let group = ControlGroup::of_process(pid.cast_unsigned());
        process.hear("LISTENS");
        let lab = Self { process, qemu, group, network, dir };
        let agent = lab.agent();
        (lab, agent)
    }

    fn agent(&self) -> TestAgent {
        let (address, deadline): (SocketAddr, _) =
            (format!("{GUEST}:7000").parse().unwrap(), Instant::now() + SOON);
        let stream = loop {
            match self.network.connect(address, Duration::from_secs(2)) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "the guest does not answer: {error}"),
            }
        };
        let mut agent = TestAgent::connected(stream).unwrap();
        agent.wait_ready(SOON).unwrap();
        agent
    }

    /// Replaces the process by a new one. One of them may kill itself at a step.
    pub(crate) fn swap(&mut self, old_dies_at: &str, new_dies_at: &str) -> Outcome {
        let mut new = Process::connected(&self.network, self.dir.path(), new_dies_at);
        self.process.say(&format!("give {old_dies_at}"));
        if !new_dies_at.is_empty() {
            let kept = self.process.hear("KEPT");
            new.wait();
            return Outcome {
                passed: false,
                complete: kept.starts_with("complete"),
                stopped: Duration::ZERO,
            };
        }
        if old_dies_at.is_empty() {
            self.process.hear("GONE");
        }
        self.process.wait();
        self.succeeded(new)
    }

    /// Offers the machine to a process that stands still at a step, until the old one has gone on without it.
    /// Then it goes on too, and has to end.
    pub(crate) fn offer_to_a_late_one(&mut self, step: &str) -> Outcome {
        let mut new = Process::connected(&self.network, self.dir.path(), &format!("stop:{step}"));
        self.process.say("hurry");
        let kept = self.process.hear("KEPT");
        let pid = Pid::from_raw(new.child.id().cast_signed()).unwrap();
        kill_process(pid, Signal::CONT).unwrap();
        let status = new.child.wait().unwrap();
        assert!(status.code().is_some(), "it was killed: {status:?}");
        Outcome { passed: false, complete: kept.starts_with("complete"), stopped: Duration::ZERO }
    }

    /// Offers the machine to a new process, which is to have it when the old one has ended.
    pub(crate) fn offer(&mut self) -> Waiting {
        let new = Process::connected(&self.network, self.dir.path(), "");
        self.process.say("offer");
        self.process.hear("OFFERED");
        Waiting(new)
    }

    /// Kills the process that has the machine; `waiting` is to have it.
    pub(crate) fn die(&mut self, waiting: Waiting) -> Outcome {
        self.process.say("die");
        self.process.wait();
        self.succeeded(waiting.0)
    }

    /// Outcome of a swap by which `new` is to have the machine.
    fn succeeded(&mut self, new: Process) -> Outcome {
        let has = new.hear("HAS");
        new.hear("LISTENS");
        self.process = new;
        let (knowledge, micros) = has.split_once(' ').unwrap();
        let stopped = Duration::from_micros(micros.parse().unwrap());
        Outcome { passed: true, complete: knowledge == "complete", stopped }
    }

    /// Copies what was written since the last time. Returns the number of pages.
    pub(crate) fn copy(&mut self) -> u64 {
        self.process.say("copy");
        self.process.hear("COPIED").parse().unwrap()
    }

    /// Panics unless the copies, brought up to date from the dirty logs alone, equal memory and disk.
    pub(crate) fn verify(&mut self, when: &str) {
        self.process.say("verify");
        assert_eq!(self.process.hear("VERIFIED"), "equal", "{when}");
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = pidfd_send_signal(&self.qemu, Signal::KILL);
        self.group.take().into_iter().for_each(ControlGroup::remove);
    }
}
