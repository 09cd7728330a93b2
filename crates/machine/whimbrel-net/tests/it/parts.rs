//! Ports that go on from the parts that another one has left, as another process would.

use crate::support::{PATIENCE, bridged, eventually, frame, number, plugged};
use std::io::Write;
use whimbrel_net::{BufferLimits, Gates, NetError, Port, PortState};

#[test]
fn no_frame_of_either_direction_is_lost_or_cut_while_a_port_is_passed() {
    let namespace = bridged();
    let (a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (mut b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    let mut sent = 0;
    for round in 0..20u32 {
        qemu_b.send(&frame(2, round)).unwrap();
        assert_eq!(number(&qemu_a.receive()), round);
        // The first half of a frame is in the port, the second comes when nobody is there.
        let half = frame(2, 1000 + round);
        let stream = qemu_b.stream.as_mut().unwrap();
        stream.write_all(&(half.len() as u32).to_be_bytes()).unwrap();
        stream.write_all(&half[..17]).unwrap();
        let (descriptors, state) = b.suspend().unwrap();
        drop(b);
        let stream = qemu_b.stream.as_mut().unwrap();
        stream.write_all(&half[17..]).unwrap();
        for n in sent..sent + 30 {
            qemu_a.send(&frame(1, n)).unwrap();
        }
        sent += 30;
        eventually("the frames left", || a.counters().outbound_frames >= u64::from(sent));
        let passed: PortState = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
        assert_eq!(passed, state);
        b = Port::from_parts(descriptors, passed).unwrap();
        assert_eq!(b.tap_name(), Some("tapb"));
        assert_eq!(number(&qemu_a.receive()), 1000 + round);
        (sent - 30..sent).for_each(|n| assert_eq!(number(&qemu_b.receive()), n));
    }
    assert_eq!(b.addresses().stations().len(), 1, "what it has learnt goes along");
    assert!(b.counters().inbound_frames >= u64::from(sent), "what it has counted goes along");
    assert!(b.wait_connected(PATIENCE), "QEMU has seen no other connection");
}

#[test]
fn a_port_that_holds_output_is_not_passed_and_goes_on() {
    let namespace = bridged();
    let (mut a, mut qemu_a) = plugged(&namespace, "tapa", Gates::OPEN);
    let (_b, mut qemu_b) = plugged(&namespace, "tapb", Gates::OPEN);
    a.buffer_output(BufferLimits::default());
    let refused = a.suspend();
    assert!(matches!(refused, Err(NetError::Protected)), "{refused:?}");
    qemu_a.send(&frame(1, 7)).unwrap();
    a.barrier().unwrap();
    a.release_all();
    assert_eq!(number(&qemu_b.receive()), 7);
}

#[test]
fn a_state_that_no_port_leaves_is_refused() {
    let namespace = bridged();
    let (mut a, _qemu) = plugged(&namespace, "tapa", Gates::OPEN);
    let (descriptors, state) = a.suspend().unwrap();
    let hostile = PortState { received: vec![0; 1 << 20], ..state.clone() };
    let refused = Port::from_parts(descriptors.try_clone().unwrap(), hostile).map(drop);
    assert!(matches!(refused, Err(NetError::InvalidState)), "{refused:?}");
    let hostile = PortState { unsent: vec![0; 1 << 20], ..state };
    let refused = Port::from_parts(descriptors, hostile).map(drop);
    assert!(matches!(refused, Err(NetError::InvalidState)), "{refused:?}");
}
