//! Serial console of a machine: recent output, live output, and input.
//!
//! A thread reads the socket, stores the last [`RING`] bytes, appends them to a log and reconnects when the
//! connection ends, until the [`Console`] is dropped. A subscriber that does not read is disconnected,
//! because the guest must not stall on a slow terminal. QEMU drops what the guest prints while nobody is
//! connected.
//!
//! A console can be suspended ([`Console::suspend`]) and go on in another process, or in this one: its
//! connection stays open, so QEMU drops nothing, and what was not read yet waits in it.
//!
//! Output can be held, as that of network ports: of a protected machine nobody sees what its standby does not
//! know. Held output is in neither the log nor the recent output.

mod held_output;
mod log;
mod output_queue;
mod parts;

pub use held_output::HeldOutputState;
pub use output_queue::Ended;
pub use parts::ConsoleState;

use held_output::HeldOutput;
use log::ConsoleLog;
use output_queue::OutputQueue;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
};
use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};
use whimbrel_core::lock;

/// Bytes of recent output.
const RING: usize = 64 << 10;
/// Interval of attempts to reconnect.
const RECONNECT: Duration = Duration::from_millis(200);
/// Interval at which the reader polls whether held output was released.
const RELEASE_POLL: Duration = Duration::from_millis(20);
/// Time that input waits for a connection, and then the guest may take to accept it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Serial console with recent output.
#[derive(Debug)]
pub struct Console {
    shared: Arc<Shared>,
    log: PathBuf,
    reader: Mutex<Option<JoinHandle<()>>>,
}

/// Output of a console, starting with recent output. Up to 1 MiB is buffered for a subscriber that does not
/// read.
#[derive(Debug)]
pub struct Subscription {
    queue: Arc<OutputQueue>,
}

impl Subscription {
    /// All output that was not received yet, waiting at most `timeout` for some; empty if there is none.
    pub fn receive(&self, timeout: Duration) -> Result<Vec<u8>, Ended> {
        self.queue.take(timeout)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.queue.close();
    }
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    /// Ends the reader, while its connection stays open.
    stop: OwnedFd,
    state: Mutex<State>,
    /// Notified when the console is connected, and when its reader is to end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    /// Whether another process may have it, or nobody reads it for now.
    suspended: bool,
    stream: Option<UnixStream>,
    held: HeldOutput,
    ring: VecDeque<u8>,
    subscribers: Vec<Arc<OutputQueue>>,
}

impl Console {
    /// Opens the console at `path` ([`crate::LaunchSpec::serial_socket`]), which need not exist yet. The end
    /// of its output is in the file `log`, at most 2 MiB.
    pub fn open(path: &Path, log: &Path) -> io::Result<Self> {
        let state = State { stream: UnixStream::connect(path).ok(), ..State::default() };
        Self::over(path.to_owned(), log.to_owned(), state)
    }

    fn over(path: PathBuf, log: PathBuf, state: State) -> io::Result<Self> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Shared { path, stop, state: Mutex::new(state), changed: Condvar::new() };
        let console = Self { shared: Arc::new(shared), log, reader: Mutex::default() };
        console.start()?;
        Ok(console)
    }

    fn start(&self) -> io::Result<()> {
        let (theirs, written) = (Arc::clone(&self.shared), ConsoleLog::new(self.log.clone()));
        let reader = thread::Builder::new().name("console".into());
        *lock(&self.reader) = Some(reader.spawn(move || theirs.read_output(written))?);
        Ok(())
    }

    /// Socket on which QEMU listens.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// File with the end of the output; absent until there is some.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Subscribes to the output: the last 64 KiB and, without a gap, all that follows.
    pub fn subscribe(&self) -> Subscription {
        let feed = Arc::new(OutputQueue::default());
        let mut state = self.shared.lock();
        let (front, back) = state.ring.as_slices();
        feed.push(front);
        feed.push(back);
        state.subscribers.push(Arc::clone(&feed));
        Subscription { queue: feed }
    }

    /// Holds all output from now on, until it is released.
    pub fn hold_output(&self) {
        self.shared.lock().held.hold();
    }

    /// Position of all output so far, for [`Console::release_output`]. Output that QEMU has not yet passed on
    /// counts as later.
    pub fn output_position(&self) -> u64 {
        self.shared.lock().held.position()
    }

    /// Releases output up to a position. It is seen a moment later.
    pub fn release_output(&self, up_to: u64) {
        self.shared.lock().held.release(up_to);
    }

    /// Releases all output and holds none any more.
    pub fn release_all_output(&self) {
        self.shared.lock().held.release_all();
    }

    /// Writes `input` to the console, once it is connected. After an error a part of it may be written.
    ///
    /// # Errors
    /// If it is not connected within five seconds, or the guest takes nothing for as long; at once if the
    /// console ends or another process has it.
    pub fn write(&self, input: &[u8]) -> io::Result<()> {
        // A second connection would take the console away from the reader, so share that one.
        let mut stream = self.shared.connection().ok_or(io::ErrorKind::NotConnected)?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        stream.write_all(input)
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        state.subscribers.drain(..).for_each(|feed| feed.close());
        let is_ours = !state.suspended;
        if let Some(stream) = state.stream.as_ref().filter(|_| is_ours) {
            // Fails only if it is closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(state);
        self.end_reader();
    }
}

impl Console {
    fn end_reader(&self) {
        self.shared.changed.notify_all();
        // Fails only if it is set already.
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
        let reader = lock(&self.reader).take();
        if let Some(reader) = reader {
            // The reader's own thread has reported a panic.
            let _ = reader.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every update under the lock is complete, even after a panic.
        lock(&self.state)
    }

    /// The present connection, or the next one if it comes in time.
    fn connection(&self) -> Option<UnixStream> {
        let absent = |state: &mut State| state.stream.is_none() && !state.closed && !state.suspended;
        let waited = self.changed.wait_timeout_while(self.lock(), WRITE_TIMEOUT, absent);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.stream.as_ref()?.try_clone().ok()
    }

    fn read_output(&self, mut log: ConsoleLog) {
        let mut buffer = vec![0; 8 << 10];
        while let Some(mut stream) = self.connected(&mut log) {
            loop {
                match self.wait_output(&stream) {
                    Ok(Wait::Output) => match stream.read(&mut buffer) {
                        Ok(0) => break,
                        Ok(read) => self.lock().held.push(&buffer[..read]),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(_) => break,
                    },
                    Ok(Wait::Nothing) => {}
                    Ok(Wait::Stop) => return self.publish(&mut log),
                    Err(_) => break,
                }
                self.publish(&mut log);
            }
            self.lock().stream = None;
        }
        self.publish(&mut log);
    }

    /// Waits for output, for a while if some is held.
    fn wait_output(&self, stream: &UnixStream) -> io::Result<Wait> {
        let held = !self.lock().held.is_empty();
        let patience = held.then_some(Timespec { tv_sec: 0, tv_nsec: RELEASE_POLL.subsec_nanos().into() });
        let mut events = [PollFd::new(stream, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
        match poll(&mut events, patience.as_ref()) {
            Ok(_) if !events[1].revents().is_empty() => Ok(Wait::Stop),
            Ok(_) if !events[0].revents().is_empty() => Ok(Wait::Output),
            Ok(_) | Err(Errno::INTR) => Ok(Wait::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Present connection, or a new one. None when the console is dropped or suspended.
    fn connected(&self, log: &mut ConsoleLog) -> Option<UnixStream> {
        loop {
            // Output of a QEMU that has ended may be released late.
            self.publish(log);
            let state = self.lock();
            if state.closed || state.suspended {
                return None;
            }
            if let Some(stream) = state.stream.as_ref().and_then(|stream| stream.try_clone().ok()) {
                return Some(stream);
            }
            let state = self.changed.wait_timeout(state, RECONNECT).unwrap_or_else(PoisonError::into_inner).0;
            if state.closed || state.suspended {
                return None;
            }
            drop(state);
            let stream = UnixStream::connect(&self.path).ok();
            self.lock().stream = stream;
            self.changed.notify_all();
        }
    }

    /// Shows and logs the output that is released.
    fn publish(&self, log: &mut ConsoleLog) {
        let mut state = self.lock();
        let output = state.held.take();
        if output.is_empty() {
            return;
        }
        let excess = (state.ring.len() + output.len()).saturating_sub(RING).min(state.ring.len());
        state.ring.drain(..excess);
        state.ring.extend(&output[output.len().saturating_sub(RING)..]);
        state.subscribers.retain(|feed| feed.push(&output));
        drop(state);
        log.append(&output);
    }
}

/// What the reader of a console has waited for.
enum Wait {
    Output,
    /// The time is over.
    Nothing,
    Stop,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    const SOON: Duration = Duration::from_secs(20);

    fn receive(from: &Subscription, len: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while all.len() < len {
            all.extend(from.receive(SOON).unwrap());
        }
        all
    }

    #[test]
    fn output_goes_on_after_the_other_side_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial");
        let log = dir.path().join("console.log");
        let console = Console::open(&path, &log).unwrap();
        let output = console.subscribe();
        for round in 0..2 {
            let listener = UnixListener::bind(&path).unwrap();
            let (mut guest, _) = listener.accept().unwrap();
            guest.write_all(b"hello ").unwrap();
            assert_eq!(receive(&console.subscribe(), (round + 1) * 6).len(), (round + 1) * 6);
            std::fs::remove_file(&path).unwrap();
        }
        assert_eq!(receive(&output, 12), b"hello hello ");
        // The thread that writes the log has ended then.
        drop(console);
        assert_eq!(std::fs::read(&log).unwrap(), b"hello hello ");
    }

    #[test]
    fn input_waits_for_the_connection_and_is_refused_at_once_by_a_console_that_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial");
        let console = Console::open(&path, &dir.path().join("console.log")).unwrap();
        thread::scope(|scope| {
            let early = scope.spawn(|| console.write(b"early"));
            thread::sleep(RECONNECT);
            let (mut guest, _) = UnixListener::bind(&path).unwrap().accept().unwrap();
            let mut typed = [0; 5];
            guest.read_exact(&mut typed).unwrap();
            assert_eq!(&typed, b"early");
            early.join().unwrap().unwrap();
        });
        console.shared.lock().closed = true;
        console.shared.lock().stream = None;
        assert_eq!(console.write(b"late").unwrap_err().kind(), io::ErrorKind::NotConnected);
    }

    #[test]
    fn held_output_is_seen_and_logged_once_it_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let (path, log) = (dir.path().join("serial"), dir.path().join("console.log"));
        let listener = UnixListener::bind(&path).unwrap();
        let console = Console::open(&path, &log).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        let output = console.subscribe();
        guest.write_all(b"before ").unwrap();
        assert_eq!(receive(&output, 7), b"before ");
        console.hold_output();
        let wait_position = |position| {
            let deadline = std::time::Instant::now() + SOON;
            while console.output_position() < position {
                assert!(std::time::Instant::now() < deadline);
                thread::sleep(Duration::from_millis(1));
            }
        };
        guest.write_all(b"one ").unwrap();
        wait_position(11);
        let mark = console.output_position();
        guest.write_all(b"two ").unwrap();
        wait_position(15);
        assert_eq!(output.receive(RELEASE_POLL * 3).unwrap(), b"");
        assert_eq!(console.subscribe().receive(SOON).unwrap(), b"before ");
        console.release_output(mark);
        assert_eq!(receive(&output, 4), b"one ");
        // Output of a QEMU that has ended is released too.
        drop((guest, listener));
        console.release_all_output();
        assert_eq!(receive(&output, 4), b"two ");
        drop(console);
        assert_eq!(std::fs::read(&log).unwrap(), b"before one two ");
    }

    #[test]
    fn the_ring_is_bounded_and_a_sleeping_subscriber_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial");
        let listener = UnixListener::bind(&path).unwrap();
        let console = Console::open(&path, &dir.path().join("console.log")).unwrap();
        let sleeping = console.subscribe();
        let (mut guest, _) = listener.accept().unwrap();
        console.write(b"typed").unwrap();
        let mut typed = [0; 5];
        guest.read_exact(&mut typed).unwrap();
        assert_eq!(&typed, b"typed");
        guest.write_all(&vec![b'x'; output_queue::BACKLOG + RING]).unwrap();
        guest.write_all(b"end").unwrap();
        let deadline = std::time::Instant::now() + SOON;
        while !console.subscribe().receive(SOON).unwrap().ends_with(b"end") {
            assert!(std::time::Instant::now() < deadline);
        }
        // All output has arrived, so this one gets only recent output.
        assert_eq!(console.subscribe().receive(SOON).unwrap().len(), RING);
        assert!(sleeping.receive(SOON).unwrap().len() <= output_queue::BACKLOG);
        assert_eq!(sleeping.receive(SOON), Err(Ended));
    }
}
