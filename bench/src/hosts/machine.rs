//! The machine that an experiment runs on a host.

use super::Daemon;
use anyhow::{Context as _, Result};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{DebianGuest, GuestFiles, GuestOptions};

/// A boot without hardware virtualisation takes a few seconds on a quiet machine.
const BOOT_PATIENCE: Duration = Duration::from_secs(120);

/// What a machine is started with.
pub(crate) struct Machine {
    pub(crate) memory: ByteSize,
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: PathBuf,
    pub(crate) options: GuestOptions,
    /// Raw image that its disk begins as.
    pub(crate) disk: Option<PathBuf>,
}

impl Machine {
    /// The small guest without a disk. With an address it has a port in `br0`.
    pub(crate) fn small(memory: ByteSize, options: GuestOptions) -> Self {
        let files = GuestFiles::get();
        Self { memory, kernel: files.kernel.clone(), initrd: files.initrd.clone(), options, disk: None }
    }

    /// The same with a blank disk of `size`, made in `folder`.
    pub(crate) fn with_blank_disk(mut self, folder: &Path, size: ByteSize) -> Result<Self> {
        let path = folder.join("blank.raw");
        File::create(&path)?.set_len(size.0)?;
        self.disk = Some(path);
        Ok(self)
    }

    /// The Debian guest.
    pub(crate) fn debian(memory: ByteSize, options: GuestOptions) -> Result<Self> {
        let DebianGuest { kernel, initrd, disk } = DebianGuest::get()?;
        Ok(Self { memory, kernel, initrd, options, disk: Some(disk) })
    }

    /// Starts it as `name` and waits until its witness answers.
    pub(crate) fn run(&self, daemon: &Daemon, name: &str) -> Result<()> {
        let text = |path: &Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
        let (kernel, initrd) = (text(&self.kernel)?, text(&self.initrd)?);
        let (memory, append) = (format!("{}M", self.memory.0 >> 20), self.options.to_string());
        let disk = self.disk.as_deref().map(text).transpose()?;
        let mut arguments = vec!["run", name, "--memory", &memory, "--kernel", &kernel, "--initrd", &initrd];
        arguments.extend(["--append", &append]);
        disk.iter().for_each(|disk| arguments.extend(["--disk", disk]));
        if self.options.address.is_some() {
            arguments.extend(["--net", "br0"]);
        }
        daemon.run(&arguments)?;
        super::console(daemon, name)?.wait_ready(BOOT_PATIENCE)?;
        Ok(())
    }
}
