//! MooseFS as a peer: a master, chunk servers and a mount of their own, in a network namespace and folders of
//! their own.
//!
//! It stripes files over chunk servers as a pool does, goal 1 is one copy. Its servers sync chunks only when
//! told to, which they are, since a pool does. They refuse the loopback address, and its tools speak to the
//! master past the mount, so all of it runs in the namespace.

use super::processes::detach;
use anyhow::{Context as _, Result, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};
use whimbrel_testkit::lab::{Namespace, Process};

const ADDRESS: &str = "10.79.0.1";
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the package puts the metadata of an empty file system.
const EMPTY: &str = "/var/lib/mfs/metadata.mfs.empty";
const COMMON: &str = "WORKING_USER = root\nWORKING_GROUP = root\n";

/// A running file system, mounted.
pub(super) struct MooseFs {
    pub(super) mounted: PathBuf,
    namespace: Namespace,
    /// Killed in this order: the mount first.
    processes: Vec<Process>,
}

fn start(namespace: &Namespace, program: &str, args: &[&str], log: &Path) -> Result<Process> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(log)?);
    namespace.start(command).with_context(|| format!("{program}: `scripts/bootstrap bench` installs it"))
}

fn master(namespace: &Namespace, dir: &Path) -> Result<Process> {
    let at = |name: &str| dir.join(name);
    fs::create_dir(at("master"))?;
    fs::copy(EMPTY, at("master/metadata.mfs"))
        .context("no MooseFS: `scripts/bootstrap bench` installs it")?;
    fs::write(at("exports"), "10.79.0.0/24 / rw,alldirs,maproot=0:0\n")?;
    fs::write(at("topology"), "10.79.0.0/24 1\n")?;
    let text = format!(
        "{COMMON}DATA_PATH = {0}/master\nEXPORTS_FILENAME = {0}/exports\nTOPOLOGY_FILENAME = {0}/topology\n",
        dir.display()
    );
    fs::write(at("master.cfg"), text)?;
    let config = at("master.cfg").display().to_string();
    start(namespace, "mfsmaster", &["-c", &config, "-f"], &at("master.log"))
}

fn chunk_server(namespace: &Namespace, dir: &Path, number: usize) -> Result<Process> {
    let [data, disk, list] = ["own", "disk", "list"].map(|what| dir.join(format!("{what}{number}")));
    fs::create_dir(&data)?;
    fs::create_dir(&disk)?;
    fs::write(&list, format!("{}\n", disk.display()))?;
    let text = format!(
        "{COMMON}DATA_PATH = {}\nHDD_CONF_FILENAME = {}\nMASTER_HOST = {ADDRESS}\nCSSERV_LISTEN_PORT = {}\n\
         HDD_FSYNC_BEFORE_CLOSE = 1\n",
        data.display(),
        list.display(),
        9500 + number
    );
    let config = dir.join(format!("server{number}.cfg"));
    fs::write(&config, text)?;
    let (config, log) = (config.display().to_string(), dir.join(format!("server{number}.log")));
    start(namespace, "mfschunkserver", &["-c", &config, "-f"], &log)
}

impl MooseFs {
    /// Starts one with `servers` chunk servers below `dir`.
    pub(super) fn start(dir: &Path, servers: usize) -> Result<Self> {
        let namespace = Namespace::new()?;
        namespace.ip(&format!("addr add {ADDRESS}/24 dev lo"))?;
        fs::create_dir(dir.join("mnt"))?;
        // As the kernel names it, without links on the way.
        let mounted = dir.join("mnt").canonicalize()?;
        let mut moose = Self { mounted, processes: vec![master(&namespace, dir)?], namespace };
        for number in 0..servers {
            moose.processes.push(chunk_server(&moose.namespace, dir, number)?);
        }
        let deadline = Instant::now() + PATIENCE;
        moose.mount(dir, deadline).with_context(|| {
            let logs: Vec<String> = ["master.log", "mount.log", "server0.log"]
                .map(|name| fs::read_to_string(dir.join(name)).unwrap_or_default())
                .into();
            format!("MooseFS does not come up: {}", logs.join("; "))
        })?;
        Ok(moose)
    }

    fn mount(&mut self, dir: &Path, deadline: Instant) -> Result<()> {
        let mount = self.mounted.display().to_string();
        // The master takes a moment to come up, and a mount that does not find it ends.
        while !is_mounted(&mount)? {
            ensure!(Instant::now() < deadline, "it is not mounted");
            let mut mounting =
                start(&self.namespace, "mfsmount", &["-f", "-H", ADDRESS, &mount], &dir.join("mount.log"))?;
            while !is_mounted(&mount)? && mounting.try_wait()?.is_none() && Instant::now() < deadline {
                sleep(Duration::from_millis(50));
            }
            self.processes.insert(0, mounting);
        }
        self.namespace.output("mfssetgoal", &["1", &mount])?;
        // And it has space when its servers are there.
        while fs::write(self.mounted.join("probe"), "x").is_err() {
            ensure!(Instant::now() < deadline, "the chunk servers do not come");
            sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

impl Drop for MooseFs {
    fn drop(&mut self) {
        detach(&self.mounted);
    }
}

fn is_mounted(path: &str) -> Result<bool> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    Ok(mounts.lines().any(|line| line.split(' ').nth(1) == Some(path)))
}
