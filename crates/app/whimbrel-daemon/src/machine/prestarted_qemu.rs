//! QEMUs started ahead of time.
//!
//! A resume spends most of its time starting a process. So after a machine was suspended or resumed, one QEMU
//! of the same shape is started in the background, attached and waiting; the next resume of that shape takes
//! it. At most a few wait, the oldest shape goes first, and all end with the daemon. Clones are no use for
//! them: the memory that they share must be named when their QEMU starts.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::runtime_dir::RuntimeDir,
    running::{LaunchOptions, RunningMemory, TemplateContent, Templates, launch},
};
use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use whimbrel_core::MachineConfig;
use whimbrel_qemu::Qemu;

/// How many wait at most; an idle one costs some 30 MB.
const WAITING_MAX: usize = 8;

/// A QEMU in its slot that is nobody's machine yet.
pub(crate) struct PrestartedQemu {
    pub(crate) slot: RuntimeDir,
    pub(crate) qemu: Qemu,
    /// The hold on its memory, where that was taken ahead of time too.
    pub(crate) memory: Option<RunningMemory>,
    pub(crate) console_log: PathBuf,
}

/// What machines to come need not make: QEMUs that wait, and memory that clones share.
#[derive(Default)]
pub(crate) struct PrestartedQemus {
    waiting: Mutex<VecDeque<(MachineConfig, PrestartedQemu)>>,
    pub(crate) templates: Templates,
}

impl PrestartedQemu {
    /// Starts a QEMU that waits to be given a machine of this configuration.
    pub(crate) fn start(host: &Daemon, config: &MachineConfig) -> Result<Self, DaemonError> {
        Self::start_in(RuntimeDir::create(&host.layout, config)?, host, config)
    }

    /// Starts one whose memory is shared with the other clones of the same content.
    pub(crate) fn start_clone(
        host: &Daemon,
        config: &MachineConfig,
        content: TemplateContent,
    ) -> Result<Self, DaemonError> {
        let mut slot = RuntimeDir::create(&host.layout, config)?;
        match host.warm.templates.link(content, &slot.ram()) {
            Ok(template) => slot.hold(template),
            Err(error) => {
                slot.remove();
                return Err(error);
            }
        }
        Self::start_in(slot, host, config)
    }

    fn start_in(slot: RuntimeDir, host: &Daemon, config: &MachineConfig) -> Result<Self, DaemonError> {
        let mut warm = launch(host, config, slot, LaunchOptions { incoming: true, vmgenid: None }, None)?;
        match RunningMemory::attach(&warm.qemu, &warm.slot, true) {
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
        self.slot.remove();
    }
}

impl PrestartedQemus {
    /// One of this configuration that still lives, if one waits.
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

    /// Ends all that wait.
    pub(crate) fn end_all(&self) {
        let all = std::mem::take(&mut *self.waiting());
        all.into_iter().for_each(|(_, warm)| warm.end());
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<(MachineConfig, PrestartedQemu)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Daemon {
    /// A QEMU for a machine of this configuration: one that waits, or else a new one.
    pub(crate) fn claim(&self, config: &MachineConfig) -> Result<PrestartedQemu, DaemonError> {
        self.warm.take(config).map_or_else(|| PrestartedQemu::start(self, config), Ok)
    }

    /// Sees to it that a QEMU of this configuration waits, in the background.
    pub(crate) fn warm_up(self: &Arc<Self>, config: &MachineConfig) {
        if self.warm.count(config) > 0 {
            return;
        }
        let (host, config) = (self.clone(), config.clone());
        let started = std::thread::Builder::new().name("warm-up".into()).spawn(move || {
            match PrestartedQemu::start(&host, &config) {
                Ok(warm) => host.warm.put(config, warm),
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "no QEMU could be started ahead")
                }
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, "no thread to start a QEMU ahead");
        }
    }
}
