//! The process of one machine, which no daemon has at the moment: it takes the machine from a daemon that
//! ends, or has nothing to do with it for a while, serves its disks, network ports, console and memory, and
//! gives it to the next daemon, or to the same one. A daemon that may be killed offers the machine long
//! before, and the process waits for the daemon's end.
//!
//! It starts no QEMU and carries out no operation. A guest that shuts down, or a QEMU that dies, ends it; the
//! daemon finds in the runtime directory which of both it was. If it cannot go on with the machine it
//! ends, and the next daemon adopts the machine, as after its own death.

use crate::{
    CapsuleImages, Given, GuestRequests, MachineDescription, MachinePlace, MachineSetup, PassError, RamFile,
    Reservations, RuntimeMark, StoreKey, SwapLimits, Taken, Templates,
    channel::{Channel, Listener, accept_first},
    give,
    process_report::{GuestQuestions, ProcessReport, Question},
    running::AgentCommands,
    runtime_dir, take,
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    error::Error,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::Receiver,
    },
    thread,
    time::Duration,
};
use whimbrel_guest_protocol::{GuestRequest, RequestOutcome};
use whimbrel_qemu::MachineEvent;
use whimbrel_store::{Options, Store};

/// Times that a daemon which takes the machine has. It takes others meanwhile, and is started just then.
const LIMITS: SwapLimits = SwapLimits {
    ready: Duration::from_secs(120),
    prepared: Duration::from_secs(30),
    running: Duration::from_secs(60),
    drain: Duration::from_millis(100),
};
/// Pause after a connection that could not be accepted.
const RETRY: Duration = Duration::from_millis(100);
/// Bytes of decoded frames that its view of the store keeps.
const STORE_CACHE: usize = 4 << 20;

/// Takes the machine of the runtime directory `slot` from the process that listens there, and has it until
/// another one takes it or it ends. Waits for as long as the machine is only offered, and calls `taken` when
/// it has it.
///
/// # Errors
/// If it could not be taken, or not be passed on and not be taken up again either.
pub fn hold(slot: &Path, taken: &dyn Fn()) -> Result<(), PassError> {
    let socket = runtime_dir::swap_socket(slot);
    let channel = Channel::connect(&socket)?;
    let place = |description: &MachineDescription| find_place(slot, description);
    let Taken { mut machine, stopped, knowledge } = take(&channel, &LIMITS, &place, &mut |_| {})?;
    drop(channel);
    tracing::info!(pid = machine.pid(), ?stopped, ?knowledge, "took a machine");
    taken();
    let listener = Listener::bind(&socket)?;
    let asked = Listener::bind(&runtime_dir::report_socket(slot))?;
    let guest = GuestQuestions::start(&machine).map_err(PassError::Descriptors)?;
    let end = End::watch(machine.events()).map_err(PassError::Descriptors)?;
    loop {
        let channel = match accept_first([&listener, &asked], end.bell.as_fd()) {
            Ok(Some((0, channel))) => channel,
            Ok(Some((_, channel))) => {
                if ProcessReport::of(&machine, &guest).send_to(&channel) == Question::ReportAndGuest {
                    guest.ask_again();
                }
                continue;
            }
            Ok(None) => break,
            // A stranger, or a process that ended at once: the machine stays.
            Err(error) => {
                tracing::warn!(error = &error as &dyn Error, "cannot accept a connection");
                thread::sleep(RETRY);
                continue;
            }
        };
        match give(machine, &channel, &LIMITS, &mut |_| {})? {
            Given::Gone { stopped } => {
                tracing::info!(?stopped, "gave the machine to the next process");
                return Ok(());
            }
            Given::Kept { machine: kept, knowledge, reason } => {
                let reason = &reason as &dyn Error;
                tracing::warn!(reason, ?knowledge, "could not give the machine to the next process");
                machine = *kept;
            }
        }
    }
    machine.end_and_leave(end.has_shut_down.load(Ordering::Acquire));
    Ok(())
}

/// What the machine needs of this process. No memory is promised: nobody is asked for any here.
fn find_place(
    slot: &Path,
    description: &MachineDescription,
) -> Result<MachinePlace, Box<dyn Error + Send + Sync>> {
    let MachineDescription { dirs, process, config, .. } = description;
    let data_key = description.store_key.clone().map(|StoreKey(key)| key);
    let options = Options { workers: 1, cache: STORE_CACHE, data_key, ..Options::default() };
    let store = Store::open(&dirs.store, options)?;
    let reservations = Reservations::new(&dirs.qemu.runtime_dirs);
    let template = match process.ram {
        RamFile::Own => None,
        RamFile::Template => {
            let content = (process.memory, config.memory);
            let path = runtime_dir::ram_path(&dirs.qemu.runtime_dirs.join(&process.slot));
            Some(Templates::default().adopt(content, &path, reservations.adopt(0))?)
        }
    };
    let setup = MachineSetup {
        host: description.host.clone(),
        name: description.name.clone(),
        config: config.clone(),
        bases: description.bases.clone(),
        dirs: dirs.clone(),
        images: CapsuleImages { store, capsule: description.capsule },
        fetcher: None,
        port_filters: description.port_filters.clone(),
        tunnel: None,
        guest_requests: Arc::new(NoDaemon { slot: slot.to_owned() }),
    };
    Ok(MachinePlace { setup, memory: reservations.adopt(0), template })
}

/// Refuses what a guest requests, and has the daemon take the machine, if there is one.
struct NoDaemon {
    slot: PathBuf,
}

impl GuestRequests for NoDaemon {
    fn handle(&self, guest: AgentCommands, id: u32, _: GuestRequest) {
        if let Err(error) = RuntimeMark::Wanted.set(&self.slot, true) {
            tracing::warn!(error = &error as &dyn Error, "cannot ask the daemon to take the machine");
        }
        let reason = "no daemon has this machine at the moment; ask again in a few seconds".to_owned();
        guest.send_result(id, RequestOutcome::Refused(reason));
    }
}

/// End of the machine, as its events tell it.
struct End {
    /// Can be read once the machine has ended.
    bell: OwnedFd,
    has_shut_down: Arc<AtomicBool>,
}

impl End {
    /// Watches events on a thread of its own, which ends with the process.
    fn watch(events: Receiver<MachineEvent>) -> io::Result<Self> {
        let (bell, has_shut_down) = (eventfd(0, EventfdFlags::CLOEXEC)?, Arc::new(AtomicBool::new(false)));
        let (ring, shut_down) = (bell.try_clone()?, has_shut_down.clone());
        let watch = move || {
            for event in events {
                match &event {
                    MachineEvent::Shutdown(_) => shut_down.store(true, Ordering::Release),
                    MachineEvent::Disconnected => {}
                    MachineEvent::BlockIoError { device, operation, reason, .. } => {
                        tracing::error!(device, operation, reason, "a disk failed; the machine is paused");
                        continue;
                    }
                    _ => continue,
                }
                tracing::info!(?event, "the machine has ended");
                // Fails only after 2^64 calls.
                let _ = rustix::io::write(&ring, &1_u64.to_ne_bytes());
                return;
            }
        };
        thread::Builder::new().name("watch".into()).spawn(watch)?;
        Ok(Self { bell, has_shut_down })
    }
}
