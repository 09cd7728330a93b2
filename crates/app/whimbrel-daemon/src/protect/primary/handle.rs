//! Protection handle: the interface between other threads and the thread that protects a machine.

use crate::{core::error::DaemonError, machine::record::Record, protect::settings::ProtectionSettings};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender},
    },
    time::{Duration, Instant},
};
use whimbrel_api::{
    EpochPauseParts, ProtectFigures, ProtectRequest, ProtectRole, ProtectState, ProtectionInfo,
};
use whimbrel_capture::Progress;
use whimbrel_core::{ByteSize, MachineName, lock};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::{codec::ByteCounts, stats::Stats};
use whimbrel_vm::{CaptureBreaks, RunningMachine};

/// Interface to a protected machine.
pub(crate) struct ProtectionHandle {
    pub(in crate::protect) name: MachineName,
    standby: Mutex<ChosenStandby>,
    shared: Mutex<Shared>,
    wake: Condvar,
}

/// The standby of a machine, until it is lost.
struct ChosenStandby {
    settings: Arc<ProtectionSettings>,
    /// Constant for all protections of this machine to this standby, which identifies retained pages by it.
    handover: HandoverId,
}

struct Shared {
    state: ProtectState,
    epoch: u64,
    stats: Stats,
    hash_bytes: usize,
    committed_at: Instant,
    commands: VecDeque<ProtectionCommand>,
    cancelled: bool,
    /// Whether no thread takes commands any more.
    closed: bool,
    woken: bool,
    witness_answers: Option<bool>,
}

/// Totals of a protection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EpochTotals {
    pub(crate) epochs: u64,
    pub(crate) late: u64,
    pub(crate) sent_bytes: u64,
}

/// A command to the protection thread, with a channel for its answer.
pub(in crate::protect) enum ProtectionCommand {
    /// End the protection; the machine stays here.
    Unprotect(Sender<Result<(), DaemonError>>),
    /// Switch over to the standby; the answer is the downtime in milliseconds.
    Failover(Sender<Result<f64, DaemonError>>),
    /// Work that needs the machine and leaves it running; between two epochs, with breaks for epochs.
    Work(Work),
}

/// Work on a protected machine.
pub(in crate::protect) type Work =
    Box<dyn FnOnce(&mut Record, &mut RunningMachine, &mut dyn CaptureBreaks) + Send>;

/// An event for the caller that started the protection.
pub(in crate::protect) enum ProtectionEvent {
    Progress(Progress),
    Protected { pause_ms: f64, wire_bytes: u64 },
    Failed(DaemonError),
}

impl ProtectionHandle {
    pub(in crate::protect) fn new(
        name: MachineName,
        settings: ProtectionSettings,
        handover: HandoverId,
    ) -> Self {
        let shared = Shared {
            state: ProtectState::Seeding,
            epoch: 0,
            stats: Stats::default(),
            hash_bytes: 0,
            committed_at: Instant::now(),
            commands: VecDeque::new(),
            cancelled: false,
            closed: false,
            woken: false,
            witness_answers: None,
        };
        let standby = Mutex::new(ChosenStandby { settings: Arc::new(settings), handover });
        Self { name, standby, shared: Mutex::new(shared), wake: Condvar::new() }
    }

    /// The settings, with the standby of now.
    pub(in crate::protect) fn settings(&self) -> Arc<ProtectionSettings> {
        lock(&self.standby).settings.clone()
    }

    /// The handover by which the standby of now knows the machine.
    pub(in crate::protect) fn handover(&self) -> HandoverId {
        lock(&self.standby).handover
    }

    /// Chooses the next spare, if there is one, in place of a standby that was lost.
    pub(in crate::protect) fn choose_next_spare(&self) {
        let mut standby = lock(&self.standby);
        if let Some(next) = standby.settings.with_next_spare() {
            let (lost, host) = (&standby.settings.request.host, &next.request.host);
            tracing::warn!(machine = %self.name, %lost, standby = %host, "a spare becomes the standby");
            *standby = ChosenStandby { settings: Arc::new(next), handover: HandoverId(rand::random()) };
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a command to the thread. If the thread has ended or ends first, the command is dropped with the
    /// channel for its answer.
    pub(in crate::protect) fn command(&self, command: ProtectionCommand) {
        let mut shared = self.shared();
        if !shared.closed {
            shared.commands.push_back(command);
        }
        self.wake.notify_all();
    }

    /// Drops all commands, and those to come.
    pub(in crate::protect) fn close(&self) {
        let mut shared = self.shared();
        shared.closed = true;
        shared.commands.clear();
    }

    /// Cancels the start of the protection.
    pub(in crate::protect) fn cancel(&self) {
        self.shared().cancelled = true;
        self.wake.notify_all();
    }

    pub(in crate::protect) fn is_cancelled(&self) -> bool {
        self.shared().cancelled
    }

    /// Whether a command is waiting.
    pub(in crate::protect) fn has_command(&self) -> bool {
        !self.shared().commands.is_empty()
    }

    /// Wakes the thread if it waits.
    pub(in crate::protect) fn wake(&self) {
        self.shared().woken = true;
        self.wake.notify_all();
    }

    /// Waits for a command, until `until` or until it is woken.
    pub(in crate::protect) fn wait_command(&self, until: Instant) -> Option<ProtectionCommand> {
        let mut shared = self.shared();
        loop {
            if let Some(command) = shared.commands.pop_front() {
                return Some(command);
            }
            let left = until.saturating_duration_since(Instant::now());
            if std::mem::take(&mut shared.woken) || left.is_zero() || shared.cancelled {
                return None;
            }
            shared = self.wake.wait_timeout(shared, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the standby was complete once.
    pub(in crate::protect) fn was_protected(&self) -> bool {
        self.shared().stats.epochs > 0
            || self.shared().epoch > 0
            || self.shared().state != ProtectState::Seeding
    }

    pub(in crate::protect) fn set_state(&self, state: ProtectState) {
        self.shared().state = state;
    }

    pub(in crate::protect) fn witness_answered(&self, answers: bool) {
        let before = self.shared().witness_answers.replace(answers);
        if before != Some(answers) {
            match answers {
                true => tracing::info!(machine = %self.name, "the witness answers"),
                false => {
                    tracing::warn!(machine = %self.name, "the witness does not answer; the machine runs as long as its standby answers")
                }
            }
        }
    }

    pub(in crate::protect) fn committed(&self, epoch: u64, hash_bytes: usize, add: impl FnOnce(&mut Stats)) {
        let mut shared = self.shared();
        shared.epoch = epoch;
        shared.hash_bytes = hash_bytes;
        shared.committed_at = Instant::now();
        add(&mut shared.stats);
    }

    /// Counts an epoch that started late.
    pub(in crate::protect) fn count_late(&self) {
        self.shared().stats.stretched += 1;
    }

    /// Numbers of epochs, of late ones among them, and of bytes sent, of all epochs so far.
    pub(in crate::protect) fn totals(&self) -> EpochTotals {
        let shared = self.shared();
        EpochTotals {
            epochs: shared.stats.epochs,
            late: shared.stats.stretched,
            sent_bytes: shared.stats.volume.sent,
        }
    }

    /// State, time since the last commit, and whether the witness answers.
    pub(in crate::protect) fn standing(&self) -> (ProtectState, Duration, Option<bool>) {
        let shared = self.shared();
        (shared.state.clone(), shared.committed_at.elapsed(), shared.witness_answers)
    }

    /// The information for users.
    pub(in crate::protect) fn info(&self) -> ProtectionInfo {
        let (settings, shared) = (self.settings(), self.shared());
        let ProtectRequest { host, witness, group, mode, spares, .. } = settings.request.clone();
        ProtectionInfo {
            role: ProtectRole::Primary,
            host,
            witness,
            witness_answers: shared.witness_answers,
            spares,
            group,
            mode,
            state: shared.state.clone(),
            epoch: shared.epoch,
            figures: Some(figures(&shared.stats, shared.hash_bytes)),
            lag_ms: shared.committed_at.elapsed().as_millis() as u64,
        }
    }
}

fn figures(stats: &Stats, hash_bytes: usize) -> ProtectFigures {
    let ms = |span: Duration| span.as_secs_f64() * 1e3;
    let ByteCounts { dirty, changed, unshared, sent, .. } = stats.volume;
    ProtectFigures {
        epochs: stats.epochs,
        epoch_ms: ms(stats.quantile(0.5, |epoch| epoch.length)),
        stretched: stats.stretched,
        pause_p50_ms: ms(stats.quantile(0.5, |epoch| epoch.pause.total)),
        pause_p99_ms: ms(stats.quantile(0.99, |epoch| epoch.pause.total)),
        pause_parts: EpochPauseParts {
            stop_ms: ms(stats.quantile(0.5, |epoch| epoch.pause.stop)),
            scan_ms: ms(stats.quantile(0.5, |epoch| epoch.pause.scan)),
            copy_ms: ms(stats.quantile(0.5, |epoch| epoch.pause.copy)),
            devices_ms: ms(stats.quantile(0.5, |epoch| epoch.pause.devices)),
            go_on_ms: ms(stats.quantile(0.5, |epoch| epoch.pause.unpause)),
        },
        output_delay_p50_ms: ms(stats.quantile(0.5, |epoch| epoch.delay)),
        output_delay_p99_ms: ms(stats.quantile(0.99, |epoch| epoch.delay)),
        dirty_pages: stats.pages(),
        dirty_bytes: ByteSize(dirty),
        changed_bytes: ByteSize(changed),
        unshared_bytes: ByteSize(unshared),
        sent_bytes: ByteSize(sent),
        device_bytes: ByteSize(stats.device_bytes),
        again_pages: stats.resent_pages,
        hash_bytes: ByteSize(hash_bytes as u64),
    }
}

/// Waits until the machine is protected and reports progress; cancels if `progress` returns false.
pub(in crate::protect) fn wait_protected(
    guard: &ProtectionHandle,
    hears: &Receiver<ProtectionEvent>,
    mut progress: impl FnMut(Progress) -> bool,
) -> Result<(f64, u64), DaemonError> {
    loop {
        match hears.recv_timeout(Duration::from_millis(100)) {
            Ok(ProtectionEvent::Protected { pause_ms, wire_bytes }) => return Ok((pause_ms, wire_bytes)),
            Ok(ProtectionEvent::Failed(error)) => return Err(error),
            Ok(ProtectionEvent::Progress(now)) => {
                if !progress(now) {
                    guard.cancel();
                }
            }
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return Err(DaemonError::Panicked),
        }
    }
}
