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
    /// Kernel and initial RAM disk; none if it boots from its first disk.
    pub(crate) boot: Option<(PathBuf, PathBuf)>,
    pub(crate) options: GuestOptions,
    /// Raw images that its disks begin as.
    pub(crate) disks: Vec<PathBuf>,
}

impl Machine {
    /// The small guest without a disk. With an address it has a port in `br0`.
    pub(crate) fn small(memory: ByteSize, options: GuestOptions) -> Self {
        let files = GuestFiles::get();
        let boot = Some((files.kernel.clone(), files.initrd.clone()));
        Self { memory, boot, options, disks: Vec::new() }
    }

    /// The same with a blank disk of `size`, made in `folder`.
    pub(crate) fn with_blank_disk(mut self, folder: &Path, size: ByteSize) -> Result<Self> {
        let path = folder.join("blank.raw");
        File::create(&path)?.set_len(size.0)?;
        self.disks = vec![path];
        Ok(self)
    }

    /// The Debian guest.
    pub(crate) fn debian(memory: ByteSize, options: GuestOptions) -> Result<Self> {
        let DebianGuest { kernel, initrd, disk } = DebianGuest::get()?;
        Ok(Self { memory, boot: Some((kernel, initrd)), options, disks: vec![disk] })
    }

    /// The Debian guest as its owner would install it: boot loader and kernel on a disk of its own, made in
    /// `folder`.
    pub(crate) fn installed(memory: ByteSize, options: GuestOptions, folder: &Path) -> Result<Self> {
        let guest = DebianGuest::get()?;
        let boot = folder.join("boot.raw");
        guest.boot_disk(&boot, &options)?;
        Ok(Self { memory, boot: None, options, disks: vec![boot, guest.disk] })
    }

    /// Starts it as `name` and waits until its witness answers.
    pub(crate) fn run(&self, daemon: &Daemon, name: &str) -> Result<()> {
        self.run_with(daemon, name, &[])
    }

    /// The same, with more arguments of `run`.
    pub(crate) fn run_with(&self, daemon: &Daemon, name: &str, more: &[&str]) -> Result<()> {
        self.start(daemon, name, more)?;
        super::console(daemon, name)?.wait_ready(BOOT_PATIENCE)?;
        Ok(())
    }

    /// Starts it as `name`, with more arguments of `run`, and waits for nothing.
    pub(crate) fn start(&self, daemon: &Daemon, name: &str, more: &[&str]) -> Result<()> {
        let text = |path: &Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
        let (memory, append) = (format!("{}M", self.memory.0 >> 20), self.options.to_string());
        let boot =
            self.boot.as_ref().map(|(kernel, initrd)| Ok::<_, anyhow::Error>([text(kernel)?, text(initrd)?]));
        let boot = boot.transpose()?;
        let disks = self.disks.iter().map(|disk| text(disk)).collect::<Result<Vec<_>>>()?;
        let mut arguments = vec!["run", name, "--memory", &memory];
        arguments.extend(more);
        if let Some([kernel, initrd]) = &boot {
            arguments.extend(["--kernel", kernel, "--initrd", initrd, "--append", &append]);
        }
        disks.iter().for_each(|disk| arguments.extend(["--disk", disk]));
        if self.options.address.is_some() {
            arguments.extend(["--net", "br0"]);
        }
        daemon.run(&arguments).map(drop)
    }
}
