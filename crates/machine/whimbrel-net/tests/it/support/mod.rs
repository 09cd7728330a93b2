//! Fake QEMU with only a network end, and distinguishable frames.

pub(crate) mod offload_guest;
pub(crate) mod tap_qemu;

use std::{
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_net::{Gates, GuestSide, Port, PortConfig, PortFilter, TapConfig, Uplink};
use whimbrel_testkit::lab::Namespace;

/// Longer than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// "Local experimental" (IEEE 802), which no kernel sends on its own.
pub(crate) const KIND: [u8; 2] = [0x88, 0xb5];

/// Network end of a fake QEMU, as `-netdev stream,server=on`.
pub(crate) struct FakeQemu {
    _place: TempDir,
    pub(crate) socket: PathBuf,
    listener: UnixListener,
    pub(crate) stream: Option<UnixStream>,
}

impl FakeQemu {
    pub(crate) fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("net0");
        let listener = UnixListener::bind(&socket).unwrap();
        Self { _place: place, socket, listener, stream: None }
    }

    /// Accepts the port's connection.
    pub(crate) fn accept(&mut self) {
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        self.stream = Some(stream);
    }

    pub(crate) fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        let mut message = (frame.len() as u32).to_be_bytes().to_vec();
        message.extend(frame);
        self.stream.as_mut().unwrap().write_all(&message)
    }

    /// Next frame of [`KIND`].
    pub(crate) fn receive(&mut self) -> Vec<u8> {
        self.receive_within(PATIENCE).expect("no frame came")
    }

    /// Next frame of [`KIND`], if one comes in this time. Other frames on the bridge, which the kernel sends,
    /// are skipped.
    pub(crate) fn receive_within(&mut self, time: Duration) -> Option<Vec<u8>> {
        let stream = self.stream.as_mut().unwrap();
        loop {
            let mut length = [0; 4];
            stream.set_read_timeout(Some(time)).unwrap();
            match stream.read(&mut length[..1]) {
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return None,
                read => assert_eq!(read.unwrap(), 1, "the port hung up"),
            }
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.read_exact(&mut length[1..]).unwrap();
            let mut frame = vec![0; u32::from_be_bytes(length) as usize];
            stream.read_exact(&mut frame).unwrap();
            if frame[12..14] == KIND {
                return Some(frame);
            }
        }
    }
}

/// A port with a fake QEMU at its end, its tap on `br0` of `namespace`.
pub(crate) fn plugged(namespace: &Namespace, tap: &str, gates: Gates) -> (Port, FakeQemu) {
    plugged_with(namespace, tap, gates, PortFilter::Off)
}

/// As [`plugged`], with a filter.
pub(crate) fn plugged_with(
    namespace: &Namespace,
    tap: &str,
    gates: Gates,
    filter: PortFilter,
) -> (Port, FakeQemu) {
    let mut qemu = FakeQemu::new();
    let tap = TapConfig { name: tap.to_owned(), bridge: Some("br0".to_owned()) };
    let config =
        PortConfig { guest: GuestSide::Stream(qemu.socket.clone()), uplink: Uplink::Tap(tap), gates, filter };
    let port = namespace.run(|| Port::open(config)).unwrap();
    qemu.accept();
    assert!(port.wait_connected(PATIENCE));
    namespace.wait_forwarding().unwrap();
    (port, qemu)
}

/// A namespace with a bridge.
pub(crate) fn bridged() -> Namespace {
    let namespace = Namespace::new().unwrap();
    namespace.ip("link add br0 type bridge mcast_snooping 0").unwrap();
    namespace.ip("link set br0 up").unwrap();
    namespace
}

/// A broadcast frame from station `from` that carries `number`.
pub(crate) fn frame(from: u8, number: u32) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 0, from]);
    frame.extend(KIND);
    frame.extend(number.to_be_bytes());
    frame.resize(60, 0);
    frame
}

/// Number in a [`frame`].
pub(crate) fn number(frame: &[u8]) -> u32 {
    u32::from_be_bytes(frame[14..18].try_into().unwrap())
}

/// Waits until `condition` holds; fails the test if it never does.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
