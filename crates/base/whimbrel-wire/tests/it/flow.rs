//! Tests of flow control: credit bounds memory on both sides, hostile peers are cut off, the rate limit is
//! exact.

use crate::hosts::*;
use bytes::{BufMut, Bytes, BytesMut};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use whimbrel_wire::{
    CONTROL_WINDOW, CallError, CloseReason, DEFAULT_WINDOW, Identity, PeerIdentity, Rights, WireFrameError,
    connect_io,
};

/// Sends until credit is used up; returns how many requests got through and the task that still tries.
async fn push_until_stuck(
    connection: &whimbrel_wire::Connection,
) -> tokio::task::JoinHandle<Result<(), CallError>> {
    let pusher = connection.clone();
    let task = tokio::spawn(async move {
        let mut pending = Vec::new();
        for _ in 0..200 {
            pending.push(pusher.start(request(HOLD, [], vec![0; 1 << 20])).await?);
        }
        for reply in pending {
            reply.await?;
        }
        Ok(())
    });
    let full = u64::from(DEFAULT_WINDOW) - (2 << 20);
    until("the window is full", || connection.traffic().in_flight > full).await;
    task
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_service_holds_one_window_and_control_still_gets_through() {
    let host = host_with(|_| (), true).await;
    let connection = host.client().await;
    let task = push_until_stuck(&connection).await;
    let far = host.far_side().await;
    until("what was sent has arrived", || far.traffic().queued > u64::from(DEFAULT_WINDOW) - (2 << 20)).await;
    for _ in 0..20 {
        soon(connection.call(request(ECHO, b"cancel", Vec::new()))).await.unwrap();
        let limit = u64::from(DEFAULT_WINDOW + CONTROL_WINDOW);
        assert!(connection.traffic().in_flight <= limit && far.traffic().queued <= limit);
    }
    assert!(!task.is_finished());
    host.bench.gate.add_permits(200);
    soon(task).await.unwrap().unwrap();
    until("all credit is back", || far.traffic().queued == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn senders_that_wait_for_credit_learn_of_the_end() {
    let host = host().await;
    let connection = host.client().await;
    let task = push_until_stuck(&connection).await;
    connection.close();
    assert!(matches!(soon(task).await.unwrap(), Err(CallError::Closed { source: CloseReason::Local })));
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_of_many_windows_can_be_awaited_in_any_order() {
    let host = host_with(|_| (), true).await;
    let connection = host.client().await;
    let mut pending = Vec::new();
    for _ in 0..24 {
        pending.push(connection.start(request(FILL, [], Vec::new())).await.unwrap());
    }
    let far = host.far_side().await;
    for reply in pending.into_iter().rev() {
        assert_eq!(soon(reply).await.unwrap().payload.len(), 4 << 20);
        assert!(far.traffic().in_flight <= u64::from(DEFAULT_WINDOW + CONTROL_WINDOW));
    }
}

fn head(kind: u16, flags: u16, request: u64, header: u32, payload: u32) -> BytesMut {
    let mut out = BytesMut::from(&b"Wf"[..]);
    out.put_u16_le(flags);
    out.put_u16_le(kind);
    out.put_u16_le(0);
    out.put_u64_le(request);
    out.put_u32_le(header);
    out.put_u32_le(payload);
    out
}

/// The close reason of a connection whose peer sends a valid hello and then `bytes`.
async fn fate_after(bytes: Bytes) -> CloseReason {
    let (near, far) = tokio::io::duplex(1 << 20);
    let (reader, writer) = tokio::io::split(near);
    let (mut far_reader, mut far_writer) = tokio::io::split(far);
    let endpoint = endpoint("server");
    let talking = tokio::spawn(async move {
        far_writer.write_all(b"WHIMBREL\x19\0\x01\0\x01\0\x01\x01\0\0\0\x02\0\0\0\0x").await.unwrap();
        // The host may close the stream in the middle of it.
        let _ = far_writer.write_all(&bytes).await;
        let _ = far_reader.read_to_end(&mut Vec::new()).await;
    });
    let connection = connect_io(reader, writer, PeerIdentity::Stdio, Rights::all(), &endpoint).await.unwrap();
    let reason = soon(connection.closed()).await;
    soon(talking).await.unwrap();
    reason
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_breaks_the_rules_is_cut_with_the_rule_named() {
    let long_header = head(0x0701, 0, 1, (64 << 10) + 1, 0);
    let long_payload = head(0x0701, 0, 1, 0, u32::MAX);
    let flags = head(0x0701, 0x80, 1, 0, 0);
    let unasked = head(0x0701, 1, 77, 0, 0);
    let mut grant = head(0x0001, 0, 0, 16, 0);
    grant.put_u64_le(5);
    grant.put_u64_le(0);
    let own = head(0x00ff, 0, 0, 0, 0);
    let text = BytesMut::from(&b"Connection to build-7 will be closed for maintenance"[..]);
    let cases = [
        (long_header, WireFrameError::HeaderTooLong { len: (64 << 10) + 1 }),
        (long_payload, WireFrameError::PayloadTooLong { len: u64::from(u32::MAX) }),
        (flags, WireFrameError::Flags { flags: 0x80 }),
        (unasked, WireFrameError::UnknownReply { request: 77 }),
        (grant, WireFrameError::GrantExceeded { over: 5 }),
        (own, WireFrameError::Malformed { kind: 0x00ff }),
        (text, WireFrameError::Magic { found: u16::from_le_bytes(*b"Co") }),
    ];
    for (bytes, expected) in cases {
        match fate_after(bytes.freeze()).await {
            CloseReason::Protocol { source } => assert_eq!(source, expected),
            other => panic!("{expected:?}: {other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_sends_without_credit_is_cut_before_it_fills_memory() {
    let mut flood = BytesMut::new();
    for at in 1..=5 {
        flood.extend_from_slice(&head(HOLD, 0, at, 0, 8 << 20));
        flood.resize(flood.len() + (8 << 20), 0);
    }
    match fate_after(flood.freeze()).await {
        CloseReason::Protocol { source: WireFrameError::CreditExceeded { over } } => {
            assert_eq!(over, 4 * (24 + (8 << 20)) - u64::from(DEFAULT_WINDOW));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rate_limit_holds_within_five_percent_and_changes_while_running() {
    let host = host().await;
    let identity = Identity::ephemeral().unwrap();
    host.admit("client", &identity, Rights::all());
    let connection = host.connect_as(&identity, &endpoint("client")).await.unwrap();
    for rate in [4_000_000u64, 20_000_000] {
        connection.limit_rate(Some(rate));
        let (began, before) = (Instant::now(), connection.traffic().sent);
        for _ in 0..rate / 1_000_000 {
            soon(connection.call(request(ECHO, [], vec![0; 1_000_000]))).await.unwrap();
        }
        // Only the upper bound is a promise on a busy machine; that the mean is exact, the bucket's own
        // tests show on a clock of their own.
        let seen = (connection.traffic().sent - before) as f64 / began.elapsed().as_secs_f64();
        assert!(seen < rate as f64 * 1.05, "{seen} of {rate}");
    }
    connection.limit_rate(Some(1));
    let stuck = connection.start(request(ECHO, [], vec![0; 1 << 20])).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    connection.limit_rate(None);
    soon(stuck).await.expect("a lifted limit is felt at once");
}
