//! Disks that boot by themselves, as the cloud images of distributions do, and folders in which they are
//! published.
//!
//! Two guests: the small one, in seconds, and Debian with cloud-init and sshd, which takes minutes to build
//! once. Needs Debian's `grub-pc-bin` and `grub-common`; Debian itself needs `debootstrap` and its mirror.

use super::{
    GuestError, GuestFiles, GuestOptions,
    artifact_cache::{once, run},
    boot_files::key,
    debian, image,
};
use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

/// First byte of the partition, behind the boot loader.
const PARTITION: u64 = 1 << 20;
/// Bytes of the first sector that are code; the partition table follows.
const CODE: usize = 440;
const BOOT_CODE: &str = "/usr/lib/grub/i386-pc/boot.img";
const DEBIAN_MIB: u64 = 1536;
const SMALL_MIB: u64 = 64;
/// Packages of the Debian cloud image beyond the smallest system. debootstrap resolves no virtual packages,
/// hence the one that Python's cryptography needs.
const PACKAGES: &str = "linux-image-cloud-amd64,initramfs-tools,systemd-sysv,udev,dbus,cloud-init,cloud-guest-utils,\
                        python3-cffi-backend,netplan.io,openssh-server,sudo,iproute2,locales,e2fsprogs,fdisk";

/// Folder with one image in qcow2 and the list `SHA512SUMS`, as a distribution publishes it.
#[derive(Debug)]
pub struct PublishedImage {
    /// Path of the folder. All users share it.
    pub folder: PathBuf,
    /// Name of the image's file in it.
    pub file: String,
}

impl PublishedImage {
    /// The small guest on a disk of its own, with the guest agent's shell and an address by DHCP.
    pub fn small() -> Result<Self, GuestError> {
        let options =
            GuestOptions { address: Some("dhcp".to_owned()), buffer_mib: 16, work: super::Work::GuestAgent };
        let files = GuestFiles::get();
        let recipe = [options.to_string().into_bytes(), include_bytes!("disk_boot.rs").to_vec()];
        let name = format!("small-{}", key(&[&recipe[0], &recipe[1]])?);
        let folder = once("guest-images", &name, |place| {
            let root = place.join("root");
            fs::create_dir(&root).map_err(GuestError::file("create", &root))?;
            for (from, name) in [(&files.kernel, "vmlinuz"), (&files.initrd, "initrd.img")] {
                fs::copy(from, root.join(name)).map_err(GuestError::file("copy", from))?;
            }
            publish(place, "small.qcow2", SMALL_MIB, &root, &options.to_string())
        })?;
        Ok(Self { folder, file: "small.qcow2".to_owned() })
    }

    /// Debian with cloud-init and sshd. Takes minutes to build, once.
    pub fn debian() -> Result<Self, GuestError> {
        Self::debian_with("plain", &[])
    }

    /// Debian with cloud-init, sshd and these packages. Takes minutes to build, once.
    pub fn debian_with(name: &str, packages: &[&str]) -> Result<Self, GuestError> {
        let file = "debian-12-generic-amd64.qcow2";
        let name = format!("debian-{name}-{}", key(&[include_bytes!("disk_boot.rs")])?);
        let folder = once("guest-images", &name, |place| {
            let root = place.join("root");
            debian::debootstrap(&root, PACKAGES)?;
            if !packages.is_empty() {
                let install = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-y", "install"];
                let mut chroot = Command::new("chroot");
                run(chroot.arg(&root).args(install).arg("--no-install-recommends").args(packages))?;
            }
            prepare_debian(&root)?;
            publish(place, file, DEBIAN_MIB, &root, "root=LABEL=root ro console=ttyS0")
        })?;
        Ok(Self { folder, file: file.to_owned() })
    }
}

/// What an image builder does after the packages are there: one file system, an initial RAM disk with the
/// drivers of virtual machines, and nothing that two machines must not share.
fn prepare_debian(root: &Path) -> Result<(), GuestError> {
    let write = |name: &str, text: &str| {
        let path = root.join(name);
        fs::write(&path, text).map_err(GuestError::file("write", &path))
    };
    write("etc/fstab", "LABEL=root / ext4 errors=remount-ro 0 1\n")?;
    write("etc/initramfs-tools/modules", "virtio_pci\nvirtio_blk\nvirtio_net\next4\n")?;
    write("etc/initramfs-tools/conf.d/modules", "MODULES=list\n")?;
    write("etc/machine-id", "")?;
    // As Debian's own images have it: no locale to generate, and the host name is known.
    write("etc/cloud/cloud.cfg.d/10_image.cfg", "locale: C.UTF-8\nmanage_etc_hosts: true\n")?;
    run(Command::new("chroot").arg(root).args(["update-initramfs", "-u"]))?;
    run(Command::new("chroot").arg(root).args(["apt-get", "clean"]))?;
    run(Command::new("chroot").arg(root).args(["sh", "-c", "rm -f /etc/ssh/ssh_host_*"])).map(drop)
}

/// Makes the disk of the tree below `root`, and its folder.
fn publish(place: &Path, file: &str, mib: u64, root: &Path, append: &str) -> Result<(), GuestError> {
    let disk = place.join("disk.raw");
    bootable(&disk, mib, root, append)?;
    let convert = ["convert", "-f", "raw", "-O", "qcow2", "-c"];
    run(Command::new("qemu-img").args(convert).args([&disk, &place.join(file)]))?;
    let list = run(Command::new("sha512sum").arg(file).current_dir(place))?;
    let path = place.join("SHA512SUMS");
    fs::write(&path, list).map_err(GuestError::file("write", &path))?;
    fs::remove_file(&disk).map_err(GuestError::file("remove", &disk))?;
    fs::remove_dir_all(root).map_err(GuestError::file("remove", root))
}

/// Creates a raw disk that a BIOS boots: GRUB, and one ext4 partition labelled `root` with the tree below
/// `root`. Its `vmlinuz` and `initrd.img` are started with the command line `append`.
fn bootable(path: &Path, mib: u64, root: &Path, append: &str) -> Result<(), GuestError> {
    image::empty(path, mib)?;
    let table = path.with_extension("table");
    fs::write(&table, "2048,,83,*\n").map_err(GuestError::file("write", &table))?;
    let input = File::open(&table).map_err(GuestError::file("open", &table))?;
    let mut sfdisk = Command::new("sfdisk");
    // Not `run`, which closes standard input.
    let status = sfdisk.arg("--quiet").arg(path).stdin(input).status();
    let status = status.map_err(|source| GuestError::Start { program: "sfdisk".into(), source })?;
    if !status.success() {
        return Err(GuestError::Program { program: "sfdisk".into(), status, errors: String::new() });
    }
    let room = format!("{}k", (mib << 10) - (PARTITION >> 10));
    let offset = format!("offset={PARTITION}");
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-L", "root", "-E", &offset, "-d"]);
    run(mke2fs.arg(root).arg(path).arg(room))?;
    let boot = boot_loader(path, append)?;
    let disk = File::options().write(true).open(path).map_err(GuestError::file("open", path))?;
    let code = fs::read(BOOT_CODE).map_err(GuestError::file("read", BOOT_CODE))?;
    // The code of the first sector reads on at the second one, unless it is told otherwise.
    let written = disk.write_all_at(&code[..CODE], 0).and_then(|()| disk.write_all_at(&boot, 512));
    written.map_err(GuestError::file("write", path))?;
    fs::remove_file(&table).map_err(GuestError::file("remove", &table))
}

fn boot_loader(beside: &Path, append: &str) -> Result<Vec<u8>, GuestError> {
    let (settings, core) = (beside.with_extension("cfg"), beside.with_extension("core"));
    let mut file = File::create(&settings).map_err(GuestError::file("create", &settings))?;
    let text = format!(
        "serial --unit=0 --speed=115200\nterminal_output serial\nset root=(hd0,msdos1)\n\
         linux /vmlinuz {append}\ninitrd /initrd.img\nboot\n"
    );
    file.write_all(text.as_bytes()).map_err(GuestError::file("write", &settings))?;
    let mut mkimage = Command::new("grub-mkimage");
    mkimage.args(["-O", "i386-pc", "-p", "(hd0,msdos1)/boot/grub", "-c"]).arg(&settings).arg("-o").arg(&core);
    run(mkimage.args(["biosdisk", "part_msdos", "ext2", "linux", "serial", "terminal"]))?;
    let bytes = fs::read(&core).map_err(GuestError::file("read", &core))?;
    for path in [&settings, &core] {
        fs::remove_file(path).map_err(GuestError::file("remove", path))?;
    }
    Ok(bytes)
}
