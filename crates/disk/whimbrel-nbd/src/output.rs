//! Output of replies: a reused buffer that devices read into, and the socket that several threads share.

use rustix::{io::retry_on_intr, net::SendFlags};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

/// Bytes after which replies are sent, even if more requests wait.
pub(crate) const SEND_AT: usize = 256 << 10;
/// Size up to which an empty buffer is retained.
const MAX_IDLE_BUFFER: usize = 2 * SEND_AT;

/// Buffer of replies to send. Reused space is not zeroed, because readers overwrite all of it.
#[derive(Debug, Default)]
pub(crate) struct ReplyBuffer {
    bytes: Vec<u8>,
    len: usize,
}

impl ReplyBuffer {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends `len` bytes of undefined content, which the caller fills.
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

    /// Removes everything after the first `len` bytes.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn clear(&mut self) {
        self.len = 0;
        if self.bytes.len() > MAX_IDLE_BUFFER {
            self.bytes = Vec::new();
        }
    }
}

/// Sending side of a socket. The lock is held while a reply is sent, so that replies do not mix.
pub(crate) struct Output<'a> {
    socket: &'a UnixStream,
    sending: Mutex<()>,
}

impl<'a> Output<'a> {
    pub(crate) fn new(socket: &'a UnixStream) -> Self {
        Self { socket, sending: Mutex::new(()) }
    }

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

    pub(crate) fn close(&self) {
        // Fails only if the client closed it first.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}
