//! Transmission phase of one connection: receives requests in batches, answers or passes them to workers, and
//! sends replies in batches.
//!
//! Requests that need not wait are answered at once. Replies may overtake each other (the protocol allows
//! it). A flush covers writes that were *answered*, and a write is answered only after the device has it, so
//! a flush in a worker needs no order with writes in this thread.

use crate::constants::CMD_FUA;
use crate::execution::{Executor, ReadMode, Work};
use crate::input::Input;
use crate::output::{ReplyBuffer, SEND_AT};
use crate::request::{Command, REQUEST_SIZE, Request, RequestError};
use crate::worker_pool::{Job, WorkerPool};
use std::{io, os::fd::BorrowedFd, thread};

/// Cause of a connection that ended without a disconnect request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransmissionError {
    #[error("the client sent an invalid request")]
    Request(#[from] RequestError),
    #[error("the connection to the client failed")]
    Socket(#[from] io::Error),
}

/// Serves requests until the client disconnects, or `stop` becomes readable; returns when all were
/// answered. If it was stopped, returns what was received of the next request.
pub(crate) fn run(
    session: &Executor<'_>,
    input: Input<'_>,
    workers: usize,
    stop: BorrowedFd<'_>,
) -> Result<Option<Vec<u8>>, TransmissionError> {
    let pool = WorkerPool::new(workers);
    thread::scope(|scope| {
        let _close = CloseOnDrop(&pool);
        let start_worker = || {
            scope.spawn(|| work(session, &pool));
        };
        let (replies, pool, start_worker) = (ReplyBuffer::default(), &pool, &start_worker);
        Receiver { session, input, pool, replies, start_worker, stop }.run()
    })
}

/// Closes the pool also when the receiver fails or panics; otherwise the scope would wait for the workers for
/// ever.
struct CloseOnDrop<'a>(&'a WorkerPool);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn work(session: &Executor<'_>, pool: &WorkerPool) {
    let mut replies = ReplyBuffer::default();
    while let Some(Job { request, work, bytes }) = pool.next() {
        let sent =
            session.execute(&request, work, &mut replies).and_then(|()| session.output.send(&mut replies));
        pool.ended(bytes);
        if sent.is_err() {
            session.output.close();
            replies = ReplyBuffer::default();
        }
    }
}

struct Receiver<'a> {
    session: &'a Executor<'a>,
    input: Input<'a>,
    pool: &'a WorkerPool,
    replies: ReplyBuffer,
    start_worker: &'a dyn Fn(),
    stop: BorrowedFd<'a>,
}

impl Receiver<'_> {
    fn run(mut self) -> Result<Option<Vec<u8>>, TransmissionError> {
        loop {
            while self.input.available().len() < REQUEST_SIZE {
                self.send()?;
                if !self.input.wait(self.stop)? {
                    return Ok(Some(self.input.available().to_vec()));
                }
                if !self.input.receive()? {
                    return Ok(None);
                }
            }
            let Some(header) = self.input.available().first_chunk() else { continue };
            let request = Request::parse(header)?;
            self.input.consume(REQUEST_SIZE);
            if request.command == Command::Disconnect {
                self.send()?;
                return Ok(None);
            }
            self.serve(&request)?;
            if self.replies.len() >= SEND_AT {
                self.send()?;
            }
        }
    }

    fn send(&mut self) -> io::Result<()> {
        self.session.output.send(&mut self.replies)
    }

    fn serve(&mut self, request: &Request) -> io::Result<()> {
        if let Err(error) = request.check(self.session.export, self.session.agreed) {
            self.input.each_part(0, request.payload() as usize, |_, _| ())?;
            self.session.fail(request, error, &mut self.replies);
            return Ok(());
        }
        match request.command {
            Command::Read => self.read(request),
            Command::Write => self.write(request),
            Command::Flush => self.hand_over(request, Work::Flush, 0),
            Command::BlockStatus => self.hand_over(request, Work::Status, 0),
            Command::Trim | Command::WriteZeroes => self.hand_over(request, Work::Clear, 0),
            // Neither passes the check or the loop above.
            Command::Disconnect | Command::Unknown(_) => Ok(()),
        }
    }

    fn read(&mut self, request: &Request) -> io::Result<()> {
        let in_pieces = self.session.in_parts(request);
        // A large reply in one part is left to a worker, where its memory is counted.
        let at_once = in_pieces || request.len as usize <= SEND_AT;
        let from = match at_once {
            true => self.session.read(request, request.offset, ReadMode::NonBlocking, &mut self.replies)?,
            false => Some(request.offset),
        };
        let Some(from) = from else { return Ok(()) };
        let bytes = if in_pieces { SEND_AT } else { request.len as usize };
        self.hand_over(request, Work::Read { from }, bytes)
    }

    fn write(&mut self, request: &Request) -> io::Result<()> {
        let (session, len) = (self.session, request.len as usize);
        if session.device.may_wait(request.offset, u64::from(request.len)) {
            return self.write_later(request, len);
        }
        let mut outcome = Ok(());
        self.input.each_part(request.offset, len, |offset, piece| {
            if outcome.is_ok() {
                outcome = session.device.write_at(offset, piece);
            }
        })?;
        if outcome.is_ok() && request.has(CMD_FUA) {
            return self.hand_over(request, Work::Flush, 0);
        }
        session.finish(request, outcome, &mut self.replies);
        Ok(())
    }

    fn write_later(&mut self, request: &Request, len: usize) -> io::Result<()> {
        self.send()?;
        self.pool.reserve(len);
        let mut data = Vec::with_capacity(len);
        let received = self.input.each_part(request.offset, len, |_, piece| data.extend_from_slice(piece));
        received.inspect_err(|_| self.pool.ended(len))?;
        self.submit(Job { request: *request, work: Work::Write { data }, bytes: len });
        Ok(())
    }

    /// Passes `work` to a worker. May wait for space in the pool, so finished replies are sent first.
    fn hand_over(&mut self, request: &Request, work: Work, bytes: usize) -> io::Result<()> {
        self.send()?;
        self.pool.reserve(bytes);
        self.submit(Job { request: *request, work, bytes });
        Ok(())
    }

    fn submit(&self, job: Job) {
        if self.pool.submit(job) {
            (self.start_worker)();
        }
    }
}
