//! Container images: their files become the disk of an image, and a kernel of this host its boot files.
//!
//! Layers are unpacked and the file system is written by confined processes (`whimbrel_qemu::NewFileSystem`)
//! in a folder that is gone afterwards.

use crate::{
    capsule::{
        disk_image::{PROGRAM, ScratchDir, unnamed_file},
        maintenance::{BootContent, ImportedDisks},
    },
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
};
use serde::{Deserialize, Deserializer};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Seek, SeekFrom},
    path::{Path, PathBuf},
};
use whimbrel_api::{PROGRAM_LABEL, Unit};
use whimbrel_block::FileDevice;
use whimbrel_container::{
    Applied, COMMANDS, ContainerError, ContainerImage, GuestPrograms, Kernel, Layer, Modules, ROOT_LABEL,
    TREE, initrd,
};
use whimbrel_core::{ByteSize, CapsuleId, RefName};
use whimbrel_qemu::{ImageError, NewFileSystem, UnpackedTree};

/// Verb of this program that unpacks a layer.
const VERB: &str = "unpack-layer";
/// Size of a disk, unless the settings say another one. Empty space of it takes none on this host.
const DISK_SIZE: ByteSize = ByteSize(8 << 30);
/// Least and greatest size of a disk.
const SIZES: std::ops::RangeInclusive<u64> = 64 << 20..=16 << 40;
/// Command line of the kernel.
const APPEND: &str = "console=ttyS0 quiet panic=10";
/// Longest text of the program in a label.
const LABEL_MAX: usize = 200;

/// What machines of container images get beside their files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerSettings {
    /// Kernel of the machines [default: the newest in /boot that has its modules in /lib/modules].
    #[serde(default)]
    pub kernel: Option<PathBuf>,
    /// Folder with the modules of `kernel`; without it, it has all that is needed built in.
    #[serde(default)]
    pub modules: Option<PathBuf>,
    /// Size of the disk that the files are on, as text like `20G` [default: 8 GiB].
    #[serde(default, deserialize_with = "size_of_text")]
    pub disk_size: Option<ByteSize>,
}

fn size_of_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<ByteSize>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

impl ContainerSettings {
    /// Refuses what no image could be made with.
    pub(super) fn check(&self) -> Result<(), DaemonError> {
        if self.modules.is_some() && self.kernel.is_none() {
            return Err(DaemonError::invalid("[containers] has `modules` and no `kernel` that they are of"));
        }
        match self.size() {
            size if SIZES.contains(&size) => Ok(()),
            _ => Err(DaemonError::invalid("[containers] disk_size must be from 64 MiB to 16 TiB")),
        }
    }

    /// Size of a disk in whole MiB.
    fn size(&self) -> u64 {
        self.disk_size.unwrap_or(DISK_SIZE).0 >> 20 << 20
    }

    fn kernel(&self) -> Result<(PathBuf, Modules), ContainerError> {
        match (&self.kernel, &self.modules) {
            (Some(image), None) => Ok((image.clone(), Modules::default())),
            (Some(image), Some(modules)) => Ok((image.clone(), Modules::for_containers(modules)?)),
            (None, _) => {
                let found = Kernel::of_this_host()?;
                Ok((found.image, Modules::for_containers(&found.modules)?))
            }
        }
    }
}

/// What a machine gets of this host beside the files of its image.
pub(crate) struct HostFiles {
    programs: GuestPrograms,
    boot: BootContent,
}

impl Daemon {
    /// What this host has for a machine of a container image; an error if it lacks something. Errors call the
    /// image `path`.
    pub(crate) fn host_files(&self, path: &Path) -> Result<HostFiles, DaemonError> {
        let failed = |source| DaemonError::Container { path: path.to_owned(), source };
        let programs = GuestPrograms::of_this_host().map_err(failed)?;
        let (kernel, modules) = self.images.containers.kernel().map_err(failed)?;
        let boot = BootContent {
            kernel: fs::read(&kernel).map_err(|source| DaemonError::io("read", &kernel, source))?,
            initrd: initrd(&programs, &modules),
            append: APPEND.to_owned(),
        };
        Ok(HostFiles { programs, boot })
    }

    /// Makes a capsule of a container image, with a tag and labels. Errors call the image `path`.
    pub(crate) fn import_container(
        &self,
        (image, host): (ContainerImage, HostFiles),
        (path, name, mut labels): (&Path, &RefName, BTreeMap<String, String>),
        reporter: &ProgressReporter,
    ) -> Result<CapsuleId, DaemonError> {
        let failed = |source| DaemonError::Container { path: path.to_owned(), source };
        let HostFiles { programs, boot } = host;
        let program: String = image.program().join(" ").chars().take(LABEL_MAX).collect();
        labels.insert(PROGRAM_LABEL.to_owned(), program);
        let (size, file) = (self.images.containers.size(), unnamed_file(&self.directories, 0)?);
        let top = programs.layer(&image, size, file).map_err(failed)?;
        let layers = image.layers.into_iter().chain([top]).collect();
        let disk = self.file_system(layers, (path, size), reporter)?;
        let disk = FileDevice::new(disk, true).map_err(|source| DaemonError::io("read", path, source))?;
        self.import_disks(ImportedDisks { disks: vec![disk], path, name, labels, boot: Some(boot) }, reporter)
    }

    /// A file system of `size` bytes with the files of all layers.
    fn file_system(
        &self,
        layers: Vec<Layer>,
        (path, size): (&Path, u64),
        reporter: &ProgressReporter,
    ) -> Result<File, DaemonError> {
        let refused = |source| match source {
            ImageError::Cancelled => DaemonError::Cancelled { left: "nothing was stored".into() },
            source => DaemonError::Image { path: path.to_owned(), source },
        };
        let cancelled = || reporter.is_cancelled();
        let dir = ScratchDir::on_disk(&self.directories)?;
        let new = NewFileSystem::new(dir.path(), size).map_err(refused)?;
        let (mut files, total) = (0, layers.len() as u64);
        for (done, mut layer) in (0..).zip(layers) {
            reporter.progress("unpacking", Unit::Items, done, Some(total));
            layer.file.seek(SeekFrom::Start(layer.offset)).map_err(|e| DaemonError::io("read", path, e))?;
            let words = [
                VERB,
                "--length",
                &layer.length.to_string(),
                "--bytes",
                &size.to_string(),
                "--diff-id",
                &layer.diff_id,
            ];
            let arguments = words.map(str::to_owned).to_vec();
            let printed =
                new.unpack(Path::new(PROGRAM), arguments, layer.file, &cancelled).map_err(refused)?;
            let applied: Applied = serde_json::from_slice(&printed)
                .map_err(|_| refused(ImageError::Header { what: "a layer was not unpacked to its end" }))?;
            files = applied.files;
        }
        reporter.progress("writing", Unit::Items, 0, None);
        let tree = UnpackedTree { folder: TREE, commands: COMMANDS, files };
        new.write(ROOT_LABEL, tree, &cancelled).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Result<ContainerSettings, String> {
        let settings: ContainerSettings = serde_json::from_str(text).map_err(|error| error.to_string())?;
        settings.check().map(|()| settings).map_err(|error| error.to_string())
    }

    #[test]
    fn disks_have_a_size_within_reason_and_modules_a_kernel() {
        assert_eq!(settings("{}").unwrap().size(), DISK_SIZE.0);
        assert_eq!(settings(r#"{"disk_size": "1500M"}"#).unwrap().size(), 1500 << 20);
        settings(r#"{"kernel": "/k", "modules": "/m"}"#).unwrap();
        let bad = [
            r#"{"disk_size": "1M"}"#,
            r#"{"disk_size": "17T"}"#,
            r#"{"disk_size": 8}"#,
            r#"{"modules": "/m"}"#,
            r#"{"size": 1}"#,
        ];
        for bad in bad {
            settings(bad).unwrap_err();
        }
    }
}
