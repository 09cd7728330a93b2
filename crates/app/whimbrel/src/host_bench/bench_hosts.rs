//! Two daemons of this program for `doctor --bench`, in a PID namespace of their own.
//!
//! The first process of the namespace waits for the end of its input, which comes when this process ends,
//! however it ends. Then it removes the folders and ends, and the kernel ends daemons and machines with it.

use super::guest;
use crate::error::CliError;
use serde_json::Value;
use std::{
    env, fs, io,
    net::TcpListener,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Names of the hosts.
pub(super) const NAMES: [&str; 2] = ["bench-one", "bench-two"];
/// Where guest memory is.
const TMPFS: &str = "/dev/shm";
/// Time for the daemons to answer.
const PATIENCE: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(50);

/// Starts the daemons `$4` and `$6` of the program `$1`, at the addresses `$5` and `$7`, with data in `$2`
/// and memory in `$3`. At the end, the signal goes to everybody else in the namespace.
const SCRIPT: &str = r#"
start() {
  "$program" host --name "$1" --listen "$2" --data "$data/$1" --run-dir "$memory/$1" --socket "$memory/$1.sock" \
    --config /dev/null < /dev/null 2> "$memory/$1.log" &
}
program=$1 data=$2 memory=$3
start "$4" "$5"
start "$6" "$7"
read _
kill -9 -1
rm -rf "$data" "$memory"
"#;

pub(super) struct BenchHosts {
    /// First process of the namespace, and its parent.
    keeper: Child,
    program: PathBuf,
    data: PathBuf,
    memory: PathBuf,
}

impl BenchHosts {
    /// Starts two hosts that trust each other, with data below `folder`.
    pub(super) fn start(folder: &Path) -> Result<Self, CliError> {
        let program = env::current_exe().map_err(CliError::io("find this program"))?;
        let name = format!("whimbrel-bench-{}", std::process::id());
        let (data, memory) = (folder.join(&name), Path::new(TMPFS).join(&name));
        for folder in [&data, &memory] {
            fs::create_dir(folder).map_err(CliError::io("create a folder for the measurement"))?;
        }
        let addresses = [free_address()?, free_address()?];
        let mut command = Command::new("unshare");
        command.args([
            "--pid",
            "--mount",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            SCRIPT,
            "sh",
        ]);
        command.arg(&program).args([&data, &memory]).args([NAMES[0], &addresses[0], NAMES[1], &addresses[1]]);
        // Ctrl-C ends this process, and they end with it.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let keeper = command.spawn().map_err(CliError::io("start `unshare`"))?;
        let hosts = Self { keeper, program, data, memory };
        hosts.wait()?;
        for (host, other) in [(0, 1), (1, 0)] {
            let key = hosts.call(other, &["key"])?;
            let key = key["public_key"].as_str().unwrap_or_default();
            hosts.call(host, &["trust", "add", NAMES[other], key, &addresses[other]])?;
        }
        Ok(hosts)
    }

    fn wait(&self) -> Result<(), CliError> {
        let deadline = Instant::now() + PATIENCE;
        for (host, name) in NAMES.iter().enumerate() {
            while let Err(error) = self.call(host, &["key"]) {
                if Instant::now() > deadline {
                    let log = self.memory.join(format!("{name}.log"));
                    let said = fs::read_to_string(log).unwrap_or_else(|_| error.to_string());
                    return Err(CliError::Step { step: "start a daemon".to_owned(), said });
                }
                thread::sleep(RETRY);
            }
        }
        Ok(())
    }

    /// Has a host do what a user would type, and returns its answer.
    pub(super) fn call(&self, host: usize, arguments: &[&str]) -> Result<Value, CliError> {
        let mut command = Command::new(&self.program);
        command
            .args(["--json", "--quiet", "--socket"])
            .arg(self.memory.join(format!("{}.sock", NAMES[host])));
        let output = command.args(arguments).stdin(Stdio::null()).output();
        let output = output.map_err(CliError::io("start this program"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(CliError::Step { step: format!("whimbrel {}", arguments.join(" ")), said });
        }
        // A move prints its rounds before its result, and some verbs print nothing.
        let values = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
        Ok(values.filter_map(Result::ok).last().unwrap_or_default())
    }

    /// A disk with the guest.
    pub(super) fn boot_disk(&self) -> Result<String, CliError> {
        let path = self.path("boot.raw");
        guest::write_disk(Path::new(&path)).map_err(CliError::io("write the disk of the guest"))?;
        Ok(path)
    }

    /// A file of the measurement.
    pub(super) fn path(&self, name: &str) -> String {
        self.data.join(name).display().to_string()
    }

    /// Executor of guest instructions.
    pub(super) fn accel(&self) -> String {
        let machines = NAMES.iter().enumerate().filter_map(|(host, _)| self.call(host, &["ps"]).ok());
        let mut accels = machines.filter_map(|machines| Some(machines[0]["accel"].as_str()?.to_owned()));
        accels.next().unwrap_or_else(|| "unknown".to_owned())
    }
}

impl Drop for BenchHosts {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        // An error means that it has ended already.
        let _ = self.keeper.wait();
    }
}

fn free_address() -> Result<String, CliError> {
    let address = |listener: TcpListener| -> io::Result<String> { Ok(listener.local_addr()?.to_string()) };
    TcpListener::bind("127.0.0.1:0").and_then(address).map_err(CliError::io("find a free port"))
}
