//! A kernel of this host, and the modules that a machine of a container image needs.

use crate::ContainerError;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read,
    path::{Path, PathBuf},
};

/// Drivers of QEMU's devices, and the file systems of the disk and of the seed. A kernel may have them built
/// in; those that it does not have at all are left out.
const WANTED: &[&str] = &[
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_balloon",
    "virtio-rng",
    "virtio_console",
    "vmgenid",
    "crc32c_generic",
    "ext4",
    "nls_cp437",
    "nls_ascii",
    "nls_iso8859-1",
    "vfat",
    "af_packet",
    "evdev",
    "button",
    "ahci",
    "sd_mod",
    "e1000",
];
const PREFIX: &str = "vmlinuz-";
/// Longest module before compression.
const MODULE_MAX: u64 = 64 << 20;

/// A kernel and the folder with its modules, which may be empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Path of the kernel.
    pub image: PathBuf,
    /// Folder with its modules, at any depth.
    pub modules: PathBuf,
}

impl Kernel {
    /// The newest kernel in /boot that has its modules in /lib/modules.
    pub fn of_this_host() -> Result<Self, ContainerError> {
        Self::newest(Path::new("/boot"), Path::new("/lib/modules")).ok_or(ContainerError::NoKernel)
    }

    fn newest(boot: &Path, modules: &Path) -> Option<Self> {
        let entries = fs::read_dir(boot).into_iter().flatten().flatten();
        let kernel = |entry: fs::DirEntry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let version = name.strip_prefix(PREFIX)?;
            let found = Self { image: entry.path(), modules: modules.join(version) };
            found.modules.is_dir().then(|| (numbers(version), version.to_owned(), found))
        };
        entries.filter_map(kernel).max_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1))).map(|(.., found)| found)
    }
}

/// Numbers in a version, by which a newer one is greater.
fn numbers(version: &str) -> Vec<u64> {
    version
        .split(|character: char| !character.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect()
}

/// Modules that were chosen, with those that they need before them.
#[derive(Debug, Default)]
pub struct Modules {
    /// Names of their files, like `virtio_blk.ko`, and their contents.
    pub files: Vec<(String, Vec<u8>)>,
    seen: BTreeSet<String>,
}

impl Modules {
    /// The modules below `folder` that a machine needs.
    pub fn for_containers(folder: &Path) -> Result<Self, ContainerError> {
        Self::chosen(folder, WANTED)
    }

    /// The modules below `folder` with these names, and those that they need.
    pub fn chosen(folder: &Path, wanted: &[&str]) -> Result<Self, ContainerError> {
        let mut found = BTreeMap::new();
        files_below(folder, &mut found)?;
        let mut modules = Self::default();
        wanted.iter().try_for_each(|name| modules.add(&found, name))?;
        Ok(modules)
    }

    fn add(&mut self, found: &BTreeMap<String, PathBuf>, name: &str) -> Result<(), ContainerError> {
        let name = name.replace('-', "_");
        let Some(path) = found.get(&name).filter(|_| self.seen.insert(name.clone())) else { return Ok(()) };
        let content = content_of(path)?;
        dependencies(&content).iter().try_for_each(|needed| self.add(found, needed))?;
        self.files.push((format!("{name}.ko"), content));
        Ok(())
    }
}

/// Modules by their names, in which `_` stands for `-` too.
fn files_below(folder: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<(), ContainerError> {
    for entry in fs::read_dir(folder).map_err(ContainerError::read(folder))?.flatten() {
        let path = entry.path();
        // Links beside the modules lead to the sources of the kernel.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files_below(&path, found)?;
        } else if let Some((name, _)) = entry.file_name().to_string_lossy().split_once(".ko") {
            found.insert(name.replace('-', "_"), path);
        }
    }
    Ok(())
}

/// A module without its compression, by the ending of its name.
fn content_of(path: &Path) -> Result<Vec<u8>, ContainerError> {
    let packed = fs::read(path).map_err(ContainerError::read(path))?;
    let packed = &*packed;
    let mut content = Vec::new();
    let ending = path.extension().unwrap_or_default().to_string_lossy();
    let read = match &*ending {
        "xz" => lzma_rust2::XzReader::new(packed, true).take(MODULE_MAX).read_to_end(&mut content),
        "gz" => flate2::read::GzDecoder::new(packed).take(MODULE_MAX).read_to_end(&mut content),
        "zst" => zstd::Decoder::new(packed).and_then(|from| from.take(MODULE_MAX).read_to_end(&mut content)),
        _ => return Ok(packed.to_vec()),
    };
    read.map_err(ContainerError::read(path))?;
    Ok(content)
}

/// Names of the modules that a module needs, as it says itself (modinfo(8), `depends`).
fn dependencies(module: &[u8]) -> Vec<String> {
    let fields = module.split(|byte| *byte == 0);
    let names = fields.filter_map(|field| field.strip_prefix(b"depends=")).next_back().unwrap_or_default();
    let names = String::from_utf8_lossy(names);
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_newest_kernel_with_modules_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let (boot, modules) = (dir.path().join("boot"), dir.path().join("modules"));
        fs::create_dir(&boot).unwrap();
        for version in ["6.1.0-9-amd64", "6.1.0-18-amd64", "6.12.1-1-amd64"] {
            fs::write(boot.join(format!("vmlinuz-{version}")), "").unwrap();
        }
        assert_eq!(Kernel::newest(&boot, &modules), None);
        for version in ["6.1.0-9-amd64", "6.1.0-18-amd64"] {
            fs::create_dir_all(modules.join(version)).unwrap();
        }
        assert!(Kernel::newest(&boot, &modules).unwrap().image.ends_with("vmlinuz-6.1.0-18-amd64"));
    }

    #[test]
    fn modules_come_after_those_that_they_need_however_they_are_packed() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("kernel/drivers");
        fs::create_dir_all(&inner).unwrap();
        let module = |needs: &str| format!("\x7fELF\0license=GPL\0depends={needs}\0name=x\0").into_bytes();
        fs::write(inner.join("virtio-blk.ko"), module("virtio,virtio_ring")).unwrap();
        fs::write(inner.join("virtio.ko.zst"), zstd::encode_all(&*module(""), 1).unwrap()).unwrap();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&module("virtio")).unwrap();
        fs::write(inner.join("virtio_ring.ko.gz"), gz.finish().unwrap()).unwrap();
        let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
        xz.write_all(&module("virtio_blk")).unwrap();
        fs::write(dir.path().join("ext4.ko.xz"), xz.finish().unwrap()).unwrap();
        let modules = Modules::chosen(dir.path(), &["ext4", "none", "virtio-blk"]).unwrap();
        let names: Vec<_> = modules.files.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["virtio.ko", "virtio_ring.ko", "virtio_blk.ko", "ext4.ko"]);
        assert!(modules.files.iter().all(|(_, content)| content.starts_with(b"\x7fELF")));
    }
}
