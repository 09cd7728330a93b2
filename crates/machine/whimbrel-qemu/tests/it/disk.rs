//! Disks on an NBD server that restarts, as the daemon does.

use crate::guest::{Guest, SOON, Slot};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command},
    time::Instant,
};
use whimbrel_core::{ByteSize, DiskConfig};
use whimbrel_machine::Machine;

const SIZE: ByteSize = ByteSize(16 << 20);

/// A `qemu-nbd` that ends with the test.
struct Server(Child);

impl Server {
    fn start(image: &Path, socket: &Path) -> Self {
        let _ = fs::remove_file(socket);
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=4", "--format=raw", "--export-name=", "--socket"]);
        let server = Self(command.args([socket, image]).spawn().unwrap());
        let deadline = Instant::now() + SOON;
        while !socket.exists() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn with_disk(incoming: bool, socket: &Path, slot: Slot) -> Guest {
    Guest::launch(slot, |spec| {
        spec.config.disks = vec![DiskConfig { size: SIZE }];
        spec.disks = vec![socket.to_owned()];
        spec.incoming = incoming;
    })
}

#[test]
fn a_disk_waits_for_a_server_that_restarts_and_moves_with_the_machine() {
    let slot = Slot::new();
    let dir = tempfile::tempdir().unwrap();
    let image: PathBuf = dir.path().join("image");
    File::create(&image).unwrap().set_len(SIZE.0).unwrap();
    let socket = dir.path().join("nbd");
    let server = Server::start(&image, &socket);
    let mut guest = with_disk(false, &socket, slot);
    guest.qemu().unpause().unwrap();
    let nonce = guest.expect("READY ");
    guest.run("echo before | dd of=/dev/vda conv=sync,fsync bs=4096 2>/dev/null");
    drop(server);
    guest.say("run echo during | dd of=/dev/vda seek=1 conv=sync,fsync bs=4096 2>/dev/null");
    let server = Server::start(&image, &socket);
    guest.expect("DONE ");
    let written = fs::read(&image).unwrap();
    assert!(written.starts_with(b"before") && written[4096..].starts_with(b"during"));
    guest.qemu().pause().unwrap();
    let state = guest.qemu().device_state().unwrap();
    let slot = Slot::new();
    fs::copy(&guest.slot.ram, &slot.ram).unwrap();
    let mut target = with_disk(true, &socket, slot);
    target.qemu().load(&state).unwrap();
    target.qemu().unpause().unwrap();
    target.run("echo after | dd of=/dev/vda seek=2 conv=sync,fsync bs=4096 2>/dev/null");
    assert_eq!(target.count(), (4, nonce));
    assert!(fs::read(&image).unwrap()[8192..].starts_with(b"after"));
    drop(target);
    drop(guest);
    drop(server);
}
