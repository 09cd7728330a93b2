//! The tasks of a connection: one reads and dispatches, one gathers and writes, one watches for a dead peer.
//!
//! None of them waits for a service or a caller, so a busy side still answers pings. The watch ends the
//! connection when nothing was received, or a write made no progress, for `dead_after`. The amount does not
//! matter: a slow line is not dead, and a peer that sends slowly holds at most one frame of memory.

use crate::{
    CloseReason, Connection, Endpoint, Peer, WireFrameError,
    connection::{self, HeldCredit, Shared},
    credit::Class,
    dispatcher::Dispatcher,
    frame::{Decoder, Flags, FrameHead, WireFrame},
    message_kinds::{range, wire},
    send_queue::encode_connection_frame,
};
use bytes::{Buf, BytesMut};
use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    task::{JoinError, JoinHandle},
    time::{sleep, timeout},
};
use whimbrel_core::lock;

/// Time for the peer to close after this side did.
pub(crate) const LINGER: Duration = Duration::from_secs(2);
/// Longest header of a connection frame; the longest in use is a goodbye with 200 characters.
const MAX_CONNECTION_HEADER: u32 = 1024;

/// A task that is aborted when its handle is dropped.
struct AbortOnDrop(JoinHandle<CloseReason>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl AbortOnDrop {
    async fn ended(&mut self) -> CloseReason {
        (&mut self.0)
            .await
            .unwrap_or_else(|error: JoinError| CloseReason::Io { source: Arc::new(io::Error::other(error)) })
    }
}

/// Starts the tasks of a connection on the current runtime.
pub(crate) fn start(
    reader: impl AsyncRead + Unpin + Send + 'static,
    writer: impl AsyncWrite + Unpin + Send + 'static,
    shared: Arc<Shared>,
    connection: &Connection,
    endpoint: &Endpoint,
) {
    let dispatcher = Dispatcher::new(
        endpoint.service.clone(),
        connection.peer.clone(),
        shared.clone(),
        endpoint.settings.max_handlers,
    );
    let dead_after = endpoint.settings.dead_after;
    let name = connection.peer.name.clone();
    let reading = AbortOnDrop(tokio::spawn(read_frames(reader, shared.clone(), dispatcher)));
    let writing = AbortOnDrop(tokio::spawn(write_frames(writer, shared.clone())));
    let peer = connection.peer.clone();
    tokio::spawn(async move {
        supervise(&shared, &peer, reading, writing, dead_after).await;
        tracing::debug!(peer = %name, reason = %shared.reason(), "connection ended");
    });
}

async fn supervise(
    shared: &Arc<Shared>,
    peer: &Peer,
    mut reading: AbortOnDrop,
    mut writing: AbortOnDrop,
    dead_after: Duration,
) {
    let reason = tokio::select! {
        reason = reading.ended() => reason,
        reason = writing.ended() => reason,
        reason = watch(shared, peer, dead_after) => reason,
    };
    let polite = !matches!(reason, CloseReason::Io { .. } | CloseReason::Dead { .. } | CloseReason::Lost);
    let told = match &reason {
        CloseReason::Protocol { source } => source.to_string(),
        CloseReason::TrustChanged => "the trust in this host has changed".to_owned(),
        _ => String::new(),
    };
    // Before the reason is set, which makes callers drop handles: these queue a goodbye without a reason.
    if polite {
        shared.send_queue.goodbye(&told);
    }
    shared.end(reason);
    if polite {
        // Send what is queued and read what the peer sends, because a reset would destroy both. Bounded,
        // since the peer may not read any more.
        let _ = timeout(LINGER, async {
            if !writing.0.is_finished() {
                writing.ended().await;
            }
            if !reading.0.is_finished() {
                reading.ended().await;
            }
        })
        .await;
    }
}

/// Pings the peer and returns when it counts as dead, or when its entry in the trust list has changed.
async fn watch(shared: &Shared, peer: &Peer, dead_after: Duration) -> CloseReason {
    let limit = dead_after.as_micros() as u64;
    loop {
        shared.send_queue.ping(shared.counters.now());
        sleep(dead_after / 4).await;
        let now = shared.counters.now();
        let heard_at = shared.counters.received_at.load(Ordering::Relaxed);
        let write_at = shared.counters.write_at.load(Ordering::Relaxed);
        if now.saturating_sub(heard_at.min(write_at)) >= limit {
            return CloseReason::Dead { silent: dead_after };
        }
        if !peer.grants.are_unchanged(&peer.identity) {
            return CloseReason::TrustChanged;
        }
    }
}

async fn read_frames(
    mut io: impl AsyncRead + Unpin,
    shared: Arc<Shared>,
    mut dispatcher: Dispatcher,
) -> CloseReason {
    let mut decoder = Decoder::default();
    let mut admitted = None;
    loop {
        let read = io.read_buf(&mut decoder.space()).await;
        match read {
            Ok(0) => return decoder.finish().map_or_else(protocol, |()| CloseReason::Lost),
            Ok(bytes) => shared.counters.received.fetch_add(bytes as u64, Ordering::Relaxed),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return CloseReason::Lost,
            Err(source) => return CloseReason::Io { source: Arc::new(source) },
        };
        shared.counters.received_at.store(shared.counters.now(), Ordering::Relaxed);
        loop {
            match next(&mut decoder, &mut admitted, &shared) {
                Ok(Some((frame, held))) => match handle_frame(frame, held, &shared, &mut dispatcher) {
                    Ok(None) => {}
                    Ok(Some(goodbye)) => return goodbye,
                    Err(error) => return protocol(error),
                },
                Ok(None) => break,
                Err(error) => return protocol(error),
            }
        }
    }
}

fn protocol(source: WireFrameError) -> CloseReason {
    CloseReason::Protocol { source }
}

fn is_connection_frame(head: &FrameHead) -> bool {
    head.kind & 0xff00 == range::WIRE
}

/// The next frame and its credit. The credit is checked when the head has arrived, before the payload.
fn next(
    decoder: &mut Decoder,
    admitted: &mut Option<HeldCredit>,
    shared: &Arc<Shared>,
) -> Result<Option<(WireFrame, Option<HeldCredit>)>, WireFrameError> {
    let Some(head) = decoder.peek()? else { return Ok(None) };
    if is_connection_frame(&head) {
        if head.flags != Flags::NONE || head.header_len > MAX_CONNECTION_HEADER || head.payload_len > 0 {
            return Err(WireFrameError::Malformed { kind: head.kind });
        }
    } else if admitted.is_none() {
        let class = Class::of(&head);
        shared.receive.of(class).admit(head.frame_len())?;
        *admitted = Some(HeldCredit { shared: shared.clone(), class, bytes: head.frame_len() });
    }
    Ok(decoder.next_frame()?.map(|frame| (frame, admitted.take())))
}

/// Handles a frame; returns the close reason if it was the goodbye.
fn handle_frame(
    frame: WireFrame,
    held: Option<HeldCredit>,
    shared: &Arc<Shared>,
    dispatcher: &mut Dispatcher,
) -> Result<Option<CloseReason>, WireFrameError> {
    let Some(held) = held else { return handle_connection_frame(&frame, shared) };
    if matches!(frame.head.flags, Flags::REPLY | Flags::REFUSAL) {
        // The credit is returned at once: a caller that awaits one reply must not wait for others to be read.
        shared.reply(frame)?;
    } else {
        dispatcher.request(frame, held);
    }
    Ok(None)
}

fn handle_connection_frame(
    frame: &WireFrame,
    shared: &Shared,
) -> Result<Option<CloseReason>, WireFrameError> {
    let malformed = WireFrameError::Malformed { kind: frame.head.kind };
    let number = |at: usize| frame.header.get(at..at + 8).map(|mut bytes| bytes.get_u64_le());
    match (frame.head.kind, frame.header.len()) {
        (wire::GRANT, 16) => {
            shared.send.of(Class::Bulk).grant(number(0).ok_or(malformed.clone())?)?;
            shared.send.of(Class::Control).grant(number(8).ok_or(malformed)?)?;
        }
        (wire::PING, 8) => shared.send_queue.pong(number(0).ok_or(malformed)?),
        (wire::PONG, 8) => {
            let trip = shared.counters.now().saturating_sub(number(0).ok_or(malformed)?);
            shared.counters.round_trip.store(trip.max(1), Ordering::Relaxed);
        }
        (wire::GOODBYE, _) => {
            let reason = String::from_utf8_lossy(&frame.header).chars().take(200).collect();
            return Ok(Some(CloseReason::Peer { reason }));
        }
        _ => return Err(malformed),
    }
    Ok(None)
}

async fn write_frames(mut io: impl AsyncWrite + Unpin, shared: Arc<Shared>) -> CloseReason {
    match write_until_goodbye(&mut io, &shared).await {
        Ok(()) => CloseReason::Local,
        Err(source) => CloseReason::Io { source: Arc::new(source) },
    }
}

async fn write_until_goodbye(io: &mut (impl AsyncWrite + Unpin), shared: &Shared) -> io::Result<()> {
    let mut gathered = BytesMut::new();
    let mut flushed = true;
    loop {
        gathered.clear();
        // In every iteration, so that grants are sent with whatever is written.
        gather_grants(shared, &mut gathered);
        let batch = shared.send_queue.gather(&mut gathered);
        if gathered.is_empty() {
            if !flushed {
                progress(shared, io.flush()).await?;
                flushed = true;
            }
            shared.send_queue.filled().await;
            continue;
        }
        write_paced(io, shared, &mut Buf::chain(&gathered[..], batch.payload)).await?;
        flushed = false;
        if batch.last {
            return progress(shared, io.shutdown()).await;
        }
    }
}

fn gather_grants(shared: &Shared, out: &mut BytesMut) {
    let (bulk, control) = (shared.receive.of(Class::Bulk).grant(), shared.receive.of(Class::Control).grant());
    if bulk > 0 || control > 0 {
        let mut header = [0; 16];
        header[..8].copy_from_slice(&bulk.to_le_bytes());
        header[8..].copy_from_slice(&control.to_le_bytes());
        encode_connection_frame(wire::GRANT, &header, out);
    }
}

/// Writes all of `bytes`, in small writes if the rate is limited.
async fn write_paced(
    io: &mut (impl AsyncWrite + Unpin),
    shared: &Shared,
    bytes: &mut impl Buf,
) -> io::Result<()> {
    while bytes.has_remaining() {
        let piece = wait_for_rate(shared).await;
        let mut piece = (&mut *bytes).take(piece);
        let written = progress(shared, io.write_buf(&mut piece)).await?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        shared.counters.sent.fetch_add(written as u64, Ordering::Relaxed);
        let now = Duration::from_micros(shared.counters.now());
        lock(&shared.limit).spend(written, now);
    }
    Ok(())
}

/// Waits until the rate limit allows a write and returns its largest size.
async fn wait_for_rate(shared: &Shared) -> usize {
    loop {
        let now = Duration::from_micros(shared.counters.now());
        let (delay, piece) = {
            let limit = lock(&shared.limit);
            (limit.delay(now), limit.max_write())
        };
        if delay.is_zero() {
            return piece;
        }
        // A changed rate or a closed connection must not wait for the delay of the old rate.
        tokio::select! {
            () = sleep(delay) => {}
            () = shared.limit_changed.notified() => {}
            _ = connection::closed(shared) => return usize::MAX,
        }
    }
}

/// Records the start of a write in the counters until `writing` completes.
async fn progress<T>(shared: &Shared, writing: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    shared.counters.write_at.store(shared.counters.now(), Ordering::Relaxed);
    let outcome = writing.await;
    shared.counters.write_at.store(u64::MAX, Ordering::Relaxed);
    outcome
}
