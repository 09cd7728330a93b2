//! The machine under test.

use crate::{Cluster, HostProcess};
use std::{
    fs::File,
    path::{Path, PathBuf},
};
use whimbrel_testkit::guest::{GuestOptions, Work};

/// Address of a guest on the lab's segment.
pub const GUEST_ADDRESS: &str = "10.77.0.100";

/// Address of a guest that asks its network for one.
pub const DHCP: &str = "dhcp";

/// What a machine is started with.
#[derive(Debug, Clone)]
pub struct Guest {
    /// Its name.
    pub name: String,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Size of its one disk in MiB.
    pub disk_mib: u64,
    /// Address on the lab's segment, or `dhcp`; none gives it no network.
    pub address: Option<String>,
    /// The bridge that its port is in, if it has an address.
    pub bridge: &'static str,
    /// Memory in MiB whose content the witness checks.
    pub buffer_mib: u32,
    /// What it does.
    pub work: Work,
    /// More arguments of `run`.
    pub arguments: Vec<String>,
}

impl Guest {
    /// A small idle guest with a disk and a network.
    pub fn small(name: &str) -> Self {
        let address = Some(GUEST_ADDRESS.to_owned());
        Self {
            name: name.to_owned(),
            memory_mib: 192,
            disk_mib: 32,
            address,
            bridge: "br0",
            buffer_mib: 16,
            work: Work::Idle,
            arguments: Vec::new(),
        }
    }

    /// Starts it on `host`.
    pub fn run(&self, cluster: &Cluster, host: &HostProcess) {
        self.run_on(cluster, host, |_| {});
    }

    /// The same, with a disk that `fill` has put something on.
    pub fn run_on(&self, cluster: &Cluster, host: &HostProcess, fill: impl FnOnce(&Path)) {
        let disk = self.disk(cluster);
        fill(&disk);
        let files = cluster.files();
        let prefix =
            |address: &String| if address == DHCP { address.clone() } else { format!("{address}/24") };
        let address = self.address.as_ref().map(prefix);
        let options = GuestOptions { address, buffer_mib: self.buffer_mib, work: self.work };
        let (memory, append) = (format!("{}M", self.memory_mib), options.to_string());
        let path = |path: &PathBuf| path.to_str().expect("a path in UTF-8").to_owned();
        let (disk, kernel, initrd) = (path(&disk), path(&files.kernel), path(&files.initrd));
        let mut arguments = vec!["run", &self.name, "--disk", &disk, "--memory", &memory];
        arguments.extend(["--kernel", &kernel, "--initrd", &initrd, "--append", &append]);
        if self.address.is_some() {
            arguments.extend(["--net", self.bridge]);
        }
        arguments.extend(self.arguments.iter().map(String::as_str));
        host.run(&arguments);
    }

    fn disk(&self, cluster: &Cluster) -> PathBuf {
        let path = cluster.disk.path().join(format!("{}.raw", self.name));
        let file = File::create(&path).expect("a disk image");
        file.set_len(self.disk_mib << 20).expect("room for a disk image");
        path
    }
}
