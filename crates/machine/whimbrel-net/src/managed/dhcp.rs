//! DHCP, DNS and router advertisements of a managed network, by dnsmasq (dnsmasq(8)).
//!
//! Each machine has one address, which is in the configuration; a station that is not in it gets none. A
//! changed configuration means a new dnsmasq: it starts in milliseconds, and clients ask again. It reads its
//! files as root and then becomes another user, so it could not read them a second time.

use super::{
    ManagedNetwork, ProgramError, host_label,
    program::{start, user_or_nobody},
};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::{
    collections::BTreeSet,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Domain of machines' names; reserved for private use by ICANN in 2024.
pub const DOMAIN: &str = "internal";
/// Time for a dnsmasq to end, and to start.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two looks at it.
const LOOK: Duration = Duration::from_millis(5);

/// A dnsmasq of this process.
#[derive(Debug)]
pub struct DhcpServer {
    child: Child,
    configuration: String,
}

impl DhcpServer {
    /// Starts a dnsmasq for the network with its files in `dir`, in place of one that an earlier process has
    /// left. Returns once it serves.
    pub fn start(network: &ManagedNetwork, dir: &Path) -> Result<Self, ProgramError> {
        end_former(dir);
        let failed = |source| ProgramError::Run { program: "dnsmasq", source };
        let (config, log) = (config_in(dir), dir.join("dnsmasq.log"));
        let configuration = configuration(network, dir);
        fs::write(&config, &configuration).map_err(failed)?;
        let said = fs::File::create(&log).map_err(failed)?;
        let mut command = Command::new("dnsmasq");
        command.arg("--keep-in-foreground").arg(argument(&config));
        let mut child = start("dnsmasq", command.stdin(Stdio::null()).stderr(said))?;
        let deadline = Instant::now() + PATIENCE;
        // dnsmasq writes the file once its sockets are open.
        while !pid_in(dir).exists() {
            let ended = child.try_wait().map_err(failed)?.is_some();
            if ended || Instant::now() > deadline {
                let _ = child.kill();
                let _ = child.wait();
                let said = fs::read_to_string(&log).unwrap_or_default().trim().to_owned();
                return Err(ProgramError::Failed { program: "dnsmasq", said });
            }
            std::thread::sleep(LOOK);
        }
        Ok(Self { child, configuration })
    }

    /// Whether the server runs and needs no other configuration for the network.
    pub fn serves(&mut self, network: &ManagedNetwork, dir: &Path) -> bool {
        self.is_alive() && self.configuration == configuration(network, dir)
    }

    /// Whether the server still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends the server at once.
    pub fn stop(mut self) {
        // One that has ended is no longer there to be ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends the dnsmasq of an earlier process whose files are in `dir`, if it runs, and forgets it.
pub fn end_former(dir: &Path) {
    let path = pid_in(dir);
    let pid =
        fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid.filter(|pid| serves(*pid, dir)) {
        let _ = kill_process(pid, Signal::KILL);
        let deadline = Instant::now() + PATIENCE;
        while test_kill_process(pid).is_ok() && serves(pid, dir) && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
    }
    let _ = fs::remove_file(path);
}

/// Whether the process is the dnsmasq of `dir`: numbers of processes are used again.
fn serves(pid: Pid, dir: &Path) -> bool {
    let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    let argument = argument(&config_in(dir));
    line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes())
}

fn argument(config: &Path) -> String {
    format!("--conf-file={}", config.display())
}

fn config_in(dir: &Path) -> PathBuf {
    dir.join("dnsmasq.conf")
}

fn pid_in(dir: &Path) -> PathBuf {
    dir.join("dnsmasq.pid")
}

/// Text of dnsmasq's configuration.
fn configuration(network: &ManagedNetwork, dir: &Path) -> String {
    let (name, subnet) = (&network.name, network.subnet);
    let user = user_or_nobody("dnsmasq");
    let mut text = format!(
        "interface={name}
except-interface=lo
bind-interfaces
user={user}
pid-file={pid}
dhcp-leasefile={leases}
dhcp-authoritative
dhcp-range={first},static,{mask},12h
domain={DOMAIN}
local=/{DOMAIN}/
no-hosts
quiet-dhcp
quiet-dhcp6
quiet-ra
",
        pid = pid_in(dir).display(),
        leases = dir.join("leases").display(),
        first = subnet.network(),
        mask = subnet.netmask(),
    );
    if network.isolated {
        // No route out: a guest that is told of none asks its neighbours only.
        text += "no-resolv\ndhcp-option=option:router\n";
    }
    if network.subnet6.is_some() {
        let _ = writeln!(text, "enable-ra\ndhcp-range=::,constructor:{name},ra-names,64,12h");
    }
    let _ = writeln!(text, "host-record=gateway.{DOMAIN},{}", network.gateway());
    for lease in &network.leases {
        let (name, address) = (host_label(&lease.machine), lease.address);
        let _ = writeln!(text, "dhcp-host={},{name},{address}", lease.mac);
        let _ = writeln!(text, "host-record={name},{name}.{DOMAIN},{address}");
    }
    text + &names_elsewhere(network)
}

/// Names of machines on other hosts. A machine of this host keeps a name that another one has too.
fn names_elsewhere(network: &ManagedNetwork) -> String {
    let mut taken: BTreeSet<String> = network.leases.iter().map(|lease| host_label(&lease.machine)).collect();
    taken.insert("gateway".to_owned());
    network.elsewhere.iter().fold(String::new(), |mut text, (machine, address)| {
        let name = host_label(machine);
        if taken.insert(name.clone()) {
            let _ = writeln!(text, "host-record={name},{name}.{DOMAIN},{address}");
        }
        text
    })
}
