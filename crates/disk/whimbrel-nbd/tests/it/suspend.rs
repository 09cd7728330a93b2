//! Servers that are suspended between two requests, and others that go on with their connections.

use crate::export::{Client, Export, READ, WRITE, request, wait_until};
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use whimbrel_block::{Device, MemDevice};
use whimbrel_nbd::{Options, ServerParts, serve_parts};

const SIZE: usize = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

fn suspend(export: &mut Export, patience: Duration) -> ServerParts {
    export.server.take().unwrap().suspend(patience).unwrap()
}

fn client(export: &Export) -> Client {
    let mut client = export.connect();
    client.shake_hands();
    client
}

#[test]
fn a_request_that_came_in_two_halves_is_answered_by_the_server_that_goes_on() {
    let device = Arc::new(MemDevice::new(vec![0xAA; SIZE]));
    let mut export = Export::new(device.clone());
    let (mut one, mut other) = (client(&export), client(&export));
    let whole = request(0, READ, 7, 4096, 4);
    one.socket.write_all(&whole[..11]).unwrap();
    // Answered, so the server is past the handshake of both.
    other.request(0, WRITE, 1, 4096, 4);
    other.socket.write_all(b"abcd").unwrap();
    assert_eq!(other.reply(), (1, 0));
    let parts = suspend(&mut export, PATIENCE);
    assert_eq!(parts.connections.len(), 2);
    one.socket.write_all(&whole[11..]).unwrap();
    other.request(0, READ, 2, 4096, 4);
    export.server = Some(serve_parts(device, parts, Options::default()).unwrap());
    assert_eq!((one.reply(), &one.bytes()), ((7, 0), b"abcd"));
    assert_eq!((other.reply(), &other.bytes()), ((2, 0), b"abcd"));
    let mut late = client(&export);
    late.request(0, READ, 3, 4096, 4);
    assert_eq!((late.reply(), &late.bytes()), ((3, 0), b"abcd"));
}

#[test]
fn a_client_that_withholds_a_payload_or_its_handshake_loses_its_own_connection_only() {
    let device = Arc::new(MemDevice::new(vec![0xAA; SIZE]));
    let mut export = Export::new(device.clone());
    let (mut good, mut stalled, mut silent) = (client(&export), client(&export), export.connect());
    stalled.request(0, WRITE, 1, 0, 600 << 10);
    stalled.socket.write_all(&vec![1; 300 << 10]).unwrap();
    let first = || {
        let mut byte = [0];
        device.read_at(0, &mut byte).unwrap();
        byte[0]
    };
    wait_until("the first part of the payload is written", || first() == 1);
    wait_until("all are connected", || export.connections() == 3);
    good.request(0, READ, 2, 1 << 20, 1);
    assert_eq!((good.reply(), good.bytes()), ((2, 0), [0xAA]));
    let parts = suspend(&mut export, Duration::from_millis(50));
    assert_eq!(parts.connections.len(), 1);
    assert!(stalled.is_cut_off() && silent.is_cut_off());
    export.server = Some(serve_parts(device, parts, Options::default()).unwrap());
    good.request(0, READ, 3, 1 << 20, 1);
    assert_eq!((good.reply(), good.bytes()), ((3, 0), [0xAA]));
}

#[test]
fn a_busy_client_loses_nothing_however_often_its_server_is_suspended() {
    const PIECE: u64 = 64 << 10;
    const PIECES: u64 = 400;
    let device = Arc::new(MemDevice::new(vec![0; (PIECE * PIECES) as usize]));
    let mut export = Export::new(device.clone());
    // Without a reconnect delay, so that a lost connection fails the test.
    let image = format!("driver=nbd,server.type=unix,server.path={}", export.socket().display());
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["--image-opts", &image]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut qemu_io = qemu_io.spawn().unwrap();
    let mut commands = qemu_io.stdin.take().unwrap();
    for piece in 0..PIECES {
        writeln!(commands, "aio_write -q -P {} {} {PIECE}", piece % 255 + 1, piece * PIECE).unwrap();
        if piece == 0 {
            // A connection in its handshake is cut off, as the case above shows.
            let first = || {
                let mut byte = [0];
                device.read_at(0, &mut byte).unwrap();
                byte[0]
            };
            wait_until("the client is past its handshake", || first() == 1);
        }
        if piece % 20 == 19 {
            let parts = suspend(&mut export, PATIENCE);
            export.server = Some(serve_parts(device.clone(), parts, Options::default()).unwrap());
        }
    }
    write!(commands, "aio_flush\nflush\nquit\n").unwrap();
    drop(commands);
    assert!(qemu_io.wait().unwrap().success());
    for piece in 0..PIECES {
        let mut out = vec![0; PIECE as usize];
        device.read_at(piece * PIECE, &mut out).unwrap();
        assert!(out.iter().all(|byte| *byte == (piece % 255 + 1) as u8), "piece {piece}");
    }
}
