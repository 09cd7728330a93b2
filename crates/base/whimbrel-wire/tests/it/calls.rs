//! Tests of calls: many at once, in both directions, in order where requested, and after the connection
//! ended.

use crate::hosts::*;
use bytes::Bytes;
use std::{sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use whimbrel_wire::{
    CallError, CloseReason, Code, ConnectError, Endpoint, Identity, Request, RequestOrder, Right, Rights,
    Trust, TrustedPeer, connect_tls,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_that_lies_in_several_places_arrives_as_one() {
    let host = host().await;
    let client = host.client().await;
    for lengths in [&[0, 3, 0, 5][..], &[9000], &[1, 300_000, 2, 400_000, 0], &[7; 500], &[]] {
        let part = |(at, length): (usize, &usize)| Bytes::from(vec![at as u8; *length]);
        let rest: Vec<Bytes> = lengths.iter().enumerate().map(part).collect();
        let whole = [b"first".to_vec(), rest.concat()].concat();
        let asked = Request { rest, ..request(ECHO, "head", &b"first"[..]) };
        let reply = soon(client.call(asked)).await.unwrap();
        assert!(reply.payload == whole, "{lengths:?}");
    }
    let rest = vec![Bytes::from(vec![0; 5 << 20]); 2];
    let long = client.call(Request { rest, ..request(ECHO, "", "") }).await;
    assert!(matches!(long, Err(CallError::Unsendable { .. })), "{long:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_calls_at_once_each_get_their_own_reply() {
    let host = host().await;
    let connection = host.client().await;
    let calls = (0..10_000u32).map(|at| {
        let connection = connection.clone();
        tokio::spawn(async move {
            let payload = vec![at as u8; (at % 300) as usize];
            let reply = connection.call(request(ECHO, at.to_le_bytes(), payload.clone())).await.unwrap();
            assert_eq!((&reply.header[..], &reply.payload[..]), (&at.to_le_bytes()[..], &payload[..]));
        })
    });
    for call in calls.collect::<Vec<_>>() {
        soon(call).await.unwrap();
    }
    until("every byte of credit is back", || connection.traffic().queued == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn payloads_of_every_size_arrive_unharmed() {
    let host = host().await;
    let connection = host.client().await;
    for len in [0, 1, 8191, 8192, 8193, 32 << 10, (64 << 10) + 1, 1 << 20, 8 << 20] {
        let payload: Bytes = (0..len).map(|at: usize| ((at * 31) >> 3) as u8).collect::<Vec<_>>().into();
        let reply = soon(connection.call(request(ECHO, vec![9; 60 << 10], payload.clone()))).await.unwrap();
        assert!(reply.payload == payload && reply.header.len() == 60 << 10, "{len}");
    }
    let over = connection.call(request(ECHO, [], vec![0; (8 << 20) + 1])).await;
    assert!(matches!(over, Err(CallError::Unsendable { .. })));
    let own = connection.call(request(0x0001, [], Vec::new())).await;
    assert!(matches!(own, Err(CallError::Unsendable { .. })), "the kinds of the wire are its own");
    assert!(connection.call(request(ECHO, [], Vec::new())).await.is_ok(), "and the connection lives on");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_calls_the_client_while_the_client_calls_the_server() {
    let host = host_with(|_| (), true).await;
    let connection = host.client().await;
    let calls: Vec<_> = (0..200u32)
        .map(|at| {
            let connection = connection.clone();
            tokio::spawn(
                async move { connection.call(request(CALL_BACK, at.to_le_bytes(), vec![1; 9000])).await },
            )
        })
        .collect();
    for (at, call) in calls.into_iter().enumerate() {
        assert_eq!(soon(call).await.unwrap().unwrap().header, (at as u32).to_le_bytes()[..]);
    }
    host.bench.connections.lock().unwrap().clear();
}

#[tokio::test(flavor = "multi_thread")]
async fn ordered_requests_keep_their_order_and_a_cancel_overtakes_them() {
    let host = host().await;
    let connection = host.client().await;
    let mut replies = vec![connection.start(request(HOLD, [], vec![0; 100]).ordered(3)).await.unwrap()];
    for at in 0..200u32 {
        // Some with a payload and some without: both count for the order.
        let batch = request(RECORD, at.to_le_bytes(), vec![0; (at % 3 * 5000) as usize]).ordered(3);
        replies.push(connection.start(batch).await.unwrap());
    }
    soon(connection.call(request(ECHO, b"cancel", Vec::new()))).await.unwrap();
    let other = request(RECORD, b"other", Vec::new()).ordered(4);
    soon(connection.call(other)).await.unwrap();
    assert_eq!(*host.bench.seen.lock().unwrap(), [(RequestOrder::Stream(4), Bytes::from_static(b"other"))]);
    host.bench.gate.add_permits(1);
    for reply in replies {
        soon(reply).await.unwrap();
    }
    let seen: Vec<_> =
        host.bench.seen.lock().unwrap()[1..].iter().map(|(_, header)| header.to_vec()).collect();
    assert_eq!(seen, (0..200u32).map(|at| at.to_le_bytes().to_vec()).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_reply_puts_nothing_out_of_step() {
    let host = host().await;
    let connection = host.client().await;
    for at in 0..100u32 {
        // 100 forgotten replies of 1 MiB are three windows: unless their credit comes back this stops.
        drop(soon(connection.start(request(ECHO, [], vec![0; 1 << 20]))).await.unwrap());
        let reply = soon(connection.call(request(ECHO, at.to_le_bytes(), Vec::new()))).await.unwrap();
        assert_eq!(reply.header, at.to_le_bytes()[..]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_an_unknown_kind_and_a_missing_right_are_refusals() {
    let host = host().await;
    let identity = Identity::ephemeral().unwrap();
    host.admit("limited", &identity, Rights(vec![Right::Store]));
    let connection = host.connect_as(&identity, &endpoint("x")).await.unwrap();
    for (kind, code) in [(PANIC, Code::INTERNAL), (0x0200, Code::UNKNOWN_KIND), (0x0100, Code::FORBIDDEN)] {
        match soon(connection.call(request(kind, [], Vec::new()))).await {
            Err(CallError::Refused { source }) => assert_eq!(source.code, code),
            other => panic!("{other:?}"),
        }
    }
}

/// The dialled host calls back over the connection: it has the rights of its entry at the dialling side.
#[tokio::test(flavor = "multi_thread")]
async fn a_dialled_host_has_the_name_and_the_rights_of_its_entry_and_loses_them_at_once() {
    let host = host_with(|_| (), true).await;
    let (identity, dir) = (Identity::ephemeral().unwrap(), tempfile::tempdir().unwrap());
    host.admit("client", &identity, Rights::all());
    let trust = Arc::new(Trust::load(dir.path()).unwrap());
    let mut near = endpoint("client").with_trust(trust.clone());
    near.settings.dead_after = Duration::from_secs(4);
    let untrusted = soon(host.connect_as(&identity, &near)).await;
    assert!(matches!(untrusted, Err(ConnectError::UntrustedKey { .. })), "{untrusted:?}");
    let entry = |rights| TrustedPeer {
        name: "known".parse().unwrap(),
        key: Some(host.identity.public_key()),
        address: None,
        rights,
        read: None,
        write: None,
    };
    trust.add(entry(Rights(vec![Right::Store]))).unwrap();
    let connection = soon(host.connect_as(&identity, &near)).await.unwrap();
    assert_eq!(connection.peer().name.as_str(), "known", "whatever it calls itself");
    let far = host.far_side().await;
    let code = async |kind| match soon(far.call(request(kind, [], Vec::new()))).await {
        Err(CallError::Refused { source }) => Some(source.code),
        Err(CallError::Closed { .. }) => None,
        other => panic!("{other:?}"),
    };
    assert_eq!(code(0x0200).await, Some(Code::UNKNOWN_KIND));
    assert_eq!(code(0x0100).await, Some(Code::FORBIDDEN));
    trust.remove(&"known".parse().unwrap()).unwrap();
    assert!(matches!(code(0x0200).await, Some(Code::FORBIDDEN) | None));
    let reason = soon(connection.closed()).await;
    assert!(matches!(reason, CloseReason::TrustChanged), "{reason:?}");
    match soon(far.closed()).await {
        CloseReason::Peer { reason } => assert!(reason.contains("trust"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_accepted_host_that_is_limited_or_removed_is_refused_at_once_and_cut() {
    for remove in [true, false] {
        let short = |endpoint: &mut Endpoint| endpoint.settings.dead_after = Duration::from_secs(4);
        let host = host_with(short, true).await;
        let connection = host.client().await;
        soon(connection.call(request(ECHO, [], Vec::new()))).await.unwrap();
        let name = host.trust.list().unwrap()[0].name.clone();
        match remove {
            true => drop(host.trust.remove(&name).unwrap()),
            false => drop(host.trust.limit(&name, (Some("web".parse().unwrap()), None)).unwrap()),
        }
        let after = soon(connection.call(request(0x0200, [], Vec::new()))).await;
        match (&after, remove) {
            (Err(CallError::Refused { source }), true) => assert_eq!(source.code, Code::FORBIDDEN),
            (Err(CallError::Refused { source }), false) => assert_eq!(source.code, Code::UNKNOWN_KIND),
            (Err(CallError::Closed { .. }), _) => {}
            other => panic!("{other:?}"),
        }
        let reason = soon(connection.closed()).await;
        assert!(matches!(reason, CloseReason::Peer { .. }), "{reason:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_threads_call_without_a_runtime() {
    let host = host().await;
    let connection = host.client().await;
    let threads: Vec<_> = (0..4u8)
        .map(|id| {
            let connection = connection.clone();
            std::thread::spawn(move || {
                for at in 0..50u8 {
                    let pending =
                        connection.send_blocking(request(ECHO, [id, at], vec![at; 100_000])).unwrap();
                    assert_eq!(
                        connection.call_blocking(request(ECHO, [at], Vec::new())).unwrap().header,
                        [at][..]
                    );
                    assert_eq!(pending.wait().unwrap().header, [id, at][..]);
                }
            })
        })
        .collect();
    let joined =
        tokio::task::spawn_blocking(|| threads.into_iter().for_each(|thread| thread.join().unwrap()));
    soon(joined).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_host_stops_every_call_fails_and_a_new_connection_works() {
    let host = host().await;
    let identity = Identity::ephemeral().unwrap();
    host.admit("client", &identity, Rights::all());
    let connection = host.connect_as(&identity, &endpoint("client")).await.unwrap();
    let reborn_trust = tempfile::tempdir().unwrap();
    std::fs::copy(host.dir.path().join("trust.toml"), reborn_trust.path().join("trust.toml")).unwrap();
    let mut held = Vec::new();
    for _ in 0..50 {
        held.push(connection.start(request(HOLD, [], vec![0; 1000])).await.unwrap());
    }
    let (address, server) = (host.address.clone(), host.identity.clone());
    let trust = Arc::new(Trust::load(reborn_trust.path()).unwrap());
    let _trust_list = host.dir.clone();
    drop(host);
    for pending in held {
        match soon(pending).await {
            Err(CallError::Closed { source: CloseReason::Peer { .. } | CloseReason::Lost }) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(soon(connection.call(request(ECHO, [], Vec::new()))).await.unwrap_err().is_retryable());
    let listener = TcpListener::bind(&address).await.unwrap();
    let key = server.public_key();
    let serving =
        tokio::spawn(
            async move { whimbrel_wire::serve_tls(listener, &server, trust, endpoint("server")).await },
        );
    let again = soon(connect_tls(&address, key, &identity, &endpoint("client"))).await.unwrap();
    soon(again.call(request(ECHO, [], Vec::new()))).await.unwrap();
    serving.abort();
}

/// Carries bytes between a client and `to` until told to cut or to freeze.
async fn relay(to: String) -> (String, Arc<tokio::sync::Notify>, Arc<tokio::sync::Notify>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (cut, freeze) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (cut_now, freeze_now) = (cut.clone(), freeze.clone());
    tokio::spawn(async move {
        let (mut near, _) = listener.accept().await.unwrap();
        let mut far = TcpStream::connect(to).await.unwrap();
        let frozen = tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut near, &mut far) => false,
            () = cut_now.notified() => false,
            () = freeze_now.notified() => true,
        };
        if frozen {
            cut_now.notified().await;
        }
    });
    (address, cut, freeze)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_line_fails_calls_at_once_and_a_frozen_one_after_the_deadline() {
    for frozen in [false, true] {
        let host = host().await;
        let identity = Identity::ephemeral().unwrap();
        host.admit("client", &identity, Rights::all());
        let (address, cut, freeze) = relay(host.address.clone()).await;
        let mut endpoint = endpoint("client");
        endpoint.settings.dead_after = Duration::from_millis(if frozen { 300 } else { 600_000 });
        let connection =
            connect_tls(&address, host.identity.public_key(), &identity, &endpoint).await.unwrap();
        let pending = connection.start(request(HOLD, [], vec![0; 100_000])).await.unwrap();
        if frozen {
            freeze.notify_one()
        } else {
            cut.notify_one()
        }
        match (frozen, soon(pending).await) {
            (true, Err(CallError::Closed { source: CloseReason::Dead { .. } })) => {}
            (false, Err(CallError::Closed { source: CloseReason::Lost | CloseReason::Io { .. } })) => {}
            other => panic!("{other:?}"),
        }
        cut.notify_one();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_handle_closes_politely_after_what_was_sent() {
    let host = host_with(|_| (), true).await;
    let connection = host.client().await;
    let pending: Vec<_> = {
        let mut pending = Vec::new();
        for at in 0..20u32 {
            pending.push(
                connection
                    .start(request(RECORD, at.to_le_bytes(), vec![0; 1 << 20]).ordered(1))
                    .await
                    .unwrap(),
            );
        }
        pending
    };
    let server_side = host.far_side().await;
    drop(connection);
    for reply in pending {
        soon(reply).await.expect("a pending reply keeps the connection");
    }
    match soon(server_side.closed()).await {
        CloseReason::Peer { reason } => assert_eq!(reason, ""),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_lives_on_pings_and_knows_its_round_trip() {
    let host = host_with(|endpoint| endpoint.settings.dead_after = Duration::from_millis(200), false).await;
    let identity = Identity::ephemeral().unwrap();
    host.admit("client", &identity, Rights::all());
    let mut endpoint = endpoint("client");
    endpoint.settings.dead_after = Duration::from_millis(200);
    let connection = host.connect_as(&identity, &endpoint).await.unwrap();
    let start = connection.traffic().received;
    until("ten pings came", || connection.traffic().received > start + 10 * 32).await;
    assert!(connection.close_reason().is_none() && connection.round_trip().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_vanishes_mid_frame_is_told_apart_from_silence() {
    let (near, far) = tokio::io::duplex(1 << 20);
    let (reader, writer) = tokio::io::split(near);
    let serving = tokio::spawn(async move {
        let identity = whimbrel_wire::PeerIdentity::Stdio;
        whimbrel_wire::connect_io(reader, writer, identity, Rights::all(), &endpoint("server")).await.unwrap()
    });
    let (mut reader, mut writer) = tokio::io::split(far);
    writer.write_all(b"WHIMBREL\x19\0\x01\0\x01\0\x01\x01\0\0\0\x02\0\0\0\0x").await.unwrap();
    writer.write_all(b"Wf\0\0\x01\x06\0\0half").await.unwrap();
    writer.shutdown().await.unwrap();
    let connection = soon(serving).await.unwrap();
    let reason = soon(connection.closed()).await;
    assert!(matches!(reason, CloseReason::Protocol { .. }), "{reason:?}");
    let mut rest = Vec::new();
    drop(connection);
    soon(reader.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.ends_with(b"the stream ended inside a frame"), "the goodbye says why");
}
