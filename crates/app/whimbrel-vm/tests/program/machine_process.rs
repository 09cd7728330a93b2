//! Process of one machine, for the tests: starts it or takes it, and passes it on when told to.
//!
//! ```text
//! machine-process start DIR KERNEL INITRD APPEND MEMORY_MIB DISK_MIB whole|lazy
//! machine-process take DIR [STEP]
//! ```
//!
//! The folder has the machine's files and the socket `swap`, and those at whose other ends the test stands in
//! for QEMU: `tty` of the console and `wire` of the network port. Commands are lines of standard input (`give
//! [STEP]`, `copy`, `verify`, `printed BYTES`, `frames NUMBER`), answers lines of standard output. It ends
//! with its standard input, and ends QEMU then if it has the machine. At STEP of a swap it kills itself.

use std::{
    env,
    error::Error,
    fs::{self, File},
    io::{self, BufRead, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_block::OverlayDir;
use whimbrel_capture::Consumer;
use whimbrel_core::{Boot, ByteSize, Digest, DiskConfig, MachineConfig, PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{Machine as _, PageError};
use whimbrel_memory::{Attachment, Mode, PageSource, RamTarget};
use whimbrel_net::{Gates, PortConfig, PortFilter, Uplink};
use whimbrel_qemu::{Console, LaunchSpec, Qemu, RamBacking, Sharing, probe};
use whimbrel_vm::{
    Disk, Given, LazyMemory, MachineParts, MemorySource, PassablePort, Step, SwapLimits,
    channel::{Channel, Listener},
    give,
    swap::Knowledge,
    take,
};

type Failure = Box<dyn Error>;

/// Generous, because tests share two cores with others: what is measured is not what is allowed.
const LIMITS: SwapLimits = SwapLimits {
    ready: Duration::from_secs(60),
    prepared: Duration::from_secs(20),
    running: Duration::from_secs(60),
    drain: Duration::from_secs(5),
};

fn main() -> Result<(), Failure> {
    let args: Vec<String> = env::args().skip(1).collect();
    let dir = PathBuf::from(args.get(1).ok_or("no folder")?);
    let machine = match args[0].as_str() {
        "start" => {
            let machine = start(&dir, &args[2..])?;
            say(&format!("QEMU {}", machine.qemu.pid()));
            machine
        }
        _ => {
            let channel = Channel::connect(&dir.join("swap"))?;
            let last = args.get(2).map(String::as_str);
            let open_memory = |source: &MemorySource| Ok(Arc::new(Nothing::of(source)) as Arc<_>);
            let taken = take(&channel, &LIMITS, &open_memory, &mut |step| die_at(step, last))?;
            let stopped = taken.stopped.map_or(0, |time| time.as_micros());
            say(&format!("HAS {} {stopped}", words(taken.knowledge)));
            taken.machine
        }
    };
    serve(machine, &dir)
}

/// Answers commands until the machine is another's, or standard input ends.
fn serve(mut machine: MachineParts, dir: &Path) -> Result<(), Failure> {
    let listener = Listener::bind(&dir.join("swap"))?;
    say("LISTENS");
    for line in io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("give", last) => match pass_on(machine, &listener, Some(last))? {
                Some(kept) => machine = kept,
                None => return Ok(()),
            },
            ("copy", _) => say(&format!("COPIED {}", copy(&mut machine, dir)?)),
            ("printed", bytes) => say(&format!("PRINTED {}", printed(&machine, bytes.parse()?)?)),
            ("frames", number) => say(&format!("FRAMES {}", frames(&machine, number.parse()?)?)),
            ("verify", _) => say(&format!("VERIFIED {}", verify(&mut machine, dir)?)),
            (other, _) => say(&format!("no command {other:?}")),
        }
    }
    machine.qemu.kill();
    Ok(())
}

/// Passes the machine on to the process that connects. Returns it if it is still this one's.
fn pass_on(
    machine: MachineParts,
    listener: &Listener,
    last: Option<&str>,
) -> Result<Option<MachineParts>, Failure> {
    let channel = match listener.accept(LIMITS.ready) {
        Ok(channel) => channel,
        Err(error) => {
            machine.qemu.kill();
            return Err(error.into());
        }
    };
    match give(machine, &channel, &LIMITS, &mut |step| die_at(step, last))? {
        Given::Gone { stopped } => {
            say(&format!("GONE {}", stopped.as_micros()));
            Ok(None)
        }
        Given::Kept { machine, knowledge, reason } => {
            say(&format!("KEPT {} {reason}", words(knowledge)));
            Ok(Some(*machine))
        }
    }
}

fn start(dir: &Path, args: &[String]) -> Result<MachineParts, Failure> {
    let [kernel, initrd, append, memory, disk, kind] = args else { return Err("six arguments".into()) };
    let ram = PathBuf::from(format!("/dev/shm/machine-process-{}", std::process::id()));
    let disk = ByteSize(disk.parse::<u64>()? << 20);
    let base = dir.join("base");
    File::create(&base)?.set_len(disk.0)?;
    let listener = whimbrel_nbd::bind_private(&dir.join("nbd"))?;
    let place = OverlayDir { dir: dir.join("overlay"), live_dir: dir.join("live") };
    let disk_served = Disk::create(&place, File::open(&base)?, Digest([7; 32]), listener)?;
    let digest = Digest([0; 32]);
    let config = MachineConfig {
        disks: vec![DiskConfig { size: disk }],
        boot: Some(Boot { kernel: digest, initrd: Some(digest), append: append.clone() }),
        ..MachineConfig::minimal(ByteSize(memory.parse::<u64>()? << 20))
    };
    File::create(&ram)?.set_len(config.memory.0)?;
    let backing = RamBacking { path: ram.clone(), sharing: Sharing::Shared };
    let spec = LaunchSpec {
        kernel: Some(kernel.into()),
        initrd: Some(initrd.into()),
        disks: vec![dir.join("nbd")],
        ..LaunchSpec::new(config, dir, backing)
    };
    let qemu = Qemu::launch(&probe()?.path, &spec)?;
    let mode = if kind == "lazy" { Mode::Lazy } else { Mode::Track };
    let memory = Attachment::attach(qemu.pid() as i32, RamTarget::Path(ram.clone()), mode)?;
    // QEMU and this process have it open. A test that is killed leaves no file of memory behind.
    fs::remove_file(&ram)?;
    let mut machine = MachineParts::new(qemu, memory, vec![disk_served])?;
    if mode == Mode::Lazy {
        let source = MemorySource { capsule: None, root: None, pages: machine.memory.page_count() };
        let pages = Arc::new(Nothing::of(&source));
        machine.lazy = Some(LazyMemory::start(&machine.memory, source, pages)?);
    }
    // The test is at the other end of both sockets.
    machine.console = Some(Console::open(&dir.join("tty"), &dir.join("console.log"))?);
    let stream_socket = dir.join("wire");
    let (uplink, gates, filter) = (Uplink::Isolated, Gates::OPEN, PortFilter::Off);
    machine.ports.push(PassablePort::open(PortConfig { stream_socket, uplink, gates, filter })?);
    for log in &mut machine.dirty_logs {
        log.attach_all(Consumer::Store)?;
    }
    machine.qemu.unpause()?;
    Ok(machine)
}

/// Content of memory that begins as zeros.
struct Nothing {
    present: PageSet,
}

impl Nothing {
    fn of(source: &MemorySource) -> Self {
        Self { present: PageSet::empty(source.pages) }
    }
}

impl PageSource for Nothing {
    fn page_count(&self) -> u64 {
        self.present.len()
    }

    fn present(&self) -> &PageSet {
        &self.present
    }

    fn read(&self, _: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        out.fill(0);
        Ok(())
    }
}

/// Recent output of the console, once it has so many bytes.
fn printed(machine: &MachineParts, bytes: usize) -> Result<String, Failure> {
    let output = machine.console.as_ref().ok_or("no console")?.subscribe();
    let mut all = Vec::new();
    while all.len() < bytes {
        let piece = output.receive(LIMITS.ready)?;
        if piece.is_empty() {
            return Ok(format!("{} bytes only", all.len()));
        }
        all.extend(piece);
    }
    Ok(String::from_utf8(all)?)
}

/// Frames that the guest sent, once they are so many.
fn frames(machine: &MachineParts, number: u64) -> Result<u64, Failure> {
    let port = machine.ports[0].port().ok_or("the port is not served")?;
    let deadline = Instant::now() + LIMITS.ready;
    while port.counters().dropped_frames < number && Instant::now() < deadline {
        std::thread::yield_now();
    }
    Ok(port.counters().dropped_frames)
}

/// Brings the copies of all arrays up to date with what their dirty logs say, as a checkpoint does. Returns
/// the number of pages copied. If nobody follows an array any more, everything is copied.
fn copy(machine: &mut MachineParts, dir: &Path) -> Result<u64, Failure> {
    let mut copied = 0;
    for log in &mut machine.dirty_logs {
        if !log.is_attached(Consumer::Store) {
            log.attach_from(Consumer::Store, PageSet::full(log.page_count()))?;
        }
        let copy = dir.join(format!("{}.copy", log.name()));
        let copy = File::options().create(true).truncate(false).write(true).open(copy)?;
        let dirty = log.collect(Consumer::Store)?;
        let mut content = vec![0; 256 * PAGE_SIZE];
        for run in dirty.runs().flat_map(|run| run.chunks(256)) {
            let content = &mut content[..run.bytes()];
            log.read(run, content)?;
            copy.write_all_at(content, run.offset())?;
        }
        copied += dirty.count();
    }
    Ok(copied)
}

/// Pauses the guest, copies what is dirty, compares the copies with everything, and continues the guest.
fn verify(machine: &mut MachineParts, dir: &Path) -> Result<String, Failure> {
    if !machine.qemu.qmp().is_running() {
        return Ok("the machine is not known to run".to_owned());
    }
    machine.qemu.pause()?;
    copy(machine, dir)?;
    let mut differing = Vec::new();
    for log in &machine.dirty_logs {
        let copy = File::open(dir.join(format!("{}.copy", log.name())))?;
        let (mut here, mut there) = (vec![0; 256 * PAGE_SIZE], vec![0; 256 * PAGE_SIZE]);
        for run in PageRun::new(0, log.page_count()).chunks(256) {
            let (here, there) = (&mut here[..run.bytes()], &mut there[..run.bytes()]);
            log.read(run, here)?;
            read_or_zeros(&copy, run.offset(), there)?;
            for page in run.pages().filter(|page| {
                let at = (page - run.start) as usize * PAGE_SIZE;
                here[at..at + PAGE_SIZE] != there[at..at + PAGE_SIZE]
            }) {
                differing.push(format!("{}:{page}", log.name()));
            }
        }
    }
    machine.qemu.unpause()?;
    Ok(if differing.is_empty() {
        "equal".to_owned()
    } else {
        format!("{} {:?}", differing.len(), differing.first())
    })
}

fn read_or_zeros(file: &File, offset: u64, out: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        match file.read_at(&mut out[done..], offset + done as u64)? {
            0 => break,
            count => done += count,
        }
    }
    out[done..].fill(0);
    Ok(())
}

fn words(knowledge: Knowledge) -> &'static str {
    match knowledge {
        Knowledge::Complete => "complete",
        Knowledge::Lost => "lost",
    }
}

/// Kills this process if that is what the test wants at this step.
fn die_at(step: Step, last: Option<&str>) {
    if env::var_os("WHIMBREL_SWAP_STEPS").is_some() {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        eprintln!("{} {:?}", now.tv_sec % 1000 * 1_000_000 + now.tv_nsec / 1000, step);
    }
    if last.is_some_and(|last| last == format!("{step:?}")) {
        let me = rustix::process::getpid();
        let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    }
}

fn say(line: &str) {
    let mut out = io::stdout().lock();
    // The test has ended if this fails, and then standard input ends too.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
