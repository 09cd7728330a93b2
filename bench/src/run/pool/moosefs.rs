//! MooseFS as a peer: a master, chunk servers and a mount of their own, in a network namespace and folders of their own.
//!
//! It stripes files over chunk servers as a pool does, goal 1 is one copy. Its servers refuse the loopback address.

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

/// A running file system, mounted.
pub(super) struct MooseFs {
    pub(super) mounted: PathBuf,
    // Dropped in this order: the mount first.
    _processes: Vec<Process>,
}

fn start(namespace: &Namespace, program: &str, args: &[&str], log: &Path) -> Result<Process> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(log)?);
    namespace.start(command).with_context(|| format!("{program}: `scripts/bootstrap bench` installs it"))
}

impl MooseFs {
    /// Starts one with `servers` chunk servers below `dir`.
    pub(super) fn start(dir: &Path, servers: usize) -> Result<Self> {
        let namespace = Namespace::new()?;
        namespace.ip(&format!("addr add {ADDRESS}/24 dev lo"))?;
        let at = |name: &str| dir.join(name);
        let common = "WORKING_USER = root\nWORKING_GROUP = root\n";
        for name in ["master", "mnt"] {
            fs::create_dir(at(name))?;
        }
        fs::copy(EMPTY, at("master/metadata.mfs"))
            .context("no MooseFS: `scripts/bootstrap bench` installs it")?;
        fs::write(at("exports"), "10.79.0.0/24 / rw,alldirs,maproot=0:0\n")?;
        fs::write(at("topology"), "10.79.0.0/24 1\n")?;
        let (data, exports, topology) = (at("master"), at("exports"), at("topology"));
        let master = format!(
            "{common}DATA_PATH = {}\nEXPORTS_FILENAME = {}\nTOPOLOGY_FILENAME = {}\n",
            data.display(),
            exports.display(),
            topology.display()
        );
        fs::write(at("master.cfg"), master)?;
        let config = at("master.cfg").display().to_string();
        let mut processes = vec![start(&namespace, "mfsmaster", &["-c", &config, "-f"], &at("master.log"))?];
        for number in 0..servers {
            let [data, disk, list] = ["own", "disk", "list"].map(|what| at(&format!("{what}{number}")));
            fs::create_dir(&data)?;
            fs::create_dir(&disk)?;
            fs::write(&list, format!("{}\n", disk.display()))?;
            let config = at(&format!("server{number}.cfg"));
            let text = format!(
                "{common}DATA_PATH = {}\nHDD_CONF_FILENAME = {}\nMASTER_HOST = {ADDRESS}\nCSSERV_LISTEN_PORT = {}\n",
                data.display(),
                list.display(),
                9500 + number
            );
            fs::write(&config, text)?;
            let (config, log) = (config.display().to_string(), at(&format!("server{number}.log")));
            processes.push(start(&namespace, "mfschunkserver", &["-c", &config, "-f"], &log)?);
        }
        let mount = at("mnt").display().to_string();
        let begun = Instant::now();
        // The master takes a moment to come up, and a mount that does not find it ends.
        while !is_mounted(&at("mnt"))? {
            ensure!(
                begun.elapsed() < PATIENCE,
                "MooseFS does not come up; its logs are in {}",
                dir.display()
            );
            let mounting = start(&namespace, "mfsmount", &["-f", "-H", ADDRESS, &mount], &at("mount.log"))?;
            let until = Instant::now() + Duration::from_secs(5);
            while !is_mounted(&at("mnt"))? && Instant::now() < until {
                sleep(Duration::from_millis(50));
            }
            processes.insert(0, mounting);
        }
        let goal = Command::new("mfssetgoal").args(["1", &mount]).stdout(Stdio::null()).status()?;
        ensure!(goal.success(), "mfssetgoal failed");
        let moose = Self { mounted: at("mnt"), _processes: processes };
        // And it has space when its servers are there.
        while fs::write(moose.mounted.join("probe"), "x").is_err() {
            ensure!(
                begun.elapsed() < PATIENCE,
                "the servers do not come; their logs are in {}",
                dir.display()
            );
            sleep(Duration::from_millis(100));
        }
        Ok(moose)
    }
}

impl Drop for MooseFs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.mounted).status();
    }
}

fn is_mounted(path: &Path) -> Result<bool> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    // As the kernel has it, without links on the way.
    let path = path.canonicalize()?.display().to_string();
    Ok(mounts.lines().any(|line| line.split(' ').nth(1) == Some(&path)))
}
