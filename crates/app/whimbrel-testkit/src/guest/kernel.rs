//! Kernels of the guests, each with the modules that a guest needs: Debian's cloud kernel, with drivers for
//! QEMU's paravirtual devices alone, and its kernel for every computer.
//!
//! Downloaded once from the package archive, and cached.

use super::{GuestError, artifact_cache::once, package};
use std::{
    fs,
    path::{Path, PathBuf},
};
use whimbrel_container::{Archive, Modules};

/// Drivers of QEMU's paravirtual devices.
const VIRTIO: &[&str] =
    &["virtio_pci", "virtio_blk", "virtio_net", "virtio_balloon", "virtio-rng", "virtio_console"];
/// Drivers of a computer's own devices, and the file systems that the cloud kernel has built in.
const COMPUTER: &[&str] = &["crc32c_generic", "ext4", "ahci", "sd_mod", "sr_mod", "isofs", "e1000"];
/// File with the names of the modules in the order in which they are loaded.
const ORDER: &str = "order";
/// Folder with the modules of machines that are made of container images.
const CONTAINERS: &str = "containers";

/// Kind of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flavour {
    /// For virtual machines.
    Cloud,
    /// For every computer.
    Generic,
}

/// Kernel file, and the folder with its modules.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// Returns the kernel, downloaded if necessary.
    pub(super) fn get(flavour: Flavour) -> Result<Self, GuestError> {
        let (name, package) = match flavour {
            Flavour::Cloud => ("kernel-cloud-2", "linux-image-cloud-amd64"),
            Flavour::Generic => ("kernel-generic-2", "linux-image-amd64"),
        };
        let place = once("guest-files", name, |place| fetch(place, package, flavour))?;
        Ok(Self { image: place.join("vmlinuz"), modules: place })
    }

    /// Folder with the modules of machines that are made of container images.
    pub(super) fn container_modules(&self) -> PathBuf {
        self.modules.join(CONTAINERS)
    }

    /// Adds the modules to an initial RAM disk, with their loading order in `modules/order`.
    pub(super) fn add_modules(&self, archive: &mut Archive) -> Result<(), GuestError> {
        let read = |name: &str| {
            let path = self.modules.join(name);
            fs::read(&path).map_err(GuestError::file("read", path))
        };
        let order = read(ORDER)?;
        archive.directory("modules");
        for name in String::from_utf8_lossy(&order).lines() {
            archive.file(&format!("modules/{name}"), 0o644, &read(name)?);
        }
        archive.file("modules/order", 0o644, &order);
        Ok(())
    }
}

fn fetch(place: &Path, package: &str, flavour: Flavour) -> Result<(), GuestError> {
    let root = tempfile::tempdir().map_err(GuestError::file("create", std::env::temp_dir()))?;
    package::unpack(&package::newest(package, "linux-image-")?, root.path())?;
    let image = package::find(&root.path().join("boot"), &|name| name.starts_with("vmlinuz"))?;
    let image = image.ok_or_else(|| GuestError::Missing { what: format!("kernel in {package}") })?;
    copy(&image, &place.join("vmlinuz"))?;
    let wanted = if flavour == Flavour::Generic { COMPUTER } else { &[] };
    let wanted: Vec<_> = VIRTIO.iter().chain(wanted).copied().collect();
    let folder = root.path().join("lib/modules");
    let modules = write_modules(Modules::chosen(&folder, &wanted)?, place)?;
    let path = place.join(ORDER);
    fs::write(&path, modules.join("\n") + "\n").map_err(GuestError::file("write", path))?;
    let containers = place.join(CONTAINERS);
    fs::create_dir(&containers).map_err(GuestError::file("create", &containers))?;
    write_modules(Modules::for_containers(&folder)?, &containers).map(drop)
}

/// Writes modules into a folder, and returns their names. A kernel may have those that are wanted built in; a
/// guest that lacks a device fails soon enough.
fn write_modules(modules: Modules, folder: &Path) -> Result<Vec<String>, GuestError> {
    let write = |(name, content): (String, Vec<u8>)| {
        let path = folder.join(&name);
        fs::write(&path, content).map_err(GuestError::file("write", path)).map(|()| name)
    };
    modules.files.into_iter().map(write).collect()
}

fn copy(from: &Path, to: &Path) -> Result<(), GuestError> {
    fs::copy(from, to).map(drop).map_err(GuestError::file("copy", from))
}
