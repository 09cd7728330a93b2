//! Network port of a machine, as its owner uses it. `forwarder` does the work, with one thread for each port.
//!
//! Guarantees: after [`Port::set_gates`] returned, no frame passes a gate that it closed (except the rest of
//! a frame that QEMU has received partially). Buffered output leaves only by [`Port::release`]. Dropping the
//! port ends its thread and removes its tap device.

use crate::{
    Addresses, BufferLimits, Epoch, FilterCounters, FramePipeEnd, Input, InputLog, NetError, PortFilter,
    forwarder::{
        Forwarder, Shared,
        guest_link::GuestEnd,
        parts::{PortDescriptors, PortState},
        run,
        uplink::NetworkSide,
    },
    guest_network,
    input_replay::InputReplay,
    tap,
};
use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Configuration of a port.
#[derive(Debug)]
pub struct PortConfig {
    /// End of the port at QEMU.
    pub guest: GuestSide,
    /// Network side of the port.
    pub uplink: Uplink,
    /// Initial state of the gates.
    pub gates: Gates,
    /// Frames that the guest may send.
    pub filter: PortFilter,
}

/// End of a port at QEMU.
#[derive(Debug)]
pub enum GuestSide {
    /// Socket on which QEMU listens: `-netdev stream,server=on,addr.type=unix,addr.path=…`. It need not exist
    /// yet. Every frame is as on the wire.
    Stream(PathBuf),
    /// Tap device of a [`GuestNetwork`](crate::GuestNetwork), which QEMU has got. Checksums and the cutting
    /// of large segments are left to the network.
    Tap {
        /// Descriptor of the namespace, or of QEMU, which is in it (pidfd).
        namespace: OwnedFd,
        /// Descriptor of the device that QEMU reads. Frames that wait there for a paused guest become late
        /// frames; without it they are lost.
        device: Option<OwnedFd>,
        /// Number of the port.
        port: usize,
    },
}

/// Network side of a port.
#[derive(Debug)]
pub enum Uplink {
    /// No network: the port is isolated.
    Isolated,
    /// Network of this host.
    Tap(TapConfig),
    /// Frame pipe, whose other end is usually a tunnel.
    Pipe(FramePipeEnd),
}

/// Configuration of a tap device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapConfig {
    /// Name of at most 15 bytes; `%d` in it becomes a number that makes it unique.
    pub name: String,
    /// Bridge of which it becomes a port.
    pub bridge: Option<String>,
}

/// Gate for the frames of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gate {
    /// Frames are dropped.
    Blocked,
    /// Frames are passed.
    Open,
}

/// Gates of both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gates {
    /// Gate from the network to the guest.
    pub inbound: Gate,
    /// Gate from the guest to the network.
    pub outbound: Gate,
}

impl Gates {
    /// Gates of a machine that runs on this host.
    pub const OPEN: Gates = Gates { inbound: Gate::Open, outbound: Gate::Open };
    /// Gates of a machine that does not run on this host yet, or no longer.
    pub const BLOCKED: Gates = Gates { inbound: Gate::Blocked, outbound: Gate::Blocked };
}

/// Counters of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PortCounters {
    /// Frames that were passed to QEMU.
    pub inbound_frames: u64,
    /// Bytes of these frames.
    pub inbound_bytes: u64,
    /// Frames that were sent to the network.
    pub outbound_frames: u64,
    /// Bytes of these frames.
    pub outbound_bytes: u64,
    /// Frames dropped in either direction: a closed gate, no connection, a device that refuses them.
    pub dropped_frames: u64,
    /// Frames of the guest that the filter dropped.
    pub filtered: FilterCounters,
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
    /// Opens a port. Its tap device is created in the network namespace of the calling thread. The port
    /// connects to QEMU as soon as it listens, and again whenever the connection is lost.
    pub fn open(config: PortConfig) -> Result<Self, NetError> {
        let end = match config.guest {
            GuestSide::Stream(path) => GuestEnd::Stream(path),
            GuestSide::Tap { namespace, device, port } => {
                let socket = guest_network::connect(namespace.as_fd(), port)?;
                GuestEnd::Tap { socket, device: device.map(File::from) }
            }
        };
        let has_offloads = matches!(end, GuestEnd::Tap { .. });
        let (device, tap_name) = match config.uplink {
            Uplink::Isolated => (None, None),
            Uplink::Tap(tap) => {
                let (file, name) = tap::open(&tap, has_offloads)?;
                (Some(NetworkSide { file: Arc::new(file), has_offloads }), Some(name))
            }
            Uplink::Pipe(FramePipeEnd(end)) => {
                (Some(NetworkSide { file: Arc::new(end), has_offloads: false }), None)
            }
        };
        let forwarder = Forwarder::new(end, device, config.gates, config.filter);
        Self::forwarding(forwarder, tap_name)
    }

    /// Port of which another process has passed the parts. Its frames wait until this call.
    pub fn from_parts(descriptors: PortDescriptors, state: PortState) -> Result<Self, NetError> {
        let tap_name = state.tap_name.clone();
        Self::forwarding(Forwarder::from_parts(descriptors, state)?, tap_name)
    }

    /// Ends the port between two frames, and returns its parts for another process, or for
    /// [`Port::from_parts`] here if that one does not take them. What arrives meanwhile waits in the tap
    /// device and in QEMU.
    ///
    /// # Errors
    /// If output is held, or inputs are recorded or replayed: protection has to end first. The port goes on
    /// then.
    pub fn suspend(&mut self) -> Result<(PortDescriptors, PortState), NetError> {
        if !self.forwarder().can_be_passed() {
            return Err(NetError::Protected);
        }
        self.end_thread();
        Ok(self.forwarder().take_parts(self.tap_name.clone()))
    }

    fn forwarding(forwarder: Forwarder, tap_name: Option<String>) -> Result<Self, NetError> {
        let failed = |action| move |source: std::io::Error| NetError::Thread { action, source };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|errno| failed("wake")(errno.into()))?);
        let shared = Arc::new(Shared::new(forwarder));
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

    /// Whether the guest leaves checksums and the cutting of large segments to the network. Its machine needs
    /// such a port for as long as it runs, on every host.
    pub fn has_offloads(&self) -> bool {
        self.forwarder().has_offloads()
    }

    /// Opens and closes both gates at once.
    pub fn set_gates(&self, gates: Gates) {
        self.forwarder().set_gates(gates);
        self.wake();
    }

    /// Present state of the gates.
    pub fn gates(&self) -> Gates {
        self.forwarder().gates()
    }

    /// Opens the inbound gate, because the guest's CPUs run now. Frames that came before are not delivered
    /// later.
    pub fn open_inbound(&self) {
        let mut pump = self.forwarder();
        let gates = pump.gates();
        pump.set_gates(Gates { inbound: Gate::Open, ..gates });
        drop(pump);
        self.wake();
    }

    /// Buffers the output of the guest from now on. When the buffer is full, the guest has to wait.
    pub fn buffer_output(&self, limits: BufferLimits) {
        self.forwarder().start_buffering(limits);
    }

    /// Sets a callback for a frame that enters the empty output buffer. It runs while the port is locked: it
    /// must be short and must not call the port.
    pub fn on_first_buffered(&self, first_held: impl Fn() + Send + 'static) {
        self.forwarder().on_first_buffered(Box::new(first_held));
    }

    /// Whether output is buffered.
    pub fn has_buffered_output(&self) -> bool {
        self.forwarder().has_buffered()
    }

    /// Ends the epoch: every frame that the guest sent so far belongs to it or to an earlier one. Call it
    /// while the guest is paused; otherwise frames still inside QEMU belong to the next epoch (which is safe,
    /// only later).
    pub fn barrier(&self) -> Result<Epoch, NetError> {
        self.forwarder().barrier().ok_or(NetError::NotBuffering)
    }

    /// Releases all epochs up to `up_to`, which [`Port::barrier`] ended; returns the number of frames.
    pub fn release(&self, up_to: Epoch) -> Result<usize, NetError> {
        let released = self.forwarder().release(up_to).ok_or(NetError::NotBuffering);
        self.wake();
        released
    }

    /// Ends buffering and releases everything: protection ended while the machine runs here.
    pub fn release_all(&self) {
        self.forwarder().release_all();
        self.wake();
    }

    /// Ends buffering and drops the output: the machine continues on another host from an earlier epoch.
    pub fn discard_buffered(&self) -> usize {
        let discarded = self.forwarder().discard_buffered();
        self.wake();
        discarded
    }

    /// Records the guest's inputs from now on, as those of port `index`; none stops recording.
    pub fn record(&self, inputs: Option<(Arc<InputLog>, u16)>) {
        self.forwarder().record(inputs);
    }

    /// Replays inputs to the guest before any other frame, and drops frames that the guest sends again, by
    /// the fingerprints of [`InputLog::take`]. Call it before the gates are opened.
    pub fn replay(&self, inputs: Vec<Input>, left: &[u64]) {
        self.forwarder().replay(InputReplay::new(inputs, left));
        self.wake();
    }

    /// Buffers frames for the guest from now on, because it is about to be paused: QEMU gets no further
    /// frame. Bounded; frames that do not fit are dropped.
    pub fn buffer_late_frames(&self) {
        self.forwarder().buffer_late_frames();
        self.wake();
    }

    /// Takes the late frames: the guest continues on another host, which delivers them with
    /// [`Port::add_late_frames`].
    pub fn take_late_frames(&self) -> Vec<Box<[u8]>> {
        self.forwarder().take_late_frames()
    }

    /// Ends buffering: the guest continues here, and gets the late frames before anything newer.
    pub fn deliver_late_frames(&self) {
        self.forwarder().deliver_late_frames();
        self.wake();
    }

    /// Adds late frames from the source host. The guest gets them once its inbound gate is open, before
    /// anything newer.
    pub fn add_late_frames<'a>(&self, frames: impl Iterator<Item = &'a [u8]>) {
        self.forwarder().add_late_frames(frames);
        self.wake();
    }

    /// Learned addresses of the guest, to be sent with it.
    pub fn addresses(&self) -> Addresses {
        self.forwarder().addresses().clone()
    }

    /// Adds addresses that were sent with the guest.
    pub fn add_addresses(&self, addresses: &Addresses) {
        self.forwarder().add_addresses(addresses);
    }

    /// Announces the guest on the network: at once and five times more over 1.25 s. Each time only if the
    /// outbound gate is open then and late frames are not buffered.
    pub fn announce(&self) {
        self.forwarder().start_announcing();
        self.wake();
    }

    /// Present values of the counters.
    pub fn counters(&self) -> PortCounters {
        self.forwarder().counters()
    }

    /// Waits until QEMU is connected; false if that takes longer than `patience`.
    pub fn wait_connected(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while !self.forwarder().is_connected() {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn forwarder(&self) -> MutexGuard<'_, Forwarder> {
        self.shared.lock()
    }

    fn wake(&self) {
        // Fails only after 2^64 wake-ups: then it is awake.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.end_thread();
    }
}

impl Port {
    fn end_thread(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a port panicked");
        }
    }
}
