//! The send queue of a connection. Every queued wire frame has credit, so the windows bound the queue.
//!
//! Order: connection frames, then control, then bulk, each first in first out. Large bulk frames are sent one
//! at a time, so control waits for at most one of them. After a goodbye nothing more is queued.

use crate::{
    credit::Class,
    frame::{Flags, WireFrame, encode_head},
    message_kinds::wire,
};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::{collections::VecDeque, io::IoSlice, sync::Mutex};
use tokio::sync::Notify;
use whimbrel_core::lock;

/// Payloads up to this size are copied behind their heads: one large write is faster than many small ones.
const COPY_MAX: usize = 8 << 10;
/// Bytes gathered into one write.
const GATHER_MAX: usize = 64 << 10;

#[derive(Debug, Default)]
struct Queues {
    ping: Option<u64>,
    pong: Option<u64>,
    control: VecDeque<WireFrame>,
    bulk: VecDeque<WireFrame>,
    end: GoodbyeState,
}

#[derive(Debug, Default)]
enum GoodbyeState {
    #[default]
    Open,
    Requested(String),
    Sent,
}

#[derive(Debug, Default)]
pub(crate) struct WriteBatch {
    /// A payload that follows the gathered bytes; may be empty.
    pub(crate) payload: Parts,
    /// Whether the gathered bytes end with the goodbye.
    pub(crate) last: bool,
}

/// A payload that lies in several places.
#[derive(Debug, Default)]
pub(crate) struct Parts(VecDeque<Bytes>);

impl Parts {
    fn of(first: Bytes, rest: Vec<Bytes>) -> Self {
        Self(std::iter::once(first).chain(rest).filter(|part| !part.is_empty()).collect())
    }
}

impl Buf for Parts {
    fn remaining(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    fn chunk(&self) -> &[u8] {
        self.0.front().map_or(&[], |part| part)
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let filled = slices.iter_mut().zip(&self.0).map(|(slice, part)| *slice = IoSlice::new(part));
        filled.count()
    }

    fn advance(&mut self, mut count: usize) {
        while let Some(part) = self.0.front_mut() {
            if count < part.len() {
                return part.advance(count);
            }
            count -= part.len();
            self.0.pop_front();
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    queues: Mutex<Queues>,
    filled: Notify,
}

impl SendQueue {
    fn change(&self, edit: impl FnOnce(&mut Queues)) {
        edit(&mut lock(&self.queues));
        self.filled.notify_one();
    }

    pub(crate) fn push(&self, frame: WireFrame) {
        self.change(|queues| match (&queues.end, Class::of(&frame.head)) {
            (GoodbyeState::Open, Class::Bulk) => queues.bulk.push_back(frame),
            (GoodbyeState::Open, Class::Control) => queues.control.push_back(frame),
            (GoodbyeState::Requested(_) | GoodbyeState::Sent, _) => {}
        });
    }

    pub(crate) fn ping(&self, value: u64) {
        self.change(|queues| queues.ping = Some(value));
    }

    /// Answers the newest ping only, so a flood of pings gets one answer.
    pub(crate) fn pong(&self, value: u64) {
        self.change(|queues| queues.pong = Some(value));
    }

    /// Queues a goodbye, which is sent after all queued wire frames.
    pub(crate) fn goodbye(&self, reason: &str) {
        self.change(|queues| {
            if matches!(queues.end, GoodbyeState::Open) {
                queues.end = GoodbyeState::Requested(reason.chars().take(200).collect());
            }
        });
    }

    /// Drops the queued wire frames when the connection is lost.
    pub(crate) fn clear(&self) {
        self.change(|queues| {
            queues.bulk.clear();
            queues.control.clear();
        });
    }

    /// Wakes the writer to send a grant, which is not in the queues.
    pub(crate) fn wake(&self) {
        self.filled.notify_one();
    }

    pub(crate) async fn filled(&self) {
        self.filled.notified().await;
    }

    /// Appends to `out` the wire frames that can be sent now.
    pub(crate) fn gather(&self, out: &mut BytesMut) -> WriteBatch {
        let mut queues = lock(&self.queues);
        let pings = [(wire::PING, queues.ping.take()), (wire::PONG, queues.pong.take())];
        for (kind, value) in pings {
            if let Some(value) = value {
                encode_connection_frame(kind, &value.to_le_bytes(), out);
            }
        }
        while out.len() < GATHER_MAX {
            let Some(frame) = queues.next() else { break };
            encode_head(&frame.head, out);
            out.extend_from_slice(&frame.header);
            let payload = Parts::of(frame.payload, frame.rest);
            if frame.head.payload_len as usize > COPY_MAX {
                return WriteBatch { payload, last: false };
            }
            out.put(payload);
        }
        WriteBatch { payload: Parts::default(), last: queues.append_goodbye(out) }
    }
}

impl Queues {
    fn next(&mut self) -> Option<WireFrame> {
        self.control.pop_front().or_else(|| self.bulk.pop_front())
    }

    fn append_goodbye(&mut self, out: &mut BytesMut) -> bool {
        if !self.control.is_empty() || !self.bulk.is_empty() {
            return false;
        }
        if let GoodbyeState::Requested(reason) = &self.end {
            encode_connection_frame(wire::GOODBYE, reason.as_bytes(), out);
            self.end = GoodbyeState::Sent;
            return true;
        }
        false
    }
}

/// Encodes a connection frame. Callers pass headers of 16 bytes or 200 characters, so encoding cannot fail.
pub(crate) fn encode_connection_frame(kind: u16, header: &[u8], out: &mut BytesMut) {
    let header = Bytes::copy_from_slice(header);
    if let Ok(frame) = WireFrame::new(Flags::NONE, kind, 0, 0, header, Bytes::new()) {
        encode_head(&frame.head, out);
        out.extend_from_slice(&frame.header);
    }
}
