//! Prestarted QEMUs: processes that wait for the next resume.
//!
//! A resume spends most of its time starting a process. So after a suspend or resume one QEMU of the same
//! configuration is started in the background, with its memory attached; the next resume of that
//! configuration takes it. At most a few wait, the oldest is ended first, and all end with the daemon. Clones
//! cannot use them: their shared memory must be named when their QEMU starts.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{reservations::Reservation, runtime_dir::RuntimeDir},
    running::{LaunchOptions, RunningMemory, TemplateContent, Templates, launch},
};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use whimbrel_core::MachineConfig;
use whimbrel_qemu::Qemu;

/// Most QEMUs that wait; an idle one costs some 30 MB.
const WAITING_MAX: usize = 8;

/// A QEMU in its runtime directory that is no machine yet.
pub(crate) struct PrestartedQemu {
    pub(crate) runtime_dir: RuntimeDir,
    pub(crate) qemu: Qemu,
    /// The memory, if that was attached early too.
    pub(crate) memory: Option<RunningMemory>,
}

/// Prestarted QEMUs, and the memory templates of clones.
#[derive(Default)]
pub(crate) struct PrestartedQemus {
    waiting: Mutex<VecDeque<(MachineConfig, PrestartedQemu)>>,
    pub(crate) templates: Templates,
}

impl PrestartedQemu {
    /// Starts a QEMU that waits for a machine of this configuration.
    pub(crate) fn start(
        host: &Daemon,
        config: &MachineConfig,
        memory: Reservation,
    ) -> Result<Self, DaemonError> {
        Self::start_in(RuntimeDir::create(&host.directories, config, memory)?, host, config)
    }

    /// Starts a QEMU that shares its memory with the other clones of the same content.
    pub(crate) fn start_clone(
        host: &Daemon,
        config: &MachineConfig,
        content: TemplateContent,
    ) -> Result<Self, DaemonError> {
        // What a clone writes is in its own process, not on the tmpfs.
        let mut slot = RuntimeDir::create(&host.directories, config, host.memory.adopt(0))?;
        let reserve = || host.reserve_memory(config.memory);
        match host.prestarted.templates.link(content, &slot.ram(), reserve) {
            Ok(template) => slot.hold_template(template),
            Err(error) => {
                slot.remove();
                return Err(error);
            }
        }
        Self::start_in(slot, host, config)
    }

    fn start_in(slot: RuntimeDir, host: &Daemon, config: &MachineConfig) -> Result<Self, DaemonError> {
        let mut warm = launch(host, config, slot, LaunchOptions { incoming: true, vmgenid: None })?;
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

    pub(crate) fn end(self) {
        self.qemu.kill();
        drop(self.memory);
        self.runtime_dir.remove();
    }
}

impl PrestartedQemus {
    /// A waiting QEMU of this configuration that still lives.
    fn take(&self, config: &MachineConfig) -> Option<PrestartedQemu> {
        loop {
            let mut waiting = self.waiting();
            let at = waiting.iter().position(|(of, _)| of == config)?;
            let (_, warm) = waiting.remove(at)?;
            drop(waiting);
            if warm.qemu.process().is_alive() {
                return Some(warm);
            }
            warm.end();
        }
    }

    fn put(&self, config: MachineConfig, warm: PrestartedQemu) {
        let mut waiting = self.waiting();
        waiting.push_back((config, warm));
        let surplus = if waiting.len() > WAITING_MAX { waiting.pop_front() } else { None };
        drop(waiting);
        if let Some((_, warm)) = surplus {
            warm.end();
        }
    }

    fn count(&self, config: &MachineConfig) -> usize {
        self.waiting().iter().filter(|(of, _)| of == config).count()
    }

    /// Ends all waiting QEMUs; false if there were none.
    pub(crate) fn end_all(&self) -> bool {
        let all = std::mem::take(&mut *self.waiting());
        let any = !all.is_empty();
        all.into_iter().for_each(|(_, warm)| warm.end());
        any
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<(MachineConfig, PrestartedQemu)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Daemon {
    /// A QEMU for a machine of this configuration: a waiting one, or else a new one.
    pub(crate) fn take_or_start_qemu(&self, config: &MachineConfig) -> Result<PrestartedQemu, DaemonError> {
        let start = || PrestartedQemu::start(self, config, self.reserve_memory(config.memory)?);
        self.prestarted.take(config).map_or_else(start, Ok)
    }

    /// Starts a QEMU of this configuration in the background, unless one waits.
    pub(crate) fn prestart_qemu(self: &Arc<Self>, config: &MachineConfig) {
        if self.prestarted.count(config) > 0 {
            return;
        }
        // It takes only what nobody else needs.
        let Ok(Ok(memory)) = self.memory.reserve(config.memory.0) else { return };
        let (host, config) = (self.clone(), config.clone());
        let started = std::thread::Builder::new().name("warm-up".into()).spawn(move || {
            match PrestartedQemu::start(&host, &config, memory) {
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
