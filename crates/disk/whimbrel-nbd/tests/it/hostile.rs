//! Hostile clients: invalid, stalled, or too many. Each may cost only its own connection.

use crate::export::{Client, Export, FLUSH, READ, WRITE, WRITE_ZEROES, request, wait_until};
use proptest::prelude::*;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;
use whimbrel_block::{BeforeSet, Device, FaultInjector, FaultPlan, MemDevice, SwappableDevice, ZeroDevice};
use whimbrel_nbd::Options;

const SIZE: usize = 4 << 20;

fn memory() -> Arc<MemDevice> {
    Arc::new(MemDevice::new(vec![0xAA; SIZE]))
}

/// A connected client past the handshake.
fn client(export: &Export) -> Client {
    let mut client = export.connect();
    assert_eq!(client.shake_hands().0, export_size());
    client
}

fn export_size() -> u64 {
    SIZE as u64
}

#[test]
fn an_old_client_reads_and_writes_with_simple_replies() {
    let export = Export::new(memory());
    let mut client = client(&export);
    client.request(0, WRITE, 1, 4095, 3);
    client.socket.write_all(b"abc").unwrap();
    assert_eq!(client.reply(), (1, 0));
    client.request(0, READ, 2, 4094, 5);
    assert_eq!(client.reply(), (2, 0));
    assert_eq!(&client.bytes(), b"\xAAabc\xAA");
    client.request(0, READ, 3, 0, SIZE as u32);
    assert_eq!(client.reply(), (3, 0));
    assert_eq!(client.bytes::<8>(), [0xAA; 8]);
}

#[test]
fn a_request_that_leaves_the_device_is_refused_and_the_next_one_works() {
    let export = Export::new(memory());
    let mut client = client(&export);
    client.request(0, WRITE, 1, SIZE as u64 - 1, 2);
    client.socket.write_all(b"xy").unwrap();
    assert_eq!(client.reply(), (1, 28));
    client.request(0, READ, 2, u64::MAX, 4096);
    assert_eq!(client.reply(), (2, 22));
    client.request(0, READ, 3, 0, (32 << 20) + 1);
    assert_eq!(client.reply(), (3, 75));
    client.request(0x40, READ, 4, 0, 1);
    assert_eq!(client.reply(), (4, 22), "an unknown flag");
    client.request(0, 99, 5, 0, 1);
    assert_eq!(client.reply(), (5, 22), "an unknown command");
    client.request(0, READ, 6, SIZE as u64 - 1, 1);
    assert_eq!((client.reply(), client.bytes()), ((6, 0), [0xAA]));
}

#[test]
fn a_write_to_a_read_only_device_is_drained_and_refused() {
    let export = Export::new(Arc::new(ZeroDevice { size: SIZE as u64 }));
    let mut client = client(&export);
    client.request(0, WRITE, 1, 0, 600_000);
    client.socket.write_all(&vec![1; 600_000]).unwrap();
    assert_eq!(client.reply(), (1, 1));
    client.request(0, FLUSH, 2, 0, 0);
    assert_eq!(client.reply(), (2, 0));
}

#[test]
fn wrong_magic_and_endless_payloads_cut_only_their_own_connection() {
    let export = Export::new(memory());
    let mut good = client(&export);
    let mut endless = client(&export);
    endless.request(0, WRITE, 1, 0, u32::MAX);
    assert!(endless.is_cut_off());
    let mut wrong = client(&export);
    wrong.socket.write_all(&[0x55; 28]).unwrap();
    assert!(wrong.is_cut_off());
    let mut http = export.connect();
    http.socket.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    assert!(http.is_cut_off());
    good.request(0, READ, 9, 0, 1);
    assert_eq!((good.reply(), good.bytes()), ((9, 0), [0xAA]));
}

#[test]
fn a_client_that_does_not_shake_hands_is_let_go() {
    let options = Options { handshake_timeout: Duration::from_millis(200), ..Options::default() };
    let export = Export::with(memory(), options);
    let mut slow = client(&export);
    // The second came later, so when it is disconnected the time is over for both.
    let mut silent = export.connect();
    assert!(silent.is_cut_off());
    wait_until("the silent client is gone", || export.connections() == 1);
    slow.request(0, READ, 1, 0, 1);
    assert_eq!(slow.reply(), (1, 0), "after the handshake a client may think as long as it likes");
}

#[test]
fn a_client_that_never_reads_its_replies_does_not_stop_the_others_nor_the_server() {
    let export = Export::new(memory());
    let mut stalled = client(&export);
    // More replies than any socket buffer holds; the server is stuck sending, then stops receiving.
    for cookie in 0..64 {
        stalled.request(0, READ, cookie, 0, 1 << 20);
    }
    let mut other = client(&export);
    for cookie in 0..100 {
        other.request(0, READ, cookie, 0, 1);
        assert_eq!((other.reply(), other.bytes()), ((cookie, 0), [0xAA]));
    }
    assert_eq!(export.connections(), 2);
    drop(export);
    assert!(other.is_cut_off());
}

#[test]
fn a_hundred_clients_are_served_and_too_many_are_turned_away() {
    let options = Options { max_connections: 100, ..Options::default() };
    let export = Export::with(memory(), options);
    let mut clients: Vec<_> = (0..100).map(|_| client(&export)).collect();
    let mut one_more = export.connect();
    assert!(one_more.is_cut_off());
    for (index, client) in clients.iter_mut().enumerate() {
        client.request(0, WRITE, index as u64, index as u64 * 100, 100);
        client.socket.write_all(&[index as u8; 100]).unwrap();
    }
    for (index, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.reply(), (index as u64, 0));
    }
    let mut last = clients.pop().unwrap();
    drop(clients);
    wait_until("the others left", || export.connections() == 1);
    last.request(0, READ, 7, 0, 10_000);
    assert_eq!(last.reply(), (7, 0));
    let content: [u8; 10_000] = last.bytes();
    assert!(content.chunks(100).enumerate().all(|(index, part)| part == [index as u8; 100]));
}

#[test]
fn a_read_that_waits_holds_up_no_other_request_of_its_connection() {
    let switch = Arc::new(SwappableDevice::new(SIZE as u64, BeforeSet::Wait));
    let export = Export::new(switch.clone());
    let mut client = client(&export);
    client.request(0, READ, 1, 0, 4);
    client.request(0, WRITE, 2, 8, 4);
    client.socket.write_all(b"abcd").unwrap();
    client.request(0, FLUSH, 3, 0, 0);
    assert_eq!(client.reply(), (3, 0));
    switch.set(memory()).unwrap();
    let mut answered = Vec::new();
    for _ in 0..2 {
        let (cookie, error) = client.reply();
        assert_eq!(error, 0);
        if cookie == 1 {
            assert_eq!(client.bytes(), [0xAA; 4]);
        }
        answered.push(cookie);
    }
    answered.sort();
    assert_eq!(answered, [1, 2]);
    let mut out = [0; 4];
    switch.read_at(8, &mut out).unwrap();
    assert_eq!(&out, b"abcd");
}

#[test]
fn a_failed_sync_reaches_the_client_of_a_flush_and_of_a_forced_write() {
    let fault = Arc::new(FaultInjector::new(memory(), FaultPlan { flush: Some(1), ..FaultPlan::default() }));
    let export = Export::new(fault.clone());
    let mut client = client(&export);
    client.request(1, WRITE, 1, 0, 1);
    client.socket.write_all(b"x").unwrap();
    assert_eq!(client.reply(), (1, 5));
    client.request(0, FLUSH, 2, 0, 0);
    assert_eq!(client.reply(), (2, 0));
    fault.set_plan(FaultPlan { write: Some(2), flush: Some(3), ..FaultPlan::default() });
    client.request(0, WRITE_ZEROES, 3, 0, 4096);
    assert_eq!(client.reply(), (3, 5));
    client.request(0, FLUSH, 4, 0, 0);
    assert_eq!(client.reply(), (4, 5));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn no_garbage_after_the_handshake_harms_the_server(
        headers in prop::collection::vec((any::<u16>(), 0..9u16, any::<u64>(), any::<u32>()), 0..6),
        tail in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let export = Export::new(memory());
        let mut bad = client(&export);
        let requests = headers.into_iter().map(|(flags, command, offset, len)| {
            request(flags & 0x1f, command, 1, offset >> (len % 64), len >> (offset % 32))
        });
        let garbage: Vec<u8> = requests.flatten().chain(tail).collect();
        // The server may close the connection meanwhile.
        let _ = bad.socket.write_all(&garbage);
        let _ = bad.socket.shutdown(std::net::Shutdown::Write);
        prop_assert!(bad.is_cut_off());
        let mut good = client(&export);
        good.request(0, READ, 1, 0, 1);
        prop_assert_eq!(good.reply(), (1, 0));
    }
}
