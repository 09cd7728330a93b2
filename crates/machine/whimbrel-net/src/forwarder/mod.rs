//! Forwarder: moves frames between QEMU and the tap device. One thread for each port, which blocks only in
//! poll.
//!
//! Outbound: one read takes many frames from the link; each is written to the tap (which takes one at a time)
//! or to the output buffer. Inbound: many frames are read from the tap into one buffer, after their lengths,
//! and sent to QEMU. All queues are bounded: while QEMU does not read, the tap is not read, or QEMU's own,
//! and its queue overflows, as a switch's does. While the output buffer is full, the link is not read: QEMU
//! waits behind a stream, and the queue of a packet socket overflows.
//!
//! Packets have the form of QEMU's end of the link: with a header of offloads before each frame, or without.
//! Whatever leaves this host, is logged or compared is plain.
//!
//! A broken stream is opened again. If the tap device was removed, that is reported once and the port
//! continues without one.

pub(crate) mod guest_link;
pub(crate) mod parts;
pub(crate) mod uplink;

use crate::{
    ANNOUNCE_GAPS, Addresses, BufferLimits, Epoch, FRAME_MAX, Gate, Gates, InputLog, OutputBuffer,
    PortCounters, PortFilter, allowed, announcements,
    framing::BrokenStream,
    input_replay::{InputReplay, Next},
    late_frames::LateFrames,
    offload,
};
use guest_link::{GuestEnd, GuestLink, Polled};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, OwnedFd},
    io::Errno,
};
use std::{
    fs::File,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use uplink::{Form, NetworkSide};
use whimbrel_core::lock;

/// Interval of checks of an input replay, and of room for late frames.
const REPLAY_INTERVAL: Duration = Duration::from_millis(1);
/// Large reads in one turn, so that callers do not wait long for the port.
const READS_PER_TURN: usize = 16;
/// Turns after which the queue of a packet socket is empty, also of the smallest frames: each is counted as
/// 768 bytes at least.
const TURNS_TO_EMPTY: usize = 16;
/// Most frames read from the tap in one turn.
const FRAMES_PER_TURN: usize = 256;
/// Most frames queued in a tap device: the kernel's default `txqueuelen`, which is not changed.
const TAP_QUEUE: usize = 1000;

/// Forwarder that its thread and the port's owner use in turns.
pub(crate) struct Shared {
    // Waiting for the forwarder requires this lock. Otherwise the thread, which releases the forwarder only
    // for an instant, would exclude the owner as long as there is traffic.
    queue_lock: Mutex<()>,
    forwarder: Mutex<Forwarder>,
}

impl Shared {
    pub(crate) fn new(pump: Forwarder) -> Self {
        Self { queue_lock: Mutex::new(()), forwarder: Mutex::new(pump) }
    }

    /// Locks the forwarder. A panic during its use leaves at worst wrong counters: gates and queue change in
    /// single steps.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Forwarder> {
        let _turn = lock(&self.queue_lock);
        lock(&self.forwarder)
    }
}

pub(crate) struct Forwarder {
    link: GuestLink,
    /// Form of all packets here.
    form: Form,
    tap: Option<NetworkSide>,
    gates: Gates,
    filter: PortFilter,
    output_buffer: Option<OutputBuffer>,
    /// Called when a frame is buffered and the buffer was empty before.
    on_first_buffered: Option<FirstHeld>,
    /// Log of frames that reach the guest, and the number of this port in it.
    inputs: Option<(Arc<InputLog>, u16)>,
    replay: Option<InputReplay>,
    late_frames: LateFrames,
    addresses: Addresses,
    announcing: Option<Announcing>,
    counters: PortCounters,
}

/// Callback that runs while the forwarder is locked, so it must not call the port.
pub(crate) type FirstHeld = Box<dyn Fn() + Send>;

struct Announcing {
    at: Instant,
    done: usize,
}

#[derive(PartialEq, Eq)]
enum Step {
    More,
    Done,
}

impl Forwarder {
    pub(crate) fn new(end: GuestEnd, tap: Option<NetworkSide>, gates: Gates, filter: PortFilter) -> Self {
        Self::over(GuestLink::new(end), tap, gates, filter)
    }

    fn over(link: GuestLink, tap: Option<NetworkSide>, gates: Gates, filter: PortFilter) -> Self {
        Self {
            form: if link.has_offloads() { Form::WithOffloads } else { Form::Plain },
            link,
            tap,
            gates,
            filter,
            output_buffer: None,
            on_first_buffered: None,
            inputs: None,
            replay: None,
            late_frames: LateFrames::default(),
            addresses: Addresses::default(),
            announcing: None,
            counters: PortCounters::default(),
        }
    }

    pub(crate) fn gates(&self) -> Gates {
        self.gates
    }

    pub(crate) fn set_gates(&mut self, gates: Gates) {
        match (self.gates.inbound, gates.inbound) {
            // Frames in the tap's queue came while the gate was closed: they are not delivered later.
            (Gate::Blocked, Gate::Open) => self.drop_waiting(),
            (Gate::Open, Gate::Blocked) => {
                self.counters.dropped_frames += self.link.unsent.remove_unsent(|_| {});
            }
            (Gate::Blocked, Gate::Blocked) | (Gate::Open, Gate::Open) => {}
        }
        if gates.outbound != self.gates.outbound {
            // Frames that QEMU has written already are subject to the previous gate.
            self.empty_guest();
        }
        self.gates = gates;
    }

    /// Reads the tap's queue; while the gate is closed that drops its frames.
    fn drop_waiting(&mut self) {
        for _ in 0..TAP_QUEUE.div_ceil(FRAMES_PER_TURN) {
            if self.read_uplink() == Step::Done {
                return;
            }
        }
    }

    pub(crate) fn start_buffering(&mut self, limits: BufferLimits) {
        self.output_buffer.get_or_insert_with(|| OutputBuffer::new(limits));
    }

    pub(crate) fn on_first_buffered(&mut self, first_held: FirstHeld) {
        self.on_first_buffered = Some(first_held);
    }

    pub(crate) fn has_buffered(&self) -> bool {
        self.output_buffer.as_ref().is_some_and(|hold| !hold.is_empty())
    }

    pub(crate) fn barrier(&mut self) -> Option<Epoch> {
        // Frames that QEMU has written already belong to the epoch that ends.
        self.empty_guest();
        self.output_buffer.as_mut().map(OutputBuffer::barrier)
    }

    pub(crate) fn release(&mut self, up_to: Epoch) -> Option<usize> {
        let hold = self.output_buffer.as_mut()?;
        let mut released = 0;
        while let Some(frame) = hold.release(up_to) {
            emit(self.tap.as_ref(), &frame, self.form, &mut self.counters);
            self.inputs.iter().for_each(|(inputs, _)| inputs.record_sent(self.form.frame_of(&frame)));
            released += 1;
        }
        Some(released)
    }

    pub(crate) fn release_all(&mut self) {
        self.barrier();
        self.release(Epoch(u64::MAX));
        self.output_buffer = None;
    }

    pub(crate) fn discard_buffered(&mut self) -> usize {
        self.output_buffer.take().map_or(0, |hold| hold.len())
    }

    pub(crate) fn record(&mut self, inputs: Option<(Arc<InputLog>, u16)>) {
        self.inputs = inputs;
    }

    pub(crate) fn replay(&mut self, replay: InputReplay) {
        self.replay = Some(replay);
    }

    pub(crate) fn buffer_late_frames(&mut self) {
        let Self { link, late_frames: strays, counters, form, .. } = self;
        strays.start_buffering();
        // Frames that QEMU has not received yet become late frames, and are counted then.
        link.unsent.remove_unsent(|packet| {
            counters.inbound_frames = counters.inbound_frames.saturating_sub(1);
            let bytes = form.frame_of(packet).len() as u64;
            counters.inbound_bytes = counters.inbound_bytes.saturating_sub(bytes);
            counters.dropped_frames += u64::from(!strays.push(packet));
        });
    }

    /// Late frames as on the wire, for another host. QEMU is paused.
    pub(crate) fn take_late_frames(&mut self) -> Vec<Box<[u8]>> {
        // Include frames in the tap's queue, and before all others those in QEMU's.
        self.read_uplink();
        let unread = self.link.take_unread().into_iter().map(Vec::into_boxed_slice);
        let mut frames = Vec::new();
        for packet in unread.chain(self.late_frames.take()) {
            frames.extend(self.form.plain(&packet).into_iter().map(|frame| Box::from(&*frame)));
        }
        frames
    }

    pub(crate) fn deliver_late_frames(&mut self) {
        self.late_frames.stop_buffering();
    }

    pub(crate) fn add_late_frames<'a>(&mut self, frames: impl Iterator<Item = &'a [u8]>) {
        let header = self.form.header();
        frames
            .filter(|frame| !frame.is_empty())
            .for_each(|frame| self.add_late_packet(&[header, frame].concat()));
    }

    /// Adds a late frame in the form of this port.
    fn add_late_packet(&mut self, packet: &[u8]) {
        let taken = (1..=FRAME_MAX).contains(&packet.len()) && self.late_frames.push(packet);
        self.counters.dropped_frames += u64::from(!taken);
    }

    pub(crate) fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    pub(crate) fn add_addresses(&mut self, addresses: &Addresses) {
        self.addresses.merge(addresses);
    }

    pub(crate) fn start_announcing(&mut self) {
        self.announcing = Some(Announcing { at: Instant::now(), done: 0 });
    }

    pub(crate) fn counters(&mut self) -> PortCounters {
        self.counters.dropped_frames += self.link.take_dropped();
        self.counters
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// Whether packets have headers of offloads.
    pub(crate) fn has_offloads(&self) -> bool {
        self.form == Form::WithOffloads
    }

    /// Does all work that needs no waiting, up to a bound.
    fn work(&mut self) {
        self.link.connect_if_due();
        self.announce_if_due();
        self.read_guest();
        self.read_uplink();
        if self.replay.as_ref().is_some_and(|replay| replay.is_over(Instant::now())) {
            self.replay = None;
        }
    }

    fn disconnect(&mut self, reason: &dyn std::fmt::Display) {
        self.counters.dropped_frames += self.link.disconnect(reason);
    }

    fn announce_if_due(&mut self) {
        let Some(announcing) = &mut self.announcing else { return };
        if Instant::now() < announcing.at {
            return;
        }
        // While frames are buffered the guest leaves for another host, which may be announcing it already.
        if self.gates.outbound == Gate::Open && !self.late_frames.is_buffering() {
            // Another host may have sent addresses that this guest may not use.
            let frames = self.addresses.stations().iter().flat_map(announcements);
            for frame in frames.filter(|frame| allowed(frame, self.filter).is_ok()) {
                let packet = [self.form.header(), &frame].concat();
                emit(self.tap.as_ref(), &packet, self.form, &mut self.counters);
            }
        }
        let gap = ANNOUNCE_GAPS.get(announcing.done);
        announcing.done += 1;
        match gap {
            Some(gap) => announcing.at += *gap,
            None => self.announcing = None,
        }
    }

    /// Reads what the guest sent, until there is nothing, no space, or a turn's work is done.
    fn read_guest(&mut self) -> Step {
        for _ in 0..READS_PER_TURN {
            match self.dispatch() {
                Ok(Step::More) => {}
                Ok(Step::Done) => return Step::Done,
                Err(broken) => {
                    self.disconnect(&broken);
                    return Step::Done;
                }
            }
            match self.link.receive() {
                Ok(Step::More) => {}
                Ok(Step::Done) => return Step::Done,
                Err(lost) => {
                    self.disconnect(&lost);
                    return Step::Done;
                }
            }
        }
        // Handles the frames of the last read; a broken stream is reported in the next turn.
        self.dispatch().unwrap_or(Step::More)
    }

    /// Reads all that the guest has sent, up to a bound that its queue does not reach.
    fn empty_guest(&mut self) {
        for _ in 0..TURNS_TO_EMPTY {
            if self.read_guest() == Step::Done {
                return;
            }
        }
    }

    /// Handles every complete frame; done when the output buffer accepts no more.
    fn dispatch(&mut self) -> Result<Step, BrokenStream> {
        let Self {
            link,
            form,
            output_buffer: hold,
            on_first_buffered: first_held,
            tap,
            counters,
            addresses,
            gates,
            filter,
            replay,
            ..
        } = self;
        let decoder = &mut link.received;
        while let Some(packet) = decoder.frame()? {
            let (length, frame) = (packet.len(), form.frame_of(packet));
            let checked = if *form == Form::WithOffloads { offload::check(packet) } else { Ok(()) };
            if let Err(reason) = checked.and_then(|()| allowed(frame, *filter)) {
                counters.filtered.count(reason, *filter);
                decoder.taken(length);
                continue;
            }
            let had_left = replay.as_mut().is_some_and(|replay| replay.is_repeated(frame));
            match (gates.outbound, hold.as_mut()) {
                (Gate::Blocked, _) => counters.dropped_frames += 1,
                (Gate::Open, _) if had_left => counters.dropped_frames += 1,
                (Gate::Open, None) => emit(tap.as_ref(), packet, *form, counters),
                (Gate::Open, Some(hold)) => {
                    let held_none = hold.is_empty();
                    if hold.push(packet).is_err() {
                        return Ok(Step::Done);
                    }
                    if held_none && let Some(first_held) = first_held {
                        first_held();
                    }
                }
            }
            addresses.record(frame);
            decoder.taken(length);
        }
        Ok(Step::More)
    }

    /// Whether the guest has to wait for a release.
    fn is_stalled(&self) -> bool {
        match (&self.output_buffer, self.link.received.frame()) {
            (Some(hold), Ok(Some(frame))) => self.gates.outbound == Gate::Open && !hold.has_room(frame.len()),
            _ => false,
        }
    }

    /// Sends buffered frames to QEMU. More if the tap may have others.
    fn read_uplink(&mut self) -> Step {
        loop {
            self.flush();
            if self.link.unsent.is_pending() && !self.late_frames.is_buffering() {
                return Step::Done;
            }
            let filled = self.fill_batch();
            self.flush();
            // No event would wake this thread for these frames.
            let more = self.has_late_frames_to_send() && self.replay.is_none() && self.link.takes_more();
            if self.link.unsent.is_pending() || !more {
                return if self.link.unsent.is_pending() { Step::Done } else { filled };
            }
        }
    }

    fn has_late_frames_to_send(&self) -> bool {
        self.late_frames.has_next() && self.passes()
    }

    /// Whether inbound frames are passed to QEMU.
    fn passes(&self) -> bool {
        self.gates.inbound == Gate::Open && self.is_connected()
    }

    /// Replays recorded inputs to the guest. Done while there are more: the uplink has to wait.
    fn fill_from_replay(&mut self) -> Step {
        let passes = self.passes();
        let Self { replay: Some(replay), link, form, .. } = self else { return Step::More };
        while passes && link.unsent.space().is_some() && link.takes_more() {
            let Next::Deliver(frame) = replay.next(Instant::now()) else { break };
            link.push(form.header(), &frame);
        }
        if replay.is_active() { Step::Done } else { Step::More }
    }

    /// Delivers late frames before new ones.
    fn fill_from_late_frames(&mut self) {
        while self.passes() && self.link.unsent.space().is_some() && self.link.takes_more() {
            let Some(frame) = self.late_frames.next() else { return };
            if may_deliver(self.inputs.as_ref(), self.form, &mut self.counters, &frame) {
                self.link.push(&[], &frame);
            }
        }
    }

    fn fill_batch(&mut self) -> Step {
        if self.fill_from_replay() == Step::Done {
            return Step::Done;
        }
        self.fill_from_late_frames();
        let passes = self.passes();
        if passes && self.late_frames.has_next() {
            return Step::Done;
        }
        let Self { link, form, late_frames: strays, inputs, counters, .. } = self;
        let batch = &mut link.unsent;
        let keeps = strays.is_buffering() && self.gates.inbound == Gate::Open;
        let Some(tap) = &self.tap else { return Step::Done };
        // A bound on frames too, because dropped ones do not fill the buffer.
        for _ in 0..FRAMES_PER_TURN {
            let Some(space) = batch.space() else { return Step::More };
            match tap.read(space, *form) {
                // A pipe whose other end was closed. A tap device never has an empty frame.
                Ok(0) => {
                    self.tap = None;
                    return Step::Done;
                }
                Ok(len) if keeps => {
                    counters.dropped_frames += u64::from(!strays.push(&space[..len]));
                }
                Ok(len) if passes => {
                    if may_deliver(inputs.as_ref(), *form, counters, &space[..len]) {
                        batch.filled(len);
                    }
                }
                Ok(_) => counters.dropped_frames += 1,
                Err(Errno::AGAIN | Errno::INTR) => return Step::Done,
                Err(errno) => {
                    tracing::warn!(%errno, "a tap device or pipe is gone; its port has no network now");
                    self.tap = None;
                    return Step::Done;
                }
            }
        }
        Step::More
    }

    fn flush(&mut self) {
        match self.link.flush() {
            Ok(dropped) => self.counters.dropped_frames += dropped,
            Err(lost) => self.disconnect(&lost),
        }
    }

    /// Time until a timer is due.
    fn quiet_for(&self) -> Option<Duration> {
        let next = self
            .link
            .retry_at()
            .into_iter()
            .chain(self.announcing.as_ref().map(|announcing| announcing.at))
            .min();
        let next = next.map(|next| next.saturating_duration_since(Instant::now()));
        // A replay may continue after any frame of the guest, late frames when QEMU has taken some.
        let polls = self.replay.is_some() || self.has_late_frames_to_send();
        next.into_iter().chain(polls.then_some(REPLAY_INTERVAL)).min()
    }

    /// Events to wait for, with descriptors that outlive the lock.
    fn waits(&self) -> PollSet {
        let mut socket_events = PollFlags::empty();
        socket_events.set(PollFlags::IN, !self.is_stalled());
        socket_events.set(PollFlags::OUT, self.link.unsent.is_pending());
        // If no event is requested, poll would still report a hang-up, again and again.
        let socket =
            self.link.polled().filter(|_| !socket_events.is_empty()).map(|socket| (socket, socket_events));
        let replays = self.replay.as_ref().is_some_and(InputReplay::is_active);
        let tap = self
            .tap
            .as_ref()
            .map(|tap| Arc::clone(&tap.file))
            .filter(|_| !replays && (self.late_frames.is_buffering() || !self.link.unsent.is_pending()));
        PollSet { socket, tap, time: self.quiet_for() }
    }
}

/// Counts a frame that is to be delivered; false if it cannot be recorded, so that it must be dropped.
fn may_deliver(
    inputs: Option<&(Arc<InputLog>, u16)>,
    form: Form,
    counters: &mut PortCounters,
    packet: &[u8],
) -> bool {
    let yes = inputs.is_none_or(|(inputs, port)| inputs.record(*port, &form.plain(packet)));
    match yes {
        true => {
            counters.inbound_frames += 1;
            counters.inbound_bytes += form.frame_of(packet).len() as u64;
        }
        false => counters.dropped_frames += 1,
    }
    yes
}

/// Writes a packet to the uplink. A frame that the device does not accept is lost, as on any wire.
fn emit(tap: Option<&NetworkSide>, packet: &[u8], form: Form, counters: &mut PortCounters) {
    match tap.map(|tap| tap.write(packet, form)) {
        Some(Ok(())) => {
            counters.outbound_frames += 1;
            counters.outbound_bytes += form.frame_of(packet).len() as u64;
        }
        Some(Err(_)) | None => counters.dropped_frames += 1,
    }
}

/// Events that the thread waits for.
struct PollSet {
    socket: Option<(Polled, PollFlags)>,
    tap: Option<Arc<File>>,
    time: Option<Duration>,
}

impl PollSet {
    fn wait(&self, wake: &OwnedFd) {
        let mut places = vec![PollFd::new(wake, PollFlags::IN)];
        if let Some((socket, events)) = &self.socket {
            places.push(PollFd::from_borrowed_fd(socket.as_fd(), *events));
        }
        if let Some(tap) = &self.tap {
            places.push(PollFd::from_borrowed_fd(tap.as_fd(), PollFlags::IN));
        }
        let time = self.time.and_then(|time| Timespec::try_from(time).ok());
        // Interrupted or not, the next turn checks everything.
        let _ = poll(&mut places, time.as_ref());
        let _ = rustix::io::read(wake, &mut [0; 8]);
    }
}

/// Body of the port's thread.
pub(crate) fn run(shared: &Shared, wake: &OwnedFd, stop: &AtomicBool) {
    while !stop.load(Ordering::SeqCst) {
        let waits = {
            let mut pump = shared.lock();
            pump.work();
            pump.waits()
        };
        waits.wait(wake);
    }
}
