//! The port of a machine, as its owner sees it. The work is done in `pump`, by one thread a port.
//!
//! What holds: after [`Port::set_gates`] returned, no frame passes a gate that it closed (but for the rest of
//! one frame whose beginning QEMU has already); what is held back leaves only by [`Port::release`]; dropping
//! the port ends its thread and removes its tap device.

use crate::{
    Addresses, Epoch, FramePipeEnd, HoldLimits, Input, InputLog, NetError,
    forwarder::{Forwarder, Shared, run},
    input_replay::InputReplay,
    tap,
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// What a port joins.
#[derive(Debug)]
pub struct PortConfig {
    /// The socket QEMU listens on: `-netdev stream,server=on,addr.type=unix,addr.path=…`. It need not exist
    /// yet.
    pub stream_socket: PathBuf,
    /// The side of the world.
    pub world: Uplink,
    /// What passes at first.
    pub gates: Gates,
}

/// The side of a port that is not the machine.
#[derive(Debug)]
pub enum Uplink {
    /// The machine hears and reaches nobody.
    Nobody,
    /// A network of this host.
    Tap(TapConfig),
    /// Whoever has the other end of the line.
    Line(FramePipeEnd),
}

/// A tap device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapConfig {
    /// Its name, at most 15 bytes; `%d` in it becomes a number that makes it unique.
    pub name: String,
    /// The bridge it becomes a port of.
    pub bridge: Option<String>,
}

/// Whether frames of one direction pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// They are dropped.
    Blocked,
    /// They pass.
    Open,
}

/// Both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gates {
    /// From the world to the guest.
    pub inbound: Gate,
    /// From the guest to the world.
    pub outbound: Gate,
}

impl Gates {
    /// A machine that runs here.
    pub const OPEN: Gates = Gates { inbound: Gate::Open, outbound: Gate::Open };
    /// A machine that does not run here yet, or no more.
    pub const BLOCKED: Gates = Gates { inbound: Gate::Blocked, outbound: Gate::Blocked };
}

/// What a port did so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortCounters {
    /// Frames that reached QEMU.
    pub inbound_frames: u64,
    /// Bytes of them.
    pub inbound_bytes: u64,
    /// Frames that left for the world.
    pub outbound_frames: u64,
    /// Bytes of them.
    pub outbound_bytes: u64,
    /// Frames dropped in either direction: a closed gate, no connection, a device that takes none.
    pub dropped_frames: u64,
}

/// The network port of a machine.
pub struct Port {
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    tap_name: Option<String>,
}

impl Port {
    /// Opens a port. Its tap device is made in the network namespace of the calling thread. QEMU is connected
    /// to as soon as it listens, and again whenever the connection is lost.
    pub fn open(config: PortConfig) -> Result<Self, NetError> {
        let (device, tap_name) = match config.world {
            Uplink::Nobody => (None, None),
            Uplink::Tap(tap) => tap::open(&tap).map(|(device, name)| (Some(device), Some(name)))?,
            Uplink::Line(FramePipeEnd(end)) => (Some(end), None),
        };
        let failed = |action| move |source: std::io::Error| NetError::Thread { action, source };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|errno| failed("wake")(errno.into()))?);
        let shared = Arc::new(Shared::new(Forwarder::new(config.stream_socket, device, config.gates)));
        let stop = Arc::new(AtomicBool::new(false));
        let (its_pump, its_wake, its_stop) = (Arc::clone(&shared), Arc::clone(&wake), Arc::clone(&stop));
        let thread = thread::Builder::new().name("port".to_owned());
        let thread = thread.spawn(move || run(&its_pump, &its_wake, &its_stop)).map_err(failed("start"))?;
        Ok(Self { shared, wake, stop, thread: Some(thread), tap_name })
    }

    /// Name of the tap device, if there is one.
    pub fn tap_name(&self) -> Option<&str> {
        self.tap_name.as_deref()
    }

    /// Opens and closes both gates at once.
    pub fn set_gates(&self, gates: Gates) {
        self.pump().set_gates(gates);
        self.wake();
    }

    /// The gates as they are.
    pub fn gates(&self) -> Gates {
        self.pump().gates()
    }

    /// Lets frames reach the guest: its CPUs run now. Frames that came before are not delivered later.
    pub fn open_inbound(&self) {
        let mut pump = self.pump();
        let gates = pump.gates();
        pump.set_gates(Gates { inbound: Gate::Open, ..gates });
        drop(pump);
        self.wake();
    }

    /// From now on holds back what the guest sends. When the queue is full the guest has to wait.
    pub fn hold(&self, limits: HoldLimits) {
        self.pump().hold(limits);
    }

    /// Calls `first_held` whenever a frame is held back and none was before. It is called in the middle of
    /// the port's work: it may not take long, nor ask anything of the port.
    pub fn on_first_held(&self, first_held: impl Fn() + Send + 'static) {
        self.pump().on_first_held(Box::new(first_held));
    }

    /// Whether anything is held back.
    pub fn holds(&self) -> bool {
        self.pump().holds()
    }

    /// Ends the epoch: every frame the guest sent so far belongs to it or to an earlier one. Call it while
    /// the guest stands still, else frames still on their way through QEMU belong to the next (which is safe,
    /// only later).
    pub fn barrier(&self) -> Result<Epoch, NetError> {
        self.pump().barrier().ok_or(NetError::NotHolding)
    }

    /// Lets go of everything up to and with an epoch that [`Port::barrier`] ended; how many frames that were.
    pub fn release(&self, up_to: Epoch) -> Result<usize, NetError> {
        let released = self.pump().release(up_to).ok_or(NetError::NotHolding);
        self.wake();
        released
    }

    /// Ends the holding and lets go of everything: protection ended while the machine runs here.
    pub fn release_all(&self) {
        self.pump().release_all();
        self.wake();
    }

    /// Ends the holding and forgets what was held: the machine goes on elsewhere from an earlier epoch.
    pub fn discard_held(&self) -> usize {
        let discarded = self.pump().discard_held();
        self.wake();
        discarded
    }

    /// From now on records what reaches the guest, as that of port `index`; or does not any more.
    pub fn record(&self, inputs: Option<(Arc<InputLog>, u16)>) {
        self.pump().record(inputs);
    }

    /// Gives the guest, before anything else, what had reached it before, and drops of what it then sends
    /// what had left before, by the fingerprints that [`InputLog::take`] told. To be called before the gates
    /// are opened.
    pub fn replay(&self, inputs: Vec<Input>, left: &[u64]) {
        self.pump().replay(InputReplay::new(inputs, left));
        self.wake();
    }

    /// From now on keeps what comes for the guest, which is about to stand still: nothing more of it reaches
    /// QEMU. Bounded; what has no room is dropped.
    pub fn keep_strays(&self) {
        self.pump().keep_strays();
        self.wake();
    }

    /// Takes what was kept so far: the guest goes on elsewhere, and gets it there by [`Port::add_strays`].
    pub fn take_strays(&self) -> Vec<Box<[u8]>> {
        self.pump().take_strays()
    }

    /// Ends the keeping: the guest goes on here, and gets what was kept before anything newer.
    pub fn let_strays_in(&self) {
        self.pump().let_strays_in();
        self.wake();
    }

    /// Gives the guest what came for it where it was. It gets that once its inbound gate is open, before
    /// anything newer.
    pub fn add_strays<'a>(&self, frames: impl Iterator<Item = &'a [u8]>) {
        self.pump().add_strays(frames);
        self.wake();
    }

    /// What addresses the guest is known to have: to travel with it.
    pub fn addresses(&self) -> Addresses {
        self.pump().addresses().clone()
    }

    /// Adds addresses that travelled with the guest.
    pub fn add_addresses(&self, addresses: &Addresses) {
        self.pump().add_addresses(addresses);
    }

    /// Tells the network that the guest is here now: at once and five times more over 1.25 s. Each time only
    /// if the outbound gate is open then.
    pub fn announce(&self) {
        self.pump().start_announcing();
        self.wake();
    }

    /// What passed so far.
    pub fn counters(&self) -> PortCounters {
        self.pump().counters()
    }

    /// Waits until QEMU is connected; false if that takes longer than `patience`.
    pub fn wait_connected(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while !self.pump().is_connected() {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn pump(&self) -> MutexGuard<'_, Forwarder> {
        self.shared.lock()
    }

    fn wake(&self) {
        // It fails only when it was woken 2^64 times already: then it is awake.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a port panicked");
        }
    }
}
