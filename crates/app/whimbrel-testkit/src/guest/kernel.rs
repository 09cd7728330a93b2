//! Kernels of the guests, each with the modules that a guest needs: Debian's cloud kernel, with drivers for
//! QEMU's paravirtual devices alone, and its kernel for every computer.
//!
//! Downloaded once from the package archive, and cached.

use super::{GuestError, artifact_cache::once, cpio::Archive, package};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Drivers of QEMU's paravirtual devices.
const VIRTIO: &[&str] =
    &["virtio_pci", "virtio_blk", "virtio_net", "virtio_balloon", "virtio-rng", "virtio_console"];
/// Drivers of a computer's own devices, and the file systems that the cloud kernel has built in.
const COMPUTER: &[&str] = &["crc32c_generic", "ext4", "ahci", "sd_mod", "sr_mod", "isofs", "e1000"];
/// File with the names of the modules in the order in which they are loaded.
const ORDER: &str = "order";

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
            Flavour::Cloud => ("kernel-cloud", "linux-image-cloud-amd64"),
            Flavour::Generic => ("kernel-generic", "linux-image-amd64"),
        };
        let place = once("guest-files", name, |place| fetch(place, package, flavour))?;
        Ok(Self { image: place.join("vmlinuz"), modules: place })
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
    let mut modules =
        Modules { root: root.path().join("lib/modules"), place, seen: BTreeSet::new(), order: vec![] };
    let wanted = if flavour == Flavour::Generic { COMPUTER } else { &[] };
    VIRTIO.iter().chain(wanted).try_for_each(|name| modules.add(name))?;
    let path = place.join(ORDER);
    fs::write(&path, modules.order.join("\n") + "\n").map_err(GuestError::file("write", path))
}

/// Modules that were copied so far.
struct Modules<'a> {
    root: PathBuf,
    place: &'a Path,
    seen: BTreeSet<String>,
    order: Vec<String>,
}

impl Modules<'_> {
    /// Copies a module, and before it those that it needs. A kernel may have it built in; a guest that lacks
    /// a device fails soon enough.
    fn add(&mut self, name: &str) -> Result<(), GuestError> {
        let plain = |name: &str| name.replace('-', "_");
        if !self.seen.insert(plain(name)) {
            return Ok(());
        }
        let is_it = |file: &str| file.strip_suffix(".ko").is_some_and(|file| plain(file) == plain(name));
        let Some(found) = package::find(&self.root, &is_it)? else { return Ok(()) };
        let content = fs::read(&found).map_err(GuestError::file("read", &found))?;
        dependencies(&content).iter().try_for_each(|name| self.add(name))?;
        let file = found.file_name().unwrap_or_default().to_string_lossy().into_owned();
        copy(&found, &self.place.join(&file))?;
        self.order.push(file);
        Ok(())
    }
}

/// Names of the modules that a module needs, as it says itself (modinfo(8), `depends`).
fn dependencies(module: &[u8]) -> Vec<String> {
    let fields = module.split(|byte| *byte == 0);
    let names = fields.filter_map(|field| field.strip_prefix(b"depends=")).next_back().unwrap_or_default();
    let names = String::from_utf8_lossy(names);
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn copy(from: &Path, to: &Path) -> Result<(), GuestError> {
    fs::copy(from, to).map(drop).map_err(GuestError::file("copy", from))
}
