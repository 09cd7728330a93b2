//! Input buffer for requests: one call receives all requests that the socket has.

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, retry_on_intr},
    net::RecvFlags,
};
use std::{
    io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
};

/// Bytes of the buffer: several writes of usual size, few enough for a second-level cache.
pub(crate) const INPUT_SIZE: usize = 512 << 10;

pub(crate) struct Input<'a> {
    socket: &'a UnixStream,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl<'a> Input<'a> {
    pub(crate) fn new(socket: &'a UnixStream) -> Self {
        Self { socket, buffer: vec![0; INPUT_SIZE], start: 0, end: 0 }
    }

    /// Starts with bytes that were received before, at most `INPUT_SIZE`.
    pub(crate) fn begun(socket: &'a UnixStream, rest: &[u8]) -> Self {
        let mut input = Self::new(socket);
        input.buffer[..rest.len()].copy_from_slice(rest);
        input.end = rest.len();
        input
    }

    /// Waits until there is something to receive; false if `stop` became readable, which comes first.
    pub(crate) fn wait(&self, stop: BorrowedFd<'_>) -> io::Result<bool> {
        let mut events = [PollFd::new(&stop, PollFlags::IN), PollFd::new(self.socket, PollFlags::IN)];
        loop {
            match poll(&mut events, None) {
                Ok(_) => return Ok(events[0].revents().is_empty()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Bytes that were received and not consumed.
    pub(crate) fn available(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Drops `count` bytes, at most those available.
    pub(crate) fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Receives once; false at the end of the stream.
    pub(crate) fn receive(&mut self) -> io::Result<bool> {
        if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let space = &mut self.buffer[self.end..];
        let (_, count) = retry_on_intr(|| rustix::net::recv(self.socket, &mut *space, RecvFlags::empty()))?;
        self.end += count;
        Ok(count > 0)
    }

    /// Receives until `count` bytes, at most `INPUT_SIZE`, are contiguous in the buffer.
    pub(crate) fn await_bytes(&mut self, count: usize) -> io::Result<&[u8]> {
        if self.start + count > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        while self.end - self.start < count {
            if !self.receive()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(&self.buffer[self.start..self.start + count])
    }

    /// Passes the next `len` bytes to `each` in parts. All parts but the last end where `offset` plus the
    /// bytes so far is a multiple of a page, so no part splits a page.
    pub(crate) fn each_part(
        &mut self,
        offset: u64,
        len: usize,
        mut each: impl FnMut(u64, &[u8]),
    ) -> io::Result<()> {
        const PIECE: usize = INPUT_SIZE / 2;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let aligned = PIECE - (at % 4096) as usize;
            let count = if len - done <= PIECE { len - done } else { aligned };
            each(at, self.await_bytes(count)?);
            self.consume(count);
            done += count;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_payload_larger_than_the_buffer_comes_whole_and_never_splits_a_page() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let sent: Vec<u8> = (0..3 * INPUT_SIZE + 77).map(|i| (i % 251) as u8).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| there.write_all(&sent).unwrap());
            let mut input = Input::new(&here);
            assert_eq!(input.await_bytes(10).unwrap(), &sent[..10]);
            input.consume(10);
            let (mut got, mut at) = (Vec::new(), 1000);
            let each = |offset, piece: &[u8]| {
                assert_eq!(offset, at);
                assert!(at == 1000 || offset % 4096 == 0);
                at += piece.len() as u64;
                got.extend_from_slice(piece);
            };
            input.each_part(1000, sent.len() - 20, each).unwrap();
            assert!(got == sent[10..sent.len() - 10]);
        });
    }
}
