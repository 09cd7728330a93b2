//! Restart of the server on the same path: a QEMU with reconnect notices only a delay.

use crate::export::{Export, wait_until};
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use whimbrel_block::{Device, MemDevice};

const PIECE: u64 = 64 << 10;
const PIECES: u64 = 200;

/// Ends the child also when the test fails.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Fails only if it ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn byte(device: &dyn Device, offset: u64) -> u8 {
    let mut out = [0];
    device.read_at(offset, &mut out).unwrap();
    out[0]
}

#[test]
fn qemu_sends_again_what_a_dead_server_did_not_answer() {
    let device = Arc::new(MemDevice::new(vec![0; (PIECE * PIECES) as usize]));
    let mut export = Export::new(device.clone());
    let image =
        format!("driver=nbd,server.type=unix,server.path={},reconnect-delay=30", export.socket().display());
    let child = Command::new("qemu-io")
        .args(["--image-opts", &image])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut qemu_io = Ended(child.unwrap());
    let mut commands = qemu_io.0.stdin.take().unwrap();
    for piece in 0..PIECES {
        writeln!(commands, "aio_write -q -P {} {} {PIECE}", piece % 255 + 1, piece * PIECE).unwrap();
        if piece == PIECES / 2 {
            wait_until("the first write has landed", || byte(&*device, 0) == 1);
            export.server = None;
            export.start(device.clone());
        }
    }
    write!(commands, "aio_flush\nflush\nquit\n").unwrap();
    drop(commands);
    wait_until("qemu-io is done", || qemu_io.0.try_wait().unwrap().is_some());
    assert!(qemu_io.0.wait().unwrap().success());
    for piece in 0..PIECES {
        let fill = (piece % 255 + 1) as u8;
        for at in [piece * PIECE, (piece + 1) * PIECE - 1] {
            assert_eq!(byte(&*device, at), fill, "byte {at}");
        }
    }
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let alive = whimbrel_nbd::bind(&path).unwrap();
    assert_eq!(whimbrel_nbd::bind(&path).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    drop(alive);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "not a socket").unwrap();
    assert!(whimbrel_nbd::bind(&path).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"not a socket");
}
