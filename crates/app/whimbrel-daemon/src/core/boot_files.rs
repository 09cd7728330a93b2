//! Boot files: kernels and initial RAM disks, stored under their digests.

use crate::core::{error::DaemonError, state::Core};
use std::path::Path;
use whimbrel_api::RunRequest;
use whimbrel_core::{Boot, Digest};

impl Core {
    /// The boot files of a new machine, stored here.
    pub(crate) fn boot_of(&self, request: &RunRequest) -> Result<Option<Boot>, DaemonError> {
        let Some(kernel) = &request.kernel else {
            return match (&request.initrd, &request.append) {
                (None, None) => Ok(None),
                _ => Err(DaemonError::invalid(
                    "an initial RAM disk or a kernel command line needs a kernel: add --kernel FILE",
                )),
            };
        };
        let kernel = self.store_boot_file(kernel)?;
        let initrd = request.initrd.as_deref().map(|path| self.store_boot_file(path)).transpose()?;
        Ok(Some(Boot { kernel, initrd, append: request.append.clone().unwrap_or_default() }))
    }

    /// Copies a boot file to the boot directory, under its digest.
    pub(crate) fn store_boot_file(&self, path: &Path) -> Result<Digest, DaemonError> {
        let content = std::fs::read(path).map_err(|source| DaemonError::io("read", path, source))?;
        let digest = Digest::of(&content);
        self.write_boot_file(&digest, &content)?;
        Ok(digest)
    }

    pub(crate) fn write_boot_file(&self, digest: &Digest, content: &[u8]) -> Result<(), DaemonError> {
        let kept = self.directories.boot_file(digest);
        if kept.exists() {
            return Ok(());
        }
        whimbrel_wire::atomic_file::replace(&kept, content)
            .map_err(|source| DaemonError::io("write", &kept, source))
    }
}
