//! One host: a network namespace, a PID namespace, a daemon.

use crate::PATIENCE;
use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::Pid,
};
use serde_json::Value;
use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};
use whimbrel_testkit::lab::{Lab, Process};

/// Where daemons listen for each other.
const PORT: u16 = 7400;
/// Where daemons have their metrics.
const METRICS_PORT: u16 = 7490;
/// Where daemons have their page: each has the loopback of its own host.
pub const WEB: &str = "127.0.0.1:7480";

/// A host and its daemon.
pub struct HostProcess {
    name: String,
    address: String,
    data: PathBuf,
    run_dir: PathBuf,
    socket: PathBuf,
    daemon: Option<Process>,
    /// First process of the host's PID namespace: when it ends, the kernel ends all the others.
    init: Process,
    network: whimbrel_testkit::lab::Namespace,
}

/// A command that failed, as a person sees it.
#[derive(Debug)]
pub struct Refusal {
    /// Exit code.
    pub code: i32,
    /// Standard error.
    pub text: String,
    /// Standard output: some commands have a result and an answer that is no.
    pub result: String,
}

impl HostProcess {
    pub(crate) fn start(lab: &Lab, name: &str, disk: &Path, memory: &Path) -> Self {
        let place = lab.host(name);
        let mut init = Command::new("unshare");
        init.args(["--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]);
        // On the kill that ends the host, `unshare` complains that it cannot die of the same signal.
        init.stderr(fs::File::create(memory.join(format!("{name}.log"))).expect("a log file"));
        let init = place.command(init).expect("a PID namespace");
        let mut host = Self {
            name: name.to_owned(),
            address: format!("{}:{PORT}", place.address()),
            data: disk.join(name),
            run_dir: memory.join(name),
            socket: memory.join(format!("{name}.sock")),
            daemon: None,
            init,
            network: (**place).clone(),
        };
        host.start_daemon();
        host
    }

    /// Starts the daemon again, with these settings.
    pub fn restart_with(&mut self, settings: &str) {
        fs::write(self.settings(), settings).expect("a settings file");
        self.kill_daemon();
        self.start_daemon();
    }

    fn settings(&self) -> PathBuf {
        self.socket.with_extension("toml")
    }

    /// Starts the daemon and waits until it answers.
    pub fn start_daemon(&mut self) {
        self.launch_daemon(&[]);
        let deadline = Instant::now() + PATIENCE;
        while self.try_run(&["ps"]).is_err() {
            assert!(Instant::now() < deadline, "the daemon does not answer:\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts the daemon with at most so many open files. False if it has ended instead of serving.
    pub fn start_daemon_with_files(&mut self, files: u32) -> bool {
        self.launch_daemon(&["prlimit", &format!("--nofile={files}")]);
        let deadline = Instant::now() + PATIENCE;
        while self.try_run(&["ps"]).is_err() {
            assert!(Instant::now() < deadline, "the daemon does nothing:\n{}", self.log_text());
            let ended = self.daemon.as_mut().map(|daemon| daemon.try_wait().expect("a process to wait for"));
            if ended.flatten().is_some() {
                self.daemon = None;
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    /// Starts the daemon, by way of a program and its arguments if there are any.
    fn launch_daemon(&mut self, by: &[&str]) {
        let log = fs::File::options().create(true).append(true).open(self.log()).expect("a log file");
        let program = binary();
        let mut words = by.iter().map(OsStr::new).chain([program.as_ref()]);
        let mut command = self.inside(words.next().expect("a program"));
        command.args(words).args(["host", "--name", &self.name, "--listen", &self.address, "--web", WEB]);
        command.arg("--data").arg(&self.data).arg("--run-dir").arg(&self.run_dir);
        command.arg("--socket").arg(&self.socket).env("RUST_LOG", "info");
        if let Some(accel) = std::env::var_os("WHIMBREL_TEST_ACCEL") {
            command.arg("--accel").arg(accel);
        }
        if self.settings().exists() {
            command.arg("--config").arg(self.settings());
        }
        command.args(["--metrics-listen", &self.metrics_address()]);
        fs::create_dir_all(self.stages()).expect("a directory of stages");
        command.env("WHIMBREL_FAILPOINTS", self.stages());
        // Servers of the tests are near, whatever proxy this computer needs for others.
        command.env("no_proxy", "*").env("NO_PROXY", "*");
        // Those of the S3 server of the tests.
        command.envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test-secret")]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.daemon = Some(self.network.start(command).expect("a daemon"));
    }

    /// The first process of the PID namespace, as seen from here: the one child of `unshare`.
    fn first_pid(&self) -> Pid {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(pid) = children(self.init.id()).first() {
                return *pid;
            }
            assert!(Instant::now() < deadline, "no PID namespace comes up:\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Runs a program among the host's processes and mounts; it is to succeed.
    pub fn exec(&self, program: &str, arguments: &[&str]) {
        let status = self.inside(program).args(arguments).status().expect("a program to run");
        assert!(status.success(), "{program} {arguments:?} failed on {}", self.name);
    }

    /// Runs a script in a shell of the host, with `whimbrel` on its path and `home` as its directory. The
    /// first command that fails ends it, and so does a long time. Programs that it leaves in the background
    /// stay, and what they print after its end is lost.
    pub fn shell(&self, script: &str, home: &Path) -> Output {
        let programs = binary().parent().expect("a directory").to_owned();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = self.inside("timeout");
        command.args(["300", "sh", "-euc", &format!("cd \"$HOME\"\n{script}")]).stdin(Stdio::null());
        command.env("PATH", format!("{}:{path}", programs.display())).env("HOME", home);
        command.env("WHIMBREL_SOCKET", &self.socket);
        // Files, because a pipe would be waited for until the last program in the background ends.
        let [printed, complained] = [(); 2].map(|()| tempfile::NamedTempFile::new().expect("a file"));
        let open = |file: &tempfile::NamedTempFile| file.reopen().expect("the file once more");
        command.stdout(open(&printed)).stderr(open(&complained));
        let status = self.network.run(move || command.status()).expect("a shell");
        let read = |file: &tempfile::NamedTempFile| fs::read(file.path()).expect("what was printed");
        Output { status, stdout: read(&printed), stderr: read(&complained) }
    }

    /// Starts a program on the host: among its processes and mounts, and in its network.
    pub fn start_program(&self, program: &str, arguments: &[&str]) -> Process {
        let mut command = self.inside(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.network.start(command).expect("a program to start")
    }

    /// A command among the host's processes and mounts.
    fn inside(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.first_pid().to_string(), "--pid", "--mount", "--"]).arg(program);
        command
    }

    /// Kills the daemon as a crash would. Its machines live on.
    pub fn kill_daemon(&mut self) {
        self.signal_daemon(Signal::SIGKILL);
        if let Some(mut daemon) = self.daemon.take() {
            daemon.wait().expect("the daemon's end");
        }
    }

    /// Tells the daemon to stop, and waits for its end.
    pub fn stop_daemon(&mut self) {
        self.signal_daemon(Signal::SIGTERM);
        if let Some(mut daemon) = self.daemon.take() {
            daemon.wait().expect("the daemon's end");
        }
    }

    /// Sends the daemon a signal, if it still runs.
    pub fn signal_daemon(&self, signal: Signal) {
        // nsenter has forked the daemon into the namespace; what we started only waits for it.
        for pid in self.daemon.iter().flat_map(|daemon| children(daemon.id())) {
            kill(pid, signal).expect("a daemon to signal");
        }
        if signal == Signal::SIGCONT {
            self.wake_keeper();
        }
    }

    /// Bytes of memory that only the daemon has, and the number of its open descriptors.
    pub fn daemon_usage(&self) -> (u64, usize) {
        let daemon = self.daemon.iter().flat_map(|daemon| children(daemon.id())).next().expect("a daemon");
        let status = fs::read_to_string(format!("/proc/{daemon}/status")).expect("the state of the daemon");
        let private =
            status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
        let private: u64 = private.and_then(|kib| kib.parse().ok()).expect("a size in KiB");
        let open = fs::read_dir(format!("/proc/{daemon}/fd")).expect("its descriptors").count();
        (private << 10, open)
    }

    /// nsenter stops itself when the daemon is stopped, and then reaps nothing: not the daemon, and so not
    /// its namespace.
    fn wake_keeper(&self) {
        if let Some(daemon) = &self.daemon {
            // An error means that it has ended, and there is nobody to wake.
            let _ = kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGCONT);
        }
    }

    /// Ends every process of the host and waits until the last one is gone.
    pub(crate) fn end(&self) {
        // The kernel ends the namespace with its first process, and `unshare` sees that end after all the
        // others.
        let Some(first) = children(self.init.id()).pop() else { return };
        if kill(first, Signal::SIGKILL).is_ok() {
            self.wake_keeper();
            let unshare = Id::Pid(Pid::from_raw(self.init.id().cast_signed()));
            // An error means that it is gone already. It is left to be reaped by its owner.
            let _ = waitid(unshare, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
            self.remove_control_groups();
        }
    }

    /// Removes the groups of machines whose processes have just ended, and which no daemon comes back for.
    fn remove_control_groups(&self) {
        for slot in fs::read_dir(self.run_dir.join("slots")).into_iter().flatten().flatten() {
            let group = fs::metadata(slot.path().join("qemu")).ok().and_then(|dir| control_group(dir.gid()));
            // Not every host has them, and an end that is on its way keeps it for a moment: then it stays.
            group.into_iter().for_each(|group| drop(fs::remove_dir(group)));
        }
    }

    /// The host's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address and port that other hosts reach it at.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Address and port of its metrics.
    pub fn metrics_address(&self) -> String {
        let host = self.address.split(':').next().expect("an address");
        format!("{host}:{METRICS_PORT}")
    }

    /// Its API socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its directory of machines and store.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// What the daemon wrote down about a machine, and where.
    pub fn record(&self, machine: &str) -> (PathBuf, Value) {
        let path = self.data.join("machines").join(machine).join("machine.json");
        let text = fs::read_to_string(&path).expect("a record");
        (path, serde_json::from_str(&text).expect("a record in JSON"))
    }

    /// The directory of a machine's QEMU, with its sockets and its RAM file.
    pub fn slot(&self, machine: &str) -> PathBuf {
        let (_, record) = self.record(machine);
        let id = record["process"]["slot"].as_str().expect("a machine with a process");
        self.run_dir.join("slots").join(id)
    }

    /// Where it is said at which stages of a migration the daemon is held (CONTRIBUTING.md).
    fn stages(&self) -> PathBuf {
        self.socket.with_extension("stages")
    }

    /// From now on the daemon stops at this stage of a machine's arrival.
    pub fn hold_at(&self, stage: &str) {
        fs::write(self.stages().join(format!("{stage}.hold")), "").expect("a stage to hold at");
    }

    /// Waits until the daemon is held at the stage.
    pub fn wait_held(&self, stage: &str) {
        let reached = self.stages().join(format!("{stage}.reached"));
        let deadline = Instant::now() + PATIENCE;
        while !reached.exists() {
            assert!(Instant::now() < deadline, "{stage} is not reached:\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(5));
        }
        fs::remove_file(reached).expect("a stage that was reached");
    }

    /// Lets the daemon go on.
    pub fn release(&self, stage: &str) {
        fs::remove_file(self.stages().join(format!("{stage}.hold"))).expect("a stage that was held at");
    }

    /// Its public key, as `whimbrel key` prints it.
    pub fn key(&self) -> String {
        let key = self.json(&["key"]);
        key["public_key"].as_str().unwrap_or_else(|| panic!("no key in {key}")).to_owned()
    }

    fn log(&self) -> PathBuf {
        self.socket.with_extension("log")
    }

    /// What the daemon logged.
    pub fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Runs the command line on this host.
    fn output(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(binary());
        command.arg("--socket").arg(&self.socket).args(arguments).stdin(Stdio::null());
        command.output().expect("the whimbrel binary")
    }

    /// Starts a command and does not wait for its end. What it says on standard error is seen with the
    /// test's.
    pub fn start_command(&self, arguments: &[&str]) -> Child {
        let mut command = Command::new(binary());
        command.arg("--socket").arg(&self.socket).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.spawn().expect("the whimbrel binary")
    }

    /// Runs a command that is to succeed; what it printed.
    pub fn run(&self, arguments: &[&str]) -> String {
        self.try_run(arguments).unwrap_or_else(|refusal| {
            panic!("{}: whimbrel {arguments:?} failed: {refusal:?}\n{}", self.name, self.log_text())
        })
    }

    /// Runs a command that is to succeed; its result as JSON.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let arguments: Vec<&str> = ["--json", "-q"].iter().chain(arguments).copied().collect();
        let text = self.run(&arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?} printed {text:?}: {error}"))
    }

    /// Runs a command that may fail.
    pub fn try_run(&self, arguments: &[&str]) -> Result<String, Refusal> {
        let output = self.output(arguments);
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let result = String::from_utf8_lossy(&output.stdout).into_owned();
        Err(Refusal { code: output.status.code().unwrap_or(-1), text, result })
    }

    /// Starts a command and does not wait for it; what it prints can be read when it has ended.
    pub fn begin(&self, arguments: &[&str]) -> Child {
        let mut command = Command::new(binary());
        command.arg("--socket").arg(&self.socket).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the whimbrel binary")
    }

    /// Its directory of memory and sockets.
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Runs a command that is to fail.
    pub fn refuse(&self, arguments: &[&str]) -> Refusal {
        match self.try_run(arguments) {
            Err(refusal) => refusal,
            Ok(text) => panic!("whimbrel {arguments:?} succeeded: {text}"),
        }
    }

    /// Names of the machines that `ps` shows, with their states.
    pub fn machines(&self) -> Vec<(String, String)> {
        let machines = self.json(&["ps"]);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let machines = machines.as_array().expect("a list of machines");
        machines.iter().map(|m| (text(&m["name"]), text(&m["state"]["kind"]))).collect()
    }

    /// Waits until the daemon has logged this, after as many bytes of its log.
    pub fn wait_log(&self, after: usize, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.log_text().get(after..).unwrap_or_default().contains(text) {
            assert!(Instant::now() < deadline, "nothing logged {text:?}:\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until `ps` shows no machine at all.
    pub fn wait_empty(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = self.machines();
            if now.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "something is left: {now:?}\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until `ps` shows the machine in one of these states.
    pub fn wait_state(&self, machine: &str, states: &[&str]) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = self.machines();
            if now.iter().any(|(name, state)| name == machine && states.contains(&state.as_str())) {
                return;
            }
            assert!(Instant::now() < deadline, "{machine} is not {states:?}: {now:?}\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        self.end();
    }
}

/// The processes that the process `parent` has started and not yet reaped.
fn children(parent: u32) -> Vec<Pid> {
    let list = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).map(Pid::from_raw).collect()
}

/// Control group of the machine whose QEMU has this user, if there is one.
pub fn control_group(user: u32) -> Option<PathBuf> {
    let parents = ["/sys/fs/cgroup/whimbrel", "/sys/fs/cgroup/unified/whimbrel"];
    parents.map(|parent| Path::new(parent).join(user.to_string())).into_iter().find(|group| group.is_dir())
}

/// The program under test: beside the test or demo program that asks.
pub fn binary() -> PathBuf {
    let me = std::env::current_exe().expect("the path of this program");
    let beside = me.ancestors().skip(1).take(2).map(|dir| dir.join("whimbrel"));
    let found = beside.into_iter().find(|path| path.is_file());
    found.expect("the whimbrel binary in the target directory: `cargo build -p whimbrel` makes it")
}
