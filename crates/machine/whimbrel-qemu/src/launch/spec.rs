//! What to launch, and which of it QEMU could not be given. Pure.

use crate::{process::ProcessError, qmp::QmpError};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};
use whimbrel_core::MachineConfig;

/// Disks of a machine: PCI slots 0x10 to 0x1d.
pub(super) const MAX_DISKS: usize = 14;
/// Network ports of a machine: PCI slots 0x08 to 0x0f.
pub(super) const MAX_NICS: usize = 8;
/// Longest path of a unix socket (`sun_path` without its final zero).
const MAX_SOCKET_PATH: usize = 107;
/// The longest name of a socket in the slot directory, with its slash.
const LONGEST_SOCKET: &str = "/state";

/// A machine on this host: its configuration and where its parts are.
#[derive(Debug, Clone)]
pub struct LaunchSpec {
    /// The machine.
    pub config: MachineConfig,
    /// An existing directory for the sockets `qmp`, `serial`, `guest`, `net0`, … and the log `qemu.log`, this
    /// machine's alone.
    pub dir: PathBuf,
    /// Guest memory.
    pub ram: RamBacking,
    /// Unix sockets of NBD servers with an export named "", one a disk of the configuration.
    pub disks: Vec<PathBuf>,
    /// The kernel file, if the configuration boots one.
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk, if the configuration has one.
    pub initrd: Option<PathBuf>,
    /// Generation id the guest sees; none has QEMU draw a new one.
    pub vmgenid: Option<Vmgenid>,
    /// Whether it waits for [`crate::Qemu::load`] instead of starting afresh.
    pub incoming: bool,
    /// File to which the serial console is appended.
    pub console_log: PathBuf,
    /// Whether it has a balloon. Must agree on both ends of a move.
    pub balloon: bool,
}

/// The file behind guest memory.
///
/// With [`Sharing::Private`] the caller must see to it that QEMU cannot change the file: it answers a balloon
/// or a free page report by punching a hole into the *file*, private mapping or not, and so would change the
/// memory of every other machine mapped from it. `whimbrel-memory` takes QEMU's descriptor of it away before
/// a CPU runs.
#[derive(Debug, Clone)]
pub struct RamBacking {
    /// Path, which may be `/proc/PID/fd/N` of a memfd. QEMU creates it sparse and grows it if need be.
    pub path: PathBuf,
    /// How QEMU maps it.
    pub sharing: Sharing,
}

/// How QEMU maps the file behind guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Writes of the guest are in the file.
    Shared,
    /// Writes of the guest stay in QEMU: clones share the pages of one file.
    Private,
}

/// A generation id: the guest learns by its change that it is a copy (Microsoft, Virtual Machine Generation
/// ID).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Vmgenid(pub [u8; 16]);

/// A specification no command line can be made of.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Memory must be a whole number of MiB, and some.
    #[error("{bytes} bytes of memory are not a whole number of MiB")]
    Memory {
        /// What was asked for.
        bytes: u64,
    },
    /// No virtual CPU.
    #[error("a machine needs a virtual CPU")]
    NoCpu,
    /// A word of the configuration could be read as several options.
    #[error("{text:?} cannot be a {what}")]
    Word {
        /// `machine type`, `CPU model`, …
        what: &'static str,
        /// What was given.
        text: String,
    },
    /// More of something than there are PCI slots for.
    #[error("{count} {what} are too many, the limit is {max}")]
    TooMany {
        /// `disks` or `network ports`.
        what: &'static str,
        /// How many were asked for.
        count: usize,
        /// How many there may be.
        max: usize,
    },
    /// Parts of the specification that belong together do not.
    #[error("{what} of the configuration and of the host do not match")]
    Mismatch {
        /// `disks`, `kernel` or `initrd`.
        what: &'static str,
    },
    /// A socket in this directory would have a name longer than the kernel allows.
    #[error("{dir} is too long a path for sockets, the limit is {max} bytes")]
    DirTooLong {
        /// The slot directory.
        dir: PathBuf,
        /// How long it may be.
        max: usize,
    },
}

/// A QEMU did not start.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The specification is wrong.
    #[error("this machine cannot be launched")]
    Spec(#[from] SpecError),
    /// The process does not start.
    #[error("cannot start qemu")]
    Process(#[from] ProcessError),
    /// QEMU ended at once. Most often it rejects its command line.
    #[error("qemu rejects its command line: {words}")]
    Rejected {
        /// QEMU's own words.
        words: String,
    },
    /// QEMU runs but does not answer.
    #[error("qemu does not answer within {after:?}: {words}")]
    Silent {
        /// How long was waited.
        after: Duration,
        /// What it wrote meanwhile.
        words: String,
    },
    /// QEMU answers, but not as it should.
    #[error("qemu does not take its first commands")]
    Qmp(#[from] QmpError),
    /// A file of ours for the machine cannot be made.
    #[error("cannot make {what}")]
    Io {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl LaunchSpec {
    /// A specification with nothing but what every machine has: no disks, no kernel, a balloon, a new
    /// generation id.
    pub fn new(config: MachineConfig, dir: impl Into<PathBuf>, ram: RamBacking) -> Self {
        let dir = dir.into();
        Self {
            config,
            ram,
            disks: Vec::new(),
            kernel: None,
            initrd: None,
            vmgenid: None,
            incoming: false,
            console_log: dir.join("console.log"),
            balloon: true,
            dir,
        }
    }

    /// QEMU's control socket.
    pub fn qmp_socket(&self) -> PathBuf {
        qmp_in(&self.dir)
    }

    /// The serial console, for [`crate::Console`].
    pub fn serial_socket(&self) -> PathBuf {
        self.dir.join("serial")
    }

    /// The virtio port `org.whimbrel.guest.0` of a program inside the guest.
    pub fn guest_socket(&self) -> PathBuf {
        guest_in(&self.dir)
    }

    /// Network port `index`: frames, each after its length in four bytes, big endian. QEMU listens.
    pub fn net_socket(&self, index: usize) -> PathBuf {
        self.dir.join(format!("net{index}"))
    }

    /// What QEMU writes to its output.
    pub fn log(&self) -> PathBuf {
        log_in(&self.dir)
    }

    /// Whether a command line can be made of it.
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
            ("kernel", boot.is_some() == self.kernel.is_some()),
            ("initrd", boot.is_some_and(|boot| boot.initrd.is_some()) == self.initrd.is_some()),
        ];
        match matches.into_iter().find(|(_, matches)| !matches) {
            Some((what, _)) => Err(SpecError::Mismatch { what }),
            None => Ok(()),
        }
    }
}

/// Where the QEMU of slot directory `dir` writes its output.
pub(crate) fn log_in(dir: &Path) -> PathBuf {
    dir.join("qemu.log")
}

/// The guest's port of the QEMU of slot directory `dir`.
pub(crate) fn guest_in(dir: &Path) -> PathBuf {
    dir.join("guest")
}

/// The control socket of the QEMU of slot directory `dir`.
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
    /// The bytes as they lie in guest memory: the first three fields are little endian (RFC 9562, section 4).
    pub fn in_memory(&self) -> [u8; 16] {
        let mut bytes = self.0;
        bytes[0..4].reverse();
        bytes[4..6].reverse();
        bytes[6..8].reverse();
        bytes
    }
}
