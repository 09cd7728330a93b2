//! QEMU that runs the guest of our own under KVM, outside the product, and what KVM counts meanwhile.
//!
//! Its QEMU is killed when it is dropped, and by the kernel when the thread that started it ends.

use super::own_guest::{OwnGuest, Ticks};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// CPU models with the options for QEMU. The first that starts is used: a KVM below another one may lack what
/// `max` or `qemu64` has.
const MODELS: [(&str, &str); 3] =
    [("max", "max"), ("qemu64", "qemu64,enforce"), ("qemu64,-pni", "qemu64,-pni,enforce")];
/// How long the guest has for its first line. A KVM that emulates the BIOS takes seconds on a busy host.
const FIRST_LINE: Duration = Duration::from_secs(120);
/// Time limit of each answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// The guest of our own under KVM.
pub struct KvmGuest {
    qemu: Child,
    /// What it prints.
    pub ticks: Ticks<UnixStream>,
    serial: UnixStream,
    qmp: BufReader<UnixStream>,
    folder: TempDir,
}

/// Counters of KVM for all processors of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvmCounts {
    /// Faults of the guest after which KVM entered a page into the guest's page tables.
    pub faults_fixed: u64,
    /// Flushes of the translation buffers of all processors.
    pub remote_flushes: u64,
}

/// CPU model under which the guest runs under KVM here, or the reason why there is none. Tried once in a
/// process.
pub fn kvm_model() -> Result<&'static str, &'static str> {
    static FOUND: OnceLock<Result<&'static str, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
            return Err(format!("/dev/kvm does not open: {error}"));
        }
        let mut reasons = Vec::new();
        for (model, options) in MODELS {
            match KvmGuest::start(options, 1, 64) {
                Ok(_) => return Ok(model),
                Err(reason) => reasons.push(format!("{model}: {reason}")),
            }
        }
        Err(format!("a guest of our own does not run under KVM ({})", reasons.join("; ")))
    });
    found.as_ref().copied().map_err(String::as_str)
}

impl KvmGuest {
    /// Starts the guest with this model of [`kvm_model`] and waits for its first line.
    pub fn start(cpu: &str, processors: usize, mib: u32) -> Result<Self, String> {
        let failed = |error: io::Error| error.to_string();
        let folder = tempfile::Builder::new().prefix("kvm").tempdir_in("/dev/shm").map_err(failed)?;
        let disk = OwnGuest::get().map_err(|error| error.to_string())?.disk;
        let errors = File::create(folder.path().join("errors")).map_err(failed)?;
        let mut command = command(folder.path(), &disk, (cpu, processors, mib));
        let mut qemu = command.stderr(errors).spawn().map_err(failed)?;
        let connected = connect(&mut qemu, folder.path());
        let (serial, qmp) = connected.inspect_err(|_| end(&mut qemu))?;
        let reader = serial.try_clone().map_err(failed)?;
        let ticks = Ticks::new(reader, processors);
        let mut guest = Self { qemu, ticks, serial, qmp: BufReader::new(qmp), folder };
        guest.ask("qmp_capabilities", &json!({})).map_err(failed)?;
        guest.ask("cont", &json!({})).map_err(failed)?;
        guest.ticks.next_tick().map_err(|error| guest.words().unwrap_or(error.to_string()))?;
        Ok(guest)
    }

    /// Process id of its QEMU.
    pub fn pid(&self) -> u32 {
        self.qemu.id()
    }

    /// File behind its memory.
    pub fn ram(&self) -> PathBuf {
        ram(self.folder.path())
    }

    /// Makes the guest stop its rounds: from now on it writes only what is requested, and its stack.
    pub fn rest(&mut self) -> io::Result<()> {
        self.request(b'!')
    }

    /// Makes the guest read each of 65,536 pages and write every 2^`shift`th of them. It needs 320 MiB.
    pub fn touch(&mut self, shift: u8) -> io::Result<()> {
        self.request(b'a' + shift)
    }

    fn request(&mut self, letter: u8) -> io::Result<()> {
        self.serial.write_all(&[letter])?;
        self.ticks.wait_done()
    }

    /// What KVM has counted so far.
    pub fn counts(&mut self) -> io::Result<KvmCounts> {
        let processors = self.ask("query-stats", &json!({"target": "vcpu"}))?;
        let machine = self.ask("query-stats", &json!({"target": "vm"}))?;
        Ok(KvmCounts {
            faults_fixed: sum(&processors, "pf_fixed"),
            remote_flushes: sum(&machine, "remote_tlb_flush"),
        })
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> io::Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        self.qmp.get_mut().write_all(format!("{request}\n").as_bytes())?;
        loop {
            let mut line = String::new();
            if self.qmp.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let mut answer: Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(error.to_string()));
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    /// Last line that QEMU complained with.
    fn words(&self) -> Option<String> {
        words(self.folder.path())
    }
}

impl Drop for KvmGuest {
    fn drop(&mut self) {
        end(&mut self.qemu);
    }
}

fn end(qemu: &mut Child) {
    // Both fail only if it has ended.
    let _ = qemu.kill();
    let _ = qemu.wait();
}

fn command(folder: &Path, disk: &Path, (cpu, processors, mib): (&str, usize, u32)) -> Command {
    let socket = |name: &str| format!("unix:{},server=on,wait=off", folder.join(name).display());
    let ram = ram(folder);
    let memory = format!("memory-backend-file,id=ram0,size={mib}M,share=on,mem-path={}", ram.display());
    let drive = format!("file={},format=raw,if=none,id=d,snapshot=on", disk.display());
    // The kernel ends QEMU when the thread that started it is gone.
    let mut qemu = Command::new("setpriv");
    qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-S", "-nodefaults", "-no-user-config"]);
    qemu.args(["-accel", "kvm", "-cpu", cpu, "-machine", "q35,memory-backend=ram0", "-display", "none"]);
    qemu.args([
        "-vga",
        "none",
        "-smp",
        &processors.to_string(),
        "-m",
        &format!("{mib}M"),
        "-object",
        &memory,
    ]);
    qemu.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=d,disable-modern=on,disable-legacy=off"]);
    qemu.args(["-serial", &socket("serial"), "-qmp", &socket("qmp")]);
    qemu.stdin(Stdio::null()).stdout(Stdio::null());
    qemu
}

fn ram(folder: &Path) -> PathBuf {
    folder.join("ram")
}

fn words(folder: &Path) -> Option<String> {
    let text = fs::read_to_string(folder.join("errors")).unwrap_or_default();
    text.trim().lines().next_back().map(str::to_owned)
}

/// Connects to both sockets as soon as QEMU has made them.
fn connect(qemu: &mut Child, folder: &Path) -> Result<(UnixStream, UnixStream), String> {
    let deadline = Instant::now() + FIRST_LINE;
    loop {
        let open = |name: &str| {
            let stream = UnixStream::connect(folder.join(name))?;
            stream.set_read_timeout(Some(PATIENCE)).map(|()| stream)
        };
        match open("serial").and_then(|serial| Ok((serial, open("qmp")?))) {
            Ok(streams) => return Ok(streams),
            Err(error) if Instant::now() > deadline => return Err(error.to_string()),
            Err(_) => {}
        }
        if let Ok(Some(status)) = qemu.try_wait() {
            return Err(words(folder).unwrap_or_else(|| format!("qemu ended with {status}")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sum of the counter `name` over all its owners.
fn sum(stats: &Value, name: &str) -> u64 {
    let owners = stats.as_array().into_iter().flatten();
    let counters = owners.flat_map(|owner| owner["stats"].as_array().into_iter().flatten());
    counters.filter(|counter| counter["name"] == name).filter_map(|counter| counter["value"].as_u64()).sum()
}
