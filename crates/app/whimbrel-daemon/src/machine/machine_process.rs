//! Machine processes: a daemon that is told to stop leaves each machine to a process of its own, which serves
//! the machine until the next daemon takes it back. That of a daemon that is killed has waited for it
//! ([`super::waiting_process`]), and a machine at rest has passed to it before ([`super::serving_process`]).
//!
//! Machines that cannot pass, or do not, are left without a process, as by a daemon that is killed: their
//! disks and networks stand still until the next daemon adopts them.
//!
//! Invariant: the process that gets a machine is recorded in the runtime directory before the machine is
//! offered to it. So the next daemon finds it, and ends it before it adopts the machine itself.

use crate::{
    core::{error::DaemonError, free_memory},
    daemon::Daemon,
    machine::{
        entry::Machine,
        record::{ProcessRecord, Record},
    },
};
use std::{
    fs::File,
    io,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use whimbrel_core::{error_chain, is_shortage};
use whimbrel_qemu::ProcessIdentity;
use whimbrel_vm::{
    Given, MachineDescription, MachinePlace, PassError, RunningMachine, SwapLimits,
    channel::{Channel, ChannelError, Listener},
    give,
    process_report::{self, Question},
    runtime_dir, take,
};

/// Verb of this program that has a machine.
const VERB: &str = "vm";
/// Path of this program, also after its file was replaced: both sides of a swap have to speak the same
/// version.
const PROGRAM: &str = "/proc/self/exe";
/// Time for a process to start and connect.
const START: Duration = Duration::from_secs(20);
/// Times for a process that gets a machine, on a host that may be busy: without it the guest would stand
/// still for longer.
pub(super) const LIMITS: SwapLimits = SwapLimits {
    ready: Duration::from_secs(30),
    prepared: Duration::from_secs(5),
    running: Duration::from_secs(10),
    drain: Duration::from_millis(100),
};

/// Time for a process that has waited to have the machine, once its daemon has ended.
pub(super) const TAKE_UP: Duration = Duration::from_secs(20);
/// Pause between attempts to connect to it.
const RETRY: Duration = Duration::from_millis(5);

/// Time after which a process that has a machine needs no more than what serves it.
const REST: Duration = Duration::from_secs(1);

/// Has the machine of the runtime directory `slot`, as a process of its own, until the next daemon takes it.
pub fn hold_machine(slot: &Path) -> Result<(), DaemonError> {
    let come_to_rest = || {
        thread::sleep(REST);
        free_memory::give_back_program();
    };
    let taken = || {
        // Without that thread the process only has more memory.
        let _ = thread::Builder::new().name("rest".into()).spawn(come_to_rest);
    };
    whimbrel_vm::machine_process::hold(slot, &taken).map_err(|source| DaemonError::Pass { source })
}

impl Daemon {
    /// Leaves every machine that can pass to a process of its own. No operation works any more.
    pub(crate) fn leave_to_processes(&self) {
        for machine in self.machines.all() {
            let name = machine.name();
            match self.leave_to_process(&machine) {
                Ok(Some(stopped)) => {
                    tracing::info!(machine = %name, ?stopped, "left to a process of its own")
                }
                Ok(None) => {}
                Err(reason) => {
                    tracing::warn!(machine = %name, reason, "left without a process: it waits for the next daemon");
                }
            }
        }
    }

    /// Leaves a machine to a process, and says for how long the guest was stopped. None if it does not run
    /// here, or has one already.
    fn leave_to_process(&self, machine: &Machine) -> Result<Option<Duration>, String> {
        if machine.is_with_process() {
            return Ok(None);
        }
        let locked = machine.try_lock_in_any_phase("stop of the daemon", None);
        let mut turn = locked.map_err(|error| error_chain(&error))?;
        let is_here = turn.is_here();
        let Some(live) = turn.running.take_if(|_| is_here) else { return Ok(None) };
        if let Some(what) = live.unpassable() {
            turn.running = Some(live);
            return Err(format!("it has {what}"));
        }
        let slot = live.runtime_path().to_owned();
        let given = give_to_process(live, &slot);
        if given.is_err() {
            // Whatever it knows of the machine, it must not act when the next daemon adopts that.
            runtime_dir::end_machine_process(&slot);
        }
        given.map(Some).map_err(|error| error_chain(&error))
    }

    /// Takes a machine back from the process that has it. None if there is none, or if the machine did not
    /// pass and that process hangs or speaks another version: then it has ended, and the machine is to be
    /// adopted.
    ///
    /// # Errors
    /// If the machine did not pass, and the process goes on with it.
    pub(super) fn take_from_process(
        &self,
        record: &Record,
        process: &ProcessRecord,
    ) -> Result<Option<RunningMachine>, DaemonError> {
        let slot = self.directories.runtime_dir(&process.slot);
        if !runtime_dir::has_machine_process(&slot) {
            return Ok(None);
        }
        let find_place =
            |description: &MachineDescription| Ok(self.place_of(record, process, description)?);
        let channel = connect(&slot);
        let taken = channel.and_then(|channel| take(&channel, &LIMITS, &find_place, &mut |_| {}));
        let taken = match taken {
            Err(source) if goes_on(&slot, &source) => return Err(DaemonError::Pass { source }),
            taken => taken,
        };
        // The process has nothing more to do, or must not do it.
        let has_ended = runtime_dir::end_machine_process(&slot);
        match taken {
            Ok(taken) => {
                let (name, stopped, knowledge) = (&record.name, taken.stopped, taken.knowledge);
                tracing::info!(machine = %name, ?stopped, ?knowledge, "took it from its own process");
                Ok(Some(taken.machine))
            }
            Err(error) if has_ended => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(machine = %record.name, error, "did not get it from its own process; adopting it");
                Ok(None)
            }
            Err(source) => Err(DaemonError::Pass { source }),
        }
    }

    fn place_of(
        &self,
        record: &Record,
        process: &ProcessRecord,
        description: &MachineDescription,
    ) -> Result<MachinePlace, DaemonError> {
        if description.name != record.name || description.process != *process {
            return Err(DaemonError::invalid(format!("the process has {}", description.name)));
        }
        let setup = self.machine_setup(record)?;
        let (memory, template) = self.reservation_of_adopted(record, process)?;
        Ok(MachinePlace { setup, memory, template })
    }
}

/// Whether the process that did not pass its machine on goes on with it. One that speaks another version does
/// not pass it later either. One that cannot be asked, for what this daemon lacks, most likely does.
fn goes_on(slot: &Path, why: &PassError) -> bool {
    let report = || process_report::ask(slot, Question::Report);
    !why.is_other_version() && report().map_or_else(|error| is_shortage(&error), |_| true)
}

/// Connects to the process that has the machine. One that has waited for it may just be taking it up.
fn connect(slot: &Path) -> Result<Channel, PassError> {
    let deadline = Instant::now() + TAKE_UP;
    loop {
        match Channel::connect(&runtime_dir::swap_socket(slot)) {
            Err(ChannelError::Io { .. })
                if Instant::now() < deadline && runtime_dir::has_machine_process(slot) =>
            {
                thread::sleep(RETRY);
            }
            connected => return Ok(connected?),
        }
    }
}

/// Starts a process and gives it the machine. Returns for how long the guest was stopped.
fn give_to_process(live: RunningMachine, slot: &Path) -> Result<Duration, PassError> {
    let (_, channel) = start_process(slot)?;
    match give(live, &channel, &LIMITS, &mut |_| {})? {
        Given::Gone { stopped } => Ok(stopped),
        Given::Kept { reason, .. } => Err(reason),
    }
}

/// Starts a process for the machine of a runtime directory, records it, and waits until it connects.
pub(super) fn start_process(slot: &Path) -> Result<(Child, Channel), PassError> {
    let listener = Listener::bind(&runtime_dir::swap_socket(slot))?;
    let mut process = start(slot).map_err(PassError::Descriptors)?;
    match accept(&listener, &process, slot) {
        Ok(channel) => Ok((process, channel)),
        Err(error) => {
            end(&mut process);
            runtime_dir::end_machine_process(slot);
            Err(error)
        }
    }
}

fn accept(listener: &Listener, process: &Child, slot: &Path) -> Result<Channel, PassError> {
    let identity = ProcessIdentity::of(process.id()).map_err(PassError::Descriptors)?;
    runtime_dir::record_machine_process(slot, identity)?;
    let channel = listener.accept(START)?;
    if channel.peer().pid().cast_unsigned() != process.id() {
        return Err(PassError::Unexpected { what: "a connection of another process" });
    }
    Ok(channel)
}

/// Ends a process and waits for its end.
pub(super) fn end(process: &mut Child) {
    // Both fail only if it was waited for already.
    let _ = process.kill();
    let _ = process.wait();
}

fn start(slot: &Path) -> io::Result<Child> {
    let log = File::options().create(true).append(true).open(slot.join("machine-process.log"))?;
    let mut command = Command::new(PROGRAM);
    // A signal for the terminal of the daemon is none for the machine.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command.arg(VERB).arg(slot).current_dir("/");
    let process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn()?;
    if let Some(group) = runtime_dir::control_group(slot)
        && let Err(error) = group.add(process.id())
    {
        tracing::warn!(slot = %slot.display(), %error, "a machine process is not in the group of its machine");
    }
    Ok(process)
}
