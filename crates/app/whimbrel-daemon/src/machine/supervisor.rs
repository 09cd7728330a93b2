//! Supervisor of machines: the daemon's reactions when a machine shuts down or its QEMU dies.

use crate::{
    daemon::Daemon,
    machine::{entry::Machine, record::Phase, restart::End},
};
use std::{
    path::Path,
    sync::{Arc, Weak, mpsc::Receiver},
};
use whimbrel_qemu::MachineEvent;
use whimbrel_vm::runtime_dir;

/// Handles the events of a machine on a thread of its own until its QEMU is gone.
pub(crate) fn watch(host: &Arc<Daemon>, machine: &Arc<Machine>, events: Receiver<MachineEvent>) {
    let (host, machine) = (Arc::downgrade(host), Arc::downgrade(machine));
    let watch = move || {
        for event in events {
            match event {
                MachineEvent::Shutdown(cause) => {
                    tracing::info!(?cause, "a machine shut down");
                    return record_end(&host, &machine, End::Shutdown);
                }
                MachineEvent::Disconnected => return record_end(&host, &machine, End::Failure),
                MachineEvent::BlockIoError { device, operation, reason, .. } => {
                    tracing::error!(device, operation, reason, "a disk failed; the machine is paused");
                }
                _ => {}
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("watch".into()).spawn(watch) {
        tracing::error!(%error, "could not start a thread to supervise a machine");
    }
}

/// Ends a machine whose QEMU is gone, even if no event arrived.
pub(crate) fn end_if_gone(host: &Arc<Daemon>, machine: &Arc<Machine>) {
    let gone = {
        let turn = machine.lock("cleanup");
        turn.running.as_ref().is_some_and(|live| !live.qemu.process().is_alive())
    };
    if gone {
        record_end(&Arc::downgrade(host), &Arc::downgrade(machine), End::Failure);
    }
}

/// Records that a machine ended by itself, unless an operation ended or handed it over meanwhile.
fn record_end(host: &Weak<Daemon>, machine: &Weak<Machine>, how: End) {
    let (Some(host), Some(machine)) = (host.upgrade(), machine.upgrade()) else { return };
    let mut turn = machine.lock("cleanup");
    let Some(live) = turn.running.take() else { return };
    // The log goes with the machine's runtime directory.
    let reason = reason(&live.qemu.process().last_output(), ended_for_memory(live.runtime_path()));
    live.end();
    host.discard_missing_memory(&mut turn);
    if turn.record.phase != Phase::Here {
        return;
    }
    turn.record.phase = match how {
        End::Shutdown => Phase::Stopped,
        End::Failure => {
            tracing::error!(machine = %machine.name(), reason, "a machine has crashed");
            Phase::Crashed { reason }
        }
    };
    turn.record.process = None;
    turn.record.since_ms = crate::now_ms();
    host.leave_home(&mut turn.record);
    if let Err(error) = turn.record.save(&host.directories) {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "could not save the record of a machine that ended"
        );
        return;
    }
    host.self_starts.ended(machine.name(), turn.record.settings.restart, how);
}

/// Why a machine has crashed whose QEMU ended, with the last line that it wrote.
fn reason(output: &str, for_memory: Option<&str>) -> String {
    let ended = for_memory.unwrap_or("its QEMU ended");
    last_line(output).map_or_else(|| ended.to_owned(), |line| format!("{ended}: {line}"))
}

/// Says of the machine of a runtime directory that the kernel has ended a process of it for its memory: QEMU,
/// most likely, which has the most.
pub(super) fn ended_for_memory(slot: &Path) -> Option<&'static str> {
    let is_so = runtime_dir::control_group(slot)?.ended_for_memory();
    is_so.then_some("its QEMU ended, and the kernel had ended a process of its control group for its memory")
}

/// Last line that a QEMU wrote, apart from warnings, which it lives on with.
pub(super) fn last_line(output: &str) -> Option<&str> {
    let is_news = |line: &&str| !line.is_empty() && !line.contains("warning:");
    output.lines().rev().map(str::trim).find(is_news)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_told_with_the_last_line_that_qemu_wrote() {
        assert_eq!(reason("", None), "its QEMU ended");
        assert_eq!(reason("qemu: warning: no such feature\n", None), "its QEMU ended");
        assert_eq!(
            reason("qemu: warning: old\nqemu: KVM internal error\n\n", None),
            "its QEMU ended: qemu: KVM internal error"
        );
        assert_eq!(reason("qemu: hello\n", Some("it took too much")), "it took too much: qemu: hello");
    }
}
