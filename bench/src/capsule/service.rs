//! `service.start`: a service that answers on its network is started on a host that is far from its disk (the
//! paper's 5.3 and figure 7): booted over plain NBD, booted from an inactive capsule, resumed from an active
//! one.
//!
//! Kernel and initial RAM disk are at the far host in every case, so what is compared is disk and memory. A
//! quick run takes a line of 10 Mbit/s in place of DSL.

use super::awaited::arrive;
use super::sites::{ALPHA, DSL, NAME, Sites, gigabit};
use crate::guest::{Guest, GuestPlan};
use crate::harness::{Row, Samples};
use crate::hosts::{GUEST, Machine};
use crate::run::Context;
use anyhow::{Context as _, Result};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{DebianGuest, GuestOptions};
use whimbrel_testkit::lab::{LinkConfig, Namespace};

const MEMORY: ByteSize = ByteSize(256 << 20);
const NBD_PORT: u16 = 10809;
const PATIENCE: Duration = Duration::from_secs(1800);
const MB: f64 = 1e6;

/// How long until the service answered, and bytes on the link until then.
struct Start {
    seconds: f64,
    bytes: u64,
}

/// What is known at the far host before.
#[derive(Clone, Copy, PartialEq)]
enum Known {
    Nothing,
    GoldenDisk,
}

/// The rows, a case a bar of the paper's figure.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let mut sites = Sites::start()?;
    let guest = DebianGuest::get()?;
    prepare(&sites, &guest)?;
    let line = if context.quick { LinkConfig::new(10, Duration::from_millis(10)) } else { DSL };
    let mut rows = Vec::new();
    let mut note = |case: &str, start: Start| {
        eprintln!("    {case}: {:.1} s, {} bytes", start.seconds, start.bytes);
        let sample = |number: f64| Samples::new(vec![number]);
        rows.push(Row::new("service.start", case, "s", &sample(start.seconds)));
        rows.push(Row::new("service.start", format!("{case}; sent"), "MB", &sample(start.bytes as f64 / MB)));
    };
    sites.set_link(line);
    note("booted over plain NBD (the paper, NFS: 42 min)", over_nbd(&sites, &guest)?);
    fresh(&mut sites, &guest, line, Known::Nothing)?;
    note("booted on demand, nothing there (21 min)", booted(&sites, "first")?);
    note("booted on demand, a second time (1.8 min)", booted(&sites, "second")?);
    fresh(&mut sites, &guest, line, Known::GoldenDisk)?;
    note("booted on demand, golden disk in the cache (10 min)", booted(&sites, "first")?);
    for (known, words) in [(Known::Nothing, "nothing there"), (Known::GoldenDisk, "golden disk in the cache")]
    {
        for (tag, how, paper) in
            [("active", "resumed", "12 min"), ("squeezed", "resumed, ballooned", "10 min")]
        {
            fresh(&mut sites, &guest, line, known)?;
            let paper = if known == Known::GoldenDisk { "ballooned: 4 min" } else { paper };
            note(&format!("{how}, {words} ({paper})"), resumed(&sites, tag)?);
        }
    }
    Ok(rows)
}

fn options() -> GuestOptions {
    GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 1, ..GuestOptions::default() }
}

/// At alpha: the inactive capsule `golden`, the active ones `active` and `squeezed`, and `boot`, which has
/// the kernel alone.
fn prepare(sites: &Sites, guest: &DebianGuest) -> Result<()> {
    let alpha = sites.alpha();
    Machine::debian(MEMORY, options())?.run(alpha, NAME)?;
    alpha.run(&["checkpoint", NAME, "--tag", "active"])?;
    alpha.run(&["checkpoint", NAME, "--tag", "squeezed", "--balloon", "auto"])?;
    alpha.discard(NAME)?;
    let (kernel, initrd) = (text(&guest.kernel)?, text(&guest.initrd)?);
    let blank = sites.disk().join("blank.raw");
    std::fs::File::create(&blank)?.set_len(1 << 20)?;
    for (name, disk) in [("golden", &guest.disk), ("boot", &blank)] {
        let append = options().to_string();
        let words =
            ["run", name, "--memory", "256M", "--disk", text(disk)?, "--net", "br0", "--append", &append];
        alpha.run(&[&words[..], &["--kernel", kernel, "--initrd", initrd][..]].concat())?;
        alpha.run(&["stop", name, "--kill"])?;
        alpha.run(&["checkpoint", name, "--disks-only", "--tag", &format!("{name}-kept")])?;
    }
    Ok(())
}

/// A beta that has the kernel, and what is to be known, behind a line like this.
fn fresh(sites: &mut Sites, guest: &DebianGuest, line: LinkConfig, known: Known) -> Result<()> {
    sites.set_link(gigabit());
    sites.fresh_beta()?;
    sites.beta().run(&["pull", "alpha:boot-kept"])?;
    if known == Known::GoldenDisk {
        sites.beta().run(&["cache", "add", text(&guest.disk)?])?;
    }
    sites.set_link(line);
    Ok(())
}

/// Runs commands at beta and waits until the service answers there.
fn timed(sites: &Sites, commands: &[&[&str]]) -> Result<Start> {
    let arrival = arrive(sites, commands, PATIENCE)?;
    Ok(Start { seconds: arrival.answered, bytes: arrival.bytes })
}

fn booted(sites: &Sites, name: &str) -> Result<Start> {
    let append = options().to_string();
    let pull: &[&str] = &["pull", "alpha:golden-kept", "--lazy"];
    let start = timed(sites, &[pull, &["derive", "golden-kept", name, "--append", &append]])?;
    sites.beta().discard(name)?;
    Ok(start)
}

fn resumed(sites: &Sites, tag: &str) -> Result<Start> {
    let start = timed(sites, &[&["resume", &format!("alpha:{tag}"), "--name", "copy"]])?;
    sites.beta().discard("copy")?;
    Ok(start)
}

/// The guest boots at beta from a disk that qemu-nbd serves at alpha.
fn over_nbd(sites: &Sites, guest: &DebianGuest) -> Result<Start> {
    let mut command = Command::new("qemu-nbd");
    command.args(["--snapshot", "--persistent", "--shared=4", "--format=raw", &format!("--port={NBD_PORT}")]);
    command.arg(format!("--bind={ALPHA}")).arg(&guest.disk).stdin(Stdio::null());
    let _server = sites.program("alpha", command)?;
    let socket = sites.disk().join("nbd.sock");
    relay(sites.network("beta").clone(), &socket)?;
    let options = GuestOptions { address: None, ..options() };
    let plan = GuestPlan::debian(guest, MEMORY, options, &socket)?.patient(PATIENCE);
    let (begun, before) = (Instant::now(), sites.link_bytes());
    let _guest = Guest::boot(&plan)?;
    Ok(Start { seconds: begun.elapsed().as_secs_f64(), bytes: sites.link_bytes() - before })
}

/// Joins a unix socket, which QEMU wants, and the server across the link, for as long as both ends live.
fn relay(network: Namespace, socket: &Path) -> Result<()> {
    let listener = UnixListener::bind(socket)?;
    thread::spawn(move || {
        let Ok((near, _)) = listener.accept() else { return };
        // Nobody waits for this: QEMU says what is wrong when its disk is gone.
        let _ = join(&network, near);
    });
    Ok(())
}

fn join(network: &Namespace, near: UnixStream) -> io::Result<()> {
    let address = SocketAddr::from((ALPHA, NBD_PORT));
    let deadline = Instant::now() + Duration::from_secs(10);
    let far = loop {
        match network.connect(address, Duration::from_secs(10)) {
            Ok(far) => break far,
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    };
    far.set_nodelay(true)?;
    let (mut near_in, mut far_out): (UnixStream, TcpStream) = (near.try_clone()?, far.try_clone()?);
    thread::spawn(move || {
        let copied = io::copy(&mut near_in, &mut far_out);
        far_out.shutdown(Shutdown::Both).and(copied)
    });
    let (mut far_in, mut near_out) = (far, near);
    io::copy(&mut far_in, &mut near_out)?;
    near_out.shutdown(Shutdown::Both)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}
