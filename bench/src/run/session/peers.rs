//! `session.peers`: other people's ways to use a directory of another host, in the same namespaces over the
//! same link.
//!
//! sshfs and rclone mount the same directory through a real sshd, with the caches they have; nbdkit serves
//! the large file and a second nbdkit caches it; NFSv4 is a server and a client of user space (`nfs`), so the
//! large file is all that is read there. Each does the same work twice on one mount: the first is cold, the
//! second warm. What is not installed is not measured and has no row.

use super::{
    documents::{documents, inputs},
    far::{Far, ONE_WAY, SERVER, seconds},
    nfs::Nfs,
};
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use whimbrel_session::client::Policy;
use whimbrel_testkit::lab::Process;

const PATIENCE: Duration = Duration::from_secs(30);
pub(super) const PORT: u16 = 2222;
const NBD: u16 = 10809;
pub(super) const DISK: usize = 16 << 20;

/// Seconds of work the first and the second time.
type Twice = [f64; 2];

pub(super) fn installed(program: &str) -> bool {
    Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|found| found.success())
}

/// The directory on the server: inputs of documents, and a disk of noise.
pub(super) fn fill(server: &Path) -> Result<()> {
    inputs(server)?;
    let mut state = 1u64;
    let noise: Vec<u8> = (0..DISK)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect();
    Ok(fs::write(server.join("disk.raw"), noise)?)
}

fn twice(mut work: impl FnMut() -> Result<()>) -> Result<Twice> {
    Ok([seconds(&mut work)?, seconds(&mut work)?])
}

fn read_disk(dir: &Path) -> Result<()> {
    ensure!(fs::read(dir.join("disk.raw"))?.len() == DISK, "a short read");
    Ok(())
}

/// Both kinds of work on a mount.
fn both(dir: &Path, rounds: usize) -> Result<[Twice; 2]> {
    let read = twice(|| read_disk(dir))?;
    Ok([twice(|| documents(dir, rounds))?, read])
}

/// An sshd at the server's end, and what a client needs to get in.
pub(super) struct Sshd {
    _process: Process,
    pub(super) key: PathBuf,
    pub(super) known: PathBuf,
}

impl Sshd {
    pub(super) fn start(far: &Far) -> Result<Self> {
        let dir = far.dir.path().join("ssh");
        fs::create_dir(&dir)?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))?;
        for name in ["host", "user"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(dir.join(name))
                .status()?;
            ensure!(made.success(), "ssh-keygen failed");
        }
        fs::create_dir_all("/run/sshd")?;
        let config = format!(
            "ListenAddress {SERVER}:{PORT}\nHostKey {0}/host\nAuthorizedKeysFile {0}/user.pub\nPidFile none\nStrictModes no\n\
             PermitRootLogin yes\nUsePAM no\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n",
            dir.display()
        );
        fs::write(dir.join("config"), config)?;
        let known = dir.join("known");
        fs::write(&known, format!("[{SERVER}]:{PORT} {}", fs::read_to_string(dir.join("host.pub"))?))?;
        let mut command = Command::new("/usr/sbin/sshd");
        command.args(["-D", "-e", "-f"]).arg(dir.join("config")).stderr(Stdio::null());
        let process = far.namespaces[1].start(command)?;
        let deadline = Instant::now() + PATIENCE;
        let address = (SERVER, PORT).into();
        while far.namespaces[0].connect(address, Duration::from_secs(2)).is_err() {
            ensure!(Instant::now() < deadline, "sshd does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(Self { _process: process, key: dir.join("user"), known })
    }

    /// Copies a file of the server's into a folder.
    pub(super) fn scp(&self, from: &Path, to: &Path) -> Command {
        let mut command = Command::new("scp");
        command.args(["-q", "-P", &PORT.to_string(), "-i"]).arg(&self.key);
        command.arg("-o").arg(format!("UserKnownHostsFile={}", self.known.display()));
        command.arg(format!("root@{SERVER}:{}", from.display())).arg(to).stdin(Stdio::null());
        command
    }
}

/// A peer's mount; gone when this is dropped.
struct Mounted {
    path: PathBuf,
    _process: Process,
}

/// How a peer mounts.
type Mounts = fn(&Far, &Sshd) -> Result<Mounted>;
const MOUNTS: [(&str, Mounts); 2] = [("sshfs", sshfs), ("rclone", rclone)];

impl Mounted {
    fn start(far: &Far, name: &str, mut command: Command) -> Result<Self> {
        let path = far.dir.path().join(name);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = far.namespaces[0].start(command)?;
        let deadline = Instant::now() + PATIENCE;
        while !path.join("disk.raw").exists() {
            let ended = process.try_wait()?;
            ensure!(Instant::now() < deadline && ended.is_none(), "{name} does not mount: {ended:?}");
            thread::sleep(Duration::from_millis(50));
        }
        Ok(Self { path, _process: process })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A mount that is gone already is as good.
        let _ = Command::new("umount").arg("-l").arg(&self.path).stderr(Stdio::null()).status();
    }
}

fn sshfs(far: &Far, sshd: &Sshd) -> Result<Mounted> {
    let path = far.dir.path().join("sshfs");
    fs::create_dir(&path)?;
    let mut command = Command::new("sshfs");
    command.arg(format!("root@{SERVER}:{}", far.served().display())).arg(&path).args([
        "-f",
        "-p",
        &PORT.to_string(),
    ]);
    let files = format!("IdentityFile={},UserKnownHostsFile={}", sshd.key.display(), sshd.known.display());
    command.args([
        "-o",
        &files,
        "-o",
        "kernel_cache,dcache_timeout=3600,entry_timeout=3600,attr_timeout=3600,max_conns=4",
    ]);
    Mounted::start(far, "sshfs", command)
}

fn rclone(far: &Far, sshd: &Sshd) -> Result<Mounted> {
    let path = far.dir.path().join("rclone");
    fs::create_dir(&path)?;
    let mut command = Command::new("rclone");
    command.arg("mount").arg(format!(":sftp:{}", far.served().display())).arg(&path);
    command.args(["--config", "/dev/null", "--sftp-user", "root", "--sftp-host"]).arg(SERVER.to_string());
    command
        .args(["--sftp-port", &PORT.to_string(), "--sftp-key-file"])
        .arg(&sshd.key)
        .arg("--sftp-known-hosts-file")
        .arg(&sshd.known);
    command.args([
        "--vfs-cache-mode",
        "full",
        "--dir-cache-time",
        "24h",
        "--attr-timeout",
        "24h",
        "--cache-dir",
    ]);
    command.arg(far.dir.path().join("rclone-cache"));
    Mounted::start(far, "rclone", command)
}

/// What comes of the same work on each peer's mount. Who is not installed has none, and who fails is told and
/// has none either.
pub(super) fn on_mounts<T>(
    far: &Far,
    sshd: &Sshd,
    mut work: impl FnMut(&str, &Path) -> Result<T>,
) -> Result<Vec<(&'static str, T)>> {
    let mut done = Vec::new();
    for (name, mount) in MOUNTS {
        if installed(name) {
            let mounted = mount(far, sshd)?;
            match work(name, &mounted.path) {
                Ok(came) => done.push((name, came)),
                Err(error) => eprintln!("    {name} is not measured: {error:#}"),
            }
        }
    }
    Ok(done)
}

/// nbdkit with the file there, nbdkit with a cache here, and a copy out of that.
fn nbdkit(far: &Far) -> Result<Twice> {
    let start = |side: usize, arguments: &[&str]| {
        let mut command = Command::new("nbdkit");
        command.args(["-f"]).args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
        far.namespaces[side].start(command)
    };
    let disk = far.served().join("disk.raw");
    let port = NBD.to_string();
    let address = SERVER.to_string();
    let _there = start(1, &["-p", &port, "-i", &address, "file", &disk.display().to_string()])?;
    let connected = || far.namespaces[0].connect((SERVER, NBD).into(), Duration::from_secs(2));
    let deadline = Instant::now() + PATIENCE;
    while connected().is_err() {
        ensure!(Instant::now() < deadline, "nbdkit does not listen");
        thread::sleep(Duration::from_millis(20));
    }
    let socket = far.dir.path().join("nbd.sock").display().to_string();
    let host = format!("hostname={address}");
    let from = [
        "-U",
        &socket,
        "--filter=readahead",
        "--filter=cache",
        "nbd",
        &host,
        &format!("port={port}"),
        "shared=true",
        "cache-on-read=true",
    ];
    let _here = start(0, &from)?;
    while !Path::new(&socket).exists() {
        ensure!(Instant::now() < deadline, "nbdkit does not cache");
        thread::sleep(Duration::from_millis(20));
    }
    twice(|| {
        let copied =
            Command::new("nbdcopy").arg(format!("nbd+unix:///?socket={socket}")).arg("null:").status()?;
        ensure!(copied.success(), "nbdcopy failed");
        Ok(())
    })
}

/// Mounts and reads, each time anew. A file system whose files cannot be opened by handle is none that
/// Ganesha serves.
fn nfs(far: &Far) -> Result<Twice> {
    let nfs = Nfs::start(far)?;
    twice(|| {
        ensure!(nfs.cat(far, "disk.raw")? == DISK as u64, "a short read");
        Ok(())
    })
}

fn row(what: &str, (mbit, times): (u64, &str), ours: f64, peer: &str, theirs: f64) -> Row {
    let (ours, theirs) = (Samples::new(vec![ours]), Samples::new(vec![theirs]));
    let delay = 2 * ONE_WAY.as_millis();
    Row::new("session.peers", format!("{what}, {delay} ms, {mbit} Mbit/s, {times}"), "s", &ours)
        .against(peer, &theirs)
        .goal(Goal::PeerAtMost(1.0))
}

fn over(mbit: u64, rounds: usize) -> Result<Vec<Row>> {
    let far = Far::new(mbit, fill)?;
    let near = far.mount("cache", Policy::Back)?;
    let [documents, read] = both(&near.path, rounds)?;
    near.end()?;
    let sshd = Sshd::start(&far)?;
    let mut others: Vec<(&str, [Option<Twice>; 2])> = Vec::new();
    for (name, mount) in MOUNTS {
        if installed(name) {
            let mounted = mount(&far, &sshd)?;
            let work = both(&mounted.path, rounds).with_context(|| format!("work on {name}"))?;
            others.push((name, work.map(Some)));
        }
    }
    if installed("nbdkit") && installed("nbdcopy") {
        others.push(("nbdkit", [None, Some(nbdkit(&far)?)]));
    }
    if installed("ganesha.nfsd") && installed("nfs-cat") {
        match nfs(&far) {
            Ok(read) => others.push(("NFSv4", [None, Some(read)])),
            Err(error) => eprintln!("    NFSv4 is not measured: {error:#}"),
        }
    }
    let mut rows = Vec::new();
    for (name, [their_documents, their_read]) in others {
        for (number, times) in ["cold", "warm"].into_iter().enumerate() {
            let works = [
                (format!("{rounds} document runs"), documents, their_documents),
                ("16 MiB read".to_owned(), read, their_read),
            ];
            let measured = works.into_iter().filter_map(|(what, ours, theirs)| Some((what, ours, theirs?)));
            rows.extend(
                measured.map(|(what, ours, theirs)| {
                    row(&what, (mbit, times), ours[number], name, theirs[number])
                }),
            );
        }
    }
    Ok(rows)
}

/// Each kind of work by each of them, over both links.
pub(crate) fn peers(context: &Context) -> Result<Vec<Row>> {
    let rounds = if context.quick { 2 } else { 10 };
    let mut rows = over(100, rounds)?;
    rows.extend(over(30, rounds)?);
    Ok(rows)
}
