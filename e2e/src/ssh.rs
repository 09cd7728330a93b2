//! ssh from one host to another: a real sshd, with keys and a configuration that nobody else sees.

use crate::{Cluster, HostProcess, PATIENCE, host::binary};
use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use whimbrel_testkit::lab::Process;

const SSHD: &str = "/usr/sbin/sshd";
/// Any one will do: the host's network is its own.
const PORT: u16 = 2222;

/// An sshd, and on the other host a configuration with these destinations for it:
///
/// | destination | its key may |
/// |---|---|
/// | `open` | run anything |
/// | `restricted` | run `whimbrel serve --stdio` and nothing else |
/// | `bare` | run what is in a PATH without anything |
/// | `locked` | not get in |
/// | `closed` | get in, where nothing listens |
pub struct Ssh {
    _sshd: Process,
}

impl Ssh {
    /// Starts it on `to`; none if this machine has no sshd. From now on `from` has the configuration.
    pub fn start(cluster: &Cluster, from: &HostProcess, to: &HostProcess) -> Option<Self> {
        if !Path::new(SSHD).exists() {
            println!("skipped: {SSHD} is not installed");
            return None;
        }
        let dir = cluster.disk.path().join(format!("ssh-{}-{}", from.name(), to.name()));
        fs::create_dir(&dir).expect("a directory");
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).expect("a directory of root's");
        let address = at_port(to, PORT);
        let sshd_config = server(&dir, to, address);
        let sshd = serve(to, &sshd_config);
        // ssh finds its user's own configuration by the user, whatever HOME says; the system's can be covered
        // up.
        from.exec("mount", &["--bind", text(&client(&dir, address)), "/etc/ssh/ssh_config"]);
        wait_listening(cluster, address);
        Some(Self { _sshd: sshd })
    }

    /// Starts one on each host, at the usual port, where root of each host gets in by the name of the host.
    pub fn everywhere(cluster: &Cluster) -> Vec<Self> {
        let dir = cluster.disk.path().join("ssh");
        fs::create_dir(&dir).expect("a directory");
        let (host, user) = (keygen(&dir.join("host")), keygen(&dir.join("user")));
        write(dir.join("authorized"), &user);
        let known = write(dir.join("known_hosts"), &format!("server {host}"));
        let config = format!(
            "Host *\n User root\n IdentityFile {}\n IdentitiesOnly yes\n HostKeyAlias server\n UserKnownHostsFile {}\n",
            dir.join("user").display(),
            known.display()
        );
        let config = write(dir.join("ssh_config"), &config);
        let start = |host: &HostProcess| {
            let address = at_port(host, 22);
            let server = write(dir.join(host.name()), &settings(&dir, host, address));
            let sshd = serve(host, &server);
            host.exec("mount", &["--bind", text(&config), "/etc/ssh/ssh_config"]);
            wait_listening(cluster, address);
            Self { _sshd: sshd }
        };
        cluster.hosts.iter().map(start).collect()
    }
}

fn at_port(host: &HostProcess, port: u16) -> SocketAddr {
    let address: SocketAddr = host.address().parse().expect("an address");
    SocketAddr::new(address.ip(), port)
}

/// Starts an sshd with this configuration.
fn serve(host: &HostProcess, config: &Path) -> Process {
    // Where sshd drops its privileges to; a machine without a running sshd may lack it.
    host.exec("mkdir", &["-p", "/run/sshd"]);
    host.start_program(SSHD, &["-D", "-e", "-f", text(config)])
}

fn wait_listening(cluster: &Cluster, address: SocketAddr) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while cluster.lab.host("client").connect(address, PATIENCE).is_err() {
        assert!(std::time::Instant::now() < deadline, "sshd does not listen on {address}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The server's keys and configuration.
fn server(dir: &Path, host: &HostProcess, address: SocketAddr) -> PathBuf {
    keygen(&dir.join("host"));
    let may = [
        ("open", ""),
        ("restricted", "restrict,command=\"whimbrel serve --stdio\" "),
        ("bare", "command=\"PATH=/nowhere; eval $SSH_ORIGINAL_COMMAND\" "),
    ];
    let authorize = |(name, what): &(&str, &str)| format!("{what}{}", keygen(&dir.join(name)));
    write(dir.join("authorized"), &may.iter().map(authorize).collect::<String>());
    write(dir.join("sshd_config"), &settings(dir, host, address))
}

/// The configuration of a server whose keys are in the directory.
fn settings(dir: &Path, host: &HostProcess, address: SocketAddr) -> String {
    let programs = binary();
    let programs = programs.parent().expect("a directory of programs").display();
    format!(
        "ListenAddress {address}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nStrictModes no\n\
         PermitRootLogin yes\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
         SetEnv WHIMBREL_SOCKET={} PATH={programs}:/usr/bin:/bin\n",
        dir.join("host").display(),
        dir.join("authorized").display(),
        host.socket().display(),
    )
}

/// The client's keys and configuration.
fn client(dir: &Path, address: SocketAddr) -> PathBuf {
    keygen(&dir.join("locked"));
    let host_key = fs::read_to_string(dir.join("host.pub")).expect("a public key");
    let known = write(dir.join("known_hosts"), &format!("server {host_key}"));
    let mut config = String::new();
    for name in ["open", "restricted", "bare", "locked", "closed"] {
        let (port, key) = if name == "closed" { (1, "open") } else { (PORT, name) };
        config += &format!("Host {name}\n Port {port}\n IdentityFile {}\n", dir.join(key).display());
    }
    config += &format!(
        "Host *\n HostName {}\n User root\n IdentitiesOnly yes\n HostKeyAlias server\n UserKnownHostsFile {}\n",
        address.ip(),
        known.display()
    );
    write(dir.join("ssh_config"), &config)
}

/// Makes a key; its public half as one line.
fn keygen(path: &Path) -> String {
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path).status();
    assert!(made.expect("ssh-keygen").success());
    fs::read_to_string(path.with_extension("pub")).expect("a public key")
}

fn write(path: PathBuf, content: &str) -> PathBuf {
    fs::write(&path, content).expect("a file");
    path
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}
