//! The machine of the demo: a small Linux with work to do, a file system with data on it, a network port.

use std::{fs, path::Path};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, HostProcess};
use whimbrel_testkit::guest::{GuestOptions, Work, image};

/// Its name.
pub(crate) const NAME: &str = "web";
/// Its memory in MiB.
pub(crate) const MEMORY_MIB: u32 = 512;
/// Size of its disk in MiB.
pub(crate) const DISK_MIB: u64 = 192;
/// How much of the disk holds files before it boots.
pub(crate) const FILES_MIB: u64 = 64;
/// Memory that the witness fills and checks.
const BUFFER_MIB: u32 = 48;
/// Memory is dirtied all the time, so that there is something to chase.
const WORK: Work = Work::Dirty { region_mib: 16, pages_per_second: 1000, bytes_per_page: 64 };

/// Makes the disk and starts the machine.
pub(crate) fn run(cluster: &Cluster, host: &HostProcess) {
    let disk = cluster.disk.path().join("web.raw");
    let content = cluster.disk.path().join("content");
    make_disk(&disk, &content);
    let files = cluster.files();
    let options =
        GuestOptions { address: Some(format!("{GUEST_ADDRESS}/24")), buffer_mib: BUFFER_MIB, work: WORK };
    let path = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
    let (disk, kernel, initrd) = (path(&disk), path(&files.kernel), path(&files.initrd));
    let (memory, append) = (format!("{MEMORY_MIB}M"), options.to_string());
    host.run(&[
        "run", NAME, "--memory", &memory, "--disk", &disk, "--net", "br0", //
        "--kernel", &kernel, "--initrd", &initrd, "--append", &append,
    ]);
}

fn make_disk(disk: &Path, content: &Path) {
    fs::create_dir(content).expect("a directory");
    image::patterned(&content.join("data"), FILES_MIB, 7).expect("data for the disk");
    image::ext4(disk, DISK_MIB, Some(content)).expect("a file system");
    fs::remove_dir_all(content).expect("a directory to remove");
}
