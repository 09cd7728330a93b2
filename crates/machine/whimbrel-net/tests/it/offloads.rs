//! Ports whose guest leaves checksums and the cutting of segments to the network, on a real QEMU.

use crate::support::{
    PATIENCE, bridged, eventually, frame, number,
    offload_guest::{Link, OffloadGuest, PeerGuest},
    plugged,
    tap_qemu::{TapQemu, large, with_offloads},
};
use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Instant,
};
use whimbrel_net::{BufferLimits, Gates, Mac, NetError, Port, PortFilter, PortState, Uplink, frame_pipe};
use whimbrel_testkit::lab::Lab;

const TAG: [u8; 4] = [0x81, 0, 0, 7];

/// Bytes of a stream, which repeat in no segment.
fn bytes(count: usize) -> Vec<u8> {
    (0..count as u32 / 4).flat_map(|number| number.wrapping_mul(0x9e37_79b1).to_le_bytes()).collect()
}

/// Sends to the echo of the guest and compares what comes back.
fn echo(stream: TcpStream, bytes: &[u8]) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut reader, mut writer) = (stream.try_clone().unwrap(), stream);
    std::thread::scope(|scope| {
        scope.spawn(move || writer.write_all(bytes).unwrap());
        let mut back = vec![0; bytes.len()];
        reader.read_exact(&mut back).unwrap();
        assert!(back == bytes, "the stream came back changed");
    });
}

#[test]
fn a_stream_passes_in_large_segments_both_ways_and_comes_back_as_it_was_sent() {
    let lab = Lab::new().unwrap();
    let guest = OffloadGuest::boot(&lab, Link::Tap);
    let before = guest.port().counters();
    let bytes = bytes(16 << 20);
    echo(lab.host("client").connect(OffloadGuest::at(7002), PATIENCE).unwrap(), &bytes);
    let after = guest.port().counters();
    let mean = |bytes: u64, frames: u64| bytes / frames.max(1);
    let sent =
        mean(after.outbound_bytes - before.outbound_bytes, after.outbound_frames - before.outbound_frames);
    let got = mean(after.inbound_bytes - before.inbound_bytes, after.inbound_frames - before.inbound_frames);
    assert!(sent > 3_000 && got > 3_000, "frames of {sent} and {got} bytes are those of the wire");
    assert_eq!(after.filtered, before.filtered);
}

#[test]
fn a_machine_of_an_earlier_version_goes_on_with_a_tap_device_and_the_way_back_is_refused() {
    let lab = Lab::new().unwrap();
    let client = lab.host("client");
    let guest = OffloadGuest::boot(&lab, Link::Stream);
    let guest = guest.go_on(&lab, Link::Tap).unwrap();
    // Its guest has agreed to leave nothing to the network, so the kernel does what others leave.
    echo(client.connect(OffloadGuest::at(7002), PATIENCE).unwrap(), &bytes(2 << 20));
    let sent = guest.port().counters();
    assert!(sent.outbound_bytes / sent.outbound_frames < 1_515, "{sent:?}");
    let refusal = guest.go_on(&lab, Link::Stream).err().unwrap();
    assert!(refusal.contains("vnet_hdr"), "{refusal}");
}

#[test]
fn a_machine_that_has_moved_still_boots_again() {
    let lab = Lab::new().unwrap();
    let client = lab.host("client");
    let mut guest = OffloadGuest::boot(&lab, Link::Tap);
    guest.reboot();
    echo(client.connect(OffloadGuest::at(7002), PATIENCE).unwrap(), &bytes(1 << 20));
    let mut guest = guest.go_on(&lab, Link::Tap).unwrap();
    echo(client.connect(OffloadGuest::at(7002), PATIENCE).unwrap(), &bytes(1 << 20));
    guest.reboot();
    echo(client.connect(OffloadGuest::at(7002), PATIENCE).unwrap(), &bytes(1 << 20));
}

#[test]
fn large_segments_that_wait_for_a_paused_guest_leave_for_another_host_as_the_kernel_cuts_them() {
    let namespace = bridged();
    let (a, mut qemu_a) = with_offloads(&namespace, "tapa", PortFilter::Off);
    let (b, _qemu_b) = with_offloads(&namespace, "tapb", PortFilter::Off);
    let (_c, mut qemu_c) = with_offloads(&namespace, "tapc", PortFilter::Off);
    b.buffer_late_frames();
    for (v6, tags) in [(false, &[][..]), (true, &[]), (false, &TAG), (true, &TAG)] {
        let sent = a.counters().outbound_frames;
        qemu_a.send_packet(&large(1, v6, 5_001, 1_400, tags));
        eventually("it left whole", || a.counters().outbound_frames == sent + 1);
        let cut: Vec<_> = (0..4).map(|_| qemu_c.receive()).collect();
        assert_eq!(cut.iter().map(|frame| frame.len()).max(), cut.first().map(|frame| frame.len()));
        let mut late = Vec::new();
        eventually("they are late", || {
            let taken = b.take_late_frames().into_iter().map(Vec::from);
            late.extend(taken.filter(|frame| frame[6..12] == [2, 0, 0, 0, 0, 1]));
            late.len() >= 4
        });
        assert!(late == cut, "IPv6 {v6}, tags {tags:?}");
    }
}

#[test]
fn what_a_paused_qemu_has_not_read_reaches_its_guest_on_another_host() {
    let namespace = bridged();
    let (a, mut qemu_a) = with_offloads(&namespace, "tapa", PortFilter::Off);
    let (b, mut qemu_b) = with_offloads(&namespace, "tapb", PortFilter::Off);
    let send = |qemu: &mut TapQemu, numbers: std::ops::Range<u32>| {
        let sent = a.counters().outbound_frames + u64::from(numbers.end - numbers.start);
        numbers.for_each(|nth| qemu.send(&frame(1, nth)));
        eventually("they left", || a.counters().outbound_frames >= sent);
    };
    send(&mut qemu_a, 0..100);
    eventually("they wait in the device", || b.counters().inbound_frames >= 100);
    assert_eq!(number(&qemu_b.receive()), 0);
    b.buffer_late_frames();
    send(&mut qemu_a, 100..200);
    let mut late = b.take_late_frames();
    late.retain(|frame| frame[6..12] == [2, 0, 0, 0, 0, 1]);
    assert_eq!(late.iter().map(|frame| number(frame)).collect::<Vec<_>>(), (1..200).collect::<Vec<_>>());
}

#[test]
fn late_frames_of_another_host_reach_a_guest_with_offloads() {
    let namespace = bridged();
    let (a, mut qemu_a) = with_offloads(&namespace, "tapa", PortFilter::Off);
    // Many more than the device of QEMU has room for.
    let late: Vec<Vec<u8>> = (0..5_000).map(|nth| frame(2, nth)).collect();
    a.add_late_frames(late.iter().map(AsRef::as_ref));
    a.deliver_late_frames();
    (0..5_000).for_each(|nth| assert_eq!(number(&qemu_a.receive()), nth));
}

#[test]
fn ports_with_and_without_offloads_reach_each_other() {
    let namespace = bridged();
    let (_a, mut qemu_a) = with_offloads(&namespace, "tapa", PortFilter::Off);
    let (_b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    for nth in 0..200 {
        qemu_a.send(&frame(1, nth));
        assert_eq!(number(&qemu_b.receive()), nth);
        qemu_b.send(&frame(2, nth)).unwrap();
        assert_eq!(number(&qemu_a.receive()), nth);
    }
}

#[test]
fn a_foreign_source_is_refused_in_a_large_segment_too() {
    let namespace = bridged();
    let own = PortFilter::Only(Mac([2, 0, 0, 0, 0, 1]));
    let (a, mut qemu_a) = with_offloads(&namespace, "tapa", own);
    let (_b, mut qemu_b) = with_offloads(&namespace, "tapb", PortFilter::Off);
    qemu_a.send_packet(&large(3, false, 5_000, 1_400, &[]));
    qemu_a.send_packet(&large(3, true, 5_000, 1_400, &TAG));
    qemu_a.send(&frame(1, 9));
    assert_eq!(number(&qemu_b.receive()), 9);
    assert_eq!((a.counters().filtered.source, a.counters().outbound_frames), (2, 1));
}

#[test]
fn held_output_leaves_with_its_epoch_and_whole() {
    let namespace = bridged();
    let (a, mut qemu_a) = with_offloads(&namespace, "tapa", PortFilter::Off);
    let (b, mut qemu_b) = with_offloads(&namespace, "tapb", PortFilter::Off);
    a.buffer_output(BufferLimits::default());
    (0..300).for_each(|nth| qemu_a.send(&frame(1, nth)));
    qemu_a.send_packet(&large(1, false, 60_000, 1_400, &[]));
    // Whatever QEMU has written belongs to the epoch, although nobody has read it yet.
    let epoch = a.barrier().unwrap();
    qemu_a.send(&frame(1, 1_000));
    assert_eq!(a.counters().outbound_frames, 0);
    assert_eq!(a.release(epoch).unwrap(), 301);
    (0..300).for_each(|nth| assert_eq!(number(&qemu_b.receive()), nth));
    let cut: usize = (0..43).map(|_| qemu_b.receive().len() - 54).sum();
    assert_eq!((cut, a.counters().outbound_frames), (60_000, 301));
    eventually("it came whole", || b.counters().inbound_bytes >= 60_054);
    assert!(b.counters().inbound_frames < 301 + 43, "it was cut on the way");
    a.release_all();
    assert_eq!(number(&qemu_b.receive()), 1_000);
}

#[test]
fn a_port_with_offloads_passes_to_another_process_and_loses_nothing() {
    let namespace = bridged();
    let (mut a, mut qemu_a) = with_offloads(&namespace, "tapa", PortFilter::Off);
    let (b, mut qemu_b) = with_offloads(&namespace, "tapb", PortFilter::Off);
    for round in 0..20 {
        let (descriptors, state) = a.suspend().unwrap();
        drop(a);
        qemu_a.send(&frame(1, round));
        qemu_a.send_packet(&large(1, round % 2 == 0, 3_000, 1_400, &[]));
        let sent = b.counters().outbound_frames;
        qemu_b.send(&frame(2, round));
        eventually("it left", || b.counters().outbound_frames == sent + 1);
        let passed: PortState = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
        a = Port::from_parts(descriptors, passed).unwrap();
        assert!(a.has_offloads() && a.tap_name() == Some("tapa"));
        assert_eq!(number(&qemu_a.receive()), round);
        assert_eq!(number(&qemu_b.receive()), round);
        (0..3).for_each(|_| assert!(qemu_b.receive().len() <= 1_474));
    }
}

#[test]
fn a_state_with_half_a_packet_is_refused() {
    let namespace = bridged();
    let (mut a, _qemu) = with_offloads(&namespace, "tapa", PortFilter::Off);
    let (descriptors, state) = a.suspend().unwrap();
    let hostile = PortState { unsent: vec![0, 0, 1, 0, 7], ..state };
    let refused = Port::from_parts(descriptors, hostile).map(drop);
    assert!(matches!(refused, Err(NetError::InvalidState)), "{refused:?}");
}

#[test]
fn a_frame_pipe_gets_frames_as_on_the_wire() {
    let namespace = bridged();
    let (near, far) = frame_pipe().unwrap();
    let mut qemu = TapQemu::new();
    let _port = qemu.port(&namespace, Uplink::Pipe(near), PortFilter::Off);
    let mut other = TapQemu::new();
    let end = other.port(&namespace, Uplink::Pipe(far), PortFilter::Off);
    qemu.send_packet(&large(1, true, 5_000, 1_400, &[]));
    (0..4).for_each(|_| assert!(other.receive().len() <= 1_474));
    assert_eq!(end.counters().inbound_frames, 4);
    other.send(&frame(2, 5));
    assert_eq!(number(&qemu.receive()), 5);
}

#[test]
fn what_is_not_read_in_time_is_dropped_and_counted() {
    let namespace = bridged();
    let (a, mut qemu_a) = with_offloads(&namespace, "tapa", PortFilter::Off);
    a.buffer_output(BufferLimits { frames: 10, bytes: 1 << 20 });
    let packet = large(1, false, 60_000, 1_400, &[]);
    (0..1_000).for_each(|_| qemu_a.send_packet(&packet));
    assert!(a.counters().dropped_frames > 0, "{:?}", a.counters());
    a.release_all();
    let before = a.counters();
    qemu_a.send(&frame(1, 1));
    eventually("it goes on", || a.counters().outbound_frames > before.outbound_frames);
}

/// Prints the throughput of a port beside that of QEMU's own tap; run by hand on an idle machine.
#[test]
#[ignore = "a measurement"]
fn measure_a_file() {
    let lab = Lab::new().unwrap();
    let (guest, _peer) = (OffloadGuest::boot(&lab, Link::Tap), PeerGuest::boot(&lab));
    let fetch = |address| {
        let mut stream = lab.host("client").connect(address, PATIENCE).unwrap();
        let (begun, mut got, mut room) = (Instant::now(), 0, vec![0; 1 << 18]);
        stream.write_all(b"GET /bytes/134217728 HTTP/1.0\r\n\r\n").unwrap();
        loop {
            match stream.read(&mut room).unwrap() {
                0 => break,
                some => got += some,
            }
        }
        got as f64 / 1e6 / begun.elapsed().as_secs_f64()
    };
    for _ in 0..5 {
        let (ours, theirs) = (fetch(OffloadGuest::at(7080)), fetch(PeerGuest::at(7080)));
        println!("{ours:.1} MB/s, QEMU's own tap {theirs:.1} MB/s, {:.2}", ours / theirs);
    }
    println!("{:?}", guest.port().counters());
}
