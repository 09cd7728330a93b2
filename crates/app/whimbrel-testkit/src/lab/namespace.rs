//! Network namespace that exists as long as a value refers to it.
//!
//! It has no name in the file system: a thread of this process entered it and stays, and a descriptor refers
//! to it. When the process ends, in any way, the namespace ends too. Threads and child processes started by
//! that thread are in the namespace, so no other thread has to switch.

use super::{LabError, Process};
use nix::sched::{CloneFlags, unshare};
use std::{
    ffi::OsStr,
    fs::File,
    net::{SocketAddr, TcpStream},
    os::fd::AsRawFd,
    process::{self, Command},
    sync::{
        Arc, Mutex,
        mpsc::{Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use whimbrel_core::lock;

type Job = Box<dyn FnOnce() + Send>;

/// Network namespace with its loopback device up. Clones refer to the same one.
#[derive(Clone)]
pub struct Namespace {
    // `Sender` is not `Sync` in every release; the mutex is held only for a send.
    jobs: Arc<Mutex<Sender<Job>>>,
    handle: Arc<File>,
}

impl Namespace {
    /// Creates a new namespace.
    pub fn new() -> Result<Self, LabError> {
        let (jobs, inbox) = channel::<Job>();
        let (born, birth) = channel();
        thread::spawn(move || {
            let entered = unshare(CloneFlags::CLONE_NEWNET).map_err(LabError::system("unshare the network"));
            let handle = entered.and_then(|()| {
                File::open("/proc/thread-self/ns/net")
                    .map_err(LabError::system("open the new network namespace"))
            });
            let failed = handle.is_err();
            if born.send(handle).is_err() || failed {
                return;
            }
            inbox.into_iter().for_each(|job| job());
        });
        let handle = birth.recv().unwrap_or_else(|_| Err(lost()))?;
        let namespace = Self { jobs: Arc::new(Mutex::new(jobs)), handle: Arc::new(handle) };
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    /// Runs `work` in the namespace and waits for it. Only for short work: one at a time.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (answer, result) = channel();
        let job: Job = Box::new(move || {
            let _ = answer.send(work());
        });
        let sent = lock(&self.jobs).send(job);
        sent.expect("the namespace's thread lives as long as the namespace");
        result.recv().expect("work in a namespace does not panic")
    }

    /// Starts a thread in the namespace.
    pub fn spawn<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        self.run(move || thread::spawn(work))
    }

    /// Starts a process in the namespace. It is killed when the [`Process`] is dropped, and when this process
    /// ends.
    pub fn start(&self, command: Command) -> Result<Process, LabError> {
        let namespace = self.clone();
        self.run(move || Process::start(command, namespace))
    }

    /// Runs a command in the namespace; returns its standard output if it succeeded.
    pub fn output<S: AsRef<OsStr>>(&self, program: &str, arguments: &[S]) -> Result<String, LabError> {
        let mut command = Command::new(program);
        command.args(arguments);
        self.run(move || {
            let output = command.output().map_err(LabError::system("start a command"))?;
            if output.status.success() {
                return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
            }
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(LabError::Command { command: format!("{command:?}"), errors })
        })
    }

    /// Runs `ip` with these arguments.
    pub fn ip(&self, words: &str) -> Result<String, LabError> {
        self.output("ip", &words.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs `tc` with these arguments.
    pub fn tc(&self, words: &str) -> Result<String, LabError> {
        self.output("tc", &words.split_whitespace().collect::<Vec<_>>())
    }

    /// Waits until every bridge port in the namespace forwards. The kernel notices new links up to a second
    /// later, and until then a bridge drops frames.
    pub fn wait_forwarding(&self) -> Result<(), LabError> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let ports = self.output("bridge", &["link", "show"])?;
            if ports.lines().all(|port| port.contains("state forwarding")) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(LabError::Command { command: "bridge link show".to_owned(), errors: ports });
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Connects to `address` from within the namespace, for at most `patience`.
    pub fn connect(&self, address: SocketAddr, patience: Duration) -> std::io::Result<TcpStream> {
        self.spawn(move || TcpStream::connect_timeout(&address, patience))
            .join()
            .expect("connecting does not panic")
    }

    /// Path of the namespace for `ip link … netns PATH`, valid as long as this value.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.handle.as_raw_fd())
    }
}

fn lost() -> LabError {
    LabError::System { action: "start a thread", source: std::io::ErrorKind::BrokenPipe.into() }
}
