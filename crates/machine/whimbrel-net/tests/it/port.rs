//! Ports on real tap devices and bridges, with fake QEMUs at their other ends.

use crate::support::{FakeQemu, PATIENCE, bridged, eventually, frame, number, plugged, plugged_with};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};
use std::{
    net::Ipv4Addr,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};
use whimbrel_net::{
    Addresses, BufferLimits, Epoch, Gates, GuestSide, Mac, Port, PortConfig, PortFilter, Station, Uplink,
    announcements,
};
use whimbrel_testkit::lab::Lab;

#[test]
fn frames_cross_from_port_to_port_in_order() {
    let namespace = bridged();
    let (_a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (_b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    for n in 0..200 {
        qemu_a.send(&frame(1, n)).unwrap();
        assert_eq!(number(&qemu_b.receive()), n);
        qemu_b.send(&frame(2, n)).unwrap();
        assert_eq!(number(&qemu_a.receive()), n);
    }
}

#[test]
fn a_guest_sends_from_its_own_address_only() {
    let namespace = bridged();
    let own = PortFilter::Only(Mac([2, 0, 0, 0, 0, 1]));
    let (port, mut qemu_a) = plugged_with(&namespace, "tap0", Gates::OPEN, own);
    let (_b, mut qemu_b) = plugged(&namespace, "tap1", Gates::OPEN);
    qemu_a.send(&frame(3, 1)).unwrap();
    qemu_a.send(&frame(3, 2)[..9]).unwrap();
    qemu_a.send(&frame(1, 3)).unwrap();
    assert_eq!(number(&qemu_b.receive()), 3);
    let filtered = port.counters().filtered;
    assert_eq!((filtered.source, filtered.malformed, port.addresses().stations().len()), (1, 1, 1));
    assert!(port.addresses().stations().iter().all(|station| station.mac == Mac([2, 0, 0, 0, 0, 1])));
}

#[test]
fn nothing_reaches_a_guest_that_does_not_run_yet_not_even_later() {
    let namespace = bridged();
    let (a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (b, mut qemu_b) = plugged(&namespace, "tapb", Gates::BLOCKED);
    (0..50).for_each(|n| qemu_a.send(&frame(1, n)).unwrap());
    eventually("the frames left", || a.counters().outbound_frames >= 50);
    b.open_inbound();
    qemu_a.send(&frame(1, 1000)).unwrap();
    assert_eq!(number(&qemu_b.receive()), 1000);
}

#[test]
fn nothing_leaves_a_machine_that_was_handed_over() {
    let namespace = bridged();
    let (a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (_b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    qemu_a.send(&frame(1, 1)).unwrap();
    assert_eq!(number(&qemu_b.receive()), 1);
    a.set_gates(Gates::BLOCKED);
    (100..150).for_each(|n| qemu_a.send(&frame(1, n)).unwrap());
    eventually("the frames are dropped", || a.counters().dropped_frames >= 50);
    a.set_gates(Gates::OPEN);
    qemu_a.send(&frame(1, 2)).unwrap();
    assert_eq!(number(&qemu_b.receive()), 2);
}

#[test]
fn what_comes_while_a_guest_stands_still_reaches_it_late_where_it_goes_on() {
    let namespace = bridged();
    let (a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    let (c, mut qemu_c) = plugged(&namespace, "tapc", Gates::BLOCKED);
    let send = |qemu: &mut FakeQemu, numbers: std::ops::Range<u32>| {
        let sent = a.counters().outbound_frames + u64::from(numbers.end - numbers.start);
        numbers.for_each(|n| qemu.send(&frame(1, n)).unwrap());
        eventually("the frames left", || a.counters().outbound_frames >= sent);
    };
    send(&mut qemu_a, 0..1);
    assert_eq!(number(&qemu_b.receive()), 0);
    b.buffer_late_frames();
    send(&mut qemu_a, 1..400);
    // The guest continues on this host.
    b.deliver_late_frames();
    send(&mut qemu_a, 400..401);
    (1..401).for_each(|n| assert_eq!(number(&qemu_b.receive()), n));
    // The guest continues on another host: its old QEMU gets nothing more, and the new one gets all frames,
    // before anything newer.
    b.buffer_late_frames();
    send(&mut qemu_a, 401..500);
    let strays = b.take_late_frames();
    c.add_late_frames(strays.iter().map(AsRef::as_ref));
    c.set_gates(Gates::OPEN);
    send(&mut qemu_a, 500..501);
    (401..501).for_each(|n| assert_eq!(number(&qemu_c.receive()), n));
    assert_eq!(qemu_b.receive_within(Duration::from_millis(50)), None, "the old one has heard of it too");
}

#[test]
fn output_leaves_only_with_its_epoch() {
    let namespace = bridged();
    let (a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (_b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    a.buffer_output(BufferLimits::default());
    let sent = a.counters().outbound_frames;
    (0..5).for_each(|n| qemu_a.send(&frame(1, n)).unwrap());
    assert_eq!(a.barrier().unwrap(), Epoch(0));
    (5..8).for_each(|n| qemu_a.send(&frame(1, n)).unwrap());
    assert_eq!(a.counters().outbound_frames, sent);
    assert_eq!(a.release(Epoch(0)).unwrap(), 5);
    assert_eq!(a.counters().outbound_frames, sent + 5);
    assert_eq!(a.barrier().unwrap(), Epoch(1));
    assert_eq!(a.release(Epoch(1)).unwrap(), 3);
    (0..8).for_each(|n| assert_eq!(number(&qemu_b.receive()), n));
}

#[test]
fn whoever_waits_for_output_is_told_of_the_first_frame_and_not_of_every_one() {
    let namespace = bridged();
    let (a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (_b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    let (tell, told) = std::sync::mpsc::channel();
    a.on_first_buffered(move || tell.send(()).unwrap());
    a.buffer_output(BufferLimits::default());
    for _ in 0..3 {
        assert!(!a.has_buffered_output());
        (0..5).for_each(|n| qemu_a.send(&frame(1, n)).unwrap());
        told.recv_timeout(PATIENCE).unwrap();
        assert!(a.has_buffered_output());
        assert_eq!(a.release(a.barrier().unwrap()).unwrap(), 5);
        assert!(told.try_recv().is_err(), "told of a frame that was not the first");
        (0..5).for_each(|n| assert_eq!(number(&qemu_b.receive()), n));
    }
}

#[test]
fn a_full_hold_queue_makes_the_guest_wait_and_loses_nothing() {
    const FRAMES: u32 = 20_000;
    let namespace = bridged();
    let (a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (_b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    a.buffer_output(BufferLimits { frames: 100, bytes: 1 << 20 });
    let sender = std::thread::spawn(move || {
        (0..FRAMES).for_each(|n| qemu_a.send(&frame(1, n)).unwrap());
        qemu_a
    });
    let mut received = 0;
    while received < FRAMES {
        let epoch = a.barrier().unwrap();
        let released = a.release(epoch).unwrap();
        assert!(released <= 100, "{released}");
        for _ in 0..released {
            assert_eq!(number(&qemu_b.receive()), received);
            received += 1;
        }
    }
    drop(sender.join().unwrap());
}

#[test]
fn a_discarded_epoch_never_leaves() {
    let namespace = bridged();
    let (a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (_b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    a.buffer_output(BufferLimits::default());
    (0..5).for_each(|n| qemu_a.send(&frame(1, n)).unwrap());
    a.barrier().unwrap();
    assert_eq!(a.discard_buffered(), 5);
    assert!(a.release(Epoch(0)).is_err());
    qemu_a.send(&frame(1, 9)).unwrap();
    assert_eq!(number(&qemu_b.receive()), 9);
}

#[test]
fn a_new_qemu_at_the_same_socket_is_connected_again() {
    let namespace = bridged();
    let (_a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (_b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    qemu_a.send(&frame(1, 1)).unwrap();
    assert_eq!(number(&qemu_b.receive()), 1);
    // Half a frame, then gone: the next connection must not begin in its middle.
    use std::io::Write;
    qemu_a.stream.take().unwrap().write_all(&[0, 0, 0, 60, 1, 2, 3]).unwrap();
    qemu_a.accept();
    qemu_a.send(&frame(1, 2)).unwrap();
    assert_eq!(number(&qemu_b.receive()), 2);
}

#[test]
fn the_host_keeps_its_own_address_whatever_machines_come_and_go() {
    let namespace = bridged();
    // The lowest port's address is the bridge's: that of a card, until a tap is lower.
    namespace.ip("link add card type veth peer name wire").unwrap();
    namespace.ip("link set wire up").unwrap();
    namespace.ip("link set card address 52:54:00:00:00:01 master br0 up").unwrap();
    let address =
        || namespace.ip("-o link show br0").unwrap().split("link/ether ").nth(1).unwrap()[..17].to_owned();
    assert_eq!(address(), "52:54:00:00:00:01");
    let ports: Vec<_> =
        (0..4).map(|index| plugged(&namespace, &format!("tapk{index}"), Gates::OPEN)).collect();
    assert_eq!(address(), "52:54:00:00:00:01");
    drop(ports);
    assert_eq!(address(), "52:54:00:00:00:01");
}

#[test]
fn a_dropped_port_leaves_no_device() {
    let namespace = bridged();
    let (port, _qemu) = plugged(&namespace, "tapx%d", Gates::OPEN);
    let name = port.tap_name().unwrap().to_owned();
    assert_eq!(name, "tapx0");
    assert!(namespace.ip("link show tapx0").unwrap().contains("master br0"));
    drop(port);
    // A child that another test is just starting has every descriptor of this process for a moment.
    eventually("the device is gone", || namespace.ip("link show tapx0").is_err());
}

#[test]
fn a_missing_bridge_is_an_error_that_names_it_and_leaves_no_device() {
    let namespace = bridged();
    let tap = whimbrel_net::TapConfig { name: "tapy".into(), bridge: Some("br9".into()) };
    let config = PortConfig {
        guest: GuestSide::Stream("/nonexistent".into()),
        uplink: Uplink::Tap(tap),
        gates: Gates::OPEN,
        filter: PortFilter::Off,
    };
    let error = namespace.run(|| Port::open(config)).err().unwrap();
    assert_eq!(error.to_string(), "cannot join bridge \"br9\"");
    assert!(namespace.ip("link show tapy").is_err());
}

#[test]
fn an_isolated_machine_reaches_nobody_and_is_known_all_the_same() {
    let mut qemu = FakeQemu::new();
    let config = PortConfig {
        guest: GuestSide::Stream(qemu.socket.clone()),
        uplink: Uplink::Isolated,
        gates: Gates::OPEN,
        filter: PortFilter::Off,
    };
    let port = Port::open(config).unwrap();
    qemu.accept();
    let station = station();
    announcements(&station).iter().for_each(|frame| qemu.send(frame).unwrap());
    eventually("the addresses are learnt", || port.addresses().stations() == [station.clone()]);
    assert_eq!(port.counters().outbound_frames, 0);
    let text = serde_json::to_string(&port.addresses()).unwrap();
    assert_eq!(serde_json::from_str::<Addresses>(&text).unwrap(), port.addresses());
}

fn station() -> Station {
    Station {
        mac: Mac([0x52, 0x54, 0, 0xaa, 0xbb, 0xcc]),
        ipv4: vec![Ipv4Addr::new(10, 77, 0, 100)],
        ipv6: vec!["fe80::5054:ff:feaa:bbcc".parse().unwrap()],
    }
}

#[test]
fn an_arrival_is_heard_six_times_on_the_other_side_of_the_network() {
    let lab = Lab::new().unwrap();
    let wire = lab.host("client").run(|| {
        socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_NONBLOCK, SockProtocol::EthAll).unwrap()
    });
    let (port, mut qemu) = plugged(lab.host("alpha"), "tap0", Gates::BLOCKED);
    announcements(&station()).iter().for_each(|frame| qemu.send(frame).unwrap());
    eventually("the addresses are learnt", || port.addresses().stations() == [station()]);
    port.set_gates(Gates::OPEN);
    port.announce();
    let expected = announcements(&station());
    let mut heard = vec![0; expected.len()];
    let deadline = Instant::now() + PATIENCE;
    // Each frame is captured twice: on the uplink and on the bridge it is a port of.
    while heard.iter().any(|count| *count < 12) {
        assert!(Instant::now() < deadline, "heard {heard:?}");
        let mut bytes = [0; 2048];
        match recv(wire.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
            Ok(len) => {
                let position = expected.iter().position(|frame| frame[..] == bytes[..len]);
                position.into_iter().for_each(|position| heard[position] += 1);
            }
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(5)),
        }
    }
    assert_eq!(heard, vec![12; expected.len()]);
}

#[test]
fn a_guest_that_leaves_right_after_its_arrival_is_announced_no_more_until_it_stays() {
    let namespace = bridged();
    let (port, mut qemu) = plugged(&namespace, "tap0", Gates::OPEN);
    announcements(&station()).iter().for_each(|frame| qemu.send(frame).unwrap());
    eventually("the addresses are learnt", || port.addresses().stations() == [station()]);
    let sent = || port.counters().outbound_frames;
    let before = announcements(&station()).len() as u64;
    eventually("the guest's own frames left", || sent() == before);
    port.buffer_late_frames();
    port.announce();
    // Announcements that are due leave before a frame that the guest sends after them.
    qemu.send(&frame(1, 1)).unwrap();
    eventually("the guest's frame left", || sent() > before);
    assert_eq!(sent(), before + 1);
    port.deliver_late_frames();
    eventually("it stays, and is announced", || sent() > before + 1);
}

/// Prints the forwarder's throughput; run by hand on an idle machine.
#[test]
#[ignore = "a measurement"]
fn measure_the_pump() {
    const FRAMES: u64 = 400_000;
    let namespace = bridged();
    let (a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    let begin = Instant::now();
    let sender = std::thread::spawn(move || {
        use std::io::Write;
        let mut one = 1514u32.to_be_bytes().to_vec();
        one.extend(frame(1, 0));
        one.resize(1518, 0);
        let many = one.repeat(40);
        (0..FRAMES / 40).for_each(|_| qemu_a.stream.as_mut().unwrap().write_all(&many).unwrap());
        qemu_a
    });
    let mut stream = qemu_b.stream.take().unwrap();
    std::thread::spawn(move || {
        use std::io::Read;
        let mut piece = vec![0; 1 << 18];
        while stream.read(&mut piece).is_ok_and(|len| len > 0) {}
    });
    let _qemu_a = sender.join().unwrap();
    eventually("all left", || a.counters().outbound_frames >= FRAMES);
    let seconds = begin.elapsed().as_secs_f64();
    let mbit = |bytes: u64| bytes as f64 * 8e-6 / seconds;
    println!(
        "out {:.0} Mbit/s, in {:.0} Mbit/s",
        mbit(a.counters().outbound_bytes),
        mbit(b.counters().inbound_bytes)
    );
}
