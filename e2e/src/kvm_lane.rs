//! KVM lane: machines of the product whose guest is one of our own, under KVM.
//!
//! The guest needs no FPU and no kernel of others, so it runs on a KVM that boots no stock kernel.

use crate::{Cluster, HostProcess, PATIENCE, console_stream};
use std::{fs::File, io::Read, os::unix::net::UnixStream};
use whimbrel_testkit::guest::{OwnGuest, Tick, Ticks, kvm_model};

const MEMORY: &str = "64M";
/// Gives a host a device of its own that every user may open: where udev is not, it belongs to root alone.
/// The mounts of a host are its own.
const OPEN_DEVICE: &str = "mount -t tmpfs -o mode=755 kvm /mnt && \
    mknod -m 666 /mnt/kvm c $(stat -c '0x%t 0x%T' /dev/kvm) && \
    mount --bind /mnt/kvm /dev/kvm && umount --lazy /mnt";
/// Rounds in which the guest goes once round its memory.
const AROUND: u64 = 16;

/// What the cases under KVM need.
#[derive(Debug, Clone, Copy)]
pub struct KvmLane {
    cpu: &'static str,
}

impl KvmLane {
    /// The lane, if the guest runs under KVM here. Otherwise says why `case` is skipped.
    pub fn open(case: &str) -> Option<Self> {
        match kvm_model() {
            Ok(cpu) => Some(Self { cpu }),
            Err(reason) => {
                println!("kvm::{case}: skipped, {reason}");
                None
            }
        }
    }

    /// Starts a cluster whose daemons use KVM whatever their probes say.
    pub fn cluster(&self, names: &[&str]) -> Cluster {
        let mut cluster = Cluster::start(names);
        for name in names {
            cluster.host(name).exec("sh", &["-c", OPEN_DEVICE]);
            cluster.host_mut(name).restart_with("accel = \"kvm\"\n");
        }
        cluster
    }

    /// Runs the guest as the machine `web`, and waits until it has gone round its memory and its disk.
    pub fn run(&self, host: &HostProcess, processors: usize) -> Tick {
        let disk = OwnGuest::get().expect("a guest of our own").disk;
        let (disk, cpus) = (disk.to_str().expect("a path in UTF-8"), processors.to_string());
        let machine = ["run", "web", "--disk", disk, "--memory", MEMORY, "--cpus", &cpus];
        host.run(&[&machine[..], &["--accel", "kvm", "--cpu", self.cpu]].concat());
        let mut ticks = ticks(host, "web", processors);
        loop {
            let tick = checked(&mut ticks, host);
            if tick.rounds.iter().all(|rounds| *rounds > 4 * AROUND) && tick.sectors > 34 {
                return tick;
            }
        }
    }

    /// A line that a machine which was at `before` prints from now on: it goes on from there, and has checked
    /// all of its memory since.
    pub fn goes_on(&self, host: &HostProcess, machine: &str, before: &Tick) -> Tick {
        // The console begins with lines of the log.
        let logged = last_logged(host, machine, before.rounds.len());
        let before = &logged.filter(|logged| logged.is_after(before)).unwrap_or_else(|| before.clone());
        let mut ticks = ticks(host, machine, before.rounds.len());
        loop {
            let tick = checked(&mut ticks, host);
            assert_eq!(tick.life, before.life, "{machine} began anew: {tick:?} after {before:?}");
            let around = |(now, then): (&u64, &u64)| *now > then + AROUND;
            if tick.is_after(before) && tick.rounds.iter().zip(&before.rounds).all(around) {
                return tick;
            }
        }
    }
}

fn last_logged(host: &HostProcess, machine: &str, processors: usize) -> Option<Tick> {
    let log = File::open(host.data().join("machines").join(machine).join("console.log")).ok()?;
    let mut ticks = Ticks::new(log, processors);
    std::iter::from_fn(|| ticks.next_tick().ok()).last()
}

fn ticks(host: &HostProcess, machine: &str, processors: usize) -> Ticks<UnixStream> {
    let stream = console_stream(host, machine);
    stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    Ticks::new(stream, processors)
}

fn checked(ticks: &mut Ticks<impl Read>, host: &HostProcess) -> Tick {
    let tick = ticks.next_tick().unwrap_or_else(|error| panic!("no line: {error}\n{}", host.log_text()));
    assert_eq!(tick.bad, 0, "memory or disk is not what it was: {tick:?}");
    tick
}
