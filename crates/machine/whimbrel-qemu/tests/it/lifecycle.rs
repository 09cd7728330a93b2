//! Life cycle of a QEMU: start, end, events, identity.

use crate::guest::{Guest, MEMORY, SOON, Slot};
use std::{
    fs,
    sync::mpsc::Receiver,
    time::{Duration, Instant},
};
use whimbrel_core::ByteSize;
use whimbrel_machine::Machine;
use whimbrel_qemu::{
    Console, LaunchError, MachineEvent, Qemu, QmpError, Sharing, ShutdownCause, Vmgenid, findings, probe,
};

fn await_event(events: &Receiver<MachineEvent>, wanted: impl Fn(&MachineEvent) -> bool) -> MachineEvent {
    let deadline = Instant::now() + SOON;
    loop {
        let event = events.recv_timeout(deadline.saturating_duration_since(Instant::now())).unwrap();
        if wanted(&event) {
            return event;
        }
    }
}

#[test]
fn a_command_line_qemu_rejects_is_reported_in_its_words() {
    let slot = Slot::new();
    let mut spec = slot.spec(Sharing::Shared);
    spec.config.machine = "pc-q35-0.0".into();
    let error = Qemu::launch(&probe().unwrap().path, &spec).unwrap_err();
    assert!(
        matches!(&error, LaunchError::Rejected { words } if words.contains("unsupported machine type")),
        "{error:?}"
    );
    let mut spec = slot.spec(Sharing::Shared);
    spec.config.cpu = "max,nonsense=on".into();
    let error = Qemu::launch(&probe().unwrap().path, &spec).unwrap_err();
    assert!(matches!(&error, LaunchError::Rejected { words } if words.contains("nonsense")), "{error:?}");
}

#[test]
fn a_killed_qemu_fails_every_waiting_command_at_once() {
    let guest = Guest::launch(Slot::new(), |_| ());
    let qemu = guest.qemu.as_ref().unwrap();
    let events = qemu.events();
    let stop = || {
        while !matches!(qemu.status(), Err(QmpError::Disconnected { .. })) {
            assert!(qemu.qmp().is_connected() || qemu.status().is_err());
        }
    };
    std::thread::scope(|scope| {
        (0..4).for_each(|_| drop(scope.spawn(stop)));
        qemu.process().kill();
    });
    await_event(&events, |event| *event == MachineEvent::Disconnected);
    assert!(qemu.process().wait(SOON));
    assert!(!qemu.process().is_alive());
}

#[test]
fn reset_panic_and_power_off_of_the_guest_are_told_apart() {
    let mut guest = Guest::boot();
    guest.expect("READY ");
    let events = guest.qemu().events();
    guest.qemu().reset().unwrap();
    let reset = await_event(&events, |event| matches!(event, MachineEvent::Reset { .. }));
    assert!(matches!(reset, MachineEvent::Reset { guest: false, .. }), "{reset:?}");
    guest.expect("READY ");
    guest.qemu().powerdown().unwrap();
    await_event(&events, |event| matches!(event, MachineEvent::Other { name, .. } if name == "POWERDOWN"));
    guest.say("run echo c > /proc/sysrq-trigger");
    await_event(&events, |event| matches!(event, MachineEvent::GuestPanicked { .. }));
    // The guest's kernel reboots after a panic, and nothing prevents that.
    let reset = await_event(&events, |event| matches!(event, MachineEvent::Reset { .. }));
    assert!(matches!(reset, MachineEvent::Reset { guest: true, .. }), "{reset:?}");
    guest.expect("READY ");
    guest.say("run poweroff -f");
    let off = await_event(&events, |event| matches!(event, MachineEvent::Shutdown(_)));
    assert_eq!(off, MachineEvent::Shutdown(ShutdownCause::Guest("guest-shutdown".into())));
    await_event(&events, |event| *event == MachineEvent::Stopped);
    assert_eq!(guest.qemu().status().unwrap().name, "shutdown", "it stays until told to quit");
    guest.qemu.take().unwrap().quit().unwrap();
    let quit = await_event(&events, |event| matches!(event, MachineEvent::Shutdown(_)));
    assert!(matches!(quit, MachineEvent::Shutdown(ShutdownCause::Host(_))), "{quit:?}");
    await_event(&events, |event| *event == MachineEvent::Disconnected);
}

#[test]
fn a_balloon_takes_memory_from_the_guest() {
    let mut guest = Guest::boot();
    guest.expect("READY ");
    let events = guest.qemu().events();
    let smaller = ByteSize(MEMORY.0 - (32 << 20));
    guest.qemu().balloon(smaller).unwrap();
    await_event(&events, |event| *event == MachineEvent::BalloonChanged { actual: smaller.0 });
    let deadline = Instant::now() + SOON;
    let stats = loop {
        let stats = guest.qemu().balloon_stats().unwrap();
        if !stats.guest.is_empty() {
            break stats;
        }
        assert!(Instant::now() < deadline, "the guest never reported");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(stats.actual, smaller);
    assert!(stats.guest["stat-free-memory"] < MEMORY.0);
    guest.qemu().announce_self().unwrap();
}

#[test]
fn a_machine_outlives_its_handle_and_is_taken_up_again() {
    let mut guest = Guest::boot();
    let nonce = guest.expect("READY ");
    let qemu = guest.qemu.take().unwrap();
    let (identity, dir) = (qemu.process().identity(), qemu.dir().to_owned());
    let session = fs::read_to_string(format!("/proc/{}/stat", identity.pid)).unwrap();
    let session = session.rsplit_once(") ").unwrap().1.split(' ').nth(3).unwrap().to_owned();
    assert_eq!(session, identity.pid.to_string(), "it must lead a session of its own");
    drop(qemu);
    guest.qemu = Some(Qemu::adopt(&dir, identity, Sharing::Shared).unwrap());
    assert_eq!(guest.count(), (1, nonce.clone()));
    guest.qemu().pause().unwrap();
    let state = guest.qemu().device_state().unwrap();
    let mut target = guest.twin(Sharing::Shared);
    target.qemu().load(&state).unwrap();
    target.qemu().unpause().unwrap();
    assert_eq!(target.count(), (2, nonce));
    guest.qemu.take().unwrap().kill();
    assert!(matches!(Qemu::adopt(&dir, identity, Sharing::Shared), Err(LaunchError::Process(_))));
}

#[test]
fn every_copy_gets_a_generation_id_of_its_own_and_its_memory_shows_it() {
    let mut source = Guest::boot();
    source.expect("READY ");
    source.qemu().pause().unwrap();
    let state = source.qemu().device_state().unwrap();
    let mut twins = [source.twin(Sharing::Shared), source.twin(Sharing::Shared)];
    let holds = |guest: &Guest, id: Vmgenid| {
        let memory = fs::read(&guest.slot.ram).unwrap();
        memory.windows(16).step_by(8).any(|window| window == id.in_memory())
    };
    let original = source.qemu().vmgenid().unwrap();
    assert!(holds(&source, original));
    for twin in &mut twins {
        let id = twin.qemu().vmgenid().unwrap();
        assert!(!holds(twin, id));
        twin.qemu().load(&state).unwrap();
        assert_eq!(twin.qemu().vmgenid().unwrap(), id, "loading must not bring the old one back");
        assert!(holds(twin, id), "before its processors run");
    }
    let ids = twins.each_mut().map(|twin| twin.qemu().vmgenid().unwrap());
    assert_ne!(ids[0], ids[1]);
    assert!(!ids.contains(&original));
}

#[test]
fn the_port_of_a_machine_can_be_connected_again() {
    let mut guest = Guest::boot();
    guest.expect("READY ");
    guest.run("ip link set eth0 up");
    let socket = guest.slot.spec(Sharing::Shared).net_socket(0);
    for _ in 0..3 {
        let mut port = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        port.set_read_timeout(Some(SOON)).unwrap();
        // QEMU takes a new connection once it has seen the end of the last; announcements come a second
        // apart.
        guest.qemu().announce_self().unwrap();
        let mut length = [0; 4];
        std::io::Read::read_exact(&mut port, &mut length).unwrap();
        let length = u32::from_be_bytes(length);
        assert!((14..=65_550).contains(&length), "{length}");
    }
}

#[test]
fn a_console_opened_late_still_types() {
    let mut guest = Guest::boot();
    let nonce = guest.expect("READY ");
    let socket = guest.slot.spec(Sharing::Shared).serial_socket();
    let log = guest.slot.console_log();
    guest.console = Console::open(&guest.slot.dir.path().join("nowhere"), &log).unwrap();
    assert!(fs::read_to_string(&log).unwrap().contains(&format!("READY {nonce}")));
    let late = Console::open(&socket, &log).unwrap();
    let output = late.subscribe();
    let deadline = Instant::now() + SOON;
    while late.write(b"count\n").is_err() {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(&nonce) {
        let more = output.receive(SOON).unwrap();
        assert!(!more.is_empty());
        seen.extend(more);
    }
    drop(late);
    let logged = fs::read_to_string(&log).unwrap();
    assert!(logged.rsplit_once(&format!("READY {nonce}")).unwrap().1.contains("COUNT 1 "), "{logged}");
}

#[test]
fn the_host_is_described_with_a_fix_for_all_that_is_amiss() {
    let findings = findings();
    assert!(findings[0].ok, "{findings:?}");
    assert!(findings.iter().all(|finding| finding.ok == finding.fix.is_none()), "{findings:?}");
    assert!(probe().unwrap().machine_type("q35").unwrap().starts_with("pc-q35-"));
}
