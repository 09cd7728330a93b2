//! A real guest to measure on: QEMU as the product starts it, the test kit's kernel and witness.
//!
//! It has no network. Its memory is a file in `/dev/shm`, gone with the value, as is its QEMU.

use anyhow::{Context as _, Result};
use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use whimbrel_core::{Boot, ByteSize, Digest, DiskConfig, MachineConfig};
use whimbrel_machine::Machine as _;
use whimbrel_qemu::{LaunchSpec, Qemu, RamBacking, Sharing, best_accel, probe};
use whimbrel_testkit::guest::{DebianGuest, GuestFiles, GuestOptions, TestAgent};

/// A boot without hardware virtualisation takes a few seconds on a quiet machine.
const BOOT_PATIENCE: Duration = Duration::from_secs(120);

/// What a guest is made of.
pub(crate) struct GuestPlan {
    pub(crate) memory: ByteSize,
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: PathBuf,
    pub(crate) options: GuestOptions,
    /// Socket of an NBD server and size of what it serves, one a disk.
    pub(crate) disks: Vec<(PathBuf, ByteSize)>,
    /// How long its boot may take.
    pub(crate) patience: Duration,
}

impl GuestPlan {
    /// The small guest, without a disk.
    pub(crate) fn small(memory: ByteSize, options: GuestOptions) -> Self {
        let files = GuestFiles::get();
        Self {
            memory,
            kernel: files.kernel.clone(),
            initrd: files.initrd.clone(),
            options,
            disks: Vec::new(),
            patience: BOOT_PATIENCE,
        }
    }

    /// The Debian guest, its disk served at `socket`.
    pub(crate) fn debian(
        guest: &DebianGuest,
        memory: ByteSize,
        options: GuestOptions,
        socket: &Path,
    ) -> Result<Self> {
        let size = std::fs::metadata(&guest.disk)?.len();
        Ok(Self {
            memory,
            kernel: guest.kernel.clone(),
            initrd: guest.initrd.clone(),
            options,
            disks: vec![(socket.to_owned(), ByteSize(size))],
            patience: BOOT_PATIENCE,
        })
    }

    /// The same, with more time to boot: its disk is slow.
    pub(crate) fn patient(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The machine as the product would make it.
    pub(crate) fn config(&self) -> Result<MachineConfig> {
        let qemu = probe()?;
        // A digest only names the file in a capsule, and nothing here becomes one.
        let nameless = Digest::of(b"");
        Ok(MachineConfig {
            machine: qemu.machine_type("q35").context("this QEMU has no machine type q35")?.to_owned(),
            accel: best_accel(qemu),
            disks: self.disks.iter().map(|(_, size)| DiskConfig { size: *size }).collect(),
            boot: Some(Boot { kernel: nameless, initrd: Some(nameless), append: self.options.to_string() }),
            ..MachineConfig::minimal(self.memory)
        })
    }
}

/// A guest that has booted and runs.
pub(crate) struct Guest {
    /// Present until drop.
    qemu: Option<Qemu>,
    pub(crate) witness: TestAgent,
    ram: PathBuf,
    _folder: TempDir,
}

impl Guest {
    /// Boots `plan` and waits for its witness.
    pub(crate) fn boot(plan: &GuestPlan) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
        let ram = folder.path().join("ram");
        let backing = RamBacking { path: ram.clone(), sharing: Sharing::Shared };
        let spec = LaunchSpec {
            kernel: Some(plan.kernel.clone()),
            initrd: Some(plan.initrd.clone()),
            disks: plan.disks.iter().map(|(socket, _)| socket.clone()).collect(),
            ..LaunchSpec::new(plan.config()?, folder.path(), backing)
        };
        let qemu = Qemu::launch(&probe()?.path, &spec)?;
        let console =
            UnixStream::connect(spec.serial_socket()).and_then(|stream| Ok((stream.try_clone()?, stream)));
        let (reader, writer) = console.inspect_err(|_| qemu.process().kill())?;
        let mut guest =
            Self { qemu: Some(qemu), witness: TestAgent::over(reader, writer), ram, _folder: folder };
        guest.qemu().unpause()?;
        guest.witness.wait_ready(plan.patience)?;
        Ok(guest)
    }

    /// Its QEMU.
    pub(crate) fn qemu(&mut self) -> &mut Qemu {
        self.qemu.as_mut().expect("a guest has its QEMU until it is dropped")
    }

    /// The file behind its memory.
    pub(crate) fn ram(&self) -> &Path {
        &self.ram
    }

    /// Copies its memory, as it is at one instant, to `to`.
    pub(crate) fn dump(&mut self, to: &Path) -> Result<()> {
        self.qemu().pause()?;
        let copied = File::open(&self.ram).and_then(|mut from| io::copy(&mut from, &mut File::create(to)?));
        self.qemu().unpause()?;
        copied.with_context(|| format!("cannot copy guest memory to {}", to.display())).map(drop)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(qemu) = self.qemu.take() {
            qemu.kill();
        }
    }
}
