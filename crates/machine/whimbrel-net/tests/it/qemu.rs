//! The port on a real QEMU with a real guest, watched from another host.

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use whimbrel_net::{Gates, GuestSide, Mac, Port, PortConfig, PortFilter, TapConfig, Uplink};
use whimbrel_testkit::{
    guest::{GuestFiles, GuestOptions, TestAgent, assert_same_life},
    lab::{Lab, Probe, StreamEnd, StreamProbe},
};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);
const GUEST: [u8; 4] = [10, 77, 0, 100];

fn qemu(socket: &std::path::Path) -> Command {
    let files = GuestFiles::get();
    let options =
        GuestOptions { address: Some("10.77.0.100/24".into()), buffer_mib: 4, ..GuestOptions::default() };
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-accel", "tcg", "-machine", "q35", "-cpu", "max", "-m", "128", "-nodefaults"]);
    qemu.args(["-display", "none", "-vga", "none", "-serial", "stdio"]);
    qemu.arg("-netdev");
    qemu.arg(format!("stream,id=net0,server=on,addr.type=unix,addr.path={}", socket.display()));
    qemu.args(["-device", "virtio-net-pci,netdev=net0,mac=52:54:00:77:00:64"]);
    qemu.arg("-kernel")
        .arg(&files.kernel)
        .arg("-initrd")
        .arg(&files.initrd)
        .arg("-append")
        .arg(options.to_string());
    qemu.stdin(Stdio::piped()).stdout(Stdio::piped());
    qemu
}

#[test]
fn a_guest_is_reached_through_its_port_and_the_port_learns_who_it_is() {
    let lab = Lab::new().unwrap();
    let (alpha, client) = (lab.host("alpha"), lab.host("client"));
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("net0");
    let mut qemu = alpha.command(qemu(&socket)).unwrap();
    let mut console = TestAgent::over(qemu.stdout.take().unwrap(), qemu.stdin.take().unwrap());
    let tap = TapConfig { name: "tap0".into(), bridge: Some("br0".into()) };
    let filter = PortFilter::Only(Mac([0x52, 0x54, 0, 0x77, 0, 0x64]));
    let config =
        PortConfig { guest: GuestSide::Stream(socket), uplink: Uplink::Tap(tap), gates: Gates::OPEN, filter };
    let port = alpha.run(|| Port::open(config)).unwrap();
    console.wait_ready(Duration::from_secs(120)).unwrap();
    assert!(port.wait_connected(PATIENCE));

    let stream = client.connect(SocketAddr::from((GUEST, 7000)), PATIENCE).unwrap();
    let mut witness = TestAgent::connected(stream).unwrap();
    assert_same_life(&console.state().unwrap(), &witness.state().unwrap());
    let stations = port.addresses();
    let [station] = stations.stations() else { panic!("{stations:?}") };
    assert_eq!(station.mac, Mac([0x52, 0x54, 0, 0x77, 0, 0x64]));
    assert_eq!(station.ipv4, [Ipv4Addr::from(GUEST)]);

    let probe = Probe::start(client, SocketAddr::from((GUEST, 7003))).unwrap();
    let numbers = StreamProbe::start(client, SocketAddr::from((GUEST, 7001)), PATIENCE).unwrap();
    assert!(probe.wait_answers(100, PATIENCE));
    // A gate closed for a while is a gap, not an end: the connection lives, and the probe sees the downtime.
    port.set_gates(Gates::BLOCKED);
    std::thread::sleep(Duration::from_millis(100));
    port.set_gates(Gates::OPEN);
    assert!(probe.wait_answers(100, PATIENCE));
    let (before, deadline) = (numbers.lines(), Instant::now() + PATIENCE);
    while numbers.lines() == before {
        assert!(Instant::now() < deadline, "the stream stands still");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (report, numbers) = (probe.stop(), numbers.stop());
    assert!(report.downtime >= Duration::from_millis(95), "{report:?}");
    assert_eq!(numbers.end, StreamEnd::Stopped, "{numbers:?}");
}
