//! Guest whose machine process is replaced again and again. All that was started ends with the value.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::{
    io::{BufRead, BufReader, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};
use whimbrel_testkit::guest::{GuestFiles, GuestOptions, TestAgent};

/// Far above any step, for a host that does much else.
const SOON: Duration = Duration::from_secs(240);
const MEMORY_MIB: u32 = 128;
const DISK_MIB: u32 = 64;

/// Machine process, killed when dropped.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Process {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_machine-process"));
        let mut child = command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
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

    /// Waits for its end.
    fn wait(&mut self) {
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Guest, and the process that has its machine.
pub(crate) struct Lab {
    dir: tempfile::TempDir,
    process: Process,
    qemu: OwnedFd,
    /// Stand in for QEMU at the serial port and the network port of the machine.
    pub(crate) tty: Source,
    pub(crate) wire: Source,
}

/// QEMU's end of a stream, at which the test writes.
pub(crate) struct Source {
    listener: UnixListener,
    stream: Option<UnixStream>,
}

impl Source {
    fn bind(path: &Path) -> Self {
        Self { listener: UnixListener::bind(path).unwrap(), stream: None }
    }

    /// Writes to the connection that the machine process made first.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let accept = || self.listener.accept().unwrap().0;
        self.stream.get_or_insert_with(accept).write_all(bytes).unwrap();
    }
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
    /// Boots a guest whose memory is `whole` or `lazy`, and connects to the agent in it.
    pub(crate) fn boot(memory: &str) -> (Self, TestAgent) {
        let files = GuestFiles::get();
        let dir = tempfile::tempdir().unwrap();
        let options = GuestOptions { buffer_mib: 16, ..GuestOptions::default() };
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let args = [
            "start",
            &text(dir.path()),
            &text(&files.kernel),
            &text(&files.initrd),
            &options.to_string(),
            &MEMORY_MIB.to_string(),
            &DISK_MIB.to_string(),
            memory,
        ];
        let (tty, wire) = (Source::bind(&dir.path().join("tty")), Source::bind(&dir.path().join("wire")));
        let process = Process::start(&args);
        let pid = process.hear("QEMU").parse().unwrap();
        let qemu = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        process.hear("LISTENS");
        let serial = UnixStream::connect(dir.path().join("serial")).unwrap();
        let mut agent = TestAgent::over_console(serial).unwrap();
        agent.wait_ready(SOON).unwrap();
        (Self { dir, process, qemu, tty, wire }, agent)
    }

    /// Replaces the process by a new one. One of them may kill itself at a step.
    pub(crate) fn swap(&mut self, old_dies_at: &str, new_dies_at: &str) -> Outcome {
        let dir = self.dir.path().to_str().unwrap().to_owned();
        self.process.say(&format!("give {old_dies_at}"));
        let mut new = Process::start(&["take", &dir, new_dies_at]);
        if !new_dies_at.is_empty() {
            let kept = self.process.hear("KEPT");
            new.wait();
            return Outcome {
                passed: false,
                complete: kept.starts_with("complete"),
                stopped: Duration::ZERO,
            };
        }
        let has = new.hear("HAS");
        if old_dies_at.is_empty() {
            self.process.hear("GONE");
        }
        self.process.wait();
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

    /// Output of the console, once the machine process has read so many bytes.
    pub(crate) fn printed(&mut self, bytes: usize) -> String {
        self.process.say(&format!("printed {bytes}"));
        self.process.hear("PRINTED")
    }

    /// Number of frames that the network port has taken, once they are so many.
    pub(crate) fn frames(&mut self, number: u64) -> u64 {
        self.process.say(&format!("frames {number}"));
        self.process.hear("FRAMES").parse().unwrap()
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
    }
}
