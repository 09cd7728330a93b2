//! Prestarted QEMUs: processes that wait for the next resume.
//!
//! A resume spends most of its time starting a process. So after a suspend or resume one QEMU of the same
//! configuration is started in the background, with its memory attached; the next resume of that
//! configuration takes it. At most a few wait, the oldest is ended first, and all end with the daemon. Clones
//! cannot use them: their shared memory must be named when their QEMU starts.

use crate::{core::error::DaemonError, daemon::Daemon};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};
use whimbrel_core::{MachineConfig, lock};
use whimbrel_vm::{PrestartedQemu, Reservation, TemplateKey, Templates, runtime_dir::RuntimeDir};

/// Most QEMUs that wait; an idle one costs some 30 MB.
const WAITING_MAX: usize = 8;

/// Prestarted QEMUs, and the memory templates of clones.
#[derive(Default)]
pub(crate) struct PrestartedQemus {
    waiting: Mutex<VecDeque<(MachineConfig, PrestartedQemu)>>,
    pub(crate) templates: Templates,
}

impl PrestartedQemus {
    /// A waiting QEMU of this configuration that still lives.
    fn take(&self, config: &MachineConfig) -> Option<PrestartedQemu> {
        loop {
            let mut waiting = lock(&self.waiting);
            let at = waiting.iter().position(|(of, _)| of == config)?;
            let (_, warm) = waiting.remove(at)?;
            drop(waiting);
            if warm.is_alive() {
                return Some(warm);
            }
            warm.end();
        }
    }

    fn put(&self, config: MachineConfig, warm: PrestartedQemu) {
        let mut waiting = lock(&self.waiting);
        waiting.push_back((config, warm));
        let surplus = if waiting.len() > WAITING_MAX { waiting.pop_front() } else { None };
        drop(waiting);
        if let Some((_, warm)) = surplus {
            warm.end();
        }
    }

    fn count(&self, config: &MachineConfig) -> usize {
        lock(&self.waiting).iter().filter(|(of, _)| of == config).count()
    }

    /// Ends all waiting QEMUs; false if there were none.
    pub(crate) fn end_all(&self) -> bool {
        let all = std::mem::take(&mut *lock(&self.waiting));
        let any = !all.is_empty();
        all.into_iter().for_each(|(_, warm)| warm.end());
        any
    }
}

impl Daemon {
    /// A QEMU for a machine of this configuration: a waiting one, or else a new one.
    pub(crate) fn take_or_start_qemu(&self, config: &MachineConfig) -> Result<PrestartedQemu, DaemonError> {
        let start = || self.start_prestarted(config, self.reserve_memory(config.memory)?);
        self.prestarted.take(config).map_or_else(start, Ok)
    }

    fn start_prestarted(
        &self,
        config: &MachineConfig,
        memory: Reservation,
    ) -> Result<PrestartedQemu, DaemonError> {
        let dirs = self.directories.qemu_dirs();
        let slot = RuntimeDir::create(&dirs.runtime_dirs, config, memory)?;
        Ok(PrestartedQemu::start(&dirs, config, slot)?)
    }

    /// Starts a QEMU that shares its memory with the other clones of the same content.
    pub(crate) fn start_clone(
        &self,
        config: &MachineConfig,
        content: TemplateKey,
    ) -> Result<PrestartedQemu, DaemonError> {
        let dirs = self.directories.qemu_dirs();
        // What a clone writes is in its own process, not on the tmpfs.
        let mut slot = RuntimeDir::create(&dirs.runtime_dirs, config, self.memory.adopt(0))?;
        let reserve = || self.reserve_memory(config.memory);
        match self.prestarted.templates.link(content, &slot.ram(), reserve) {
            Ok(template) => slot.hold_template(template),
            Err(error) => {
                slot.remove();
                return Err(error);
            }
        }
        Ok(PrestartedQemu::start(&dirs, config, slot)?)
    }

    /// Starts a QEMU of this configuration in the background, unless one waits.
    pub(crate) fn prestart_qemu(self: &Arc<Self>, config: &MachineConfig) {
        if self.prestarted.count(config) > 0 {
            return;
        }
        // Only memory that nobody else needs is taken.
        let Ok(Ok(memory)) = self.memory.reserve(config.memory.0) else { return };
        let (host, config) = (self.clone(), config.clone());
        let started = std::thread::Builder::new().name("warm-up".into()).spawn(move || {
            match host.start_prestarted(&config, memory) {
                Ok(warm) => host.prestarted.put(config, warm),
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "could not prestart a QEMU")
                }
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, "could not start a thread to prestart a QEMU");
        }
    }
}
