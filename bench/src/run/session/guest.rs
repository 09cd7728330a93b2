//! `session.guest`: document runs and a seismic trace in a guest whose disk lies on a mount, or is an NBD
//! export of the session (section 7.3 of the paper, figures 3 and 4).
//!
//! The monitor is QEMU as it is packaged, started by hand. Its kernel is local, so what goes through the
//! session is the disk: the program, its inputs, what it makes, and the file system's own. Time runs from the
//! mount of the disk in the guest to its unmount, by this host's clock. The guest takes away at its begin
//! what it made the last time, so the disk is the same for all, and nobody else writes to it.

use super::{
    far::{Line, Near, WAN_100},
    scenario::{self, Cache, Places, Ran, Work},
};
use crate::harness::{Goal, Row};
use crate::run::Context;
use anyhow::{Context as _, Result, bail, ensure};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};
use whimbrel_core::Accel;
use whimbrel_qemu::{best_accel, probe};
use whimbrel_session::client::{Control, ControlRequest, send_request};
use whimbrel_testkit::{
    guest::{Archive, GuestFiles, image},
    lab::Namespace,
};

const INIT: &str = include_str!("guest-init.sh");
const WORK: &str = include_str!("guest-work.c");
const DISK: &str = "disk.raw";
const DISK_MIB: u64 = 256;
const MEMORY_MIB: u32 = 192;
/// For one guest, boot and all, over the slowest line.
const PATIENCE: Duration = Duration::from_secs(300);
const PARTS: [&str; 4] = ["first document", "each document after it", "phase 1", "phase 4"];

/// What guests do, and how much of it.
struct Guests {
    documents: usize,
    mib: usize,
    /// The initial RAM disk.
    initrd: PathBuf,
}

impl Guests {
    fn new(quick: bool, dir: &Path) -> Result<Self> {
        let initrd = dir.join("initrd");
        let mut archive = Archive::new();
        archive.file("init", 0o755, INIT.as_bytes());
        // The kernel unpacks one archive after the other, and the later file of a name is the file.
        let small = fs::read(&GuestFiles::get().initrd)?;
        fs::write(&initrd, [small, archive.finish()].concat())?;
        let (documents, mib) = if quick { (5, 8) } else { (20, 32) };
        Ok(Self { documents, mib, initrd })
    }

    fn what(&self) -> String {
        format!("{} documents and {} MiB of trace in a guest", self.documents, self.mib)
    }

    /// Boots with the disk at `drive` and waits for the end of it.
    fn boot(&self, drive: &str) -> Result<Ran> {
        let mut qemu = Command::new("qemu-system-x86_64");
        let append = format!("console=ttyS0 quiet panic=-1 documents={} mib={}", self.documents, self.mib);
        let accel = match best_accel(probe()?) {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        };
        qemu.args(["-nodefaults", "-no-reboot", "-display", "none"]);
        qemu.args(["-machine", "q35", "-cpu", "max", "-accel", accel]);
        qemu.args(["-m", &MEMORY_MIB.to_string(), "-serial", "stdio", "-append", &append]);
        qemu.args(["-drive", &format!("file={drive},format=raw,if=virtio")]);
        qemu.arg("-kernel").arg(&GuestFiles::get().kernel).arg("-initrd").arg(&self.initrd);
        // What QEMU has to complain about is for people.
        qemu.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = Namespace::new()?.start(qemu)?;
        let stdout = process.stdout.take().context("no serial port")?;
        let (tell, told) = mpsc::channel();
        let reader = thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            // Who does not listen any more has seen enough.
            lines.map(|line| (Instant::now(), line)).try_for_each(|line| tell.send(line)).ok()
        });
        let ran = follow(&told);
        if ran.is_ok() {
            let status = process.wait()?;
            ensure!(status.success(), "QEMU ended with {status}");
        }
        drop((process, told));
        ensure!(reader.join().is_ok(), "whoever read the serial port panicked");
        ran
    }
}

/// Hears a guest to its end.
fn follow(told: &Receiver<(Instant, String)>) -> Result<Ran> {
    let deadline = Instant::now() + PATIENCE;
    let (mut begun, mut last, mut said) = (None, Instant::now(), Vec::new());
    let (mut documents, mut phases) = (Vec::new(), Vec::new());
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((at, line)) = told.recv_timeout(left) else { bail!("the guest does not end: {said:?}") };
        let line = line.trim();
        let part = (at - last.min(at)).as_secs_f64();
        if line.ends_with("BEGIN") {
            begun = Some(at);
        } else if line.starts_with("DID document") {
            documents.push(part);
        } else if line.starts_with("DID phase") {
            phases.push(part);
        } else if line == "END" {
            break;
        } else {
            ensure!(!line.starts_with("FAILED"), "{line}: {said:?}");
            said.push(line.to_owned());
            continue;
        }
        last = at;
    }
    let begun = begun.context("it never began")?;
    let (first, rest) = documents.split_first().context("no documents")?;
    let [one, .., four] = phases[..] else { bail!("no trace") };
    let parts = vec![*first, rest.iter().sum::<f64>() / rest.len().max(1) as f64, one, four];
    Ok(Ran { total: begun.elapsed().as_secs_f64(), parts })
}

/// A file of the file system on a disk.
fn read(dir: &Path, name: &str) -> Result<Vec<u8>> {
    let output =
        Command::new("debugfs").args(["-R", &format!("cat /{name}")]).arg(dir.join(DISK)).output()?;
    ensure!(output.status.success() && !output.stdout.is_empty(), "no {name} on the disk");
    Ok(output.stdout)
}

/// The disk is a file of the mount.
struct OnMount<'a>(&'a Guests);

impl Work for OnMount<'_> {
    const ROW: &'static str = "session.guest";
    const PARTS: &'static [&'static str] = &PARTS;
    const WAITS: bool = true;

    fn what(&self) -> String {
        self.0.what()
    }

    fn fill(&self, dir: &Path) -> Result<()> {
        // Program, texts, the model, and room; blocks as a disk of the paper's size has them. A guest with
        // smaller ones writes parts of pages, and waits for what was around them.
        let content = tempfile::tempdir()?;
        super::documents::inputs(content.path())?;
        super::io::velocities(content.path())?;
        let source = content.path().join("work.c");
        fs::write(&source, WORK)?;
        let compiled = Command::new("gcc")
            .args(["-O2", "-static", "-o"])
            .arg(content.path().join("work"))
            .arg(&source)
            .status()?;
        ensure!(compiled.success(), "gcc failed");
        Ok(image::ext4_of_pages(&dir.join(DISK), DISK_MIB, Some(content.path()))?)
    }

    fn run(&self, dir: &Path) -> Result<Ran> {
        self.0.boot(&dir.join(DISK).display().to_string())
    }

    /// The guest itself takes away what it made.
    fn clean(&self, _: &Path) -> Result<()> {
        Ok(())
    }

    fn compare(&self, local: &Path, served: &Path) -> Result<()> {
        for name in ["main.dvi", "trace", "stack-2"] {
            ensure!(read(local, name)? == read(served, name)?, "another {name} came about on the server");
        }
        Ok(())
    }

    fn goal(&self, line: Line, cache: Cache) -> Option<Goal> {
        (line.is_wan() && cache == Cache::Warm).then_some(Goal::PeerAtMost(1.1))
    }
}

/// The disk is an export, as of `whimbrel session nbd`, and else all is as on the mount.
struct Exported<'a>(OnMount<'a>);

impl Work for Exported<'_> {
    const ROW: &'static str = "session.guest";
    const PARTS: &'static [&'static str] = &PARTS;
    const PLACES: Places = &[(WAN_100, &[Cache::Cold, Cache::Warm])];

    fn what(&self) -> String {
        format!("{}, over NBD", self.0.what())
    }

    fn fill(&self, dir: &Path) -> Result<()> {
        self.0.fill(dir)
    }

    fn run(&self, dir: &Path) -> Result<Ran> {
        self.0.run(dir)
    }

    fn run_on(&self, near: &Near) -> Result<Ran> {
        let dir = tempfile::tempdir()?;
        let (control, socket) = (dir.path().join("control.sock"), dir.path().join("nbd.sock"));
        let (ended, _end) = mpsc::channel();
        let serving = Control::start(&control, near.session.clone(), near.path.clone(), ended)?;
        let request = ControlRequest::Nbd { file: DISK.to_owned(), socket: Some(socket.clone()) };
        let answer = send_request(&control, &request)?;
        ensure!(answer.error.is_none(), "no export: {:?}", answer.error);
        let ran = self.0.0.boot(&format!("nbd+unix:///?socket={}", socket.display()));
        drop(serving);
        ran
    }

    fn clean(&self, dir: &Path) -> Result<()> {
        self.0.clean(dir)
    }

    fn compare(&self, local: &Path, served: &Path) -> Result<()> {
        self.0.compare(local, served)
    }

    fn goal(&self, line: Line, cache: Cache) -> Option<Goal> {
        self.0.goal(line, cache)
    }
}

/// The same guest at every place, and by an export.
pub(crate) fn guests(context: &Context) -> Result<Vec<Row>> {
    let dir = tempfile::tempdir()?;
    let guests = Guests::new(context.quick, dir.path())?;
    let times = context.times(3, 1);
    let mut rows = scenario::rows(&OnMount(&guests), times)?;
    rows.extend(scenario::rows(&Exported(OnMount(&guests)), times)?);
    Ok(rows)
}
