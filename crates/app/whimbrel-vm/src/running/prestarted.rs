//! Prestarted QEMU: a process in its runtime directory that is no machine yet.

use super::{LaunchOptions, QemuDirs, RunningError, RunningMemory, builder::launch, runtime_dir::RuntimeDir};
use whimbrel_core::MachineConfig;
use whimbrel_qemu::Qemu;

/// A QEMU in its runtime directory that is no machine yet.
pub struct PrestartedQemu {
    pub(super) runtime_dir: RuntimeDir,
    pub(super) qemu: Qemu,
    /// The memory, if that was attached early too.
    pub(super) memory: Option<RunningMemory>,
}

impl PrestartedQemu {
    /// Starts a QEMU that waits for a machine of this configuration.
    pub fn start(dirs: &QemuDirs, config: &MachineConfig, slot: RuntimeDir) -> Result<Self, RunningError> {
        let mut warm = launch(dirs, config, slot, LaunchOptions { incoming: true, vmgenid: None })?;
        match RunningMemory::attach(&warm.qemu, &warm.runtime_dir, true) {
            Ok(memory) => {
                warm.memory = Some(memory);
                Ok(warm)
            }
            Err(error) => {
                warm.end();
                Err(error)
            }
        }
    }

    /// Whether its process lives.
    pub fn is_alive(&self) -> bool {
        self.qemu.process().is_alive()
    }

    /// Ends the process and removes its runtime directory.
    pub fn end(self) {
        self.qemu.kill();
        drop(self.memory);
        self.runtime_dir.remove();
    }
}
