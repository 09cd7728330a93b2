//! Kernel of the guests: Debian's cloud kernel with the modules for QEMU's paravirtual devices.
//!
//! Downloaded once from the package archive (`apt-get download`, so `apt-get update` must have run) and
//! cached.

use super::{
    GuestError,
    artifact_cache::{once, run},
    cpio::Archive,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Modules in the order in which they must be loaded. The kernel has the file systems of a guest built in.
const MODULES: &[&str] = &[
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "virtio_blk",
    "failover",
    "net_failover",
    "virtio_net",
    "virtio_balloon",
    "virtio-rng",
    "virtio_console",
];

/// Kernel file and its modules, in loading order.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) image: PathBuf,
    pub(super) modules: Vec<PathBuf>,
}

impl Kernel {
    /// Adds the modules to an initial RAM disk, with their loading order in `modules/order`.
    pub(super) fn add_modules(&self, archive: &mut Archive) -> Result<(), GuestError> {
        let mut order = String::new();
        archive.directory("modules");
        for module in &self.modules {
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            let content = fs::read(module).map_err(GuestError::file("read", module))?;
            archive.file(&format!("modules/{name}"), 0o644, &content);
            order.push_str(&name);
            order.push('\n');
        }
        archive.file("modules/order", 0o644, order.as_bytes());
        Ok(())
    }
}

/// Returns the kernel, downloaded if necessary.
pub(super) fn get() -> Result<Kernel, GuestError> {
    let place = once("guest-files", "kernel", fetch)?;
    let modules =
        MODULES.iter().map(|name| place.join(format!("{name}.ko"))).filter(|path| path.exists()).collect();
    Ok(Kernel { image: place.join("vmlinuz"), modules })
}

fn fetch(place: &Path) -> Result<(), GuestError> {
    let depends = run(Command::new("apt-cache").args(["depends", "linux-image-cloud-amd64"]))?;
    let package =
        depends.lines().find_map(|line| line.trim().strip_prefix("Depends: ").filter(|name| is_kernel(name)));
    let package =
        package.ok_or_else(|| GuestError::Missing { what: "package linux-image-cloud-amd64".into() })?;
    let work = tempfile::tempdir().map_err(GuestError::file("create", std::env::temp_dir()))?;
    run(Command::new("apt-get").args(["-q", "download", package]).current_dir(&work))?;
    let deb = find(work.path(), &|name| name.ends_with(".deb"))?;
    let deb = deb.ok_or_else(|| GuestError::Missing { what: format!("downloaded file of {package}") })?;
    let root = work.path().join("root");
    run(Command::new("dpkg").arg("-x").args([&deb, &root]))?;
    let image = find(&root.join("boot"), &|name| name.starts_with("vmlinuz"))?;
    let image = image.ok_or_else(|| GuestError::Missing { what: format!("kernel in {package}") })?;
    copy(&image, &place.join("vmlinuz"))?;
    for module in MODULES {
        let file = format!("{module}.ko");
        // A later kernel may have one of them built in; a guest that lacks a device fails soon enough.
        if let Some(found) = find(&root.join("lib/modules"), &|name| name == file)? {
            copy(&found, &place.join(file))?;
        }
    }
    Ok(())
}

fn is_kernel(name: &str) -> bool {
    name.starts_with("linux-image-")
}

fn copy(from: &Path, to: &Path) -> Result<(), GuestError> {
    fs::copy(from, to).map(drop).map_err(GuestError::file("copy", from))
}

/// First file below `root` whose name satisfies `wanted`.
fn find(root: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<Option<PathBuf>, GuestError> {
    for entry in fs::read_dir(root).map_err(GuestError::file("list", root))? {
        let entry = entry.map_err(GuestError::file("list", root))?;
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if let Some(found) = find(&path, wanted)? {
                return Ok(Some(found));
            }
        } else if wanted(&entry.file_name().to_string_lossy()) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}
