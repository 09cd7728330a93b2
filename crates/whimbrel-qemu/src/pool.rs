//! QEMUs started ahead of time, so that a resume need not wait for one.
//!
//! A warm QEMU is incoming: it has no state until somebody loads one. Its shape is all that stands on its command line, because
//! nothing of that can change later. One thread keeps each shape filled and replaces the dead; a failed start is reported by
//! `tracing` and tried again later. Dropping the pool ends every QEMU that was not claimed.

use crate::{
    launch::{LaunchError, LaunchSpec},
    machine::Qemu,
};
use std::{
    any::Any,
    error::Error,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use whimbrel_core::MachineConfig;

/// How often the pool looks for dead QEMUs.
const SWEEP: Duration = Duration::from_secs(1);
/// How long a shape is left alone after a failed start.
const BACK_OFF: Duration = Duration::from_secs(5);

/// What a warm QEMU must have in common with the machine that takes it.
///
/// Hardware addresses belong to it (a reset brings back the one on the command line), bridges do not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    config: MachineConfig,
    variant: String,
}

/// Makes the parts of a warm QEMU: its slot directory, its RAM file, its NBD sockets. Called by the pool's thread.
pub type Prepare = Box<dyn Fn(&Shape) -> Result<Slot, Box<dyn Error + Send + Sync>> + Send>;

/// The parts of one QEMU.
pub struct Slot {
    /// How to launch it; the pool makes it incoming.
    pub spec: LaunchSpec,
    /// Whatever must live as long as the QEMU does (directories, servers). Dropped after its end, or handed on with a claim.
    pub keep: Box<dyn Any + Send>,
}

/// A QEMU that waits for [`Qemu::load`].
pub struct WarmQemu {
    /// The QEMU.
    pub qemu: Qemu,
    /// How it was launched.
    pub spec: LaunchSpec,
    /// What the preparation wants kept.
    pub keep: Box<dyn Any + Send>,
}

/// QEMUs started ahead of time.
pub struct Pool {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    racks: Vec<Rack>,
}

/// The warm QEMUs of one shape.
struct Rack {
    shape: Shape,
    capacity: usize,
    warm: Vec<WarmQemu>,
    retry_at: Option<Instant>,
}

#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("cannot prepare a slot")]
    Prepare(#[source] Box<dyn Error + Send + Sync>),
    #[error("cannot launch")]
    Launch(#[from] LaunchError),
}

impl Shape {
    /// The shape of machines with this configuration.
    pub fn of(config: &MachineConfig) -> Self {
        let mut config = config.clone();
        for nic in &mut config.nics {
            nic.bridge = None;
        }
        Self { config, variant: String::new() }
    }

    /// The shape set apart by something the configuration does not show, such as the image that private memory comes from.
    #[must_use]
    pub fn with_variant(mut self, variant: impl Into<String>) -> Self {
        self.variant = variant.into();
        self
    }

    /// The configuration, without bridges.
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// What [`Shape::with_variant`] set.
    pub fn variant(&self) -> &str {
        &self.variant
    }
}

impl Pool {
    /// A pool that starts `binary`, empty until a shape is wanted.
    pub fn new(binary: PathBuf, prepare: Prepare) -> io::Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let theirs = Arc::clone(&shared);
        let work = move || theirs.work(&binary, &prepare);
        let worker = thread::Builder::new().name("qemu-pool".into()).spawn(work)?;
        Ok(Self { shared, worker: Some(worker) })
    }

    /// Keeps `capacity` QEMUs of `shape` warm from now on; 0 ends those there are.
    pub fn keep_warm(&self, shape: &Shape, capacity: usize) {
        let mut state = self.shared.lock();
        let surplus = match state.racks.iter_mut().position(|rack| rack.shape == *shape) {
            Some(index) if capacity == 0 => state.racks.swap_remove(index).warm,
            Some(index) => {
                let rack = &mut state.racks[index];
                rack.capacity = capacity;
                let keep = capacity.min(rack.warm.len());
                rack.warm.split_off(keep)
            }
            None if capacity == 0 => Vec::new(),
            None => {
                state.racks.push(Rack { shape: shape.clone(), capacity, warm: Vec::new(), retry_at: None });
                Vec::new()
            }
        };
        drop(state);
        self.shared.changed.notify_all();
        surplus.into_iter().for_each(WarmQemu::end);
    }

    /// A warm QEMU of `shape`, if one is ready. Another takes its place in the background.
    pub fn claim(&self, shape: &Shape) -> Option<WarmQemu> {
        let mut dead = Vec::new();
        let mut state = self.shared.lock();
        let rack = state.racks.iter_mut().find(|rack| rack.shape == *shape)?;
        let claimed = loop {
            match rack.warm.pop() {
                Some(warm) if warm.is_alive() => break Some(warm),
                Some(warm) => dead.push(warm),
                None => break None,
            }
        };
        drop(state);
        self.shared.changed.notify_all();
        claimed
    }

    /// How many QEMUs of `shape` are ready.
    pub fn ready(&self, shape: &Shape) -> usize {
        let state = self.shared.lock();
        let rack = state.racks.iter().find(|rack| rack.shape == *shape);
        rack.map_or(0, |rack| rack.warm.iter().filter(|warm| warm.is_alive()).count())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let racks = {
            let mut state = self.shared.lock();
            state.closed = true;
            std::mem::take(&mut state.racks)
        };
        self.shared.changed.notify_all();
        racks.into_iter().flat_map(|rack| rack.warm).for_each(WarmQemu::end);
        if let Some(worker) = self.worker.take() {
            // A panic in the worker was reported by its own thread.
            let _ = worker.join();
        }
    }
}

impl WarmQemu {
    fn is_alive(&self) -> bool {
        self.qemu.process().is_alive()
    }

    /// Nothing runs in it, so it need not be asked.
    fn end(self) {
        self.qemu.kill();
        drop(self.keep);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock leaves the state half made.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, binary: &Path, prepare: &Prepare) {
        while let Some(shape) = self.next_to_start() {
            let started = start(binary, prepare, &shape);
            if let Err(error) = &started {
                let error: &dyn Error = error;
                tracing::warn!(error, "cannot start a qemu ahead of time");
            }
            if let Some(unwanted) = self.put(&shape, started.ok()) {
                unwanted.end();
            }
        }
    }

    /// Waits for a shape that lacks a QEMU. None when the pool is dropped.
    fn next_to_start(&self) -> Option<Shape> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let dead: Vec<_> = state.racks.iter_mut().flat_map(Rack::take_dead).collect();
            if !dead.is_empty() {
                // What they kept may take its time to drop.
                drop(state);
                drop(dead);
                state = self.lock();
                continue;
            }
            if let Some(rack) = state.racks.iter().find(|rack| rack.wants(Instant::now())) {
                return Some(rack.shape.clone());
            }
            state = self.changed.wait_timeout(state, SWEEP).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Puts what was started on its rack, or gives it back if it is not wanted any more.
    fn put(&self, shape: &Shape, started: Option<WarmQemu>) -> Option<WarmQemu> {
        let mut state = self.lock();
        let Some(rack) = state.racks.iter_mut().find(|rack| rack.shape == *shape) else { return started };
        match started {
            Some(warm) if rack.warm.len() < rack.capacity => {
                rack.retry_at = None;
                rack.warm.push(warm);
                None
            }
            Some(surplus) => Some(surplus),
            None => {
                rack.retry_at = Some(Instant::now() + BACK_OFF);
                None
            }
        }
    }
}

impl Rack {
    fn wants(&self, now: Instant) -> bool {
        self.warm.len() < self.capacity && self.retry_at.is_none_or(|at| at <= now)
    }

    fn take_dead(&mut self) -> Vec<WarmQemu> {
        self.warm.extract_if(.., |warm| !warm.is_alive()).collect()
    }
}

fn start(binary: &Path, prepare: &Prepare, shape: &Shape) -> Result<WarmQemu, StartError> {
    let Slot { mut spec, keep } = prepare(shape).map_err(StartError::Prepare)?;
    spec.incoming = true;
    let qemu = Qemu::launch(binary, &spec)?;
    Ok(WarmQemu { qemu, spec, keep })
}
