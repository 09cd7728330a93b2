//! Tests of the lab: namespaces, links and probes on the real kernel.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    process::Command,
    time::{Duration, Instant},
};
use whimbrel_testkit::lab::{Lab, LinkConfig, LinkEmulator, Namespace, Probe};

const PATIENCE: Duration = Duration::from_secs(20);

/// Echoes datagrams on a port of `namespace` until the end of the test.
fn echo(namespace: &Namespace, port: u16) {
    let socket = namespace.run(move || UdpSocket::bind(("0.0.0.0", port)).unwrap());
    namespace.spawn(move || {
        let mut datagram = [0; 64];
        while let Ok((len, from)) = socket.recv_from(&mut datagram) {
            if socket.send_to(&datagram[..len], from).is_err() {
                return;
            }
        }
    });
}

#[test]
fn a_pulled_cable_shows_as_downtime_and_the_hosts_find_each_other_again() {
    let lab = Lab::new().unwrap();
    echo(lab.host("alpha"), 7003);
    let address = SocketAddr::from((lab.host("alpha").address(), 7003));
    let probe = Probe::start(lab.host("client"), address).unwrap();
    assert!(probe.wait_answers(50, PATIENCE));
    lab.unplug("alpha").unwrap();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(100) {
        std::thread::sleep(Duration::from_millis(10));
    }
    lab.replug("alpha").unwrap();
    assert!(probe.wait_answers(50, PATIENCE));
    let report = probe.stop();
    assert!(report.downtime >= Duration::from_millis(90), "{report:?}");
    assert!(!report.lost.is_empty(), "{report:?}");
}

#[test]
fn a_process_of_a_host_ends_with_its_value() {
    let lab = Lab::with_hosts(&["alpha"]).unwrap();
    let mut sleep = Command::new("sleep");
    sleep.arg("1000");
    let process = lab.host("alpha").command(sleep).unwrap();
    let pid = process.id();
    let of = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net"));
    assert_ne!(of(pid).unwrap(), std::fs::read_link("/proc/self/ns/net").unwrap());
    drop(process);
    assert!(of(pid).is_err(), "the process is still there");
}

#[test]
fn a_limited_host_is_not_faster_than_its_limit() {
    let lab = Lab::with_hosts(&["alpha", "beta"]).unwrap();
    lab.limit("alpha", 80).unwrap();
    let address = lab.host("beta").address();
    let seconds = transfer(lab.host("alpha"), lab.host("beta"), address, 4_000_000);
    // 4 MB at 80 Mbit/s take 0.4 s; the bucket's 256 KiB go at once.
    assert!(seconds > 0.35, "{seconds} s");
}

#[test]
fn a_long_link_delays_and_counts_what_it_carries() {
    let (a, b) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    let ends = [Ipv4Addr::new(10, 88, 0, 1), Ipv4Addr::new(10, 88, 0, 2)];
    let config = LinkConfig::new(1000, Duration::from_millis(20));
    let link = LinkEmulator::between((&a, ends[0]), (&b, ends[1]), config, 7).unwrap();
    echo(&b, 7003);
    let probe = Probe::start(&a, SocketAddr::from((ends[1], 7003))).unwrap();
    assert!(probe.wait_answers(100, PATIENCE));
    let report = probe.stop();
    assert!(report.round_trip >= Duration::from_millis(40), "{report:?}");
    assert!(link.bytes().iter().all(|bytes| *bytes >= 100 * 36), "{:?}", link.bytes());
}

/// Prints the emulator's throughput; run by hand on an idle machine.
#[test]
#[ignore = "a measurement"]
fn measure_the_link_emulator() {
    let (a, b) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    let ends = [Ipv4Addr::new(10, 89, 0, 1), Ipv4Addr::new(10, 89, 0, 2)];
    let config = LinkConfig::new(1000, Duration::from_millis(1));
    let link = LinkEmulator::between((&a, ends[0]), (&b, ends[1]), config, 7).unwrap();
    let bytes = 400_000_000;
    let seconds = transfer(&a, &b, ends[1], bytes);
    println!("{:.0} Mbit/s of content, {:?} bytes on the link", bytes as f64 * 8e-6 / seconds, link.bytes());
    assert!(seconds > 3.0, "faster than its gigabit: {seconds}");
}

/// Seconds to send `bytes` from one namespace to another.
fn transfer(from: &Namespace, to: &Namespace, address: Ipv4Addr, bytes: usize) -> f64 {
    let listener = to.run(move || TcpListener::bind((address, 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let reader = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (mut piece, mut total) = (vec![0; 1 << 18], 0);
        while let Ok(len @ 1..) = stream.read(&mut piece) {
            total += len;
        }
        total
    });
    let mut stream = from.connect(address, PATIENCE).unwrap();
    let begin = Instant::now();
    for piece in vec![7; bytes].chunks(1 << 18) {
        stream.write_all(piece).unwrap();
    }
    drop(stream);
    assert_eq!(reader.join().unwrap(), bytes);
    begin.elapsed().as_secs_f64()
}
