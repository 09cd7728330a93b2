//! Relay: one end of a tunnel, a thread between sockets and a transport.
//!
//! Invariants: the thread blocks only in poll. Waiting frames are bounded by the backlog, bytes in flight by
//! the window; a frame that a socket does not accept is lost. Dropping a relay ends its thread and closes its
//! sockets, and with them the tap devices.

use super::{BadBatch, MacTable, backlog::Backlog, congestion_window::Window, frames};
use crate::{FRAME_MAX, FilterCounters, FramePipeEnd, NetError, PortFilter, TapConfig, allowed, tap};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fd::{AsFd, OwnedFd},
    io::Errno,
};
use std::{
    fs::File,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Instant,
};
use whimbrel_core::lock;

/// Frames read from a socket in one turn, so that it does not delay the others.
const FRAMES_PER_TURN: usize = 256;

/// Source and destination of a relay's frames.
#[derive(Debug)]
pub struct Socket {
    file: File,
    filter: PortFilter,
    /// Name of the tap device; none for a pipe.
    device: Option<String>,
}

impl Socket {
    /// Creates a tap device in the network namespace of the calling thread. The other end delivers frames of
    /// a guest, and only those that `filter` allows reach the device.
    pub fn tap(config: &TapConfig, filter: PortFilter) -> Result<Self, NetError> {
        tap::open(config, false).map(|(file, device)| Self { file, filter, device: Some(device) })
    }

    /// Name of the tap device, if it is one.
    pub fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }
}

impl From<FramePipeEnd> for Socket {
    fn from(end: FramePipeEnd) -> Self {
        Self { file: end.0, filter: PortFilter::Off, device: None }
    }
}

/// Transport to the other end. It must preserve the order of batches; those that it cannot send it drops.
pub trait Transport: Send {
    /// Sends a batch. Drop the receipt when the other end has the batch, or never will.
    fn send(&mut self, batch: Vec<u8>, receipt: InFlightBatch);
}

/// Receipt of a batch in flight, until it is dropped.
#[derive(Debug)]
pub struct InFlightBatch {
    relay: Weak<Shared>,
    bytes: usize,
    sent: Instant,
    /// Number of the transport: receipts of an earlier one do not affect the current window.
    transport_number: u64,
}

/// Counters of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RelayCounters {
    /// Frames that were passed to the transport.
    pub sent: u64,
    /// Frames from the other end that were delivered here.
    pub delivered: u64,
    /// Frames dropped in either direction.
    pub dropped: u64,
    /// Frames from the other end that the filter dropped.
    pub filtered: FilterCounters,
}

/// One end of a tunnel.
pub struct Relay {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    sockets: Vec<Option<Socket>>,
    mac_table: Option<Mutex<MacTable>>,
    outgoing: Mutex<Outgoing>,
    began: Instant,
    wake: OwnedFd,
    stop: AtomicBool,
    sent: AtomicU64,
    delivered: AtomicU64,
    dropped: AtomicU64,
    filtered: Mutex<FilterCounters>,
}

whimbrel_core::opaque_debug!(Shared);

struct Outgoing {
    backlog: Backlog,
    window: Window,
    transport: Option<Box<dyn Transport>>,
    transport_number: u64,
}

impl Relay {
    /// Starts an end whose port number N is `sockets[N]`; none is not connected. With `reach` it sends only
    /// frames for stations at the other end, and learns them.
    pub fn start(sockets: Vec<Option<Socket>>, reach: Option<MacTable>) -> Result<Self, NetError> {
        let failed = |action| move |source: std::io::Error| NetError::Thread { action, source };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let outgoing = Outgoing {
            backlog: Backlog::default(),
            window: Window::new(),
            transport: None,
            transport_number: 0,
        };
        let shared = Arc::new(Shared {
            sockets,
            mac_table: reach.map(Mutex::new),
            outgoing: Mutex::new(outgoing),
            began: Instant::now(),
            wake: wake.map_err(|errno| failed("wake")(errno.into()))?,
            stop: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            delivered: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            filtered: Mutex::default(),
        });
        let its = Arc::clone(&shared);
        let thread = thread::Builder::new().name("tunnel".to_owned()).spawn(move || its.run());
        Ok(Self { shared, thread: Some(thread.map_err(failed("start"))?) })
    }

    /// Sets or removes the transport. Frames that waited for the previous one are dropped.
    pub fn set_transport(&self, carrier: Option<Box<dyn Transport>>) {
        let mut outgoing = self.shared.outgoing();
        let lost = outgoing.backlog.clear();
        outgoing.transport_number += 1;
        outgoing.window = Window::new();
        let before = std::mem::replace(&mut outgoing.transport, carrier);
        drop(outgoing);
        // Dropped outside the lock, because it may have receipts, which take the lock.
        drop(before);
        self.shared.count(&self.shared.dropped, lost);
    }

    /// Delivers a batch of the other end, up to the first invalid frame.
    pub fn deliver(&self, batch: &[u8]) -> Result<(), BadBatch> {
        frames(batch).try_for_each(|frame| {
            let (port, frame) = frame?;
            let socket = self.shared.sockets.get(usize::from(port)).and_then(Option::as_ref);
            let socket = socket.ok_or(BadBatch::Port { port })?;
            if let Err(reason) = allowed(frame, socket.filter) {
                lock(&self.shared.filtered).count(reason, socket.filter);
                return Ok(());
            }
            if let Some(reach) = &self.shared.mac_table {
                lock(reach).record(frame);
            }
            let counter = match rustix::io::write(&socket.file, frame) {
                Ok(_) => &self.shared.delivered,
                Err(_) => &self.shared.dropped,
            };
            self.shared.count(counter, 1);
            Ok(())
        })
    }

    /// Present values of the counters.
    pub fn counters(&self) -> RelayCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Shared { sent, delivered, dropped, .. } = &*self.shared;
        let filtered = *lock(&self.shared.filtered);
        RelayCounters { sent: read(sent), delivered: read(delivered), dropped: read(dropped), filtered }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a tunnel panicked");
        }
        self.set_transport(None);
    }
}

impl Drop for InFlightBatch {
    fn drop(&mut self) {
        let Some(relay) = self.relay.upgrade() else { return };
        let mut outgoing = relay.outgoing();
        if outgoing.transport_number == self.transport_number {
            outgoing.window.answered(self.bytes, self.sent.elapsed());
        }
        drop(outgoing);
        relay.wake();
    }
}

impl Shared {
    fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        lock(&self.outgoing)
    }

    fn count(&self, counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }

    fn wake(&self) {
        // Fails only after 2^64 wake-ups: then it is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn run(self: &Arc<Self>) {
        let mut room = vec![0; FRAME_MAX];
        let mut gone = vec![false; self.sockets.len()];
        while !self.stop.load(Ordering::SeqCst) {
            for (port, socket) in self.sockets.iter().enumerate() {
                if let Some(socket) = socket.as_ref().filter(|_| !gone[port]) {
                    gone[port] = !self.read(port as u8, &socket.file, &mut room);
                }
            }
            self.send();
            self.wait(&gone);
        }
    }

    /// Reads the frames of a socket, up to a turn's worth; false if it is gone.
    fn read(&self, port: u8, socket: &File, room: &mut [u8]) -> bool {
        for _ in 0..FRAMES_PER_TURN {
            let len = match rustix::io::read(socket, &mut *room) {
                Ok(0) => return false,
                Ok(len) => len,
                Err(Errno::AGAIN | Errno::INTR) => return true,
                Err(errno) => {
                    tracing::warn!(%errno, "a socket of a tunnel is gone");
                    return false;
                }
            };
            let frame = &room[..len];
            if self.mac_table.as_ref().is_some_and(|reach| !lock(reach).wants(frame)) {
                continue;
            }
            let mut outgoing = self.outgoing();
            let taken =
                outgoing.transport.is_some() && outgoing.backlog.push(self.began.elapsed(), port, frame);
            drop(outgoing);
            if !taken {
                self.count(&self.dropped, 1);
            }
        }
        true
    }

    /// Passes batches to the transport while the window is open.
    fn send(self: &Arc<Self>) {
        loop {
            let mut outgoing = self.outgoing();
            let Outgoing { backlog, window, transport: carrier, transport_number: turn } = &mut *outgoing;
            if backlog.is_empty() || !window.is_open() || carrier.is_none() {
                return;
            }
            let (batch, old) = backlog.pop(self.began.elapsed());
            self.count(&self.dropped, old);
            let Some(batch) = batch else { return };
            window.sent(batch.len());
            let (relay, bytes, turn) = (Arc::downgrade(self), batch.len(), *turn);
            let receipt = InFlightBatch { relay, bytes, sent: Instant::now(), transport_number: turn };
            self.count(&self.sent, frames(&batch).count() as u64);
            let Some(mut carrier) = carrier.take() else { return };
            // Outside the lock, because it may drop the receipt at once, or take a while.
            drop(outgoing);
            carrier.send(batch, receipt);
            self.return_transport(carrier, turn);
        }
    }

    /// Puts the transport back, unless another one was set meanwhile.
    fn return_transport(&self, carrier: Box<dyn Transport>, turn: u64) {
        let mut outgoing = self.outgoing();
        if outgoing.transport_number == turn {
            outgoing.transport = Some(carrier);
        } else {
            drop(outgoing);
            drop(carrier);
        }
    }

    fn wait(&self, gone: &[bool]) {
        let mut places = vec![PollFd::new(&self.wake, PollFlags::IN)];
        let live = self.sockets.iter().zip(gone).filter(|(_, gone)| !**gone);
        let live = live.filter_map(|(socket, _)| socket.as_ref());
        places.extend(live.map(|socket| PollFd::from_borrowed_fd(socket.file.as_fd(), PollFlags::IN)));
        // Interrupted or not, the next turn checks everything.
        let _ = poll(&mut places, None);
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame_pipe::frame_pipe;
    use std::{
        sync::mpsc::{Receiver, Sender, channel},
        time::Duration,
    };

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Transport that hands batches to the test.
    struct Hands(Sender<(Vec<u8>, InFlightBatch)>);

    impl Transport for Hands {
        fn send(&mut self, batch: Vec<u8>, receipt: InFlightBatch) {
            let _ = self.0.send((batch, receipt));
        }
    }

    fn end() -> (Relay, FramePipeEnd, Receiver<(Vec<u8>, InFlightBatch)>) {
        let (near, far) = frame_pipe().unwrap();
        let relay = Relay::start(vec![None, Some(far.into())], None).unwrap();
        let (sender, batches) = channel();
        relay.set_transport(Some(Box::new(Hands(sender))));
        (relay, near, batches)
    }

    fn frame(number: u32) -> Vec<u8> {
        [&[0xff; 12][..], &number.to_be_bytes(), &[0; 1400]].concat()
    }

    fn wait_for(what: &str, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < deadline, "never: {what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn frames_pass_both_ways_with_the_number_of_their_port() {
        let (relay, near, batches) = end();
        rustix::io::write(&near.0, &frame(7)).unwrap();
        let (batch, receipt) = batches.recv_timeout(PATIENCE).unwrap();
        assert_eq!(frames(&batch).collect::<Vec<_>>(), [Ok((1, &frame(7)[..]))]);
        drop(receipt);
        relay.deliver(&batch).unwrap();
        let mut room = [0; 2000];
        let len = rustix::io::read(&near.0, &mut room).unwrap();
        assert_eq!(room[..len], frame(7));
        let unplugged = [&[0][..], &batch[1..]].concat();
        assert_eq!(relay.deliver(&unplugged), Err(BadBatch::Port { port: 0 }));
    }

    #[test]
    fn a_frame_of_another_station_does_not_come_out_of_a_tunnel() {
        let (near, far) = frame_pipe().unwrap();
        let filter = PortFilter::Only(crate::Mac([2; 6]));
        let reach = MacTable::new([crate::Mac([2; 6])]);
        let relay =
            Relay::start(vec![Some(Socket { file: far.0, filter, device: None })], Some(reach)).unwrap();
        let mut backlog = Backlog::default();
        let own = [&[0xff; 6][..], &[2; 6], &[0x88, 0xb5, 1]].concat();
        let foreign = [&[0xff; 6][..], &[4; 6], &[0x88, 0xb5, 2]].concat();
        for frame in [&foreign, &own] {
            assert!(backlog.push(Duration::ZERO, 0, frame));
        }
        relay.deliver(&backlog.pop(Duration::ZERO).0.unwrap()).unwrap();
        let mut room = [0; 100];
        let len = rustix::io::read(&near.0, &mut room).unwrap();
        assert_eq!(room[..len], own);
        assert_eq!(rustix::io::read(&near.0, &mut room), Err(Errno::AGAIN));
        assert_eq!((relay.counters().delivered, relay.counters().filtered.source), (1, 1));
    }

    #[test]
    fn a_peer_that_takes_nothing_makes_frames_drop_and_nobody_wait() {
        let (relay, near, batches) = end();
        let mut sent = 0;
        while relay.counters().dropped < 100 {
            if rustix::io::write(&near.0, &frame(sent)).is_ok() {
                sent += 1;
            }
            assert!(sent < 100_000, "nothing is dropped");
        }
        // When it sends batches again, those that waited follow in order.
        let (mut last, mut got) = (None, 0);
        while let Ok((batch, receipt)) = batches.recv_timeout(Duration::from_millis(300)) {
            for (_, frame) in frames(&batch).map(Result::unwrap) {
                let number = u32::from_be_bytes(*frame[12..].first_chunk().unwrap());
                assert!(last < Some(number), "{last:?} {number}");
                (last, got) = (Some(number), got + 1);
            }
            drop(receipt);
        }
        assert!(got > 0 && got < sent);
    }

    #[test]
    fn without_a_carrier_frames_are_dropped_and_not_kept_for_later() {
        let (relay, near, batches) = end();
        relay.set_transport(None);
        rustix::io::write(&near.0, &frame(1)).unwrap();
        wait_for("a dropped frame", || relay.counters().dropped == 1);
        let (sender, later) = channel();
        relay.set_transport(Some(Box::new(Hands(sender))));
        rustix::io::write(&near.0, &frame(2)).unwrap();
        let (batch, _receipt) = later.recv_timeout(PATIENCE).unwrap();
        assert_eq!(frames(&batch).collect::<Vec<_>>(), [Ok((1, &frame(2)[..]))]);
        assert!(batches.try_recv().is_err());
    }
}
