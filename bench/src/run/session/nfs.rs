//! NFSv4 as a peer, all of it in user space: NFS-Ganesha on the server's side, `nfs-cat` of libnfs on ours.
//! Neither kernel takes part, for few have both ends, and ports of the kernel's server are not those of a
//! namespace.
//!
//! Ganesha has a configuration of its own, speaks NFSv4 alone, so that nobody asks rpcbind, and ends with the
//! value. `nfs-cat` mounts, reads from begin to end, and keeps nothing: its second time is its first. It does
//! not write here: Debian's `nfs-cp` (libnfs 4.0) makes the file over NFSv4 and then sends no byte of it.

use super::far::{CLIENT, Far, SERVER};
use anyhow::{Context as _, Result, ensure};
use std::{
    fs, io,
    path::Path,
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};
use whimbrel_testkit::lab::Process;

const PORT: u16 = 2049;
/// A file to find out by that it answers.
const READY: &str = "ready";
const PATIENCE: Duration = Duration::from_secs(30);

/// A server of the directory; ends with the value.
pub(super) struct Nfs {
    _process: Process,
}

/// Ours and nobody else's: what it exports, what it writes down, whom it answers.
fn configuration(served: &Path, dir: &Path) -> String {
    format!(
        "NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {PORT}; Enable_RQUOTA = false; Enable_NLM = false; Enable_UDP = false; }}\n\
         NFSV4 {{ Graceless = true; RecoveryRoot = \"{}\"; }}\n\
         EXPORT {{ Export_Id = 1; Path = \"{}\"; Pseudo = \"/served\"; Protocols = 4; Transports = TCP; SecType = sys;\n\
         Access_Type = None; FSAL {{ Name = VFS; }}\n\
         CLIENT {{ Clients = {CLIENT}; Access_Type = RO; Squash = No_Root_Squash; }} }}\n",
        dir.display(),
        served.display(),
    )
}

impl Nfs {
    /// Starts it at the far end, and waits until it answers.
    pub(super) fn start(far: &Far) -> Result<Self> {
        let dir = far.dir.path().join("nfs");
        fs::create_dir(&dir)?;
        let served = far.served().canonicalize()?;
        fs::write(served.join(READY), "x")?;
        fs::write(dir.join("config"), configuration(&served, &dir))?;
        let mut command = Command::new("ganesha.nfsd");
        command.arg("-F").arg("-f").arg(dir.join("config"));
        command.arg("-L").arg(dir.join("log")).arg("-p").arg(dir.join("pid"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let nfs = Self { _process: far.namespaces[1].start(command)? };
        let deadline = Instant::now() + PATIENCE;
        while nfs.cat(far, READY).is_err() {
            let log = || fs::read_to_string(dir.join("log")).unwrap_or_default();
            ensure!(Instant::now() < deadline, "NFS-Ganesha does not answer: {}", log());
            sleep(Duration::from_millis(100));
        }
        Ok(nfs)
    }

    /// Reads a file of the directory from here; how many bytes came.
    pub(super) fn cat(&self, far: &Far, name: &str) -> Result<u64> {
        let mut command = Command::new("nfs-cat");
        command.arg(format!("nfs://{SERVER}/served/{name}?version=4&nfsport={PORT}"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = far.namespaces[0].start(command)?;
        let came = io::copy(&mut child.stdout.take().context("no output")?, &mut io::sink())?;
        let ended = child.wait()?;
        ensure!(ended.success(), "nfs-cat failed: {ended}");
        Ok(came)
    }
}
