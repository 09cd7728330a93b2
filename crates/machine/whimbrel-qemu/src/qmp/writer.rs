//! Writer of a QMP connection: whole commands, and one whose end is held back until it is to be carried out.
//!
//! QEMU reads a command byte by byte as it comes, 3 us each, and carries it out when its last brace is there.
//! What is urgent is therefore sent ahead of its time, without that brace. Other commands wait meanwhile.

use std::{
    io::{self, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Bytes of a command that are held back: its last brace, and the end of the line.
const HELD_BACK: usize = 2;
/// How long other commands wait for one that is not finished. It is finished within a millisecond or two.
const UNFINISHED_MAX: Duration = Duration::from_secs(1);

pub(super) struct Writer {
    outgoing: Mutex<Outgoing>,
    finished: Condvar,
}

struct Outgoing {
    stream: UnixStream,
    /// What is missing of a command; empty if none is unfinished.
    rest: Vec<u8>,
}

impl Writer {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { outgoing: Mutex::new(Outgoing { stream, rest: Vec::new() }), finished: Condvar::new() }
    }

    /// Sends whole lines.
    pub(super) fn send(&self, lines: &[u8]) -> io::Result<()> {
        self.with_stream(|mut stream| stream.write_all(lines))
    }

    /// Uses the stream between two commands.
    pub(super) fn with_stream<T>(&self, action: impl FnOnce(&UnixStream) -> io::Result<T>) -> io::Result<T> {
        action(&self.between_commands()?.stream)
    }

    /// Sends a line without its end. [`Writer::finish`] must follow at once.
    pub(super) fn begin(&self, line: &[u8]) -> io::Result<()> {
        let mut outgoing = self.between_commands()?;
        let (begin, rest) = line.split_at(line.len().saturating_sub(HELD_BACK));
        outgoing.stream.write_all(begin)?;
        outgoing.rest = rest.to_vec();
        Ok(())
    }

    /// Sends the end of the line that was begun.
    pub(super) fn finish(&self) -> io::Result<()> {
        let mut outgoing = self.lock();
        let rest = std::mem::take(&mut outgoing.rest);
        let sent = outgoing.stream.write_all(&rest);
        self.finished.notify_all();
        sent
    }

    /// Closes the connection, if it is open still.
    pub(super) fn shut_down(&mut self) {
        let outgoing = self.outgoing.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = outgoing.stream.shutdown(Shutdown::Both);
    }

    fn between_commands(&self) -> io::Result<MutexGuard<'_, Outgoing>> {
        let is_unfinished = |outgoing: &mut Outgoing| !outgoing.rest.is_empty();
        let waited = self.finished.wait_timeout_while(self.lock(), UNFINISHED_MAX, is_unfinished);
        let (outgoing, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(outgoing) }
    }

    fn lock(&self) -> MutexGuard<'_, Outgoing> {
        // Nothing under the lock panics.
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Read, thread};

    #[test]
    fn other_commands_wait_until_one_that_was_begun_is_finished() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let writer = Writer::new(ours);
        writer.begin(b"{\"a\":1}\n").unwrap();
        thread::scope(|scope| {
            let other = scope.spawn(|| writer.send(b"{\"b\":2}\n"));
            let mut begun = [0; 6];
            theirs.read_exact(&mut begun).unwrap();
            assert_eq!(&begun, b"{\"a\":1");
            writer.finish().unwrap();
            other.join().unwrap().unwrap();
        });
        drop(writer);
        let mut rest = String::new();
        theirs.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "}\n{\"b\":2}\n");
    }

    #[test]
    fn a_command_that_nobody_finishes_keeps_others_back_for_a_second() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let writer = Writer::new(ours);
        writer.begin(b"{\"a\":1}\n").unwrap();
        assert_eq!(writer.send(b"{}\n").unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
