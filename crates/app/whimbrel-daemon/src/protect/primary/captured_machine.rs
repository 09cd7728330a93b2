//! The machine as the captures of a protection see it: during seeding, and while epochs are captured.

use super::{
    epochs::{OutputMarks, barriers},
    heartbeat::Heartbeat,
    input_shipping::InputShipper,
};
use std::{sync::Mutex, time::Duration};
use whimbrel_core::lock;
use whimbrel_machine::{Machine, MachineError, UnpauseReport};
use whimbrel_memory::{CpuShare, Throttle};
use whimbrel_vm::PausableMachine;

/// Shares of the time, in percent, that virtual CPUs get one after the other if rounds do not suffice.
const SHARES: [u8; 3] = [60, 35, 20];

/// The machine during seeding: output is buffered before it runs on after the last pause.
pub(super) struct SeedingMachine<'a> {
    pub(super) machine: SlowableMachine<'a>,
    pub(super) heartbeat: &'a Heartbeat,
    pub(super) output_marks: &'a Mutex<OutputMarks>,
    pub(super) shipper: Option<&'a InputShipper<'a>>,
}

impl Machine for SeedingMachine<'_> {
    fn slow_down(&mut self, predicted: Duration) -> bool {
        self.machine.slow_down(predicted)
    }

    fn about_to_pause(&mut self) {
        self.machine.about_to_pause();
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        self.machine.pause()
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        self.heartbeat.buffer_output();
        // From the epoch end on the standby might take over, so the lease is armed before it.
        self.heartbeat.arm();
        *lock(self.output_marks) = barriers(self.heartbeat);
        if let Some(shipping) = self.shipper {
            shipping.epoch_captured(0, false);
        }
        self.machine.unpause()
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.machine.device_state()
    }
}

/// A machine whose virtual CPUs can be slowed down until its next pause.
pub(super) struct SlowableMachine<'a> {
    machine: PausableMachine<'a>,
    /// How often it was slowed down, and by what at present.
    shares: usize,
    throttle: Option<Throttle>,
}

impl<'a> SlowableMachine<'a> {
    pub(super) fn new(machine: PausableMachine<'a>) -> Self {
        Self { machine, shares: 0, throttle: None }
    }
}

impl Machine for SlowableMachine<'_> {
    fn slow_down(&mut self, _predicted: Duration) -> bool {
        // The smallest share lasts until the next pause.
        let Some(percent) = SHARES.get(self.shares).copied() else { return false };
        self.shares += 1;
        let share = CpuShare::percent(percent).unwrap_or(CpuShare::MIN);
        tracing::info!(percent, "virtual CPUs run for a part of the time, so that the standby can catch up");
        let threads = self.machine.qemu.cpu_threads().unwrap_or_default();
        self.throttle = Throttle::start(&threads, share)
            .inspect_err(|error| tracing::warn!(%error, "cannot throttle virtual CPUs"))
            .ok();
        self.throttle.is_some()
    }

    fn about_to_pause(&mut self) {
        // The pause would wait for a throttled CPU.
        self.throttle = None;
        self.machine.about_to_pause();
    }

    fn about_to_pause_for_state(&mut self) {
        self.throttle = None;
        self.machine.about_to_pause_for_state();
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        self.machine.pause()
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        self.machine.unpause()
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.machine.device_state()
    }

    fn pause_for_state(&mut self) -> Result<(), MachineError> {
        self.machine.pause_for_state()
    }

    fn unpause_with_state(&mut self) -> UnpauseReport {
        self.machine.unpause_with_state()
    }
}

/// The machine while epochs are captured: others see how long QEMU and the disks take.
pub(super) struct EpochMachine<'a> {
    pub(super) machine: &'a mut dyn Machine,
    pub(super) heartbeat: &'a Heartbeat,
}

impl Machine for EpochMachine<'_> {
    fn slow_down(&mut self, predicted: Duration) -> bool {
        self.machine.slow_down(predicted)
    }

    fn about_to_pause_for_state(&mut self) {
        self.heartbeat.set_capturing(true);
        self.machine.about_to_pause_for_state();
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        self.machine.pause()
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        self.machine.unpause()
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.machine.device_state()
    }

    fn pause_for_state(&mut self) -> Result<(), MachineError> {
        self.machine.pause_for_state()
    }

    fn unpause_with_state(&mut self) -> UnpauseReport {
        let report = self.machine.unpause_with_state();
        self.heartbeat.set_capturing(false);
        report
    }
}

impl Drop for EpochMachine<'_> {
    fn drop(&mut self) {
        self.heartbeat.set_capturing(false);
    }
}
