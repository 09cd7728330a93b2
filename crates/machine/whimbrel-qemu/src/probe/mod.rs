//! Probe of the host: its QEMU binary, and the accelerator for its guests.
//!
//! Runs once in each process, because the results do not change while it runs.

mod binary;
mod kvm;
mod kvm_result;

pub(crate) use binary::program;
pub use binary::{ProbeError, QemuBinary, Version, find};
pub use kvm::{KvmProbe, probe_kvm};

use std::sync::OnceLock;
use whimbrel_core::Accel;

/// Oldest QEMU with all required features (`-netdev stream` came with 7.2).
const OLDEST: Version = Version { major: 7, minor: 2, micro: 0 };

/// Finding about this host, for `doctor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Whether the check passed.
    pub ok: bool,
    /// Finding in one sentence.
    pub found: String,
    /// Advice for a failed check; none if it passed.
    pub fix: Option<String>,
}

/// QEMU binary of this host, found on the first call.
pub fn probe() -> Result<&'static QemuBinary, &'static ProbeError> {
    static FOUND: OnceLock<Result<QemuBinary, ProbeError>> = OnceLock::new();
    FOUND.get_or_init(|| find().and_then(|path| QemuBinary::probe(&path))).as_ref()
}

/// Findings about QEMU and KVM, for people.
pub fn findings() -> Vec<Finding> {
    match probe() {
        Ok(binary) => vec![binary_finding(binary), kvm_finding(probe_kvm(binary))],
        Err(error) => vec![Finding {
            ok: false,
            found: error.to_string(),
            fix: Some("install qemu 7.2 or newer, on Debian: apt install qemu-system-x86".into()),
        }],
    }
}

/// Accelerator that the owner of this host has chosen.
static CHOSEN: OnceLock<Accel> = OnceLock::new();

/// Makes `accel` the result of [`best_accel`], whatever the probe finds: guests of one's own may run where
/// those of today do not. The first choice holds for the life of the process.
pub fn choose_accel(accel: Accel) {
    if CHOSEN.set(accel).is_err() {
        tracing::debug!("the accelerator was chosen before");
    }
}

/// Accelerator of new machines: the chosen one, else the fastest that works on this host.
pub fn best_accel(binary: &QemuBinary) -> Accel {
    CHOSEN.get().copied().unwrap_or_else(|| match probe_kvm(binary) {
        KvmProbe::Works => Accel::Kvm,
        _ => Accel::Tcg,
    })
}

fn binary_finding(binary: &QemuBinary) -> Finding {
    let found = format!("qemu {} at {}", binary.version, binary.path.display());
    let ok = binary.version >= OLDEST;
    Finding { ok, found, fix: (!ok).then(|| format!("install qemu {OLDEST} or newer")) }
}

fn kvm_finding(kvm: &KvmProbe) -> Finding {
    let (ok, found, fix) = match kvm {
        KvmProbe::Works => (true, "kvm executes guests".to_owned(), None),
        KvmProbe::Absent => (
            false,
            "there is no /dev/kvm, guests run on the slower tcg".to_owned(),
            Some("turn on virtualisation in the firmware and load kvm_intel or kvm_amd"),
        ),
        KvmProbe::Denied => (
            false,
            "/dev/kvm cannot be opened, guests run on the slower tcg".to_owned(),
            Some("join the group kvm"),
        ),
        KvmProbe::Closed => (
            false,
            "/dev/kvm is closed to the users of machines, guests run on the slower tcg".to_owned(),
            Some("give it a group other than root's, as udev does: root:kvm, mode 0660"),
        ),
        KvmProbe::Broken { words } => (
            false,
            format!(
                "/dev/kvm exists but is of no use to guests of today: {words}; they run on the slower tcg"
            ),
            Some("turn on nested virtualisation on the host below; --accel kvm runs guests that need less"),
        ),
    };
    Finding { ok, found, fix: fix.map(str::to_owned) }
}
