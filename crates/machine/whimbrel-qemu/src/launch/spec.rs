//! Launch specification of a machine, and the errors of an invalid one. Pure.

use crate::{process::ProcessError, qmp::QmpError};
use std::{
    fmt, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};
use whimbrel_core::{DeviceModel, MachineConfig};

/// Most disks of a machine: PCI slots 0x10 to 0x1d.
pub const MAX_DISKS: usize = 14;
/// Most network ports of a machine: PCI slots 0x08 to 0x0f.
pub const MAX_NICS: usize = 8;
/// Most SATA disks and CD-ROM drives of a machine: ports of the controller that every PC of QEMU has (q35).
pub const MAX_SATA: usize = 6;
/// Longest path of a Unix socket (`sun_path` without its final zero).
const MAX_SOCKET_PATH: usize = 107;
/// Longest name of a socket in the runtime directory, with its slash.
const LONGEST_SOCKET: &str = "/state";

/// Machine to launch on this host: its configuration and the locations of its parts.
#[derive(Debug, Clone)]
pub struct LaunchSpec {
    /// Configuration of the machine.
    pub config: MachineConfig,
    /// Existing directory of this machine for the sockets `qmp`, `serial`, `guest`, `agent`, `vnc`, `net0`, …
    /// and the log `qemu.log`.
    pub dir: PathBuf,
    /// File of guest memory.
    pub ram: RamBacking,
    /// Unix sockets of NBD servers with an export named "", one for each disk of the configuration.
    pub disks: Vec<PathBuf>,
    /// Kernel file, if the configuration boots one.
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk, if the configuration has one.
    pub initrd: Option<PathBuf>,
    /// Program of the firmware, if the configuration has UEFI. Its variables are on a disk.
    pub firmware: Option<PathBuf>,
    /// Generation id for the guest; if none, QEMU draws a new one.
    pub vmgenid: Option<Vmgenid>,
    /// Whether the machine waits for [`crate::Qemu::load`] instead of booting.
    pub incoming: bool,
    /// Namespace and tap devices for its network ports; if none, QEMU listens on [`LaunchSpec::net_socket`].
    /// A state that was saved with tap devices loads only with them.
    pub network: Option<Arc<TapDevices>>,
    /// Connection to its TPM, if the configuration has one.
    pub tpm: Option<Arc<OwnedFd>>,
    /// Whether the machine has a balloon. Source and target of a migration must agree.
    pub balloon: bool,
}

/// Tap devices that QEMU gets, and the network namespace that they are in and QEMU too.
#[derive(Debug)]
pub struct TapDevices {
    /// Descriptor of the namespace.
    pub namespace: OwnedFd,
    /// Tap device of each network port, in their order, with headers of offloads.
    pub taps: Vec<OwnedFd>,
}

/// File of guest memory.
///
/// With [`Sharing::Private`] the caller must prevent QEMU from changing the file. For a balloon or a free
/// page report QEMU punches a hole into the *file*, even with a private mapping, and so would change the
/// memory of every other machine that maps it. `whimbrel-memory` removes QEMU's descriptor of the file before
/// a CPU runs.
#[derive(Debug, Clone)]
pub struct RamBacking {
    /// Path of a file that is sparse or empty; QEMU extends it if necessary.
    pub path: PathBuf,
    /// Sharing of the mapping.
    pub sharing: Sharing,
}

/// Sharing of the mapping of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Writes of the guest go to the file.
    Shared,
    /// Writes of the guest stay in QEMU: clones share the pages of one file.
    Private,
}

/// Generation id: a change tells the guest that it is a copy (Microsoft, Virtual Machine Generation ID).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Vmgenid(pub [u8; 16]);

/// The specification is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Memory must be a whole number of MiB, and not zero.
    #[error("{bytes} bytes of memory are not a whole number of MiB")]
    Memory {
        /// Requested size in bytes.
        bytes: u64,
    },
    /// The machine has no virtual CPU.
    #[error("a machine needs a virtual CPU")]
    NoCpu,
    /// A word of the configuration could be parsed as several options.
    #[error("{text:?} cannot be a {what}")]
    Word {
        /// Kind of the word: `machine type`, `CPU model`, …
        what: &'static str,
        /// Text of the word.
        text: String,
    },
    /// There are not enough PCI slots for the devices.
    #[error("{count} {what} are too many, the limit is {max}")]
    TooMany {
        /// Kind of the device: `disks` or `network ports`.
        what: &'static str,
        /// Number that was requested.
        count: usize,
        /// Greatest number allowed.
        max: usize,
    },
    /// Two parts of the specification do not match.
    #[error("{what} of the configuration and of the host do not match")]
    Mismatch {
        /// Kind of the part: `disks`, `tap devices`, `kernel`, …
        what: &'static str,
    },
    /// A socket in this directory would have a longer path than the kernel allows.
    #[error("{dir} is too long a path for sockets, the limit is {max} bytes")]
    DirTooLong {
        /// Path of the runtime directory.
        dir: PathBuf,
        /// Greatest length of the path in bytes.
        max: usize,
    },
}

/// Cause of a failed launch.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The specification is invalid.
    #[error("this machine cannot be launched")]
    Spec(#[from] SpecError),
    /// The process could not be started.
    #[error("cannot start qemu")]
    Process(#[from] ProcessError),
    /// QEMU ended at once, usually because it rejects its command line.
    #[error("qemu rejects its command line: {words}")]
    Rejected {
        /// Error output of QEMU.
        words: String,
    },
    /// QEMU runs but does not answer.
    #[error("qemu does not answer within {after:?}: {words}")]
    Silent {
        /// Time waited for an answer.
        after: Duration,
        /// Output of QEMU in this time.
        words: String,
    },
    /// QEMU answers, but rejects a command.
    #[error("qemu rejects its first commands")]
    Qmp(#[from] QmpError),
    /// A file for the machine could not be created.
    #[error("cannot create {what}")]
    Io {
        /// Name of the file.
        what: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
}

impl LaunchSpec {
    /// Creates a minimal specification: no disks, no kernel, a balloon, a new generation id.
    pub fn new(config: MachineConfig, dir: impl Into<PathBuf>, ram: RamBacking) -> Self {
        let dir = dir.into();
        Self {
            config,
            ram,
            disks: Vec::new(),
            kernel: None,
            initrd: None,
            firmware: None,
            vmgenid: None,
            incoming: false,
            network: None,
            tpm: None,
            balloon: true,
            dir,
        }
    }

    /// Path of QEMU's control socket.
    pub fn qmp_socket(&self) -> PathBuf {
        qmp_in(&self.dir)
    }

    /// Path of the serial console's socket, for [`crate::Console`].
    pub fn serial_socket(&self) -> PathBuf {
        self.dir.join("serial")
    }

    /// Socket of the virtio port `org.whimbrel.guest.0`, for the guest agent.
    pub fn guest_socket(&self) -> PathBuf {
        guest_in(&self.dir)
    }

    /// Socket of the virtio port `org.qemu.guest_agent.0`, for qemu-ga, if the machine has it.
    pub fn agent_socket(&self) -> PathBuf {
        agent_in(&self.dir)
    }

    /// Socket of network port `index` without a tap device: frames, each after its length in four bytes, big
    /// endian. QEMU listens.
    pub fn net_socket(&self, index: usize) -> PathBuf {
        self.dir.join(format!("net{index}"))
    }

    /// Socket of the screen, which speaks RFB (RFC 6143), if the machine has one.
    pub fn display_socket(&self) -> PathBuf {
        display_in(&self.dir)
    }

    /// File of QEMU's output.
    pub fn log(&self) -> PathBuf {
        log_in(&self.dir)
    }

    /// Checks the specification.
    pub fn check(&self) -> Result<(), SpecError> {
        let config = &self.config;
        let bytes = config.memory.0;
        if bytes == 0 || !bytes.is_multiple_of(1 << 20) {
            return Err(SpecError::Memory { bytes });
        }
        if config.cpus == 0 {
            return Err(SpecError::NoCpu);
        }
        check_word("machine type", &config.machine, "-_.")?;
        // A CPU model is followed by features: `max,-avx512f,phys-bits=40`.
        check_word("CPU model", &config.cpu, "-_.,=+")?;
        for nic in &config.nics {
            check_mac(&nic.mac)?;
        }
        check_count("disks", config.disks.len(), MAX_DISKS)?;
        check_count("network ports", config.nics.len(), MAX_NICS)?;
        check_count("CD-ROM drives and SATA disks", sata_disks(config).count(), MAX_SATA)?;
        self.check_files()?;
        let max = MAX_SOCKET_PATH - LONGEST_SOCKET.len().max("/serial".len());
        if self.dir.as_os_str().len() > max {
            return Err(SpecError::DirTooLong { dir: self.dir.clone(), max });
        }
        Ok(())
    }

    fn check_files(&self) -> Result<(), SpecError> {
        let boot = self.config.boot.as_ref();
        let matches = [
            ("disks", self.config.disks.len() == self.disks.len()),
            (
                "tap devices",
                self.network.as_ref().is_none_or(|taps| taps.taps.len() == self.config.nics.len()),
            ),
            ("kernel", boot.is_some() == self.kernel.is_some()),
            ("initrd", boot.is_some_and(|boot| boot.initrd.is_some()) == self.initrd.is_some()),
            ("firmware", self.config.firmware.uefi().is_some() == self.firmware.is_some()),
            ("TPM", self.config.tpm.is_some() == self.tpm.is_some()),
            ("the disk of the TPM", self.config.tpm.is_none_or(|disk| (disk as usize) < self.disks.len())),
            (
                "the disk of the firmware's variables",
                variables(&self.config).is_none_or(|disk| disk < self.disks.len()),
            ),
            (
                "the medium of a CD-ROM drive",
                self.config.cdroms.disks.iter().all(|disk| (*disk as usize) < self.disks.len()),
            ),
        ];
        match matches.into_iter().find(|(_, matches)| !matches) {
            Some((what, _)) => Err(SpecError::Mismatch { what }),
            None => Ok(()),
        }
    }
}

/// Index of the disk with the firmware's variables.
fn variables(config: &MachineConfig) -> Option<usize> {
    config.firmware.uefi().map(|uefi| uefi.variables as usize)
}

/// Disks that the guest has, in their order: not those that are flash memory or the state of a TPM.
pub fn guest_disks(config: &MachineConfig) -> impl Iterator<Item = usize> {
    let is_hidden = |disk: usize| variables(config) == Some(disk) || config.tpm == u32::try_from(disk).ok();
    (0..config.disks.len()).filter(move |disk| !is_hidden(*disk))
}

/// Disks of the guest at ports of the SATA controller, in the order of the ports.
pub fn sata_disks(config: &MachineConfig) -> impl Iterator<Item = usize> {
    let all = config.devices == DeviceModel::Emulated;
    guest_disks(config).filter(move |disk| all || config.cdroms.has(*disk))
}

/// Log file of the QEMU with runtime directory `dir`.
pub(crate) fn log_in(dir: &Path) -> PathBuf {
    dir.join("qemu.log")
}

/// Guest port of the QEMU with runtime directory `dir`.
pub(crate) fn guest_in(dir: &Path) -> PathBuf {
    dir.join("guest")
}

/// Port of qemu-ga of the QEMU with runtime directory `dir`.
pub(crate) fn agent_in(dir: &Path) -> PathBuf {
    dir.join("agent")
}

/// Socket of the screen of the QEMU with runtime directory `dir`.
pub fn display_in(dir: &Path) -> PathBuf {
    dir.join("vnc")
}

/// Control socket of the QEMU with runtime directory `dir`.
pub(crate) fn qmp_in(dir: &Path) -> PathBuf {
    dir.join("qmp")
}

fn check_word(what: &'static str, text: &str, also: &str) -> Result<(), SpecError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || also.contains(c);
    if !text.is_empty() && text.chars().all(allowed) {
        return Ok(());
    }
    Err(SpecError::Word { what, text: text.chars().take(80).collect() })
}

fn check_mac(mac: &str) -> Result<(), SpecError> {
    let bytes: Vec<_> = mac.split(':').collect();
    let is_byte = |byte: &&str| byte.len() == 2 && byte.chars().all(|c| c.is_ascii_hexdigit());
    if bytes.len() == 6 && bytes.iter().all(is_byte) {
        return Ok(());
    }
    Err(SpecError::Word { what: "hardware address", text: mac.chars().take(80).collect() })
}

fn check_count(what: &'static str, count: usize, max: usize) -> Result<(), SpecError> {
    if count <= max { Ok(()) } else { Err(SpecError::TooMany { what, count, max }) }
}

impl fmt::Display for Vmgenid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Vmgenid {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let fail = || SpecError::Word { what: "generation id", text: text.chars().take(80).collect() };
        let digits: Vec<_> = text.bytes().filter(|byte| *byte != b'-').collect();
        if text.len() != 36 || digits.len() != 32 {
            return Err(fail());
        }
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).ok_or_else(fail);
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

impl Vmgenid {
    /// Bytes as in guest memory: the first three fields are little endian (RFC 9562, section 4).
    pub fn in_memory(&self) -> [u8; 16] {
        let mut bytes = self.0;
        bytes[0..4].reverse();
        bytes[4..6].reverse();
        bytes[6..8].reverse();
        bytes
    }
}
