//! Replies on their way out: a reused buffer that devices read into, and the socket that several threads
//! share.

use rustix::{io::retry_on_intr, net::SendFlags};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

/// Replies are sent once so many bytes wait, even if more requests do.
pub(crate) const SEND_AT: usize = 256 << 10;
/// A buffer that grew beyond this for one large reply gives the memory back.
const KEEP: usize = 2 * SEND_AT;

/// Replies that wait to be sent. Reused space is not zeroed again: readers overwrite it whole.
#[derive(Debug, Default)]
pub(crate) struct ReplyBuffer {
    bytes: Vec<u8>,
    len: usize,
}

impl ReplyBuffer {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds `len` bytes of any content, to be filled by the caller.
    pub(crate) fn space(&mut self, len: usize) -> &mut [u8] {
        let (start, end) = (self.len, self.len + len);
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        self.len = end;
        &mut self.bytes[start..end]
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.space(bytes.len()).copy_from_slice(bytes);
    }

    /// Takes back everything after the first `len` bytes.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn clear(&mut self) {
        self.len = 0;
        if self.bytes.len() > KEEP {
            self.bytes = Vec::new();
        }
    }
}

/// The sending side of a socket. A reply is a frame, so the lock is held while it is sent: the others have
/// nothing better to do, as the socket takes one frame at a time.
pub(crate) struct Output<'a> {
    socket: &'a UnixStream,
    sending: Mutex<()>,
}

impl<'a> Output<'a> {
    pub(crate) fn new(socket: &'a UnixStream) -> Self {
        Self { socket, sending: Mutex::new(()) }
    }

    /// Sends all of `replies` and empties it.
    pub(crate) fn send(&self, replies: &mut ReplyBuffer) -> io::Result<()> {
        let mut rest = &replies.bytes[..replies.len];
        if !rest.is_empty() {
            let _one_frame_at_a_time = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
            while !rest.is_empty() {
                let count = retry_on_intr(|| rustix::net::send(self.socket, rest, SendFlags::NOSIGNAL))?;
                rest = &rest[count..];
            }
        }
        replies.clear();
        Ok(())
    }

    /// Ends the conversation for all threads.
    pub(crate) fn hang_up(&self) {
        // It fails only if the client hung up first.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}
