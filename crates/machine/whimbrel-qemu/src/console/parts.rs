//! Parts of a console, for another process that goes on with it: its connection, and the output that this one
//! has read.

use super::{Console, HeldOutputState, RING, State, held_output::HeldOutput};
use serde::{Deserialize, Serialize};
use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::PathBuf,
};
use whimbrel_core::lock;

/// State of a suspended console, in plain types.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleState {
    /// Socket on which QEMU listens.
    pub path: PathBuf,
    /// File with the end of the output.
    pub log: PathBuf,
    /// Recent output, at most 64 KiB.
    pub recent: Vec<u8>,
    /// Output that nobody may see yet.
    pub held: HeldOutputState,
}

impl Console {
    /// Stops reading, and returns a copy of the connection, if there is one, with the state for another
    /// process. Subscriptions end after what they have. [`Console::resume`] goes on here; dropped while
    /// suspended, the console leaves its connection open.
    pub fn suspend(&self) -> io::Result<(Option<OwnedFd>, ConsoleState)> {
        self.shared.lock().suspended = true;
        self.end_reader();
        let mut state = self.shared.lock();
        state.subscribers.drain(..).for_each(|feed| feed.close());
        let connection = state.stream.as_ref().map(UnixStream::try_clone).transpose()?;
        let recent = state.ring.iter().copied().collect();
        let (path, log, held) = (self.shared.path.clone(), self.log.clone(), state.held.state());
        Ok((connection.map(OwnedFd::from), ConsoleState { path, log, recent, held }))
    }

    /// Reads on after [`Console::suspend`], because no other process does. Without effect if it reads.
    pub fn resume(&self) -> io::Result<()> {
        if lock(&self.reader).is_some() {
            return Ok(());
        }
        self.shared.lock().suspended = false;
        // The counter is set since the reader was told to end.
        let _ = rustix::io::read(&self.shared.stop, &mut [0; 8]);
        self.start()
    }

    /// A console that another process has suspended.
    ///
    /// # Errors
    /// If its state contradicts itself, or no thread can be started.
    pub fn from_parts(connection: Option<OwnedFd>, state: ConsoleState) -> io::Result<Self> {
        let ConsoleState { path, log, recent, held } = state;
        let held = HeldOutput::from_state(held).ok_or(io::ErrorKind::InvalidData)?;
        if recent.len() > RING {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let stream = connection.map(UnixStream::from);
        Self::over(path, log, State { stream, held, ring: recent.into(), ..State::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write, os::unix::net::UnixListener, time::Duration};

    const SOON: Duration = Duration::from_secs(20);

    /// Everything that a new subscriber sees, once it is `len` bytes long.
    fn seen(console: &Console, len: usize) -> Vec<u8> {
        let (subscription, mut all) = (console.subscribe(), Vec::new());
        while all.len() < len {
            all.extend(subscription.receive(SOON).unwrap());
        }
        all
    }

    #[test]
    fn a_console_goes_on_in_another_process_and_no_output_is_lost_or_shown_too_early() {
        let dir = tempfile::tempdir().unwrap();
        let (path, log) = (dir.path().join("serial"), dir.path().join("console.log"));
        let listener = UnixListener::bind(&path).unwrap();
        let console = Console::open(&path, &log).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        guest.write_all(b"seen ").unwrap();
        assert_eq!(seen(&console, 5), b"seen ");
        console.hold_output();
        let subscriber = console.subscribe();
        let (connection, state) = console.suspend().unwrap();
        assert_eq!(subscriber.receive(SOON).unwrap(), b"seen ");
        assert!(subscriber.receive(SOON).is_err(), "nobody feeds it any more");
        guest.write_all(b"between ").unwrap();
        let next = Console::from_parts(connection, state).unwrap();
        drop(console);
        guest.write_all(b"after").unwrap();
        assert_eq!(next.subscribe().receive(SOON).unwrap(), b"seen ", "the rest is held");
        next.release_all_output();
        assert_eq!(seen(&next, 18), b"seen between after");
        drop(next);
        assert_eq!(std::fs::read(&log).unwrap(), b"seen between after");
    }

    #[test]
    fn a_suspended_console_reads_on_here_if_nobody_takes_it() {
        let dir = tempfile::tempdir().unwrap();
        let (path, log) = (dir.path().join("serial"), dir.path().join("console.log"));
        let listener = UnixListener::bind(&path).unwrap();
        let console = Console::open(&path, &log).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        for round in 1..=2 {
            drop(console.suspend().unwrap());
            guest.write_all(b"more ").unwrap();
            console.resume().unwrap();
            assert_eq!(seen(&console, 5 * round), b"more ".repeat(round));
        }
    }

    #[test]
    fn a_state_with_too_much_output_is_refused() {
        let (path, log) = (PathBuf::from("/nowhere/serial"), PathBuf::from("/nowhere/log"));
        let state = ConsoleState { path, log, recent: vec![0; RING + 1], held: HeldOutputState::default() };
        assert!(Console::from_parts(None, state).is_err());
    }
}
