//! Link emulator: an IP link between two namespaces, of any rate, delay and loss (for kernels without netem).
//!
//! A TUN device `wan` at each end and two threads for each direction: one receives packets and asks the
//! [`DelayLine`] when they are due, one delivers them then. Handles a Gbit/s in full packets.

use super::{DelayLine, LabError, LinkConfig, Namespace};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use std::{
    collections::VecDeque,
    fs::File,
    net::Ipv4Addr,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use whimbrel_core::lock;

/// Interval at which an idle thread checks whether it should end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Most bytes of a packet from a device with the default MTU.
const PACKET_MAX: usize = 2048;

/// Link between two namespaces, which ends when this is dropped.
pub struct LinkEmulator {
    threads: Vec<JoinHandle<()>>,
    shared: [Arc<Direction>; 2],
}

/// One direction: source device, packets in transit with their due time, destination device.
struct Direction {
    from: File,
    to: File,
    line: Mutex<DelayLine>,
    in_transit: Mutex<VecDeque<(Instant, Vec<u8>)>>,
    more: Condvar,
    stop: AtomicBool,
    bytes: AtomicU64,
}

impl LinkEmulator {
    /// Connects two namespaces; each end gets a point-to-point device `wan` with its address (so one link for
    /// each namespace).
    pub fn between(
        a: (&Namespace, Ipv4Addr),
        b: (&Namespace, Ipv4Addr),
        config: LinkConfig,
        seed: u64,
    ) -> Result<Self, LabError> {
        let near = device(a.0, a.1, b.1)?;
        let far = device(b.0, b.1, a.1)?;
        let clone = |file: &File| file.try_clone().map_err(LabError::system("share a TUN device"));
        let shared = [Direction::new(clone(&near)?, clone(&far)?, config), Direction::new(far, near, config)]
            .map(Arc::new);
        let mut threads = Vec::new();
        for (number, direction) in shared.iter().enumerate() {
            let (taking, giving) = (Arc::clone(direction), Arc::clone(direction));
            let noise = SmallRng::seed_from_u64(seed ^ number as u64);
            threads.push(thread::spawn(move || taking.receive(noise)));
            threads.push(thread::spawn(move || giving.deliver()));
        }
        Ok(Self { threads, shared })
    }

    /// Changes the parameters of both directions from now on. Connections across the link continue.
    pub fn change(&self, config: LinkConfig) {
        self.shared.iter().for_each(|direction| lock(&direction.line).change(config));
    }

    /// Bytes of IP packets delivered so far, from the first end to the second and back.
    pub fn bytes(&self) -> [u64; 2] {
        [0, 1].map(|index: usize| self.shared[index].bytes.load(Ordering::Relaxed))
    }
}

impl Drop for LinkEmulator {
    fn drop(&mut self) {
        for direction in &self.shared {
            direction.stop.store(true, Ordering::Relaxed);
            direction.more.notify_all();
        }
        for thread in self.threads.drain(..) {
            // A thread of the link that panicked has nothing left to clean up.
            let _ = thread.join();
        }
    }
}

fn device(namespace: &Namespace, own: Ipv4Addr, peer: Ipv4Addr) -> Result<File, LabError> {
    let device = namespace.run(|| whimbrel_net::open_tun("wan"));
    let device = device.map_err(LabError::system("make a TUN device"))?;
    namespace.ip(&format!("addr add {own} peer {peer} dev wan"))?;
    // The queue of the device must not overflow before that of the model.
    namespace.ip("link set wan txqueuelen 1000 up")?;
    Ok(device)
}

impl Direction {
    fn new(from: File, to: File, config: LinkConfig) -> Self {
        let (in_transit, more) = (Mutex::default(), Condvar::new());
        let line = Mutex::new(DelayLine::new(config));
        Self { from, to, line, in_transit, more, stop: AtomicBool::new(false), bytes: AtomicU64::new(0) }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Receives packets until the link is dropped.
    fn receive(&self, mut noise: SmallRng) {
        let (begin, mut packet) = (Instant::now(), [0; PACKET_MAX]);
        while !self.stopped() {
            match rustix::io::read(&self.from, &mut packet) {
                Ok(len) => {
                    let due = lock(&self.line).admit(begin.elapsed(), len, noise.random());
                    if let Some(due) = due {
                        lock(&self.in_transit).push_back((begin + due, packet[..len].to_vec()));
                        self.more.notify_one();
                    }
                }
                Err(Errno::AGAIN) => wait_readable(&self.from),
                // The device ended with its namespace.
                Err(_) => return,
            }
        }
    }

    /// Delivers packets when they are due, until the link is dropped.
    fn deliver(&self) {
        while !self.stopped() {
            let Some((due, packet)) = self.next() else { continue };
            thread::sleep(due.saturating_duration_since(Instant::now()));
            // A device that is down loses packets, as any does.
            if rustix::io::write(&self.to, &packet).is_ok() {
                self.bytes.fetch_add(packet.len() as u64, Ordering::Relaxed);
            }
        }
    }

    fn next(&self) -> Option<(Instant, Vec<u8>)> {
        let (mut under_way, _) = self
            .more
            .wait_timeout_while(lock(&self.in_transit), POLL_INTERVAL, |waiting| waiting.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        under_way.pop_front()
    }
}

fn wait_readable(file: &File) {
    let look = Timespec { tv_sec: 0, tv_nsec: POLL_INTERVAL.as_nanos() as i64 };
    // An interrupted wait is followed by a read that finds nothing: harmless.
    let _ = poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&look));
}
