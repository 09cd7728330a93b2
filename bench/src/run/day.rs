//! The set `day`: what people notice of a machine on its first day.
//!
//! `net.*`: one client and one guest, through the network port that the product puts between, beside a QEMU
//! whose tap is a port of the same bridge.

use super::precopy::{Role, Side};
use super::{Context, Experiment};
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{GUEST, Hosts, Machine};
use anyhow::{Context as _, Result, ensure};
use std::io::{Read as _, Write as _};
use std::net::UdpSocket;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};
use whimbrel_testkit::lab::{Lab, Namespace};

/// The experiments.
pub(super) const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        rows: &["net.throughput"],
        about: "fetch a file from a guest, beside a QEMU with its own tap",
        run: throughput,
    },
    Experiment {
        rows: &["net.latency"],
        about: "ask a guest and wait, beside a QEMU with its own tap",
        run: latency,
    },
    Experiment {
        rows: &["launch.cached"],
        about: "launch a Debian image that is here already, until sshd greets",
        run: super::debian_images::launch,
    },
    Experiment {
        rows: &["image.store"],
        about: "keep five images of one release, beside their files",
        run: super::debian_images::store,
    },
    Experiment {
        rows: &["smp.migrate"],
        about: "move a guest whose four CPUs all write, beside one with a single CPU",
        run: super::smp::migrate,
    },
    Experiment {
        rows: &["micro.boot"],
        about: "boot a small Linux without a BIOS, until its first program speaks",
        run: super::profiles::micro,
    },
    Experiment {
        rows: &["uefi.migrate"],
        about: "move a guest with UEFI, beside one with a BIOS",
        run: super::profiles::uefi,
    },
    Experiment {
        rows: &["clock"],
        about: "ask guests for the time after a hundred moves",
        run: super::clock::clock,
    },
];

const MEMORY: ByteSize = ByteSize(512 << 20);
/// Address of the guest with a tap of its own.
const PEER: &str = "10.77.0.101";
const NAME: &str = "QEMU's own tap";
/// Bytes of the file that is fetched.
const FILE: u64 = 256 << 20;
const QUESTIONS: u32 = 2_000;
const PATIENCE: Duration = Duration::from_secs(60);

/// Both guests on one host, at rest unless they are asked.
struct Guests {
    hosts: Hosts,
    _peer: Side,
    _folder: TempDir,
}

impl Guests {
    fn start() -> Result<Self> {
        let hosts = Hosts::start(&["alpha"])?;
        Machine::small(MEMORY, options(GUEST)).run(hosts.get("alpha")?, "web")?;
        let folder = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
        let plan = GuestPlan::small(MEMORY, options(PEER));
        let peer = Side::start(hosts.lab.host("alpha"), &plan, &folder.path().join("a"), Role::Source)?;
        peer.boot()?;
        Ok(Self { hosts, _peer: peer, _folder: folder })
    }

    fn client(&self) -> &Namespace {
        let lab: &Lab = &self.hosts.lab;
        lab.host("client")
    }
}

fn options(guest: &str) -> GuestOptions {
    GuestOptions { address: Some(format!("{guest}/24")), buffer_mib: 16, work: Work::Idle }
}

fn throughput(context: &Context) -> Result<Vec<Row>> {
    let guests = Guests::start()?;
    let fetched = |guest: &str| fetch(guests.client(), guest);
    fetched(GUEST)?;
    fetched(PEER)?;
    let (ours, theirs) = in_turn(context.times(10, 3), || fetched(GUEST), || fetched(PEER))?;
    let row = Row::new("net.throughput", "256 MiB over one connection", "MB/s", &Samples::new(ours));
    Ok(vec![row.against(NAME, &Samples::new(theirs)).goal(Goal::PeerAtLeast(0.8))])
}

fn latency(context: &Context) -> Result<Vec<Row>> {
    let guests = Guests::start()?;
    let asked = |guest: &str| ask(guests.client(), guest);
    asked(GUEST)?;
    asked(PEER)?;
    let (ours, theirs) = in_turn(context.times(10, 3), || asked(GUEST), || asked(PEER))?;
    let case = format!("a datagram and its answer, median of {QUESTIONS}");
    let row = Row::new("net.latency", case, "ms", &Samples::new(ours));
    Ok(vec![row.against(NAME, &Samples::new(theirs)).goal(Goal::PeerAtMost(1.3))])
}

/// Megabytes a second of one fetch.
fn fetch(client: &Namespace, guest: &str) -> Result<f64> {
    let mut stream = client.connect(format!("{guest}:7080").parse()?, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let begun = Instant::now();
    stream.write_all(format!("GET /bytes/{FILE} HTTP/1.0\r\n\r\n").as_bytes())?;
    let (mut buffer, mut got) = (vec![0; 256 << 10], 0);
    loop {
        match stream.read(&mut buffer)? {
            0 => break,
            bytes => got += bytes as u64,
        }
    }
    ensure!(got > FILE, "the guest sent {got} bytes");
    Ok(got as f64 / 1e6 / begun.elapsed().as_secs_f64())
}

/// Median of round trips in milliseconds, one after the other.
fn ask(client: &Namespace, guest: &str) -> Result<f64> {
    let address = format!("{guest}:7003");
    let trips = client.run(move || -> Result<Vec<f64>> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(address)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut trips = Vec::new();
        for number in 0..QUESTIONS {
            let (question, mut answer) = (u64::from(number).to_le_bytes(), [0; 64]);
            let begun = Instant::now();
            socket.send(&question)?;
            while socket.recv(&mut answer)? != question.len() || answer[..question.len()] != question {}
            trips.push(begun.elapsed().as_secs_f64() * 1e3);
            sleep(Duration::from_micros(200));
        }
        Ok(trips)
    });
    Ok(Samples::new(trips.context("the guest does not answer")?).median())
}
