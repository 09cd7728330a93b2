//! Executor: runs checked requests on the device and writes the replies.
//!
//! Reads have two modes. In mode *now*, a device that would wait returns, and a worker does the rest of the
//! read. In mode *patient*, the read waits. With structured replies a read is sent in parts, so its memory is
//! bounded by one part.

use crate::constants::*;
use crate::handshake::{Agreed, Export};
use crate::output::{Output, ReplyBuffer, SEND_AT};
use crate::reply::{self, Chunk, DATA_HEAD};
use crate::request::{Command, Request};
use rustix::io::Errno;
use std::{io, sync::Arc};
use whimbrel_block::{BlockError, Device, Extent, ExtentKind};

/// Bytes of a read that are in memory at once, if the client allows parts.
pub(crate) const PART: u32 = SEND_AT as u32;
/// Most bytes of a device in a block status reply, to bound the reply.
const STATUS_SPAN: u64 = 1 << 30;
/// Most extents of a block status reply.
const STATUS_EXTENTS: usize = 8192;

pub(crate) struct Executor<'a> {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) export: &'a Export,
    pub(crate) agreed: Agreed,
    pub(crate) output: Output<'a>,
}

/// Remaining work of a request after the part that was done at once.
#[derive(Debug)]
pub(crate) enum Work {
    /// Read from this offset on; the data before it has been sent.
    Read {
        from: u64,
    },
    Write {
        data: Vec<u8>,
    },
    /// Flush, also that after a write with FUA.
    Flush,
    /// Trim or write zeroes.
    Clear,
    Status,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadMode {
    NonBlocking,
    Blocking,
}

/// Interrupted read: the device failed, the client is gone, or it would have waited at this offset.
enum Stop {
    Device(BlockError),
    Client(io::Error),
    WouldWait(u64),
}

impl From<BlockError> for Stop {
    fn from(error: BlockError) -> Self {
        Stop::Device(error)
    }
}

impl Executor<'_> {
    /// Whether a read is sent in parts of at most `PIECE` bytes instead of one reply.
    pub(crate) fn in_parts(&self, request: &Request) -> bool {
        self.agreed.structured && !request.has(CMD_DF)
    }

    /// Runs `work` of `request`, waiting if necessary.
    pub(crate) fn execute(&self, request: &Request, work: Work, out: &mut ReplyBuffer) -> io::Result<()> {
        let (offset, len) = (request.offset, u64::from(request.len));
        let outcome = match work {
            Work::Read { from } => return self.read(request, from, ReadMode::Blocking, out).map(drop),
            Work::Status => {
                self.status(request, out);
                return Ok(());
            }
            Work::Write { data } => self.device.write_at(offset, &data),
            Work::Flush => self.device.flush(),
            Work::Clear if request.command == Command::Trim => self.device.trim(offset, len),
            Work::Clear => self.device.write_zeroes(offset, len),
        };
        let forced = request.has(CMD_FUA) && request.command != Command::Flush;
        let outcome = outcome.and_then(|()| if forced { self.device.flush() } else { Ok(()) });
        self.finish(request, outcome, out);
        Ok(())
    }

    pub(crate) fn finish(&self, request: &Request, outcome: Result<(), BlockError>, out: &mut ReplyBuffer) {
        match outcome {
            Ok(()) => out.push(&reply::simple(request.cookie, None)),
            Err(error) => self.fail(request, wire_error(&error), out),
        }
    }

    pub(crate) fn fail(&self, request: &Request, error: WireError, out: &mut ReplyBuffer) {
        let in_chunks = matches!(request.command, Command::Read | Command::BlockStatus);
        if self.agreed.structured && in_chunks {
            out.push(&reply::error(request.cookie, error));
        } else {
            out.push(&reply::simple(request.cookie, Some(error)));
        }
    }

    /// Answers a read from `from` on. Returns the offset at which it would have waited, if `Now`.
    pub(crate) fn read(
        &self,
        request: &Request,
        from: u64,
        pace: ReadMode,
        out: &mut ReplyBuffer,
    ) -> io::Result<Option<u64>> {
        let outcome = match self.in_parts(request) {
            true => self.read_parts(request, from, pace, out),
            false => self.read_whole(request, pace, out),
        };
        match outcome {
            Ok(()) => Ok(None),
            Err(Stop::WouldWait(at)) => Ok(Some(at)),
            Err(Stop::Client(error)) => Err(error),
            Err(Stop::Device(error)) => {
                self.fail(request, wire_error(&error), out);
                Ok(None)
            }
        }
    }

    /// Sends all data in one reply, for old clients and for those that request no fragments.
    fn read_whole(&self, request: &Request, pace: ReadMode, out: &mut ReplyBuffer) -> Result<(), Stop> {
        let data_head = reply::data(request.cookie, request.offset, request.len, true);
        let simple_head = reply::simple(request.cookie, None);
        let head = if self.agreed.structured { &data_head[..] } else { &simple_head[..] };
        let mark = out.len();
        let space = out.space(head.len() + request.len as usize);
        let outcome = self.fill(request.offset, &mut space[head.len()..], pace);
        space[..head.len()].copy_from_slice(head);
        outcome.inspect_err(|_| out.truncate(mark))
    }

    fn read_parts(
        &self,
        request: &Request,
        from: u64,
        pace: ReadMode,
        out: &mut ReplyBuffer,
    ) -> Result<(), Stop> {
        let end = request.offset + u64::from(request.len);
        let mut at = from;
        for extent in self.extents_to_read(from, end, pace)? {
            let extent_end = at + extent.len;
            while at < extent_end || request.len == 0 {
                let len = (extent_end - at).min(u64::from(PART)) as u32;
                let done = at + u64::from(len) == end;
                match extent.kind {
                    ExtentKind::Data => self.read_part(request.cookie, at, len, done, pace, out)?,
                    ExtentKind::Zero | ExtentKind::Hole => {
                        out.push(&reply::hole(request.cookie, at, len, done))
                    }
                }
                if out.len() >= SEND_AT {
                    self.output.send(out).map_err(Stop::Client)?;
                }
                at += u64::from(len);
                if done {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Extents of the range. The query costs two system calls, which a short read does not justify.
    fn extents_to_read(&self, from: u64, end: u64, pace: ReadMode) -> Result<Vec<Extent>, Stop> {
        let len = end - from;
        if len <= u64::from(PART) {
            return Ok(vec![Extent { len, kind: ExtentKind::Data }]);
        }
        if pace == ReadMode::NonBlocking && self.device.may_wait(from, len) {
            return Err(Stop::WouldWait(from));
        }
        Ok(self.device.extents(from, len)?)
    }

    fn read_part(
        &self,
        cookie: u64,
        offset: u64,
        len: u32,
        done: bool,
        pace: ReadMode,
        out: &mut ReplyBuffer,
    ) -> Result<(), Stop> {
        let mark = out.len();
        let space = out.space(DATA_HEAD + len as usize);
        let (head, data) = space.split_at_mut(DATA_HEAD);
        if let Err(stop) = self.fill(offset, data, pace) {
            out.truncate(mark);
            return Err(stop);
        }
        // Used pages differ from zero in their first bytes; sending zeros costs more than the test.
        if len > 0 && whimbrel_core::is_zero(data) {
            out.truncate(mark);
            out.push(&reply::hole(cookie, offset, len, done));
        } else {
            head.copy_from_slice(&reply::data(cookie, offset, len, done));
        }
        Ok(())
    }

    fn fill(&self, offset: u64, data: &mut [u8], pace: ReadMode) -> Result<(), Stop> {
        match pace {
            ReadMode::Blocking => Ok(self.device.read_at(offset, data)?),
            ReadMode::NonBlocking if self.device.try_read_at(offset, data)? => Ok(()),
            ReadMode::NonBlocking => Err(Stop::WouldWait(offset)),
        }
    }

    fn status(&self, request: &Request, out: &mut ReplyBuffer) {
        let span = u64::from(request.len).min(STATUS_SPAN);
        let mut extents = match self.device.extents(request.offset, span) {
            Ok(extents) => extents,
            Err(error) => return self.fail(request, wire_error(&error), out),
        };
        extents.truncate(if request.has(CMD_REQ_ONE) { 1 } else { STATUS_EXTENTS });
        let len = 4 + 8 * extents.len() as u32;
        let head = Chunk { cookie: request.cookie, kind: CHUNK_BLOCK_STATUS, done: true, len };
        out.push(&head.encode());
        out.push(&ALLOCATION_ID.to_be_bytes());
        for extent in extents {
            let state = match extent.kind {
                ExtentKind::Data => 0,
                ExtentKind::Zero => STATE_ZERO,
                ExtentKind::Hole => STATE_ZERO | STATE_HOLE,
            };
            // The cast is lossless, because the span is shorter.
            out.push(&(extent.len as u32).to_be_bytes());
            out.push(&state.to_be_bytes());
        }
    }
}

fn wire_error(error: &BlockError) -> WireError {
    tracing::warn!(error = error as &dyn std::error::Error, "a request failed");
    match error {
        BlockError::OutOfRange { .. } => WireError::Invalid,
        BlockError::ReadOnly => WireError::Perm,
        BlockError::Closed => WireError::Shutdown,
        BlockError::Io { source, .. } if source.raw_os_error() == Some(Errno::NOSPC.raw_os_error()) => {
            WireError::NoSpace
        }
        BlockError::Io { .. } | BlockError::Latched { .. } | BlockError::Content { .. } => WireError::Io,
    }
}
