//! Process of one machine, for the tests: starts it or takes it, and passes it on when told to.
//!
//! ```text
//! machine-process start DIR KERNEL INITRD APPEND MEMORY_MIB DISK_MIB
//! machine-process take DIR [STEP]
//! ```
//!
//! The folder, on a tmpfs, has all files of the machine and the socket `swap`. Its network port is in the
//! bridge `br0`. Commands are lines of standard input (`give [STEP]`, `hurry`, `offer`, `copy`, `verify`),
//! answers lines of standard output. It ends with its standard input, and ends QEMU then if it has the
//! machine. At STEP of a swap it kills itself, and stops itself at `stop:STEP`. `hurry` gives with little
//! patience; `offer` only offers the machine, and `die` kills the process.

use rustix::process::Signal;
use std::{
    env,
    error::Error,
    fs::{self, File},
    io::{self, BufRead, Write},
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use whimbrel_capture::Consumer;
use whimbrel_core::{
    Boot, ByteSize, CapsuleId, Digest, DiskConfig, MachineConfig, NicConfig, PAGE_SIZE, PageRun, PageSet,
};
use whimbrel_guest_protocol::GuestRequest;
use whimbrel_net::PortFilter;
use whimbrel_store::{Options, Store};
use whimbrel_vm::{
    AgentCommands, CapsuleImages, DiskBase, Given, GuestRequests, MachineDescription, MachineDirs,
    MachinePlace, MachineSetup, QemuDirs, Reservations, RunningMachine, Step, SwapLimits,
    channel::{Channel, Listener},
    give, offer_for_later,
    swap::Knowledge,
    take,
};

type Failure = Box<dyn Error + Send + Sync>;

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
            say(&format!("QEMU {}", machine.pid()));
            machine
        }
        _ => {
            let channel = Channel::connect(&dir.join("swap"))?;
            say("CONNECTED");
            let last = args.get(2).map(String::as_str);
            let find_place = |description: &MachineDescription| place(&dir, description.config.clone());
            let taken = take(&channel, &LIMITS, &find_place, &mut |step| die_at(step, last))?;
            let stopped = taken.stopped.map_or(0, |time| time.as_micros());
            say(&format!("HAS {} {stopped}", words(taken.knowledge)));
            taken.machine
        }
    };
    serve(machine, &dir)
}

/// Answers commands until the machine is another's, or standard input ends.
fn serve(mut machine: RunningMachine, dir: &Path) -> Result<(), Failure> {
    let listener = Listener::bind(&dir.join("swap"))?;
    say("LISTENS");
    // Open until this process ends.
    let mut offered = Vec::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("give" | "hurry", last) => {
                let prepared = if line == "hurry" { Duration::from_secs(2) } else { LIMITS.prepared };
                let limits = SwapLimits { prepared, ..LIMITS };
                match pass_on(machine, &listener, &limits, Some(last))? {
                    Some(kept) => machine = kept,
                    None => return Ok(()),
                }
            }
            ("offer", _) => {
                let channel = listener.accept(LIMITS.ready)?;
                offer_for_later(&mut machine, &channel, LIMITS.ready)?;
                offered.push(channel);
                say("OFFERED");
            }
            ("die", _) => rustix::process::kill_process(rustix::process::getpid(), Signal::KILL)?,
            ("copy", _) => say(&format!("COPIED {}", copy(&mut machine, dir)?)),
            ("verify", _) => say(&format!("VERIFIED {}", verify(&mut machine, dir)?)),
            (other, _) => say(&format!("no command {other:?}")),
        }
    }
    machine.end();
    Ok(())
}

/// Passes the machine on to the process that connects. Returns it if it is still this one's.
fn pass_on(
    machine: RunningMachine,
    listener: &Listener,
    limits: &SwapLimits,
    last: Option<&str>,
) -> Result<Option<RunningMachine>, Failure> {
    let channel = match listener.accept(LIMITS.ready) {
        Ok(channel) => channel,
        Err(error) => {
            machine.end();
            return Err(error.into());
        }
    };
    match give(machine, &channel, limits, &mut |step| die_at(step, last))? {
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

/// Boots a machine whose boot files lie in the folder.
fn start(dir: &Path, args: &[String]) -> Result<RunningMachine, Failure> {
    let [kernel, initrd, append, memory, disk] = args else { return Err("five arguments".into()) };
    let dirs = dirs(dir);
    for folder in [&dirs.qemu.runtime_dirs, &dirs.qemu.boot_files, &dirs.folder, &dirs.live_bitmaps] {
        fs::create_dir_all(folder)?;
    }
    let keep = |file: &str| -> Result<Digest, Failure> {
        let content = fs::read(file)?;
        let digest = Digest::of(&content);
        let path = dirs.qemu.boot_file(&digest);
        fs::write(&path, content)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644))?;
        Ok(digest)
    };
    let boot = Boot { kernel: keep(kernel)?, initrd: Some(keep(initrd)?), append: append.clone() };
    let base = dir.join("base");
    let disk = ByteSize(disk.parse::<u64>()? << 20);
    File::create(&base)?.set_len(disk.0)?;
    Store::open(&dirs.store, Options::create())?;
    let nic = NicConfig { mac: "52:54:00:12:34:56".to_owned(), bridge: Some("br0".to_owned()) };
    let config = MachineConfig {
        disks: vec![DiskConfig { size: disk }],
        nics: vec![nic],
        boot: Some(boot),
        ..MachineConfig::minimal(ByteSize(memory.parse::<u64>()? << 20))
    };
    let MachinePlace { setup, memory, .. } = place(dir, config)?;
    let mut machine = RunningMachine::boot(setup, memory)?;
    for log in &mut machine.dirty_logs {
        log.attach_all(Consumer::Store)?;
    }
    machine.start()?;
    Ok(machine)
}

fn dirs(dir: &Path) -> MachineDirs {
    MachineDirs {
        qemu: QemuDirs { runtime_dirs: dir.join("slots"), boot_files: dir.join("boot") },
        store: dir.join("store"),
        folder: dir.join("machine"),
        live_bitmaps: dir.join("bitmaps"),
        console_log: dir.join("console.log"),
    }
}

/// What the machine needs, in whichever process.
fn place(dir: &Path, config: MachineConfig) -> Result<MachinePlace, Failure> {
    let dirs = dirs(dir);
    let store = Store::open(&dirs.store, Options::default())?;
    let memory = Reservations::new(&dirs.qemu.runtime_dirs).adopt(config.memory.0);
    let setup = MachineSetup {
        host: "alpha".parse()?,
        name: "web".parse()?,
        bases: vec![DiskBase::File { path: dir.join("base") }],
        dirs,
        images: CapsuleImages { store, capsule: None::<CapsuleId> },
        fetcher: None,
        port_filters: vec![PortFilter::Off; config.nics.len()],
        config,
        tunnel: None,
        guest_requests: Arc::new(NoRequests),
    };
    Ok(MachinePlace { setup, memory, template: None })
}

/// Nobody whom the guest could ask.
struct NoRequests;

impl GuestRequests for NoRequests {
    fn handle(&self, _: AgentCommands, _: u32, _: GuestRequest) {}
}

/// Brings the copies of all arrays up to date with what their dirty logs say, as a checkpoint does. Returns
/// the number of pages copied. If nobody follows an array any more, everything is copied.
fn copy(machine: &mut RunningMachine, dir: &Path) -> Result<u64, Failure> {
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
fn verify(machine: &mut RunningMachine, dir: &Path) -> Result<String, Failure> {
    if !machine.qemu.qmp().is_running() {
        return Ok("the machine is not known to run".to_owned());
    }
    machine.set_paused(true)?;
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
    machine.set_paused(false)?;
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

/// Kills or stops this process if that is what the test wants at this step.
fn die_at(step: Step, last: Option<&str>) {
    if env::var_os("WHIMBREL_SWAP_STEPS").is_some() {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        eprintln!("{} {:?}", now.tv_sec % 1000 * 1_000_000 + now.tv_nsec / 1000, step);
    }
    let (me, step) = (rustix::process::getpid(), format!("{step:?}"));
    let signal = match last {
        Some(last) if last == step => Signal::KILL,
        Some(last) if last.strip_prefix("stop:") == Some(&step) => Signal::STOP,
        _ => return,
    };
    let _ = rustix::process::kill_process(me, signal);
}

fn say(line: &str) {
    let mut out = io::stdout().lock();
    // The test has ended if this fails, and then standard input ends too.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
