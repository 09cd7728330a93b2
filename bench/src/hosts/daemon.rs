//! One host: a network namespace, and a PID namespace with a daemon in it.

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_testkit::lab::{Host, Namespace, Process};

/// Where daemons listen for each other.
const PORT: u16 = 7400;
/// Where a daemon has its web page: on the loopback of its own host.
pub(crate) const WEB: &str = "127.0.0.1:7480";
/// How long a daemon may take to come up.
const PATIENCE: Duration = Duration::from_secs(30);

/// A host and its daemon.
pub(crate) struct Daemon {
    name: String,
    address: String,
    data: PathBuf,
    run_dir: PathBuf,
    socket: PathBuf,
    network: Namespace,
    /// Whether machines have processes of their own.
    machine_processes: bool,
    /// `unshare` over the first process of the PID namespace: when that ends, the kernel ends all the others.
    /// Absent only while the host is down.
    init: Option<Process>,
    /// `nsenter`, which waits for the daemon. Absent only while there is none.
    process: Option<Process>,
}

impl Daemon {
    /// Starts the daemon of a host, which listens at this address of it; its store lies below `disk`, memory
    /// of guests below `memory`.
    pub(crate) fn start(place: &Host, address: Ipv4Addr, disk: &Path, memory: &Path) -> Result<Self> {
        let name = place.name();
        let mut daemon = Self {
            name: name.to_owned(),
            address: format!("{address}:{PORT}"),
            data: disk.join(name),
            run_dir: memory.join(name),
            socket: memory.join(format!("{name}.sock")),
            network: Namespace::clone(place),
            machine_processes: true,
            init: None,
            process: None,
        };
        daemon.begin()?;
        Ok(daemon)
    }

    /// Ends the daemon and all its machines, and starts another one on the same store.
    pub(crate) fn restart(&mut self) -> Result<()> {
        self.end()?;
        self.begin()
    }

    /// The same, with nothing left of what the host had.
    pub(crate) fn renew(&mut self) -> Result<()> {
        self.end()?;
        fs::remove_dir_all(&self.data)?;
        self.begin()
    }

    /// Ends the daemon and all its machines, as a crash of the host would.
    pub(crate) fn end(&mut self) -> Result<()> {
        if let Some(mut init) = self.init.take() {
            // `unshare` ends only when nothing is left in the namespace, so the store is free then.
            kill(child(&init)?)?;
            init.wait()?;
        }
        if let Some(mut process) = self.process.take() {
            process.wait()?;
        }
        Ok(())
    }

    /// Kills the daemon alone, as a crash of it would. Its QEMUs live on.
    pub(crate) fn end_daemon(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            kill(child(&process)?)?;
            process.wait()?;
        }
        Ok(())
    }

    /// Has daemons of this host serve machines themselves, from the next one on.
    pub(crate) fn refuse_machine_processes(&mut self) {
        self.machine_processes = false;
    }

    /// Tells the daemon to stop, and waits for its end. Its machines live on.
    pub(crate) fn ask_to_end(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            signal(child(&process)?, "TERM")?;
            process.wait()?;
        }
        Ok(())
    }

    /// Lets the daemon stand still, as if its processors were taken away.
    pub(crate) fn stop_daemon(&self) -> Result<()> {
        signal(self.pid()?, "STOP")
    }

    /// Lets it go on. `nsenter` stops itself when the daemon is stopped, and would not see its end.
    pub(crate) fn continue_daemon(&self) -> Result<()> {
        let keeper = self.process.as_ref().context("no daemon")?.id();
        signal(self.pid()?, "CONT").and_then(|()| signal(keeper, "CONT"))
    }

    /// Directory of its data.
    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    /// Starts a command, which may end in any way.
    pub(crate) fn spawn(&self, arguments: &[&str]) -> Result<Started> {
        let mut command = Command::new(program()?);
        command.arg("--socket").arg(&self.socket).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Started(command.spawn().context("cannot start whimbrel")?))
    }

    /// Starts the daemon after [`Daemon::end`] or [`Daemon::end_daemon`].
    pub(crate) fn begin(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let first = self.first_pid()?.to_string();
        let mut command = Command::new("nsenter");
        command.args(["--target", &first, "--pid", "--mount", "--"]).arg(program()?);
        command.args(["host", "--name", &self.name, "--listen", &self.address, "--web", WEB]);
        command.arg("--data").arg(&self.data).arg("--run-dir").arg(&self.run_dir);
        command.arg("--socket").arg(&self.socket).env("RUST_LOG", "info");
        if !self.machine_processes {
            command.arg("--no-machine-processes");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut process = self.network.start(command)?;
        let deadline = Instant::now() + PATIENCE;
        while self.run(&["ps"]).is_err() {
            let ended = process.try_wait()?.is_some() || Instant::now() > deadline;
            ensure!(!ended, "the daemon of {} does not answer: {}", self.name, self.last_words());
            sleep(Duration::from_millis(20));
        }
        self.process = Some(process);
        Ok(())
    }

    /// The first process of the PID namespace, as seen from here; made if there is none.
    fn first_pid(&mut self) -> Result<u32> {
        if self.init.is_none() {
            let mut command = Command::new("unshare");
            command.args(["--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            self.init = Some(self.network.start(command)?);
        }
        let init = self.init.as_ref().context("no PID namespace")?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            // Before it is what it is to be, its mounts are not there.
            let is_up = |pid: &u32| {
                fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
            };
            if let Some(pid) = child(init).ok().filter(is_up) {
                return Ok(pid);
            }
            ensure!(Instant::now() < deadline, "no PID namespace comes up for {}", self.name);
            sleep(Duration::from_millis(2));
        }
    }

    /// The host's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Where other hosts reach it.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Its API socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Where memory of its guests lies, on a tmpfs.
    pub(crate) fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// The process id of the daemon.
    pub(crate) fn pid(&self) -> Result<u32> {
        child(self.process.as_ref().context("no daemon")?)
    }

    /// Seconds of processor time it has used, all threads, those that have ended too (proc_pid_stat(5):
    /// utime, stime).
    pub(crate) fn cpu(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid()?))?;
        // The second field is a name in parentheses, which may hold anything.
        let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().skip(11));
        let ticks = fields.into_iter().flatten().take(2).map(str::parse::<f64>);
        let ticks: f64 = ticks.sum::<Result<_, _>>()?;
        // Linux tells user programs of a hundred ticks a second on every machine we run on.
        Ok(ticks / 100.0)
    }

    /// How many files it has open.
    pub(crate) fn descriptors(&self) -> Result<usize> {
        Ok(fs::read_dir(format!("/proc/{}/fd", self.pid()?))?.count())
    }

    /// Runs a program among the host's mounts; it is to succeed.
    pub(crate) fn inside(&self, program: &str, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid()?.to_string(), "--mount", "--"]).arg(program).args(arguments);
        let output = command.stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{}: {program} failed: {}", self.name, text.trim());
        Ok(())
    }

    /// Its public key.
    pub(crate) fn key(&self) -> Result<String> {
        let key = self.json(&["key"])?;
        key["public_key"].as_str().map(str::to_owned).context("`whimbrel key` without a key")
    }

    /// Runs a command to its end; what it printed.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(program()?);
        command.arg("--socket").arg(&self.socket).args(arguments).stdin(Stdio::null());
        let output = command.output().context("cannot start whimbrel")?;
        if output.status.success() {
            return Ok(String::from_utf8(output.stdout)?);
        }
        bail!(
            "{}: whimbrel {} failed: {}",
            self.name,
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        )
    }

    /// Runs a command to its end; its result.
    pub(crate) fn json(&self, arguments: &[&str]) -> Result<Value> {
        let arguments: Vec<&str> = ["--json", "--quiet"].iter().chain(arguments).copied().collect();
        Ok(serde_json::from_str(&self.run(&arguments)?)?)
    }

    /// Runs a command to its end; its result, and how many milliseconds the caller waited.
    pub(crate) fn timed(&self, arguments: &[&str]) -> Result<(Value, f64)> {
        let begun = Instant::now();
        let result = self.json(arguments)?;
        Ok((result, begun.elapsed().as_secs_f64() * 1e3))
    }

    /// Ends a machine and forgets it; its capsules stay.
    pub(crate) fn discard(&self, machine: &str) -> Result<()> {
        self.run(&["stop", machine, "--kill"])?;
        self.run(&["delete", machine]).map(drop)
    }

    fn log(&self) -> PathBuf {
        self.socket.with_extension("log")
    }

    /// What the daemon logged.
    pub(crate) fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Its machines and the end of its log, to see what went wrong.
    pub(crate) fn account(&self) -> String {
        let machines = self.run(&["ps"]).unwrap_or_else(|error| format!("{error:#}"));
        format!("{machines}\n{}", self.last_words())
    }

    /// The end of the daemon's log.
    fn last_words(&self) -> String {
        let log = self.log_text();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

/// A number of what came of an operation.
pub(crate) fn number(operation: &Value, field: &str) -> Result<f64> {
    operation["result"][field].as_f64().with_context(|| format!("no number {field} in {operation}"))
}

/// The one child of `unshare` or `nsenter`.
fn child(process: &Process) -> Result<u32> {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", process.id()))?;
    let first = children.split_whitespace().next().context("it has ended")?;
    Ok(first.parse()?)
}

fn kill(pid: u32) -> Result<()> {
    signal(pid, "KILL")
}

fn signal(pid: u32, name: &str) -> Result<()> {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status()?;
    ensure!(status.success(), "cannot send {name} to process {pid}");
    Ok(())
}

/// A command that was started.
pub(crate) struct Started(std::process::Child);

impl Started {
    /// Ends it as Ctrl-C does, if it still runs.
    pub(crate) fn interrupt(&mut self) -> Result<()> {
        if self.0.try_wait()?.is_none() {
            signal(self.0.id(), "INT")?;
        }
        Ok(())
    }

    /// Waits for its end; after `patience` it is killed. Returns whether it succeeded.
    pub(crate) fn wait_for(&mut self, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        while self.0.try_wait()?.is_none() && Instant::now() < deadline {
            sleep(Duration::from_millis(10));
        }
        let _ = self.0.kill();
        Ok(self.0.wait()?.success())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program that is measured: of the same build as this one, beside it.
pub(crate) fn program() -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    let beside = me.ancestors().skip(1).take(2).map(|folder| folder.join("whimbrel"));
    beside.into_iter().find(|path| path.is_file()).context("no whimbrel beside this program; build it first")
}
